/* A tile of a product in float32: up to TILE_ROWS rows by TILE_COLUMNS columns live in registers, 12 sums beside two
 * of b and one of a of the 16 that AVX2 has. Each sum runs over the depth in order, one term after the other, so what a
 * row gives does not depend on the rows beside it. */

#define TILE_ROWS 6
#define TILE_COLUMNS 16

/* c [rows][TILE_COLUMNS] = or += a [rows][depth] times b [depth][TILE_COLUMNS]. Constant rows and `add` once inlined. */
static inline __attribute__((always_inline)) void multiply_tile(const float *a, int64_t a_stride, const float *b,
                                                                int64_t b_stride, float *c, int64_t c_stride,
                                                                int64_t depth, int rows, int add) {
  vec sums[TILE_ROWS][2];
  for (int r = 0; r < rows; r++)
    for (int s = 0; s < 2; s++) sums[r][s] = add ? v_load(c + r * c_stride + LANES * s) : v_zero();
  for (int64_t k = 0; k < depth; k++) {
    vec low = v_load(b + k * b_stride), high = v_load(b + k * b_stride + LANES);
    for (int r = 0; r < rows; r++) {
      vec all = v_set(a[r * a_stride + k]);
      sums[r][0] = v_fma(all, low, sums[r][0]);
      sums[r][1] = v_fma(all, high, sums[r][1]);
    }
  }
  for (int r = 0; r < rows; r++)
    for (int s = 0; s < 2; s++) v_store(c + r * c_stride + LANES * s, sums[r][s]);
}

/* Elements [at, at + n) of eight rows of bfloat16, n up to 8, into columns: to[i] holds the i-th of each. Rows that are
 * NULL give zeros. */
static inline void transpose(const uint16_t *const rows[LANES], int64_t at, int64_t n, float *to, int64_t stride) {
  vec x[LANES], y[LANES];
  for (int i = 0; i < LANES; i++)
    x[i] = !rows[i] ? v_zero() : n >= LANES ? v_widen(rows[i] + at) : v_widen_part(rows[i] + at, n);
  for (int i = 0; i < LANES; i += 2) {
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < 2; j++) {
      x[i + 2 * j] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0x44);
      x[i + 2 * j + 1] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0xee);
    }
  for (int i = 0; i < 4; i++) {
    v_store(to + i * stride, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
    v_store(to + (i + 4) * stride, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
  }
}
