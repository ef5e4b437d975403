/* Products of pairs of bfloat16: a tile of OUTPUTS outputs by up to ROWS rows lives in registers. */

#define OUTPUTS 4
#define ROWS 4
#define PAIRS 32 /* elements of a register */
/* Bytes from what is multiplied to what is fetched: the processor sees four short streams and does not look beyond
 * their ends. Into the second level; 19 GB/s without, 20 into the first, 33 like this. */
#define AHEAD 9216

static inline __attribute__((always_inline)) __m512bh elements(const uint16_t *p, __mmask32 which) {
  return (__m512bh)_mm512_maskz_loadu_epi16(which, p);
}

/* Constant arguments once inlined: the sums stay in registers. */
static inline __attribute__((always_inline)) void tile(const uint16_t *w, const uint16_t *x, uint16_t *y, int outputs,
                                                       int rows, int64_t stride, int64_t inputs, int ahead) {
  __m512 sums[ROWS][OUTPUTS];
  for (int r = 0; r < ROWS; r++)
    for (int o = 0; o < OUTPUTS; o++) sums[r][o] = _mm512_setzero_ps();
  for (int64_t i = 0; i < inputs; i += PAIRS) {
    __mmask32 which = inputs - i < PAIRS ? ((__mmask32)1 << (inputs - i)) - 1 : ~(__mmask32)0;
    __m512bh weights[OUTPUTS];
    for (int o = 0; o < outputs; o++) {
      weights[o] = elements(w + o * inputs + i, which);
      if (ahead) _mm_prefetch((const char *)(w + o * inputs + i) + AHEAD, _MM_HINT_T1);
    }
    for (int r = 0; r < rows; r++) {
      __m512bh input = elements(x + r * inputs + i, which);
      for (int o = 0; o < outputs; o++) sums[r][o] = _mm512_dpbf16_ps(sums[r][o], weights[o], input);
    }
  }
  for (int r = 0; r < rows; r++) {
    __m128 totals = v_sums(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    __m128i narrow = (__m128i)_mm_cvtneps_pbh(totals);
    if (outputs == OUTPUTS)
      _mm_storel_epi64((__m128i *)(y + r * stride), narrow);
    else
      for (int o = 0; o < outputs; o++) y[r * stride + o] = ((const uint16_t *)&narrow)[o];
  }
}

static void outputs_of(const uint16_t *w, const uint16_t *x, uint16_t *y, int outputs, int64_t rows, int64_t stride,
                       int64_t inputs) {
  for (int64_t r = 0; r < rows;) {
    int count = rows - r < ROWS ? 1 : ROWS;
    for (int o = 0; o < outputs; o += outputs == OUTPUTS ? OUTPUTS : 1) {
      const uint16_t *from = w + o * inputs;
      uint16_t *to = y + r * stride + o;
      if (outputs == OUTPUTS && count == ROWS)
        tile(from, x + r * inputs, to, OUTPUTS, ROWS, stride, inputs, r == 0);
      else if (outputs == OUTPUTS)
        tile(from, x + r * inputs, to, OUTPUTS, 1, stride, inputs, r == 0);
      else if (count == ROWS)
        tile(from, x + r * inputs, to, 1, ROWS, stride, inputs, 0);
      else
        tile(from, x + r * inputs, to, 1, 1, stride, inputs, 0);
    }
    r += count;
  }
}

static void few_rows(const uint16_t *w, const void *x, uint16_t *y, int64_t rows, int64_t outputs, int64_t inputs,
                     int64_t first, int64_t end) {
  for (int64_t o = first; o < end; o += OUTPUTS) {
    int count = end - o < OUTPUTS ? (int)(end - o) : OUTPUTS;
    outputs_of(w + o * inputs, x, y + o, count, rows, outputs, inputs);
  }
}
