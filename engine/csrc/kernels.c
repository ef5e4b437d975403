/* Chooses what the processor can do, and deals the work out to threads. On other processors there is nothing here: the
 * extension cannot be loaded then, and torch computes. */
#include "kernels.h"

#include <cpuid.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "chunk.h"
#include "level.h"

#define OUTPUTS 48       /* outputs of a product that a thread takes at a time: their weights stay in its cache */
#define MOST_SCORED 32   /* rows that are scored together */
#define PIECES 4         /* of a product of many rows for a thread, so that all end at about the same time */
#define LEAST_ROWS 96    /* of a piece: packing its weights costs as much as multiplying them with 15 */
#define ELEMENTS 16384   /* fewer are not worth waking a thread */
#define ATTENDED 524288  /* nor is attending to fewer, of keys by the elements of query heads: 60 us on one thread */

#if defined(__x86_64__)

static const KvLevel *level;

/* Whether the processor has tiles of bfloat16, and Linux lets this process use them. */
static int tiles(void) {
  enum { BF16 = 1 << 22, TILE = 1 << 24, ASK = 0x1023, TILE_DATA = 18 };
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & BF16) || !(d & TILE)) return 0;
  return syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
}

static int best(void) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512bf16");
  return !wide ? 1 : tiles() ? 3 : 2;
}

static const KvLevel *const levels[] = {NULL, &kv_avx2, &kv_avx512, &kv_amx};

int kv_limit_level(int limit) {
  int used = best() < limit ? best() : limit;
  level = levels[used];
  return used;
}

const KvLevel *kv_used_level(void) { return level; }

int kv_level(void) {
  for (int used = 1; used <= 3; used++)
    if (level == levels[used]) return used;
  return kv_limit_level(3);
}

static void begin(void) {
  if (level->begin) level->begin();
}

static void end(void) {
  if (level->end) level->end();
}

/* A product in the form that its inputs have at the level that is used; of y and wide one is NULL. */
typedef struct {
  const uint16_t *w;
  const void *x;
  uint16_t *y;
  float *wide;
  int64_t rows, outputs, inputs;
} Product;

void kv_score_part(const uint16_t *w, const void *x, float *y, int64_t rows, int64_t outputs, int64_t inputs,
                   int64_t first, int64_t end) {
  uint16_t some[MOST_SCORED][OUTPUTS];
  for (int64_t o = first; o < end; o += OUTPUTS)
    for (int64_t r = 0; r < rows; r += MOST_SCORED) {
      const int64_t n = end - o < OUTPUTS ? end - o : OUTPUTS, some_rows = rows - r < MOST_SCORED ? rows - r : MOST_SCORED;
      level->few_rows(w + o * inputs, (const char *)x + kv_arranged(level, r, inputs), some[0], some_rows, n, inputs, 0, n);
      for (int64_t i = 0; i < some_rows; i++) level->widen(some[0] + i * n, y + (r + i) * outputs + o, n);
    }
}

static void dealt(const Product *p) {
#pragma omp parallel
  {
    begin();
#pragma omp for schedule(guided)
    for (int64_t first = 0; first < p->outputs; first += OUTPUTS) {
      int64_t last = p->outputs - first < OUTPUTS ? p->outputs : first + OUTPUTS;
      if (p->y)
        level->few_rows(p->w, p->x, p->y, p->rows, p->outputs, p->inputs, first, last);
      else
        kv_score_part(p->w, p->x, p->wide, p->rows, p->outputs, p->inputs, first, last);
    }
    end();
  }
}

/* Memory that begins with a cache line, or NULL. */
static void *lines(int64_t bytes) { return aligned_alloc(KV_LINE, (size_t)kv_padded(bytes, KV_LINE)); }

static int multiply(Product p, const uint16_t *x) {
  p.x = x;
  if (!level->arrange) return dealt(&p), 0;
  void *arranged = lines(kv_arranged(level, p.rows, p.inputs));
  if (!arranged) return -1;
  level->arrange(x, arranged, p.rows, p.inputs);
  p.x = arranged;
  dealt(&p);
  free(arranged);
  return 0;
}

int kv_few_rows(const uint16_t *w, const uint16_t *x, uint16_t *y, int64_t rows, int64_t outputs, int64_t inputs) {
  return multiply((Product){.w = w, .y = y, .rows = rows, .outputs = outputs, .inputs = inputs}, x);
}

int kv_score(const uint16_t *w, const uint16_t *x, float *y, int64_t rows, int64_t outputs, int64_t inputs) {
  return multiply((Product){.w = w, .wide = y, .rows = rows, .outputs = outputs, .inputs = inputs}, x);
}

void kv_rms_norm(const uint16_t *x, const uint16_t *w, uint16_t *y, int64_t tokens, int64_t heads, int64_t of_first,
                 int64_t stride, int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (tokens * heads * size > ELEMENTS)
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < heads; h++)
      level->rms_norm(x + t * stride + h * size, h < of_first ? w : w + size, y + (t * heads + h) * size, size, eps);
}

