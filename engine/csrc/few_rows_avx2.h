/* A tile of OUTPUTS outputs by up to ROWS rows lives in registers: 12 sums, 3 weights, 1 input of the 16 that AVX2 has.
 * Every weight is widened once for ROWS rows, from the cache after the first of them has read it from memory. */

#define OUTPUTS 3
#define ROWS 4
#define AHEAD 9216 /* bytes from what is multiplied to what is fetched, into the second level */

/* Constant arguments once inlined: the sums stay in registers. */
static inline __attribute__((always_inline)) void tile(const uint16_t *w, const float *x, uint16_t *y, int outputs,
                                                       int rows, int64_t stride, int64_t inputs, int ahead) {
  vec sums[OUTPUTS][ROWS];
  for (int o = 0; o < outputs; o++)
    for (int r = 0; r < rows; r++) sums[o][r] = v_zero();
  int64_t i = 0;
  for (; i + LANES <= inputs; i += LANES) {
    vec wide[OUTPUTS];
    for (int o = 0; o < outputs; o++) {
      wide[o] = v_widen(w + o * inputs + i);
      if (ahead) _mm_prefetch((const char *)(w + o * inputs + i) + AHEAD, _MM_HINT_T1);
    }
    for (int r = 0; r < rows; r++) {
      vec input = v_load(x + r * inputs + i);
      for (int o = 0; o < outputs; o++) sums[o][r] = v_fma(wide[o], input, sums[o][r]);
    }
  }
  for (int o = 0; o < outputs; o++)
    for (int r = 0; r < rows; r++) {
      float total = v_sum(sums[o][r]), rest[LANES];
      v_store(rest, v_widen_part(w + o * inputs + i, inputs - i));
      for (int64_t j = i; j < inputs; j++) total += rest[j - i] * x[r * inputs + j];
      v_narrow_part(y + r * stride + o, v_set(total), 1);
    }
}

static void outputs_of(const uint16_t *w, const float *x, uint16_t *y, int outputs, int64_t rows, int64_t stride,
                       int64_t inputs) {
  int64_t r = 0;
  for (; r + ROWS <= rows; r += ROWS) {
    if (outputs == OUTPUTS)
      tile(w, x + r * inputs, y + r * stride, OUTPUTS, ROWS, stride, inputs, r == 0);
    else
      for (int o = 0; o < outputs; o++)
        tile(w + o * inputs, x + r * inputs, y + r * stride + o, 1, ROWS, stride, inputs, 0);
  }
  for (; r < rows; r++) {
    if (outputs == OUTPUTS)
      tile(w, x + r * inputs, y + r * stride, OUTPUTS, 1, stride, inputs, r == 0);
    else
      for (int o = 0; o < outputs; o++) tile(w + o * inputs, x + r * inputs, y + r * stride + o, 1, 1, stride, inputs, 0);
  }
}

static void few_rows(const uint16_t *w, const void *x, uint16_t *y, int64_t rows, int64_t outputs, int64_t inputs,
                     int64_t first, int64_t end) {
  for (int64_t o = first; o < end; o += OUTPUTS) {
    int count = end - o < OUTPUTS ? (int)(end - o) : OUTPUTS;
    outputs_of(w + o * inputs, x, y + o, count, rows, outputs, inputs);
  }
}
