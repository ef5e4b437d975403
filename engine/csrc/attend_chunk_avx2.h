/* Attention of many tokens of one sequence, in float32: blocks of tokens of one query head against blocks of KEYS
 * tokens, with a running maximum and sum. Keys and values are widened first, once for all query heads, the keys
 * transposed into panels of TILE_COLUMNS tokens. */

#define QUERIES 36 /* tokens of a block, a multiple of TILE_ROWS */
#define KEYS 64

/* Keys [KEYS / TILE_COLUMNS][dim][TILE_COLUMNS] and values [KEYS][dim] of a block of tokens; zeros behind the end. */
static void pack_block(const KvLayer *layer, int64_t head, const int64_t *table, int64_t first, int64_t len, void *keys,
                       void *values) {
  const int64_t dim = layer->head_dim, step = layer->page_size * dim;
  float *k = keys, *v = values;
  for (int64_t j = 0; j < KEYS; j += LANES) {
    const uint16_t *rows[LANES];
    for (int64_t i = 0; i < LANES; i++) {
      rows[i] = first + j + i < len ? key_of(layer, head, table, first + j + i) : NULL;
      if (rows[i])
        widen(rows[i] + step, v + (j + i) * dim, dim);
      else
        memset(v + (j + i) * dim, 0, (size_t)dim * sizeof(*v));
    }
    float *to = k + j / TILE_COLUMNS * dim * TILE_COLUMNS + j % TILE_COLUMNS;
    for (int64_t d = 0; d < dim; d += LANES) transpose(rows, d, LANES, to + d * TILE_COLUMNS, TILE_COLUMNS);
  }
}

typedef struct {
  float q[QUERIES * MOST_DIM];
  float sums[QUERIES * MOST_DIM];
  float scores[TILE_ROWS * KEYS];
  float largest[QUERIES], total[QUERIES];
} Block;

/* Rows [r, r + TILE_ROWS) against a block of keys, of which the first row sees `seen`, and each other one more. */
static void attend_tile(Block *block, int r, int64_t seen, const float *k, const float *v, int64_t dim) {
  const int64_t most = seen + TILE_ROWS - 1 < KEYS ? seen + TILE_ROWS - 1 : KEYS;
  float *scores = block->scores, *sums = block->sums + r * dim;
  for (int64_t j = 0; j < most; j += TILE_COLUMNS)
    multiply_tile(block->q + r * dim, dim, k + j * dim, TILE_COLUMNS, scores + j, KEYS, dim, TILE_ROWS, 0);
  for (int i = 0; i < TILE_ROWS; i++) {
    int64_t sees = seen + i < 0 ? 0 : seen + i < KEYS ? seen + i : KEYS;
    if (sees) weigh(scores + i * KEYS, sees, sums + i * dim, dim, block->largest + r + i, block->total + r + i);
    for (int64_t j = (sees + LANES - 1) / LANES * LANES; j < most; j++) scores[i * KEYS + j] = 0;
  }
  for (int64_t d = 0; d < dim; d += TILE_COLUMNS)
    multiply_tile(scores, KEYS, v + d, dim, sums + d, dim, most, TILE_ROWS, 1);
}

static void attend_block(const KvLayer *layer, const uint16_t *q, uint16_t *out, int64_t stride, int64_t out_stride,
                         int64_t rows, int64_t start, const void *keys, const void *values) {
  const int64_t dim = layer->head_dim;
  const float *k = keys, *v = values;
  Block block;
  for (int r = 0; r < QUERIES; r++) {
    block.largest[r] = -__builtin_inff(), block.total[r] = 0;
    const uint16_t *from = q + (r < rows ? r : rows - 1) * stride;
    for (int64_t d = 0; d < dim; d += LANES) {
      v_store(block.q + r * dim + d, v_mul(v_widen(from + d), v_set(layer->scale)));
      v_store(block.sums + r * dim + d, v_zero());
    }
  }
  for (int64_t first = 0; first < start + rows; first += KEYS)
    for (int r = 0; r < rows; r += TILE_ROWS)
      if (start + r + TILE_ROWS > first)
        attend_tile(&block, r, start + r + 1 - first, k + first * dim, v + first * dim, dim);
  for (int r = 0; r < rows; r++)
    for (int64_t d = 0; d < dim; d += LANES)
      v_narrow(out + r * out_stride + d, v_div(v_load(block.sums + r * dim + d), v_set(block.total[r])));
}
