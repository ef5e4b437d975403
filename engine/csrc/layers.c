/* Whole layers in one parallel region: waking a thread takes as long as a small product. */
#include "kernels.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "level.h"
#include "team.h"

#if defined(__x86_64__)

#define GRAIN 48     /* elements between the halves of the MLP, or tokens, at a time: whole tiles, and vectors */
#define TILE 32768   /* bytes of weights that are multiplied at a time where they are read more than once */

/* One thread's view of a step. All that is not const is written in one phase and read in others, but for
 * `normal` and `arranged`. */
typedef struct {
  KvTeam *team;
  const KvLevel *level;
  const KvStack *stack;
  const KvStep *step;
  const KvDense *layer;
  KvLayer pages;
  uint16_t *normal;    /* the norm of the residual stream, which each thread computes for itself */
  void *arranged;      /* inputs of a product, arranged, also by each for itself */
  uint16_t *inner;     /* what attention gives, and what is between the halves of the MLP */
  uint16_t *heads, *q; /* before and after turning */
  uint16_t *out;       /* of a product, [rows][outputs] */
} Work;

static int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t heads_of(const KvStack *stack) { return stack->heads + 2 * stack->kv_heads; }

/* x [rows][inputs] as few_rows wants it. Sooner done by each thread than by one that the others wait for. */
static const void *arranged(const Work *w, const uint16_t *x, int64_t inputs) {
  if (!w->level->arrange) return x;
  w->level->arrange(x, w->arranged, w->step->rows, inputs);
  return w->arranged;
}

static const void *norm(const Work *w, const uint16_t *weights) {
  const int64_t size = w->stack->hidden;
  for (int64_t r = 0; r < w->step->rows; r++)
    w->level->rms_norm(w->step->x + r * size, weights, w->normal + r * size, size, w->stack->eps);
  return arranged(w, w->normal, size);
}

/* Outputs [first, end) of y [rows][outputs] = x times W. */
static void multiply(const Work *w, const uint16_t *weights, const void *x, uint16_t *y, int64_t outputs,
                     int64_t inputs, int64_t first, int64_t end) {
  const int64_t rows = w->step->rows, grain = w->level->grain;
  const int64_t tile = rows > w->level->once ? largest(1, TILE / (2 * inputs * grain)) * grain : end - first;
  for (int64_t o = first; o < end; o += tile)
    w->level->few_rows(weights, x, y, rows, outputs, inputs, o, least(o + tile, end));
}

/* Adds x times W to the residual stream. */
static void project(const Work *w, const uint16_t *weights, int64_t inputs) {
  const int64_t size = w->stack->hidden, grain = w->level->grain;
  const void *x = arranged(w, w->inner, inputs);
  for (int64_t i, last; kv_take(w->team, (size + grain - 1) / grain, &i, &last);) {
    const int64_t first = i * grain, end = least(last * grain, size);
    multiply(w, weights, x, w->out, size, inputs, first, end);
    for (int64_t r = 0; r < w->step->rows; r++)
      w->level->add(w->step->x + r * size + first, w->out + r * size + first, end - first);
  }
  kv_meet(w->team);
}

/* Turns a head of row r, a query for attention, a key into the pool; a value is put beside its key. */
static void place_head(const Work *w, int64_t r, int64_t h) {
  const KvStack *s = w->stack;
  const KvStep *step = w->step;
  const int64_t dim = s->head_dim, tokens = w->pages.page_size, slot = step->slots[r], turned = s->heads + s->kv_heads;
  uint16_t *head = w->heads + (r * heads_of(s) + h) * dim, *to = w->q + (r * s->heads + h) * dim;
  if (h >= s->heads) {
    const int64_t of = (h - s->heads) % s->kv_heads, value = h >= turned;
    to = w->pages.pages + (((slot / tokens * s->kv_heads + of) * 2 + value) * tokens + slot % tokens) * dim;
    if (value) {
      memcpy(to, head, (size_t)dim * sizeof(*to));
      return;
    }
  }
  const uint16_t *weights = w->layer->head_norm;
  if (weights) w->level->rms_norm(head, h < s->heads ? weights : weights + dim, head, dim, s->eps);
  const int64_t at = step->positions[r] * dim;
  w->level->rotate(head, s->cos + at, s->sin + at, to, dim);
}

static void make_heads(const Work *w, const void *x) {
  const int64_t dim = w->stack->head_dim, all = heads_of(w->stack);
  for (int64_t h, end; kv_take(w->team, all, &h, &end);) {
    multiply(w, w->layer->qkv, x, w->heads, all * dim, w->stack->hidden, h * dim, end * dim);
    for (; h < end; h++)
      for (int64_t r = 0; r < w->step->rows; r++) place_head(w, r, h);
  }
  kv_meet(w->team);
}

static void attend_heads(const Work *w) {
  const KvStep *step = w->step;
  const int64_t heads = w->stack->kv_heads, size = w->pages.group * w->stack->head_dim;
  for (int64_t i, end; kv_take(w->team, step->rows * heads, &i, &end);)
    for (; i < end; i++)
      w->level->attend_row(&w->pages, i % heads, w->q + i * size, w->inner + i * size,
                           step->tables + i / heads * step->width, step->lens[i / heads]);
  kv_meet(w->team);
}

