/* The kernels at odd sizes, with every operand once behind the last page before it and once before the first one after it:
 * a read or write beyond either end is a fault, in vectors and in assembly too. Both runs give the same. */
#include "kernels.h"

#include "check.h"

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST = 64 };

/* Everything that a case has, between pages that nobody may touch. */
static struct {
  void *memory;
  size_t size;
} held[MOST];
static int holds;
static int at_end; /* whether operands end where the page behind them begins */
static uint32_t seed;

static uint32_t drawn(void) { return seed = seed * 1664525u + 1013904223u; }

static void *place(size_t bytes) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (bytes + page - 1) / page * page;
  char *memory = mmap(NULL, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED && holds < MOST && mprotect(memory + page, room, PROT_READ | PROT_WRITE) == 0);
  held[holds].memory = memory;
  held[holds++].size = room + 2 * page;
  return memory + page + (at_end ? room - bytes : 0);
}

static void clear(void) {
  while (holds--) CHECK(munmap(held[holds].memory, held[holds].size) == 0);
  holds = 0;
}

/* Numbers from -1 to 1 in bfloat16. */
static uint16_t *numbers(int64_t count) {
  uint16_t *x = place((size_t)count * sizeof *x);
  for (int64_t i = 0; i < count; i++) {
    float value = (float)(int32_t)drawn() / 2147483648.0f;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    x[i] = (uint16_t)(bits >> 16);
  }
  return x;
}

static uint16_t *space(int64_t count) { return place((size_t)count * sizeof(uint16_t)); }

static int64_t *places(int64_t count, int64_t first) {
  int64_t *x = place((size_t)count * sizeof *x);
  for (int64_t i = 0; i < count; i++) x[i] = first + i;
  return x;
}

static uint32_t sum_of(const void *numbers_of_two_bytes, int64_t count) {
  const unsigned char *each = numbers_of_two_bytes;
  uint32_t sum = 2166136261u;
  for (int64_t i = 0; i < 2 * count; i++) sum = (sum ^ each[i]) * 16777619u;
  return sum;
}

static uint32_t products(int64_t rows, int64_t outputs, int64_t inputs) {
  const uint16_t *w = numbers(outputs * inputs), *x = numbers(rows * inputs);
  uint16_t *y = space(rows * outputs), *many = space(rows * outputs);
  float *wide = place((size_t)(rows * outputs) * sizeof *wide);
  CHECK(kv_few_rows(w, x, y, rows, outputs, inputs) == 0 && kv_score(w, x, wide, rows, outputs, inputs) == 0);
  for (int64_t i = 0; i < rows * outputs; i++) {
    uint32_t bits;
    memcpy(&bits, wide + i, sizeof bits);
    CHECK(bits >> 16 == y[i]);
  }
  if (kv_level() == 2) return sum_of(y, rows * outputs);
  CHECK(kv_many_rows(w, x, many, rows, outputs, inputs) == 0);
  return sum_of(y, rows * outputs) ^ sum_of(many, rows * outputs);
}

static uint32_t elementwise(int64_t rows, int64_t unused, int64_t size) {
  const int64_t even = size / 2 * 2;
  const uint16_t *x = numbers(rows * 2 * size), *w = numbers(2 * size), *turns = numbers(rows * even);
  uint16_t *normed = space(rows * 2 * size), *y = space(rows * size), *turned = space(rows * 2 * even);
  (void)unused;
  kv_rms_norm(x, w, normed, rows, 2, 1, 2 * size, size, 1e-5f);
  kv_silu_times(x, y, rows, size);
  kv_rotate(x, turns, turns, turned, rows, 2, 2 * size, size, even);
  return sum_of(normed, rows * 2 * size) ^ sum_of(y, rows * size) ^ sum_of(turned, rows * 2 * even);
}

enum { PAGE = 16, KV_HEADS = 2 };

/* `len` tokens in all, the last `tokens` of which attend, as rows and as a chunk. */
static uint32_t attention(int64_t tokens, int64_t len, int64_t dim) {
  const int64_t group = 1 + len % 5, heads = KV_HEADS * group, pages = (len + PAGE - 1) / PAGE;
  KvLayer layer = {numbers(pages * KV_HEADS * 2 * PAGE * dim), KV_HEADS, PAGE, dim, group, 0.125f};
  const uint16_t *q = numbers(tokens * heads * dim), *k = numbers(tokens * KV_HEADS * dim);
  uint16_t *rows = space(tokens * heads * dim), *chunk = space(tokens * heads * dim);
  int64_t *tables = place((size_t)(tokens * pages) * sizeof *tables), *table = places(pages, 0);
  const int64_t *lens = places(tokens, len - tokens + 1);
  for (int64_t i = 0; i < tokens * pages; i++) tables[i] = i % pages;
  kv_append(&layer, k, KV_HEADS * dim, k, KV_HEADS * dim, places(tokens, len - tokens), tokens);
  kv_attend_rows(&layer, q, heads * dim, rows, tables, pages, lens, tokens);
  kv_attend_chunk(&layer, q, heads * dim, chunk, table, len - tokens, tokens, place((size_t)kv_chunk_work(&layer, len)));
  return sum_of(rows, tokens * heads * dim) ^ sum_of(chunk, tokens * heads * dim);
}

enum { VOCABULARY = 50 };

static int64_t *filled(int64_t count, int64_t value) {
  int64_t *x = places(count, 0);
  for (int64_t i = 0; i < count; i++) x[i] = value;
  return x;
}

