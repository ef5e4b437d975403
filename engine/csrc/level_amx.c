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

#include "tiles_amx.h"

#include "pairs_avx512.h"
#define KEYS 64 /* 128 take a tenth longer: scores of two blocks leave little of the first cache */
#include "pairs_amx.h"

#include "attend_chunk_pairs.h"
#include "elementwise.h"
#include "product_amx.h"

const KvLevel kv_amx = {
    .begin = begin,
    .end = end,
    .few_rows = few_rows,
    .arrange = arrange,
    .arrange_many = arrange,
    .many_rows = many_rows,
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
    .once = INT64_MAX, /* two tiles of weights stay in the cache for all rows */
    .grain = SIDE,
    .wide = sizeof(uint16_t),
    .together = SIDE,
    .step = STEP,
};

#endif