/* What an earlier owner left in pages that get their first token now. Nobody reads them before all have met. */
static void clear(const Work *w) {
  const int64_t size = 2 * w->stack->kv_heads * w->pages.page_size * w->stack->head_dim;
  for (int64_t p, end; kv_take(w->team, w->step->opened_pages, &p, &end);)
    for (; p < end; p++) memset(w->pages.pages + w->step->opened[p] * size, 0, (size_t)size * sizeof(uint16_t));
  kv_meet(w->team);
}

static void attention(const Work *w) {
  if (w->step->opened_pages) clear(w);
  make_heads(w, norm(w, w->layer->attention_norm));
  attend_heads(w);
  project(w, w->layer->output, w->stack->heads * w->stack->head_dim);
}

/* The first half of the MLP: gate and up of the same elements, and what is made of the two. */
static void gate(const Work *w, const void *x) {
  const int64_t size = w->stack->between, inputs = w->stack->hidden;
  for (int64_t i, last; kv_take(w->team, (size + GRAIN - 1) / GRAIN, &i, &last);) {
    const int64_t first = i * GRAIN, end = least(last * GRAIN, size);
    multiply(w, w->layer->gate_up, x, w->out, 2 * size, inputs, first, end);
    multiply(w, w->layer->gate_up, x, w->out, 2 * size, inputs, size + first, size + end);
    for (int64_t r = 0; r < w->step->rows; r++) {
      const uint16_t *gates = w->out + 2 * r * size + first;
      w->level->silu_times(gates, gates + size, w->inner + r * size + first, end - first);
    }
  }
  kv_meet(w->team);
}

static void feed_forward(const Work *w) {
  gate(w, norm(w, w->layer->mlp_norm));
  project(w, w->layer->down, w->stack->between);
}

static void score(const Work *w) {
  const KvStack *s = w->stack;
  const int64_t rows = w->step->rows;
  const void *x = norm(w, s->norm);
  for (int64_t i, last; kv_take(w->team, (s->vocabulary + GRAIN - 1) / GRAIN, &i, &last);)
    kv_score_part(s->head, x, w->step->logits, rows, s->vocabulary, s->hidden, i * GRAIN,
                  least(last * GRAIN, s->vocabulary));
}

static void run_halves(Work w, int64_t first, int64_t end) {
  if (w.level->begin) w.level->begin();
  for (int64_t half = first; half < end; half++) {
    w.layer = w.stack->layers + half / 2;
    w.pages.pages = w.step->pool + half / 2 * w.step->layer_stride;
    if (half % 2)
      feed_forward(&w);
    else
      attention(&w);
  }
  if (w.step->logits) score(&w);
  if (w.level->end) w.level->end();
}

static void embed(const KvStack *stack, const KvStep *step) {
  const size_t size = (size_t)stack->hidden * sizeof(*step->x);
  for (int64_t r = 0; r < step->rows; r++)
    memcpy(step->x + r * stack->hidden, stack->embedding + step->tokens[r] * stack->hidden, size);
}

/* Memory for so many elements of bfloat16 and what is arranged, in whole cache lines: no two threads write to one. */
typedef struct {
  int64_t arranged, normal, inner, heads, q, out; /* bytes; the first two are a thread's */
} Sizes;

static int64_t bytes_of(int64_t elements) { return kv_padded(elements * (int64_t)sizeof(uint16_t), KV_LINE); }

static Sizes sizes_of(const KvLevel *level, const KvStack *s, int64_t rows) {
  const int64_t q = s->heads * s->head_dim, inner = largest(s->between, q);
  return (Sizes){
      .arranged = kv_padded(kv_arranged(level, rows, largest(s->hidden, inner)), KV_LINE),
      .normal = bytes_of(rows * s->hidden),
      .inner = bytes_of(rows * inner),
      .heads = bytes_of(rows * heads_of(s) * s->head_dim),
      .q = bytes_of(rows * q),
      .out = bytes_of(rows * largest(s->hidden, 2 * s->between)),
  };
}

int kv_run_layers(const KvStack *s, const KvStep *step, int64_t first, int64_t end) {
  const int threads = omp_get_max_threads();
  const KvLevel *level = kv_used_level();
  const Sizes size = sizes_of(level, s, step->rows);
  const int64_t own = size.arranged + size.normal;
  char *memory = aligned_alloc(KV_LINE, (size_t)(threads * own + size.inner + size.heads + size.q + size.out));
  if (!memory) return -1;
  if (step->tokens) embed(s, step);
  KvTeam team = {0};
  Work work = {.team = &team, .level = level, .stack = s, .step = step};
  work.pages = (KvLayer){NULL, s->kv_heads, step->page_size, s->head_dim, s->heads / s->kv_heads, s->scale};
  char *shared = memory + threads * own;
  work.inner = (uint16_t *)shared;
  work.heads = (uint16_t *)(shared + size.inner);
  work.q = (uint16_t *)(shared + size.inner + size.heads);
  work.out = (uint16_t *)(shared + size.inner + size.heads + size.q);
#pragma omp parallel num_threads(threads)
  {
    Work mine = work;
    mine.arranged = memory + omp_get_thread_num() * own;
    mine.normal = (uint16_t *)((char *)mine.arranged + size.arranged);
    /* Each says it to itself: nobody would come to meet the others before they have been counted. */
    atomic_store(&team.threads, omp_get_num_threads());
    run_halves(mine, first, end);
  }
  free(memory);
  return 0;
}

#endif
