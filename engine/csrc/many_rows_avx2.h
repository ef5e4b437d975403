/* The product of many rows: weights are widened and transposed, once for all rows, into panels that stay in the first
 * two levels of the cache, and tiles of rows, widened already, run over them. */

#define PANELS (KV_COLUMNS / TILE_COLUMNS)
#define DEPTH 288 /* inputs of a panel: two panels of 18 KiB, beside the rows' 7 KiB */

/* Panels [DEPTH][TILE_COLUMNS] of the inputs [at, at + depth) of `outputs` outputs, zeros behind the last of them. */
static void pack_weights(const uint16_t *w, int64_t inputs, int64_t outputs, int64_t at, int64_t depth, float *panels) {
  for (int64_t o = 0; o < KV_COLUMNS; o += LANES) {
    const uint16_t *rows[LANES];
    for (int64_t i = 0; i < LANES; i++) rows[i] = o + i < outputs ? w + (o + i) * inputs + at : NULL;
    float *to = panels + o / TILE_COLUMNS * DEPTH * TILE_COLUMNS + o % TILE_COLUMNS;
    for (int64_t k = 0; k < depth; k += LANES) transpose(rows, k, depth - k, to + k * TILE_COLUMNS, TILE_COLUMNS);
  }
}

static inline __attribute__((always_inline)) void run_over(const float *panels, const float *x, int64_t inputs,
                                                           float *sums, int64_t depth, int rows) {
  for (int p = 0; p < PANELS; p++)
    multiply_tile(x, inputs, panels + p * DEPTH * TILE_COLUMNS, TILE_COLUMNS, sums + p * TILE_COLUMNS, KV_COLUMNS, depth,
                  rows, 1);
}

static void run_over_rows(const float *panels, const float *x, int64_t inputs, float *sums, int64_t depth,
                          int64_t rows) {
  int64_t r = 0;
  for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
    run_over(panels, x + r * inputs, inputs, sums + r * KV_COLUMNS, depth, TILE_ROWS);
  const float *from = x + r * inputs;
  float *to = sums + r * KV_COLUMNS;
  switch (rows - r) {
    case 1: run_over(panels, from, inputs, to, depth, 1); break;
    case 2: run_over(panels, from, inputs, to, depth, 2); break;
    case 3: run_over(panels, from, inputs, to, depth, 3); break;
    case 4: run_over(panels, from, inputs, to, depth, 4); break;
    case 5: run_over(panels, from, inputs, to, depth, 5);
  }
}

static void narrow_row(const float *sums, uint16_t *y, int64_t outputs) {
  int64_t o = 0;
  for (; o + LANES <= outputs; o += LANES) v_narrow(y + o, v_load(sums + o));
  if (o < outputs) v_narrow_part(y + o, v_load(sums + o), outputs - o);
}

/* Rows in float32. */
static void arrange_many(const uint16_t *x, void *to, int64_t rows, int64_t inputs) { widen(x, to, rows * inputs); }

static void many_rows(const uint16_t *w, const void *x, uint16_t *y, int64_t stride, int64_t rows, int64_t outputs,
                      int64_t inputs) {
  float panels[PANELS * DEPTH * TILE_COLUMNS], sums[KV_ROWS * KV_COLUMNS];
  memset(sums, 0, (size_t)(rows * KV_COLUMNS) * sizeof(*sums));
  for (int64_t at = 0; at < inputs; at += DEPTH) {
    int64_t depth = inputs - at < DEPTH ? inputs - at : DEPTH;
    pack_weights(w, inputs, outputs, at, depth, panels);
    run_over_rows(panels, (const float *)x + at, inputs, sums, depth, rows);
  }
  for (int64_t r = 0; r < rows; r++) narrow_row(sums + r * KV_COLUMNS, y + r * stride, outputs);
}
