/* x W^T on tiles: weights [SIDE outputs][STEP inputs] are read where they lie, rows are arranged, and what comes out is
 * transposed. A sum runs over the inputs in order, a step at a time, whatever is beside it: few rows and many are one
 * product. Two tiles of outputs by two of rows are summed at once, so that a tile is loaded once for two products. The
 * processor reads ahead well enough by itself: fetching by hand, in four ways, gave nothing. */

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

/* Bytes of SIDE rows, arranged. */
static inline int64_t group_bytes(int64_t inputs) { return kv_padded(inputs, STEP) * SIDE * 2; }

/* x [rows][inputs] -> [rows / SIDE][inputs / STEP][STEP / 2][SIDE][2], zeros behind the ends. */
static void arrange(const uint16_t *x, void *to, int64_t rows, int64_t inputs) {
  char *at = to;
  for (int64_t r = 0; r < rows; r += SIDE)
    for (int64_t k = 0; k < inputs; k += STEP, at += SIDE * 64) {
      const int64_t left = inputs - k;
      const __mmask32 here = left < STEP ? ((__mmask32)1 << left) - 1 : ~(__mmask32)0;
      __m512i some[SIDE];
      for (int i = 0; i < SIDE; i++)
        some[i] = r + i < rows ? _mm512_maskz_loadu_epi16(here, x + (r + i) * inputs + k) : _mm512_setzero_si512();
      transpose(some);
      for (int i = 0; i < SIDE; i++) _mm512_storeu_si512(at + 64 * i, some[i]);
    }
}

typedef struct {
  const void *at;
  int64_t stride; /* bytes */
} Tile;

/* SIDE of `outputs` outputs and STEP of `left` inputs: where they lie, or with zeros behind their end in `edge`. */
static inline Tile weights_at(const uint16_t *w, int64_t outputs, int64_t inputs, int64_t left,
                              uint16_t edge[SIDE][STEP]) {
  if (outputs >= SIDE && left >= STEP) return (Tile){w, inputs * 2};
  memset(edge, 0, SIDE * STEP * sizeof(**edge));
  for (int64_t o = 0; o < lesser(outputs, SIDE); o++) memcpy(edge[o], w + o * inputs, (size_t)lesser(left, STEP) * 2);
  return (Tile){edge, STEP * 2};
}

typedef struct {
  float of[2][2][SIDE][SIDE]; /* [tile of outputs][tile of rows] */
} Sums;

/* Constant tiles and groups once inlined. */
static inline __attribute__((always_inline)) void sum_tiles(const uint16_t *w, int64_t outputs, int64_t inputs,
                                                            const char *x, int tiles, int groups, Sums *sums) {
  const char *beside = x + group_bytes(inputs);
  uint16_t edges[2][SIDE][STEP];
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int64_t k = 0; k < inputs; k += STEP) {
    Tile first = weights_at(w + k, outputs, inputs, inputs - k, edges[0]);
    TILE_LOAD(6, x + k * SIDE * 2, 64);
    TILE_LOAD(4, first.at, first.stride);
    TILE_PRODUCT(0, 4, 6);
    if (groups > 1) {
      TILE_LOAD(7, beside + k * SIDE * 2, 64);
      TILE_PRODUCT(1, 4, 7);
    }
    if (tiles > 1) {
      Tile second = weights_at(w + SIDE * inputs + k, outputs - SIDE, inputs, inputs - k, edges[1]);
      TILE_LOAD(5, second.at, second.stride);
      TILE_PRODUCT(2, 5, 6);
      if (groups > 1) TILE_PRODUCT(3, 5, 7);
    }
  }
  TILE_STORE(0, sums->of[0][0], 64);
  if (groups > 1) TILE_STORE(1, sums->of[0][1], 64);
  if (tiles > 1) TILE_STORE(2, sums->of[1][0], 64);
  if (groups > 1 && tiles > 1) TILE_STORE(3, sums->of[1][1], 64);
}

/* y [rows][outputs], of a tile's transpose. */
static inline void narrow_tile(float from[SIDE][SIDE], uint16_t *y, int64_t stride, int64_t rows, int64_t outputs) {
  const __mmask16 here = outputs < SIDE ? (__mmask16)((1 << outputs) - 1) : (__mmask16)~0;
  __m512i sums[SIDE];
  for (int i = 0; i < SIDE; i++) sums[i] = _mm512_loadu_si512(from[i]);
  transpose(sums);
  for (int64_t r = 0; r < lesser(rows, SIDE); r++)
    _mm256_mask_storeu_epi16(y + r * stride, here, (__m256i)_mm512_cvtneps_pbh(_mm512_castsi512_ps(sums[r])));
}

/* Up to two tiles of outputs of up to two of rows. */
static void some_outputs(const uint16_t *w, const char *x, uint16_t *y, int64_t stride, int64_t rows, int64_t outputs,
                         int64_t inputs) {
  const int tiles = outputs > SIDE ? 2 : 1, groups = rows > SIDE ? 2 : 1;
  Sums sums;
  if (tiles > 1 && groups > 1)
    sum_tiles(w, outputs, inputs, x, 2, 2, &sums);
  else if (tiles > 1)
    sum_tiles(w, outputs, inputs, x, 2, 1, &sums);
  else
    sum_tiles(w, outputs, inputs, x, 1, groups, &sums);
  for (int t = 0; t < tiles; t++)
    for (int g = 0; g < groups; g++)
      narrow_tile(sums.of[t][g], y + g * SIDE * stride + t * SIDE, stride, rows - g * SIDE, outputs - t * SIDE);
}

/* y [rows][outputs], rows `stride` apart. */
static void many_rows(const uint16_t *w, const void *x, uint16_t *y, int64_t stride, int64_t rows, int64_t outputs,
                      int64_t inputs) {
  for (int64_t o = 0; o < outputs; o += 2 * SIDE)
    for (int64_t r = 0; r < rows; r += 2 * SIDE)
      some_outputs(w + o * inputs, (const char *)x + r / SIDE * group_bytes(inputs), y + r * stride + o, stride,
                   lesser(rows - r, 2 * SIDE), lesser(outputs - o, 2 * SIDE), inputs);
}

static void few_rows(const uint16_t *w, const void *x, uint16_t *y, int64_t rows, int64_t outputs, int64_t inputs,
                     int64_t first, int64_t end) {
  many_rows(w + first * inputs, x, y + first, outputs, rows, end - first, inputs);
}
