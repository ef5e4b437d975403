/* x W^T on tiles: weights [SIDE outputs][STEP inputs] are read where they lie, rows are arranged, and what comes out is
 * transposed. A sum runs over the inputs in order, a step at a time, whatever is beside it: few rows and many are one
 * product. Two tiles of outputs by two of rows are summed at once, so that a tile is loaded once for two products.
 *
 * The weights of 32 outputs stay in the first cache while many rows pass by. These are loaded with the hint that keeps
 * them out of it (1.25 times as fast), and long rows are summed in parts, so that a part's weights fit (1.2 times). */

#define PART 576    /* inputs: with 32 outputs 36 of the first cache's 48 KiB */
#define PASSING 512 /* rows that pass by at a time: sums of 64 KiB are kept from part to part */

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

/* Bytes of SIDE rows, arranged. */
static inline int64_t group_bytes(int64_t inputs) { return kv_padded(inputs, STEP) * SIDE * 2; }

/* x [rows][inputs] -> [rows / SIDE][inputs / STEP][STEP / 2][SIDE][2], zeros behind the ends. */
static void arrange(const uint16_t *x, void *to, int64_t rows, int64_t inputs) {
  char *at = to;
  for (int64_t r = 0; r < rows; r += SIDE)
    for (int64_t k = 0; k < inputs; k += STEP, at += SIDE * 64) {
      const int64_t left = inputs - k;
      const __mmask32 here = left < STEP ? ((__mmask32)1 << left) - 1 : ~(__mmask32)0;
      __m512i some[SIDE];
      for (int i = 0; i < SIDE; i++)
        some[i] = r + i < rows ? _mm512_maskz_loadu_epi16(here, x + (r + i) * inputs + k) : _mm512_setzero_si512();
      transpose(some);
      for (int i = 0; i < SIDE; i++) _mm512_storeu_si512(at + 64 * i, some[i]);
    }
}

typedef struct {
  const void *at;
  int64_t stride; /* bytes */
} Tile;

/* SIDE of `outputs` outputs and STEP of `left` inputs: where they lie, or with zeros behind their end in `edge`. */
static inline Tile weights_at(const uint16_t *w, int64_t outputs, int64_t inputs, int64_t left,
                              uint16_t edge[SIDE][STEP]) {
  if (outputs >= SIDE && left >= STEP) return (Tile){w, inputs * 2};
  memset(edge, 0, SIDE * STEP * sizeof(**edge));
  for (int64_t o = 0; o < lesser(outputs, SIDE); o++) memcpy(edge[o], w + o * inputs, (size_t)lesser(left, STEP) * 2);
  return (Tile){edge, STEP * 2};
}

typedef struct {
  float of[2][2][SIDE][SIDE]; /* [tile of outputs][tile of rows] */
} Sums;

/* A product of up to two tiles of outputs and two of rows. */
typedef struct {
  const uint16_t *w;
  const char *x;
  uint16_t *y;
  int64_t stride, rows, outputs, inputs;
} Some;

static inline __attribute__((always_inline)) void begin_sums(const Sums *before, int tiles, int groups) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  if (!before) return;
  TILE_LOAD(0, before->of[0][0], 64);
  if (groups > 1) TILE_LOAD(1, before->of[0][1], 64);
  if (tiles > 1) TILE_LOAD(2, before->of[1][0], 64);
  if (groups > 1 && tiles > 1) TILE_LOAD(3, before->of[1][1], 64);
}

static inline __attribute__((always_inline)) void end_sums(Sums *sums, int tiles, int groups) {
  TILE_STORE(0, sums->of[0][0], 64);
  if (groups > 1) TILE_STORE(1, sums->of[0][1], 64);
  if (tiles > 1) TILE_STORE(2, sums->of[1][0], 64);
  if (groups > 1 && tiles > 1) TILE_STORE(3, sums->of[1][1], 64);
}

/* Has two of the rows of y at hand that are written next, in each step: 1.08 times as fast, and all at once slower. */
static inline void fetch(const Some *s, int64_t step) {
  const int64_t row = 2 * step;
  if (row + 1 >= lesser(s->rows, 2 * SIDE)) return;
  __builtin_prefetch(s->y + row * s->stride, 1);
  __builtin_prefetch(s->y + (row + 1) * s->stride, 1);
}

