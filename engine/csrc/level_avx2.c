#if defined(__x86_64__)

#pragma GCC target("avx2,fma")

#include "vector_avx2.h"

#include "vector.h"

#include <stddef.h>
#include <string.h>

#include "level.h"

#include "pages.h"
#include "softmax.h"

#include "attend_row.h"
#include "elementwise.h"

#include "tile_avx2.h"

#include "attend_chunk_avx2.h"
#include "few_rows_avx2.h"
#include "many_rows_avx2.h"

const KvLevel kv_avx2 = {
    .few_rows = few_rows,
    .arrange = arrange,
    .wide = sizeof(float),
    .together = 1,
    .step = 1,
    .once = 4,
    .grain = 12,
    .widen = widen,
    .add = add,
    .rms_norm = rms_norm,
    .silu_times = silu_times,
    .rotate = rotate,
    .attend_row = attend_row,
    .arrange_many = arrange_many,
    .many_rows = many_rows,
    .pack_block = pack_block,
    .packed = sizeof(float),
    .attend_block = attend_block,
    .queries = QUERIES,
    .keys = KEYS,
};

#endif
