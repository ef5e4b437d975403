/* Products whose pairs of bfloat16 lie side by side, in registers: TILE rows by TILE registers of 16 columns, or by one. */

#define TILE 4

/* c [TILE][registers of 16] = or += a [TILE][pairs][2] times b [pairs][width][2]. */
static inline __attribute__((always_inline)) void multiply_tile(const uint16_t *a, int64_t a_stride, const uint16_t *b,
                                                          int64_t width, float *c, int64_t c_stride, int64_t pairs,
                                                          int registers, int add) {
  __m512 sums[TILE][TILE];
  for (int r = 0; r < TILE; r++)
    for (int s = 0; s < registers; s++)
      sums[r][s] = add ? _mm512_loadu_ps(c + r * c_stride + 16 * s) : _mm512_setzero_ps();
  for (int64_t p = 0; p < pairs; p++) {
    __m512bh from[TILE];
    for (int s = 0; s < registers; s++) from[s] = (__m512bh)_mm512_loadu_si512(b + (p * width + 16 * s) * 2);
    for (int r = 0; r < TILE; r++) {
      int32_t pair;
      memcpy(&pair, a + r * a_stride + 2 * p, sizeof(pair));
      __m512bh all = (__m512bh)_mm512_set1_epi32(pair);
      for (int s = 0; s < registers; s++) sums[r][s] = _mm512_dpbf16_ps(sums[r][s], all, from[s]);
    }
  }
  for (int r = 0; r < TILE; r++)
    for (int s = 0; s < registers; s++) _mm512_storeu_ps(c + r * c_stride + 16 * s, sums[r][s]);
}

/* The first `columns` of c [TILE][width] = or += a [TILE][pairs][2], rows a_stride elements apart, times b
 * [pairs][width][2]; columns are a multiple of 16. */
static void multiply_four(const uint16_t *a, int64_t a_stride, int64_t pairs, const uint16_t *b, int64_t width,
                          int64_t columns, float *c, int add) {
  int64_t d = 0;
  for (; d + 16 * TILE <= columns; d += 16 * TILE)
    multiply_tile(a, a_stride, b + 2 * d, width, c + d, width, pairs, TILE, add);
  for (; d < columns; d += 16) multiply_tile(a, a_stride, b + 2 * d, width, c + d, width, pairs, 1, add);
}
