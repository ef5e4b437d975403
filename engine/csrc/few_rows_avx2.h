/* A weight is the upper half of a float32, so two that lie side by side are widened by one operation each: the even ones
 * by a shift, the odd ones by masking the others away. Inputs are spread to match: of every STEP of them the even ones,
 * then the odd ones. A tile of OUTPUTS by ROWS lives in registers: 12 sums, 3 weights and 1 input of the 16 that there
 * are; of a row alone, SINGLE outputs do. An output has one sum, in one order, whatever tile it is in.
 *
 * The outputs of a tile lie far apart, so that as many long streams are read at once: the processor reads each of them
 * ahead by itself. One core reads 23 GB/s in four streams, and 15 in one, whatever is fetched ahead by hand. */

#define OUTPUTS 3
#define ROWS 4
#define SINGLE 4
#define STEP (2 * LANES)
#define AHEAD 1024 /* bytes from what is multiplied to what is fetched */

static inline vec even_of(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)p), 16));
}

static inline vec odd_of(const uint16_t *p) {
  const __m256i odd = _mm256_set1_epi32((int)0xffff0000);
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)p), odd));
}

/* Rows in float32, spread. */
static void arrange(const uint16_t *x, void *to, int64_t rows, int64_t inputs) {
  float *y = to;
  for (int64_t r = 0; r < rows; r++, x += inputs, y += inputs) {
    int64_t i = 0;
    for (; i + STEP <= inputs; i += STEP) {
      v_store(y + i, even_of(x + i));
      v_store(y + i + LANES, odd_of(x + i));
    }
    for (; i < inputs; i++) y[i] = widened(x[i]);
  }
}

static inline __attribute__((always_inline)) void fetch(const uint16_t *p, int ahead) {
  if (ahead) _mm_prefetch((const char *)p + AHEAD, _MM_HINT_T0);
}

/* Adds one row's input to the sums of three outputs. Left to itself gcc loads the input anew for each, and keeps sums in
 * memory: 22 billion products per second instead of 42, of the 52 that are possible. */