void kv_silu_times(const uint16_t *gate_up, uint16_t *y, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size > ELEMENTS)
  for (int64_t r = 0; r < rows; r++)
    level->silu_times(gate_up + 2 * r * size, gate_up + (2 * r + 1) * size, y + r * size, size);
}

void kv_rotate(const uint16_t *x, const uint16_t *cos, const uint16_t *sin, uint16_t *y, int64_t tokens, int64_t heads,
               int64_t stride, int64_t head_stride, int64_t size) {
#pragma omp parallel for schedule(static) if (tokens * heads * size > ELEMENTS)
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < heads; h++)
      level->rotate(x + t * stride + h * head_stride, cos + t * size, sin + t * size, y + (t * heads + h) * size, size);
}

void kv_append(const KvLayer *layer, const uint16_t *k, int64_t k_stride, const uint16_t *v, int64_t v_stride,
               const int64_t *slots, int64_t tokens) {
  const int64_t heads = layer->kv_heads, dim = layer->head_dim, size = layer->page_size;
#pragma omp parallel for schedule(static) if (tokens * heads * dim > ELEMENTS)
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < heads; h++) {
      uint16_t *to = layer->pages + ((slots[t] / size * heads + h) * 2 * size + slots[t] % size) * dim;
      memcpy(to, k + t * k_stride + h * dim, (size_t)dim * sizeof(*to));
      memcpy(to + size * dim, v + t * v_stride + h * dim, (size_t)dim * sizeof(*to));
    }
}

void kv_attend_rows(const KvLayer *layer, const uint16_t *q, int64_t stride, uint16_t *out, const int64_t *tables,
                    int64_t width, const int64_t *lens, int64_t tokens) {
  const int64_t heads = layer->kv_heads, size = layer->group * layer->head_dim;
  int64_t seen = 0;
  for (int64_t t = 0; t < tokens; t++) seen += lens[t];
#pragma omp parallel for schedule(dynamic) if (seen * heads * size > ATTENDED)
  for (int64_t i = 0; i < tokens * heads; i++) {
    int64_t t = i / heads, h = i % heads;
    level->attend_row(layer, h, q + t * stride + h * size, out + i * size, tables + t * width, lens[t]);
  }
}

/* Rows that a thread takes at a time: as many as it may, since weights are packed anew for them, but enough pieces for
 * all threads. */
static int64_t rows_at_a_time(int64_t rows, int64_t tiles) {
  int64_t pieces = kv_blocks(rows, KV_ROWS), wanted = kv_blocks(PIECES * omp_get_max_threads(), tiles);
  if (pieces < wanted) pieces = wanted < rows / LEAST_ROWS ? wanted : rows / LEAST_ROWS;
  return kv_padded(pieces > 1 ? kv_blocks(rows, pieces) : rows < KV_ROWS ? rows : KV_ROWS, level->together);
}

int kv_many_rows(const uint16_t *w, const uint16_t *x, uint16_t *y, int64_t rows, int64_t outputs, int64_t inputs) {
  const int64_t tiles_of_outputs = kv_blocks(outputs, KV_COLUMNS), most = rows_at_a_time(rows, tiles_of_outputs);
  const int64_t group = level->together;
  char *arranged = lines(kv_arranged(level, rows, inputs));
  if (!arranged) return -1;
#pragma omp parallel
  {
    begin();
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r += group)
      level->arrange_many(x + r * inputs, arranged + kv_arranged(level, r, inputs), rows - r < group ? rows - r : group,
                          inputs);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < tiles_of_outputs * kv_blocks(rows, most); i++) {
      int64_t o = i % tiles_of_outputs * KV_COLUMNS, r = i / tiles_of_outputs * most;
      int64_t columns = outputs - o < KV_COLUMNS ? outputs - o : KV_COLUMNS;
      level->many_rows(w + o * inputs, arranged + kv_arranged(level, r, inputs), y + r * outputs + o, outputs,
                       rows - r < most ? rows - r : most, columns, inputs);
    }
    end();
  }
  free(arranged);
  return 0;
}

int64_t kv_chunk_work(const KvLayer *layer, int64_t len) {
  return 2 * layer->kv_heads * kv_padded(len, level->keys) * layer->head_dim * level->packed;
}

void kv_attend_chunk(const KvLayer *layer, const uint16_t *q, int64_t stride, uint16_t *out, const int64_t *table,
                     int64_t start, int64_t tokens, uint8_t *work) {
  const KvChunk chunk = {0, tokens, start, table};
#pragma omp parallel
  {
    begin();
#pragma omp for schedule(static)
    for (int64_t i = 0; i < kv_pack_pieces(level, layer, &chunk); i++) kv_pack_piece(level, layer, &chunk, work, i);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < kv_attend_pieces(level, layer, &chunk); i++)
      kv_attend_piece(level, layer, &chunk, q, stride, out, work, i);
    end();
  }
}

#endif
