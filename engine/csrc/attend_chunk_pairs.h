/* Attention of many tokens of one sequence, by products of pairs of bfloat16: blocks of QUERIES tokens of one query head
 * against blocks of KEYS tokens, with a running maximum and sum. Keys and values are packed first, once for all query
 * heads: a product wants the two elements of a pair side by side, and what it spreads over a register after them. Those
 * products are in a header of their own, multiply_pairs of ROWS_OF_PAIRS rows. */

#define QUERIES KV_QUERIES
#define SOME_KEYS 32 /* a block's keys are looked at in multiples of these, up to the last that anyone sees */

/* Keys [dim / 2][KEYS][2] and values [KEYS / 2][dim][2] of a block of tokens; zeros behind the sequence's end. */
static void pack_block(const KvLayer *layer, int64_t head, const int64_t *table, int64_t first, int64_t len, void *keys,
                       void *values) {
  const int64_t dim = layer->head_dim, step = layer->page_size * dim;
  static const uint16_t zeros[2 * MOST_DIM];
  uint16_t *k = keys, *v = values;
  for (int64_t j = 0; j < KEYS; j += 2) {
    const uint16_t *a = first + j < len ? key_of(layer, head, table, first + j) : NULL;
    const uint16_t *b = first + j + 1 < len ? key_of(layer, head, table, first + j + 1) : NULL;
    const uint16_t *va = a ? a + step : zeros, *vb = b ? b + step : zeros;
    a = a ? a : zeros, b = b ? b : zeros;
    for (int64_t d = 0; d < dim; d += 2) {
      uint32_t pairs[2];
      memcpy(pairs, a + d, 4), memcpy(pairs + 1, b + d, 4);
      memcpy(k + (d / 2 * KEYS + j) * 2, pairs, 8);
    }
    for (int64_t d = 0; d < dim; d += 16) {
      __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(va + d)));
      __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(vb + d)));
      _mm512_storeu_si512(v + (j / 2 * dim + d) * 2, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

typedef struct {
  uint16_t q[QUERIES * MOST_DIM];
  uint16_t weights[QUERIES * KEYS];
  float scores[QUERIES * KEYS];
  float sums[QUERIES * MOST_DIM];
  float largest[QUERIES], total[QUERIES];
} Block;

/* 2 to the power of x up to 0 where `here`, else 0; within 3e-6, a thousandth of what rounding to bfloat16 takes. Below
 * -126 it is that of -126, beside a largest weight of 1: what is no normal number takes a processor long. What is not a
 * number at all stays so. */
static inline __m512 power_of_two(__m512 x, __mmask16 here) {
  x = _mm512_max_ps(_mm512_set1_ps(-126), x);
  const __m512 n = v_round(x), r = v_sub(x, n);
  __m512 y = v_fma(v_set(1.3333558e-3f), r, v_set(9.6181291e-3f));
  y = v_fma(y, r, v_set(5.5504109e-2f));
  y = v_fma(y, r, v_set(2.4022651e-1f));
  y = v_fma(y, r, v_set(6.9314718e-1f));
  y = v_fma(y, r, v_set(1));
  return _mm512_maskz_scalef_ps(here, y, n);
}

static inline __mmask16 seen_of(int64_t left) {
  return left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1 << left) - 1);
}

/* Makes `keys` scores of row r, of which the first `seen` count, into weights: powers of two of what `scale` makes of
 * them. */
static inline void weigh_row(Block *block, int r, int64_t keys, int64_t seen, int64_t dim, float scale) {
  const __m512 none = _mm512_set1_ps(-__builtin_inff());
  __m512 scores[KEYS / 16], most = _mm512_set1_ps(block->largest[r]), total = _mm512_setzero_ps();
  for (int i = 0; i < keys / 16; i++) {
    __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(block->scores + r * KEYS + 16 * i), _mm512_set1_ps(scale));
    scores[i] = _mm512_mask_mov_ps(none, seen_of(seen - 16 * i), scaled);
    most = _mm512_max_ps(scores[i], most);
  }
  float largest = v_most(most);
  for (int i = 0; i < keys / 16; i++) {
    __m512 weights = power_of_two(_mm512_sub_ps(scores[i], _mm512_set1_ps(largest)), seen_of(seen - 16 * i));
    total = _mm512_add_ps(total, weights);
    v_narrow(block->weights + r * KEYS + 16 * i, weights);
  }
  if (largest != block->largest[r]) {
    __m512 before = power_of_two(_mm512_set1_ps(block->largest[r] - largest), 0xffff);
    for (int64_t d = 0; d < dim; d += 16)
      v_store(block->sums + r * dim + d, v_mul(v_load(block->sums + r * dim + d), before));
    block->total[r] *= _mm512_cvtss_f32(before);
    block->largest[r] = largest;
  }
  block->total[r] += v_sum(total);
}

/* The first `rows` of QUERIES tokens of one head, `stride` apart, the first of them at position `start`. */
static void attend_block(const KvLayer *layer, const uint16_t *q, uint16_t *out, int64_t stride, int64_t out_stride,
                         int64_t rows, int64_t start, const void *keys, const void *values) {
  const int64_t dim = layer->head_dim;
  const uint16_t *k = keys, *v = values;
  const float scale = layer->scale * 1.44269504f; /* of powers of two instead of e's */
  Block block;
  for (int r = 0; r < QUERIES; r++) {
    memcpy(block.q + r * dim, q + (r < rows ? r : rows - 1) * stride, (size_t)dim * sizeof(*q));
    memset(block.sums + r * dim, 0, (size_t)dim * sizeof(float));
    block.largest[r] = -__builtin_inff(), block.total[r] = 0;
  }
  for (int64_t first = 0; first < start + rows; first += KEYS) {
    const int64_t left = kv_padded(start + rows - first, SOME_KEYS), some = left < KEYS ? left : KEYS;
    for (int r = 0; r < QUERIES; r += ROWS_OF_PAIRS) {
      multiply_pairs(block.q + r * dim, dim, dim / 2, k + first * dim, KEYS, some, block.scores + r * KEYS, 0);
      for (int i = r; i < r + ROWS_OF_PAIRS; i++) weigh_row(&block, i, some, start + i + 1 - first, dim, scale);
      multiply_pairs(block.weights + r * KEYS, KEYS, some / 2, v + first * dim, dim, dim, block.sums + r * dim, 1);
    }
  }
  for (int r = 0; r < rows; r++)
    for (int64_t d = 0; d < dim; d += 16)
      v_narrow(out + r * out_stride + d, v_div(v_load(block.sums + r * dim + d), v_set(block.total[r])));
}