#define ADD(sums, p)                                                                                                      \
  __asm__ volatile("vmovups %4, %3\n\tvfmadd231ps %5, %3, %0\n\tvfmadd231ps %6, %3, %1\n\tvfmadd231ps %7, %3, %2"       \
                   : "+x"(sums##0), "+x"(sums##1), "+x"(sums##2), "=&x"(input)                                           \
                   : "m"(*(const __m256_u *)(p)), "x"(w0), "x"(w1), "x"(w2))

/* totals[o][r] = the whole steps of output w[o] for row x[r]. */
static inline __attribute__((always_inline)) void tile(const uint16_t *const w[OUTPUTS], const float *const x[ROWS],
                                                       float totals[OUTPUTS][ROWS], int64_t inputs, int ahead) {
  const uint16_t *p0 = w[0], *p1 = w[1], *p2 = w[2];
  const float *xa = x[0], *xb = x[1], *xc = x[2], *xd = x[3];
  vec a0 = v_zero(), a1 = a0, a2 = a0, b0 = a0, b1 = a0, b2 = a0, c0 = a0, c1 = a0, c2 = a0, d0 = a0, d1 = a0, d2 = a0;
  for (int64_t i = 0; i + STEP <= inputs; i += STEP) {
    vec w0 = even_of(p0 + i), w1 = even_of(p1 + i), w2 = even_of(p2 + i), input;
    fetch(p0 + i, ahead), fetch(p1 + i, ahead), fetch(p2 + i, ahead);
    ADD(a, xa + i);
    ADD(b, xb + i);
    ADD(c, xc + i);
    ADD(d, xd + i);
    __asm__ volatile("" ::: "memory"); /* or the odd ones would be loaded before, for which there are no registers */
    w0 = odd_of(p0 + i), w1 = odd_of(p1 + i), w2 = odd_of(p2 + i);
    ADD(a, xa + i + LANES);
    ADD(b, xb + i + LANES);
    ADD(c, xc + i + LANES);
    ADD(d, xd + i + LANES);
  }
  _mm_storeu_ps(totals[0], v_sums(a0, b0, c0, d0));
  _mm_storeu_ps(totals[1], v_sums(a1, b1, c1, d1));
  _mm_storeu_ps(totals[2], v_sums(a2, b2, c2, d2));
}

static inline void single(const uint16_t *const w[SINGLE], const float *x, float totals[SINGLE], int64_t inputs) {
  const uint16_t *p0 = w[0], *p1 = w[1], *p2 = w[2], *p3 = w[3];
  vec a = v_zero(), b = a, c = a, d = a;
  for (int64_t i = 0; i + STEP <= inputs; i += STEP) {
    vec input = v_load(x + i), after = v_load(x + i + LANES);
    a = v_fma(even_of(p0 + i), input, a), b = v_fma(even_of(p1 + i), input, b);
    c = v_fma(even_of(p2 + i), input, c), d = v_fma(even_of(p3 + i), input, d);
    fetch(p0 + i, 1), fetch(p1 + i, 1), fetch(p2 + i, 1), fetch(p3 + i, 1);
    a = v_fma(odd_of(p0 + i), after, a), b = v_fma(odd_of(p1 + i), after, b);
    c = v_fma(odd_of(p2 + i), after, c), d = v_fma(odd_of(p3 + i), after, d);
  }
  _mm_storeu_ps(totals, v_sums(a, b, c, d));
}

/* Adds the inputs behind the last whole step. */
static void add_rest(const uint16_t *w, const float *x, float *total, int64_t inputs) {
  for (int64_t i = inputs / STEP * STEP; i < inputs; i++) *total = __builtin_fmaf(widened(w[i]), x[i], *total);
}

static inline void round_four(const float totals[4], uint16_t out[4]) {
  uint16_t rounded[LANES];
  v_narrow(rounded, _mm256_castps128_ps256(_mm_loadu_ps(totals)));
  memcpy(out, rounded, 4 * sizeof(*out));
}

/* SINGLE outputs of one row, `apart` from each other. */
static inline void one_row(const uint16_t *w, const float *x, uint16_t *y, int64_t apart, int64_t inputs) {
  const uint16_t *of[SINGLE];
  float totals[SINGLE];
  uint16_t out[SINGLE];
  for (int o = 0; o < SINGLE; o++) of[o] = w + o * apart * inputs;
  single(of, x, totals, inputs);
  if (inputs % STEP)
    for (int o = 0; o < SINGLE; o++) add_rest(of[o], x, totals + o, inputs);
  round_four(totals, out);
  for (int o = 0; o < SINGLE; o++) y[o * apart] = out[o];
}

/* OUTPUTS outputs, `apart` from each other, of up to ROWS rows; the first stands in where there are fewer. */
static inline void some_rows(const uint16_t *w, const float *x, uint16_t *y, int64_t apart, int rows, int64_t stride,
                             int64_t inputs, int ahead) {
  const uint16_t *of[OUTPUTS];
  const float *row[ROWS];
  float totals[OUTPUTS][ROWS];
  uint16_t out[ROWS];
  for (int o = 0; o < OUTPUTS; o++) of[o] = w + o * apart * inputs;
  for (int r = 0; r < ROWS; r++) row[r] = x + (r < rows ? r : 0) * inputs;
  if (ahead)
    tile(of, row, totals, inputs, 1);
  else
    tile(of, row, totals, inputs, 0);
  for (int o = 0; o < OUTPUTS; o++) {
    if (inputs % STEP)
      for (int r = 0; r < rows; r++) add_rest(of[o], row[r], totals[o] + r, inputs);
    round_four(totals[o], out);
    for (int r = 0; r < rows; r++) y[r * stride + o * apart] = out[r];
  }
}

static inline int least(int64_t a, int b) { return a < b ? (int)a : b; }

/* Outputs w[0 .. count), and as many tiles: output o is with o + apart, o + 2 apart ... in one. */
static void tiles(const uint16_t *w, const float *x, uint16_t *y, int64_t count, int64_t apart, int64_t rows,
                  int64_t stride, int64_t inputs) {
  for (int64_t r = 0; r < rows; r += ROWS)
    for (int64_t o = 0; o < count; o++)
      if (rows == 1)
        one_row(w + o * inputs, x, y + o, apart, inputs);
      else
        some_rows(w + o * inputs, x + r * inputs, y + r * stride + o, apart, least(rows - r, ROWS), stride, inputs,
                  r == 0);
}

static void few_rows(const uint16_t *w, const void *x, uint16_t *y, int64_t rows, int64_t outputs, int64_t inputs,
                     int64_t first, int64_t end) {
  const int64_t streams = rows == 1 ? SINGLE : OUTPUTS, apart = (end - first) / streams;
  const int64_t left = first + streams * apart; /* no whole tile: each is all outputs of one */
  tiles(w + first * inputs, x, y + first, apart, apart, rows, outputs, inputs);
  tiles(w + left * inputs, x, y + left, end - left, 0, rows, outputs, inputs);
}
