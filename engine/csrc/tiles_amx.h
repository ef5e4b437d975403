/* Tiles of AMX: eight registers, each SIDE rows of 64 bytes. A product adds to a tile of float32 [SIDE][SIDE] what two
 * tiles of bfloat16 give, [SIDE][STEP] times [STEP / 2][SIDE][2], whose pairs lie side by side. Instructions are written
 * out: gcc's own do not say that they read and write memory. */

#define SIDE 16
#define STEP 32 /* elements of bfloat16 in a row of a tile */

#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define TILE_LOAD(tile, from, stride)                                                                                    \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
/* With the hint that what is loaded passes by: it stays out of the first cache. */
#define TILE_LOAD_PASSING(tile, from, stride)                                                                            \
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tile, to, stride)                                                                                     \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
/* sums += a times b. */
#define TILE_PRODUCT(sums, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::)

/* Gives the thread its tiles, all of the whole size. */
static void begin(void) {
  static const struct {
    uint8_t palette, row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } whole = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE}};
  __asm__ volatile("ldtilecfg %0" ::"m"(whole));
}

/* Takes them back: a thread without any is switched faster. */
static void end(void) { __asm__ volatile("tilerelease" ::); }

/* Sixteen rows of sixteen elements of 32 bits into columns. */
static inline void transpose(__m512i x[SIDE]) {
  __m512i y[SIDE];
  for (int i = 0; i < SIDE; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < SIDE; i += 4)
    for (int j = 0; j < 2; j++) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  /* x[4 i + c] has columns c, c + 4, c + 8 and c + 12 of rows 4 i .. 4 i + 3. */
  for (int c = 0; c < 4; c++) {
    __m512i low = _mm512_shuffle_i32x4(x[c], x[c + 4], 0x88), high = _mm512_shuffle_i32x4(x[c + 8], x[c + 12], 0x88);
    __m512i low_odd = _mm512_shuffle_i32x4(x[c], x[c + 4], 0xdd);
    __m512i high_odd = _mm512_shuffle_i32x4(x[c + 8], x[c + 12], 0xdd);
    y[c] = _mm512_shuffle_i32x4(low, high, 0x88);
    y[c + 8] = _mm512_shuffle_i32x4(low, high, 0xdd);
    y[c + 4] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
    y[c + 12] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
  }
  for (int i = 0; i < SIDE; i++) x[i] = y[i];
}
