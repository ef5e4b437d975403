/* Attention of the query heads of one KV head to the pages of its sequence: block after block of its tokens, with a
 * running maximum and sum. Blocks begin at multiples of BLOCK whatever the length, so a token's answer is the same
 * whoever is beside it. */

#define BLOCK 64
#define HEADS 4 /* query heads that read a key, or a value, together */
#define MOST_DIM 256

typedef struct {
  float q[HEADS][MOST_DIM];
  float sums[HEADS][MOST_DIM];
  float scores[HEADS][BLOCK];
  float largest[HEADS], total[HEADS];
} Row;

/* Where the keys and values of n tokens from `first` on are, the last of them repeated to a multiple of four; all are on
 * their way into the cache, since they are in short runs. */
static inline void find(const KvLayer *layer, int64_t head, const int64_t *table, int64_t first, int64_t n,
                        const uint16_t **keys, const uint16_t **values) {
  const int64_t dim = layer->head_dim, tokens = layer->page_size;
  int64_t page = first / tokens, offset = first % tokens;
  for (int64_t j = 0; j < n; j++) {
    keys[j] = layer->pages + ((table[page] * layer->kv_heads + head) * 2 * tokens + offset) * dim;
    values[j] = keys[j] + tokens * dim;
    for (int64_t d = 0; d < dim; d += 32) {
      _mm_prefetch((const char *)(keys[j] + d), _MM_HINT_T0);
      _mm_prefetch((const char *)(values[j] + d), _MM_HINT_T0);
    }
    if (++offset == tokens) page++, offset = 0;
  }
  for (int64_t j = n; j % 4; j++) keys[j] = keys[n - 1];
}

static inline __attribute__((always_inline)) void score(Row *row, const uint16_t **keys, int heads, int64_t n,
                                                        int64_t dim) {
  for (int64_t j = 0; j < n; j += 4) {
    vec sums[HEADS][4];
    for (int h = 0; h < heads; h++)
      for (int k = 0; k < 4; k++) sums[h][k] = v_zero();
    for (int64_t d = 0; d < dim; d += LANES)
      for (int k = 0; k < 4; k++) {
        vec key = v_widen(keys[j + k] + d);
        for (int h = 0; h < heads; h++) sums[h][k] = v_fma(v_load(row->q[h] + d), key, sums[h][k]);
      }
    for (int h = 0; h < heads; h++)
      _mm_storeu_ps(row->scores[h] + j, v_sums(sums[h][0], sums[h][1], sums[h][2], sums[h][3]));
  }
}

static inline __attribute__((always_inline)) void mix(Row *row, const uint16_t **values, int heads, int64_t n,
                                                      int64_t dim) {
  for (int64_t d = 0; d < dim; d += LANES) {
    vec sums[HEADS];
    for (int h = 0; h < heads; h++) sums[h] = v_load(row->sums[h] + d);
    for (int64_t j = 0; j < n; j++) {
      vec value = v_widen(values[j] + d);
      for (int h = 0; h < heads; h++) sums[h] = v_fma(v_set(row->scores[h][j]), value, sums[h]);
    }
    for (int h = 0; h < heads; h++) v_store(row->sums[h] + d, sums[h]);
  }
}

static inline __attribute__((always_inline)) void attend(const KvLayer *layer, int64_t head, const uint16_t *q,
                                                         uint16_t *out, const int64_t *table, int64_t len, int heads) {
  const int64_t dim = layer->head_dim;
  Row row;
  for (int h = 0; h < heads; h++) {
    row.largest[h] = -__builtin_inff(), row.total[h] = 0;
    for (int64_t d = 0; d < dim; d += LANES) {
      v_store(row.q[h] + d, v_mul(v_widen(q + h * dim + d), v_set(layer->scale)));
      v_store(row.sums[h] + d, v_zero());
    }
  }
  for (int64_t first = 0; first < len; first += BLOCK) {
    const int64_t n = len - first < BLOCK ? len - first : BLOCK;
    const uint16_t *keys[BLOCK], *values[BLOCK];
    find(layer, head, table, first, n, keys, values);
    score(&row, keys, heads, n, dim);
    for (int h = 0; h < heads; h++) weigh(row.scores[h], n, row.sums[h], dim, row.largest + h, row.total + h);
    mix(&row, values, heads, n, dim);
  }
  for (int h = 0; h < heads; h++)
    for (int64_t d = 0; d < dim; d += LANES)
      v_narrow(out + h * dim + d, v_div(v_load(row.sums[h] + d), v_set(row.total[h])));
}

static void attend_row(const KvLayer *layer, int64_t head, const uint16_t *q, uint16_t *out, const int64_t *table,
                       int64_t len) {
  for (int64_t h = 0; h < layer->group; h += HEADS) {
    const uint16_t *from = q + h * layer->head_dim;
    uint16_t *to = out + h * layer->head_dim;
    switch (layer->group - h) {
      case 1: attend(layer, head, from, to, table, len, 1); break;
      case 2: attend(layer, head, from, to, table, len, 2); break;
      case 3: attend(layer, head, from, to, table, len, 3); break;
      default: attend(layer, head, from, to, table, len, 4);
    }
  }
}