/* From tokens to logits through two layers of `size` inputs; each row attends to `len` tokens in pages of its own. */
static uint32_t layers(int64_t rows, int64_t len, int64_t size) {
  const int64_t dim = 16, heads = 4, between = size + 8, width = (len + PAGE - 1) / PAGE;
  const int64_t pages = rows * width, page = KV_HEADS * 2 * PAGE * dim;
  KvDense dense[2];
  for (int l = 0; l < 2; l++)
    dense[l] = (KvDense){numbers(size), numbers((heads + 2 * KV_HEADS) * dim * size), l ? NULL : numbers(2 * dim),
                         numbers(size * heads * dim), numbers(size), numbers(2 * between * size), numbers(size * between)};
  const KvStack stack = {dense, numbers(VOCABULARY * size), numbers(size), numbers(VOCABULARY * size), numbers(len * dim),
                         numbers(len * dim), VOCABULARY, size, heads, KV_HEADS, dim, between, 1e-5f, 0.25f};
  int64_t *slots = places(rows, 0);
  for (int64_t r = 0; r < rows; r++) slots[r] = r * width * PAGE + len - 1;
  float *logits = place((size_t)(rows * VOCABULARY) * sizeof *logits);
  const KvStep step = {space(rows * size), rows, filled(rows, VOCABULARY - 1), logits, filled(rows, len - 1),
                       numbers(2 * pages * page), pages * page, PAGE, slots, places(pages, 0), filled(rows, len), width,
                       places(1, pages - 1), len % PAGE == 1, places(rows, 0), rows, NULL, 0};
  CHECK(kv_run_layers(&stack, &step, 0, 4) == 0);
  return sum_of(step.x, rows * size) ^ sum_of(logits, 2 * rows * VOCABULARY);
}

/* A row that attends by itself between two chunks of `rows` rows, the last of them at `len` tokens. */
static uint32_t chunked(int64_t rows, int64_t len, int64_t size) {
  const int64_t dim = 16, heads = 4, between = size + 8, width = (len + PAGE - 1) / PAGE, all = 2 * rows + 1;
  const KvDense dense = {numbers(size), numbers((heads + 2 * KV_HEADS) * dim * size), numbers(2 * dim),
                         numbers(size * heads * dim), numbers(size), numbers(2 * between * size), numbers(size * between)};
  const KvStack stack = {&dense, NULL, numbers(size), numbers(VOCABULARY * size), numbers(len * dim), numbers(len * dim),
                         VOCABULARY, size, heads, KV_HEADS, dim, between, 1e-5f, 0.25f};
  int64_t *slots = filled(all, len - 1), *positions = filled(all, len - 1);
  for (int64_t r = 0; r < all; r++) {
    if (r != rows) positions[r] = len - rows + (r < rows ? r : r - rows - 1);
    slots[r] = (r < rows ? 0 : r > rows ? 2 : 1) * width * PAGE + positions[r];
  }
  const KvChunk chunks[] = {{0, rows, len - rows, places(width, 0)}, {rows + 1, rows, len - rows, places(width, 2 * width)}};
  float *logits = place((size_t)(all * VOCABULARY) * sizeof *logits);
  const KvStep step = {.x = numbers(all * size), .rows = all, .logits = logits, .positions = positions,
                       .pool = numbers(3 * width * KV_HEADS * 2 * PAGE * dim), .page_size = PAGE, .slots = slots,
                       .tables = places(width, width), .lens = filled(1, len), .width = width, .alone = filled(1, rows),
                       .alone_count = 1, .chunks = chunks, .chunk_count = 2};
  CHECK(kv_run_layers(&stack, &step, 0, 2) == 0);
  return sum_of(step.x, all * size) ^ sum_of(logits, 2 * all * VOCABULARY);
}

static void both_ways(uint32_t (*run)(int64_t, int64_t, int64_t), int64_t a, int64_t b, int64_t c) {
  uint32_t sums[2];
  for (at_end = 0; at_end < 2; at_end++) {
    seed = 1;
    sums[at_end] = run(a, b, c);
    clear();
  }
  if (sums[0] == sums[1]) return;
  fprintf(stderr, "(%d, %d, %d) depends on where operands are\n", (int)a, (int)b, (int)c);
  exit(1);
}

int main(void) {
#define OF(list) (sizeof list / sizeof *list)
  static const int64_t rows[] = {1, 2, 3, 5, 6, 7, 37}, outputs[] = {1, 3, 31, 50}, inputs[] = {1, 15, 17, 40, 289};
  static const int64_t lens[] = {1, 15, 16, 17, 63, 64, 65, 130}, dims[] = {16, 48, 256}, sizes[] = {8, 33, 72};
  const int best = kv_level();
  if (!best) return fprintf(stderr, "this processor has no AVX2\n"), 77;
  for (int level = 1; level <= best; level++) {
    CHECK(kv_limit_level(level) == level);
    for (size_t r = 0; r < OF(rows); r++) {
      for (size_t i = 0; i < OF(inputs); i++) {
        both_ways(elementwise, rows[r], 0, inputs[i]);
        for (size_t o = 0; o < OF(outputs); o++) both_ways(products, rows[r], outputs[o], inputs[i]);
      }
      for (size_t l = 0; l < OF(lens); l++) {
        for (size_t d = 0; d < OF(dims); d++)
          if (rows[r] <= lens[l]) both_ways(attention, rows[r], lens[l], dims[d]);
        for (size_t s = 0; s < OF(sizes); s++) {
          both_ways(layers, rows[r], lens[l], sizes[s]);
          if (level == 3 && rows[r] <= lens[l]) both_ways(chunked, rows[r], lens[l], sizes[s]);
        }
      }
    }
    both_ways(products, 600, 33, 300); /* more than one piece of rows, and of inputs */
    if (level == 3) both_ways(chunked, 137, 150, 72);
  }
  return 0;
}
