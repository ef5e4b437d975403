/* A tile of OUTPUTS outputs by up to ROWS rows lives in registers: 12 sums, 3 weights, 1 input of the 16 that AVX2 has.
 * Every weight is widened once for ROWS rows, from the cache after the first of them has read it from memory. */
#include "few_rows.h"

#include <stddef.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define OUTPUTS 3
#define ROWS 4
#define LANES 8
#define TILE 48 /* outputs that a thread takes at a time, while their weights stay in its cache */

#define VECTOR __attribute__((target("avx2,fma")))

int kv_few_rows_supported(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

static uint16_t narrow(float value) {
  union {
    float f;
    uint32_t u;
  } bits = {.f = value};
  if (value != value) return 0x7fc0;
  return (uint16_t)((bits.u + 0x7fff + ((bits.u >> 16) & 1)) >> 16);
}

static float widen(uint16_t value) {
  union {
    uint32_t u;
    float f;
  } bits = {.u = (uint32_t)value << 16};
  return bits.f;
}

VECTOR static inline float sum(__m256 v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

VECTOR static inline __m256 weights(const uint16_t *w) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)w)), 16));
}

/* Constant arguments once inlined: the sums stay in registers. */
VECTOR static inline __attribute__((always_inline)) void tile(const uint16_t *w, const float *x, uint16_t *y, int outputs,
                                                              int rows, int64_t stride, int64_t inputs) {
  __m256 sums[OUTPUTS][ROWS];
  for (int o = 0; o < outputs; o++)
    for (int r = 0; r < rows; r++) sums[o][r] = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + LANES <= inputs; i += LANES) {
    __m256 wide[OUTPUTS];
    for (int o = 0; o < outputs; o++) wide[o] = weights(w + o * inputs + i);
    for (int r = 0; r < rows; r++) {
      __m256 input = _mm256_loadu_ps(x + r * inputs + i);
      for (int o = 0; o < outputs; o++) sums[o][r] = _mm256_fmadd_ps(wide[o], input, sums[o][r]);
    }
  }
  for (int o = 0; o < outputs; o++)
    for (int r = 0; r < rows; r++) {
      float total = sum(sums[o][r]);
      for (int64_t j = i; j < inputs; j++) total += widen(w[o * inputs + j]) * x[r * inputs + j];
      y[r * stride + o] = narrow(total);
    }
}

VECTOR static void outputs_of(const uint16_t *w, const float *x, uint16_t *y, int outputs, int64_t rows, int64_t stride,
                              int64_t inputs) {
  int64_t r = 0;
  for (; r + ROWS <= rows; r += ROWS) {
    if (outputs == OUTPUTS)
      tile(w, x + r * inputs, y + r * stride, OUTPUTS, ROWS, stride, inputs);
    else
      for (int o = 0; o < outputs; o++) tile(w + o * inputs, x + r * inputs, y + r * stride + o, 1, ROWS, stride, inputs);
  }
  for (; r < rows; r++) {
    if (outputs == OUTPUTS)
      tile(w, x + r * inputs, y + r * stride, OUTPUTS, 1, stride, inputs);
    else
      for (int o = 0; o < outputs; o++) tile(w + o * inputs, x + r * inputs, y + r * stride + o, 1, 1, stride, inputs);
  }
}

void kv_few_rows(const uint16_t *w, const float *x, uint16_t *y, int64_t rows, int64_t outputs, int64_t inputs) {
  int64_t tiles = (outputs + TILE - 1) / TILE;
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tiles; t++) {
    int64_t end = (t + 1) * TILE < outputs ? (t + 1) * TILE : outputs;
    for (int64_t o = t * TILE; o < end; o += OUTPUTS) {
      int count = end - o < OUTPUTS ? (int)(end - o) : OUTPUTS;
      outputs_of(w + o * inputs, x, y + o, count, rows, outputs, inputs);
    }
  }
}

#else

int kv_few_rows_supported(void) { return 0; }

void kv_few_rows(const uint16_t *w, const float *x, uint16_t *y, int64_t rows, int64_t outputs, int64_t inputs) {
  (void)w, (void)x, (void)y, (void)rows, (void)outputs, (void)inputs;
}

#endif