/* Adds inputs [first, end) to the sums of those before. Constant tiles and groups once inlined. */
static inline __attribute__((always_inline)) void sum_tiles(const Some *s, int64_t first, int64_t end, int tiles,
                                                            int groups, Sums *sums) {
  const char *x = s->x, *beside = x + group_bytes(s->inputs);
  const uint16_t *w = s->w, *below = w + SIDE * s->inputs;
  uint16_t edges[2][SIDE][STEP];
  begin_sums(first ? sums : NULL, tiles, groups);
  for (int64_t k = first; k < end; k += STEP) {
    const int64_t left = s->inputs - k;
    if (groups > 1 && end == s->inputs) fetch(s, (k - first) / STEP);
    Tile of = weights_at(w + k, s->outputs, s->inputs, left, edges[0]);
    if (groups > 1)
      TILE_LOAD_PASSING(6, x + k * SIDE * 2, 64);
    else
      TILE_LOAD(6, x + k * SIDE * 2, 64);
    TILE_LOAD(4, of.at, of.stride);
    TILE_PRODUCT(0, 4, 6);
    if (groups > 1) {
      TILE_LOAD_PASSING(7, beside + k * SIDE * 2, 64);
      TILE_PRODUCT(1, 4, 7);
    }
    if (tiles > 1) {
      of = weights_at(below + k, s->outputs - SIDE, s->inputs, left, edges[1]);
      TILE_LOAD(5, of.at, of.stride);
      TILE_PRODUCT(2, 5, 6);
      if (groups > 1) TILE_PRODUCT(3, 5, 7);
    }
  }
  end_sums(sums, tiles, groups);
}

/* Two neighbours of bfloat16 for each of SIDE rows. */
static inline __m512i neighbours(const float even[SIDE], const float odd[SIDE]) {
  static const uint16_t order[STEP] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i apart = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(odd), _mm512_loadu_ps(even));
  return _mm512_permutexvar_epi16(_mm512_loadu_si512(order), apart);
}

/* y of a tile of rows, of the transpose of their sums. Narrowed first, there is half as much to transpose. */
static inline __attribute__((always_inline)) void narrow_rows(const Some *s, const Sums *sums, int group, int tiles) {
  const __mmask32 here = s->outputs < 2 * SIDE ? ((__mmask32)1 << s->outputs) - 1 : ~(__mmask32)0;
  uint16_t *y = s->y + group * SIDE * s->stride;
  __m512i pairs[SIDE];
  for (int i = 0; i < SIDE; i++) {
    const float(*from)[SIDE] = sums->of[i / (SIDE / 2)][group] + 2 * i % SIDE;
    pairs[i] = i < tiles * SIDE / 2 ? neighbours(from[0], from[1]) : _mm512_setzero_si512();
  }
  transpose(pairs);
  for (int64_t r = 0; r < lesser(s->rows - group * SIDE, SIDE); r++)
    _mm512_mask_storeu_epi16(y + r * s->stride, here, pairs[r]);
}

static inline __attribute__((always_inline)) void some_outputs(const Some *s, int64_t first, int64_t end, int tiles,
                                                               int groups, Sums *sums) {
  sum_tiles(s, first, end, tiles, groups, sums);
  if (end < s->inputs) return;
  for (int g = 0; g < groups; g++) narrow_rows(s, sums, g, tiles);
}

/* Inputs [first, end), `sums` of those before. */
static void add_part(const Some *s, int64_t first, int64_t end, Sums *sums) {
  const int two = s->outputs > SIDE;
  if (s->rows <= SIDE && two)
    some_outputs(s, first, end, 2, 1, sums);
  else if (s->rows <= SIDE)
    some_outputs(s, first, end, 1, 1, sums);
  else if (two)
    some_outputs(s, first, end, 2, 2, sums);
  else
    some_outputs(s, first, end, 1, 2, sums);
}

/* Up to PASSING rows of up to two tiles of outputs. */
static void pass_rows(const uint16_t *w, const char *x, uint16_t *y, int64_t stride, int64_t rows, int64_t outputs,
                      int64_t inputs) {
  Sums sums[PASSING / SIDE / 2];
  const int64_t parts = rows > 2 * SIDE ? kv_blocks(inputs, PART) : 1;
  const int64_t part = kv_padded(kv_blocks(inputs, parts), STEP);
  for (int64_t k = 0; k < inputs; k += part)
    for (int64_t r = 0; r < rows; r += 2 * SIDE)
      add_part(&(Some){w, x + r / SIDE * group_bytes(inputs), y + r * stride, stride, rows - r, outputs, inputs}, k,
               lesser(k + part, inputs), sums + r / SIDE / 2);
}

/* y [rows][outputs], rows `stride` apart. */
static void many_rows(const uint16_t *w, const void *x, uint16_t *y, int64_t stride, int64_t rows, int64_t outputs,
                      int64_t inputs) {
  for (int64_t o = 0; o < outputs; o += 2 * SIDE)
    for (int64_t r = 0; r < rows; r += PASSING)
      pass_rows(w + o * inputs, (const char *)x + r / SIDE * group_bytes(inputs), y + r * stride + o, stride,
                lesser(rows - r, PASSING), lesser(outputs - o, 2 * SIDE), inputs);
}

static void few_rows(const uint16_t *w, const void *x, uint16_t *y, int64_t rows, int64_t outputs, int64_t inputs,
                     int64_t first, int64_t end) {
  many_rows(w + first * inputs, x, y + first, outputs, rows, end - first, inputs);
}
