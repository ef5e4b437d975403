#if defined(__x86_64__)

#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")

#include "vector_avx512.h"

#include "vector.h"

#include <stddef.h>
#include <string.h>

#include "level.h"

#include "pages.h"
#include "softmax.h"

#include "attend_row.h"

#include "pairs_avx512.h"

#define ROWS_OF_PAIRS TILE
#define multiply_pairs multiply_four

#define KEYS 64
#define ROWS_OF_PART TILE

/* Scores of the rows of a part. */
static void score_part(const uint16_t *q, int64_t dim, const uint16_t *k, int64_t keys, float *scores, int r) {
  multiply_four(q + r * dim, dim, dim / 2, k, KEYS, keys, scores + r * KEYS, 0);
}

#include "attend_chunk_pairs.h"
#include "elementwise.h"
#include "few_rows_avx512.h"

const KvLevel kv_avx512 = {
    .few_rows = few_rows,
    .widen = widen,
    .add = add,
    .rms_norm = rms_norm,
    .silu_times = silu_times,
    .rotate = rotate,
    .attend_row = attend_row,
    .pack_block = pack_block,
    .packed = sizeof(uint16_t),
    .attend_block = attend_block,
    .queries = QUERIES,
    .keys = KEYS,
    .once = 4,
    .grain = 12,
    .wide = sizeof(uint16_t),
    .together = 1,
    .step = 1,
};

#endif
