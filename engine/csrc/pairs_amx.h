/* The same products on tiles, all rows of a block at once: two tiles of rows by one or two of columns. */

#define ROWS_OF_PAIRS KV_QUERIES

/* Constant columns once inlined: tiles of SIDE of them. */
static inline __attribute__((always_inline)) void multiply_tiles(const uint16_t *a, int64_t a_stride,
                                                                 int64_t pairs, const uint16_t *b, int64_t width,
                                                                 float *c, int columns, int add) {
  const int64_t from = 2 * a_stride, to = 4 * width;
  float *below = c + SIDE * width;
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  if (add) {
    TILE_LOAD(0, c, to);
    TILE_LOAD(1, below, to);
    if (columns > 1) TILE_LOAD(2, c + SIDE, to);
    if (columns > 1) TILE_LOAD(3, below + SIDE, to);
  }
  for (int64_t p = 0; p < pairs; p += STEP / 2) {
    TILE_LOAD(4, a + 2 * p, from);
    TILE_LOAD(5, a + SIDE * a_stride + 2 * p, from);
    TILE_LOAD(6, b + 2 * p * width, to);
    TILE_PRODUCT(0, 4, 6);
    TILE_PRODUCT(1, 5, 6);
    if (columns > 1) {
      TILE_LOAD(7, b + 2 * (p * width + SIDE), to);
      TILE_PRODUCT(2, 4, 7);
      TILE_PRODUCT(3, 5, 7);
    }
  }
  TILE_STORE(0, c, to);
  TILE_STORE(1, below, to);
  if (columns > 1) TILE_STORE(2, c + SIDE, to);
  if (columns > 1) TILE_STORE(3, below + SIDE, to);
}

/* As multiply_four, for ROWS_OF_PAIRS rows. Pairs that are no whole steps are multiplied in registers: heads of 16 or
 * 48, say. */
static void multiply_pairs(const uint16_t *a, int64_t a_stride, int64_t pairs, const uint16_t *b, int64_t width,
                           int64_t columns, float *c, int add) {
  if (pairs % (STEP / 2)) {
    for (int64_t r = 0; r < ROWS_OF_PAIRS; r += TILE)
      multiply_four(a + r * a_stride, a_stride, pairs, b, width, columns, c + r * width, add);
    return;
  }
  int64_t d = 0;
  for (; d + 2 * SIDE <= columns; d += 2 * SIDE) multiply_tiles(a, a_stride, pairs, b + 2 * d, width, c + d, 2, add);
  if (d < columns) multiply_tiles(a, a_stride, pairs, b + 2 * d, width, c + d, 1, add);
}

/* A part of the scores of a block is some of its keys against all rows. */
#define KEYS_OF_PART (2 * SIDE)
#define ROWS_OF_PART (KV_QUERIES * KEYS_OF_PART / KEYS)

static void score_part(const uint16_t *q, int64_t dim, const uint16_t *k, int64_t keys, float *scores, int r) {
  const int64_t first = r / ROWS_OF_PART * KEYS_OF_PART;
  if (first < keys) multiply_pairs(q, dim, dim / 2, k + 2 * first, KEYS, KEYS_OF_PART, scores + first, 0);
}
