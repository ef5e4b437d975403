/* Attention of many tokens of one sequence, by products of pairs of bfloat16: blocks of QUERIES tokens of one query head
 * against blocks of KEYS tokens, with a running maximum and sum. Keys and values are packed first, once for all query
 * heads: a product wants the two elements of a pair side by side, and what it spreads over a register after them. Those
 * products are in a header of their own: multiply_pairs of ROWS_OF_PAIRS rows, and score_part, the scores of a part of a
 * block that is as large as ROWS_OF_PART rows of it. */

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
  float scores[2][QUERIES * KEYS]; /* of this block of keys and of the next, in turns */
  float sums[QUERIES * MOST_DIM];
  float largest[QUERIES], total[QUERIES];
  int64_t dim;
} __attribute__((aligned(KV_LINE))) Block;

/* 2 to the power of x where `here`, else 0; within 7.5e-5, a fiftieth of what rounding to bfloat16 takes. What is not a
 * number at all stays so. */
static inline __m512 power_of_two(__m512 x, __mmask16 here) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* x less the whole number below */
  __m512 y = v_fma(v_set(7.8024523e-2f), r, v_set(2.2606716e-1f));
  y = v_fma(y, r, v_set(6.9583354e-1f));
  y = v_fma(y, r, v_set(9.9992522e-1f));
  return _mm512_maskz_scalef_ps(here, y, x);
}

static inline __mmask16 seen_of(int64_t left) {
  return left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1 << left) - 1);
}

/* From now on row r is weighed against `largest`: what was summed before is made comparable. */
static void outgrow(Block *block, int r, int64_t dim, float largest) {
  const __m512 before = _mm512_scalef_ps(v_set(1), v_set(block->largest[r] - largest));
  for (int64_t d = 0; d < dim; d += 16)
    v_store(block->sums + r * dim + d, v_mul(v_load(block->sums + r * dim + d), before));
  block->total[r] *= _mm512_cvtss_f32(before);
  block->largest[r] = largest;
}

#define TOGETHER 4 /* rows whose largest and sums are looked for side by side: one would wait for each step of it */
#define SLACK 8    /* what a row is weighed against may be this much too small: weights are up to 2^8 then, and as exact */

/* Makes `keys` scores of rows from r on, of which the first `seen` count in row r and one more in each behind it, into
 * weights: powers of two of what `scale`, which is positive, makes of them. */
static void weigh_rows(Block *block, const float *scores, int r, int64_t keys, int64_t seen, float scale) {
  const int64_t dim = block->dim;
  __m512 most[TOGETHER], total[TOGETHER];
  float largest[TOGETHER];
  scores += r * KEYS;
  for (int j = 0; j < TOGETHER; j++) most[j] = v_set(-__builtin_inff()), total[j] = v_zero();
  for (int i = 0; i < keys; i += 16)
    for (int j = 0; j < TOGETHER; j++)
      most[j] = _mm512_mask_max_ps(most[j], seen_of(seen + j - i), v_load(scores + j * KEYS + i), most[j]);
  for (int j = 0; j < TOGETHER; j++) largest[j] = v_most(most[j]) * scale;
  for (int j = 0; j < TOGETHER; j++)
    if (largest[j] > block->largest[r + j] + SLACK) outgrow(block, r + j, dim, largest[j]);
  for (int i = 0; i < keys; i += 32)
    for (int j = 0; j < TOGETHER; j++) {
      __m512 weights[2];
      for (int n = 0; n < 2; n++) {
        const __m512 score = v_load(scores + j * KEYS + i + 16 * n), largest_of_row = v_set(block->largest[r + j]);
        weights[n] = power_of_two(_mm512_fmsub_ps(score, v_set(scale), largest_of_row), seen_of(seen + j - i - 16 * n));
      }
      total[j] = v_add(total[j], v_add(weights[0], weights[1]));
      _mm512_storeu_si512(block->weights + (r + j) * KEYS + i, (__m512i)_mm512_cvtne2ps_pbh(weights[1], weights[0]));
    }
  const __m128 added = v_sums(total[0], total[1], total[2], total[3]);
  _mm_storeu_ps(block->total + r, _mm_add_ps(_mm_loadu_ps(block->total + r), added));
}

static void clear(Block *block, const uint16_t *q, int64_t stride, int64_t rows, int64_t dim) {
  block->dim = dim;
  for (int r = 0; r < QUERIES; r++) {
    memcpy(block->q + r * dim, q + (r < rows ? r : rows - 1) * stride, (size_t)dim * sizeof(*q));
    memset(block->sums + r * dim, 0, (size_t)dim * sizeof(float));
    block->largest[r] = -__builtin_inff(), block->total[r] = 0;
  }
}

/* How many of a block's keys are looked at where `left` tokens are seen from its first on; 0 or less: none. */
static inline int64_t some_keys(int64_t left) {
  const int64_t some = kv_padded(left, SOME_KEYS);
  return some < KEYS ? some : KEYS;
}

/* Adds what the tokens below `len` give, the first row's own at `start`. The next block's scores come part by part between
 * rows that are weighed: tiles that have paused for 0.15 us take 0.28 us to wake, as long as they work on a block. */
static void add_tokens(Block *block, const uint16_t *k, const uint16_t *v, int64_t start, int64_t len, float scale) {
  const int64_t dim = block->dim;
  for (int r = 0; r < QUERIES; r += ROWS_OF_PART) score_part(block->q, dim, k, some_keys(len), block->scores[0], r);
  for (int64_t first = 0, turn = 0; first < len; first += KEYS, turn = !turn) {
    const int64_t some = some_keys(len - first), next = some_keys(len - first - KEYS);
    for (int r = 0; r < QUERIES; r += TOGETHER) {
      weigh_rows(block, block->scores[turn], r, some, start + r + 1 - first, scale);
      const int done = r + TOGETHER;
      if (next > 0 && done % ROWS_OF_PART == 0)
        score_part(block->q, dim, k + (first + KEYS) * dim, next, block->scores[!turn], done - ROWS_OF_PART);
      if (done % ROWS_OF_PAIRS) continue;
      const int64_t from = done - ROWS_OF_PAIRS;
      multiply_pairs(block->weights + from * KEYS, KEYS, some / 2, v + first * dim, dim, dim, block->sums + from * dim, 1);
    }
  }
}

/* The first `rows` of QUERIES tokens of one head, `stride` apart, the first of them at position `start`. A power of two that
 * is no normal number becomes zero meanwhile: a core takes 150 cycles for one. */
static void attend_block(const KvLayer *layer, const uint16_t *q, uint16_t *out, int64_t stride, int64_t out_stride,
                         int64_t rows, int64_t start, const void *keys, const void *values) {
  const int64_t dim = layer->head_dim;
  const unsigned usual = _mm_getcsr();
  Block block;
  clear(&block, q, stride, rows, dim);
  _mm_setcsr(usual | _MM_FLUSH_ZERO_ON);
  add_tokens(&block, keys, values, start, start + rows, layer->scale * 1.44269504f); /* of powers of two instead of e's */
  _mm_setcsr(usual);
  for (int r = 0; r < rows; r++)
    for (int64_t d = 0; d < dim; d += 16)
      v_narrow(out + r * out_stride + d, v_div(v_load(block.sums + r * dim + d), v_set(block.total[r])));
}
