/* Whole layers in one parallel region: waking a thread takes as long as a small product. */
#include "kernels.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "level.h"
#include "team.h"

#if defined(__x86_64__)

#define GRAIN 512    /* elements of silu times up that a thread takes at a time */
#define TILE 32768   /* bytes of weights that it takes at a time: they stay in its cache for all rows */
#define OUTPUTS 12   /* whole tiles of registers */

/* One thread's view of a step. All that is not const is the team's, written in one phase and read in others. */
typedef struct {
  KvTeam *team;
  const KvLevel *level;
  const KvStack *stack;
  const KvStep *step;
  const KvDense *layer;
  KvLayer pages;
  uint16_t *in, *qkv, *q, *out; /* a product's input, two ways; heads before and after turning; a product's output */
  float *spread;
} Work;

static int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t heads_of(const KvStack *stack) { return stack->heads + 2 * stack->kv_heads; }

/* Elements [at, at + size) of the next product's input are there. */
static void ready(const Work *w, int64_t at, int64_t size) {
  if (w->level->spread) w->level->spread(w->in + at, w->spread + at, size);
}

static void norm(const Work *w, const uint16_t *weights) {
  const int64_t size = w->stack->hidden;
  for (int64_t r, end; kv_take(w->team, w->step->rows, &r, &end);)
    for (; r < end; r++) {
      w->level->rms_norm(w->step->x + r * size, weights, w->in + r * size, size, w->stack->eps);
      ready(w, r * size, size);
    }
  kv_meet(w->team);
}

static void add_rows(const Work *w, int64_t first, int64_t end) {
  const int64_t size = w->stack->hidden;
  for (int64_t r = 0; r < w->step->rows; r++)
    w->level->add(w->step->x + r * size + first, w->out + r * size + first, end - first);
}

/* y [rows][outputs] = the input times W; with `add`, outputs are the residual stream's and added to it. */
static void multiply(const Work *w, const uint16_t *weights, uint16_t *y, int64_t outputs, int64_t inputs, int add) {
  const int64_t tile = largest(1, TILE / (2 * inputs * OUTPUTS)) * OUTPUTS, tiles = (outputs + tile - 1) / tile;
  const void *x = w->level->spread ? (const void *)w->spread : w->in;
  for (int64_t t, last; kv_take(w->team, tiles, &t, &last);) {
    int64_t first = t * tile, end = last * tile < outputs ? last * tile : outputs;
    for (int64_t o = first; o < end; o += tile)
      w->level->few_rows(weights, x, y, w->step->rows, outputs, inputs, o, o + tile < end ? o + tile : end);
    if (add) add_rows(w, first, end);
  }
  kv_meet(w->team);
}

/* Turns the heads of row r, queries for attention and keys into the pool, and puts the values beside those. */
static void turn_row(const Work *w, int64_t r) {
  const KvStack *s = w->stack;
  const KvStep *step = w->step;
  const int64_t dim = s->head_dim, tokens = w->pages.page_size, slot = step->slots[r];
  uint16_t *from = w->qkv + r * heads_of(s) * dim;
  for (int64_t h = 0; h < s->heads + s->kv_heads; h++) {
    uint16_t *head = from + h * dim, *key = w->pages.pages + (slot / tokens * s->kv_heads + h - s->heads) * 2 * tokens * dim;
    const uint16_t *weights = w->layer->head_norm;
    if (weights) w->level->rms_norm(head, h < s->heads ? weights : weights + dim, head, dim, s->eps);
    uint16_t *to = h < s->heads ? w->q + (r * s->heads + h) * dim : key + slot % tokens * dim;
    w->level->rotate(head, step->cos + r * dim, step->sin + r * dim, to, dim);
    if (h >= s->heads) memcpy(to + tokens * dim, head + s->kv_heads * dim, (size_t)dim * sizeof(*to));
  }
}

static void turn(const Work *w) {
  for (int64_t r, end; kv_take(w->team, w->step->rows, &r, &end);)
    for (; r < end; r++) turn_row(w, r);
  kv_meet(w->team);
}

static void attend_heads(const Work *w) {
  const KvStep *step = w->step;
  const int64_t heads = w->stack->kv_heads, size = w->pages.group * w->stack->head_dim;
  for (int64_t i, end; kv_take(w->team, step->rows * heads, &i, &end);)
    for (; i < end; i++) {
      w->level->attend_row(&w->pages, i % heads, w->q + i * size, w->in + i * size, step->tables + i / heads * step->width,
                           step->lens[i / heads]);
      ready(w, i * size, size);
    }
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
  const KvStack *s = w->stack;
  const KvDense *layer = w->layer;
  if (w->step->opened_pages) clear(w);
  norm(w, layer->attention_norm);
  multiply(w, layer->qkv, w->qkv, heads_of(s) * s->head_dim, s->hidden, 0);
  turn(w);
  attend_heads(w);
  multiply(w, layer->output, w->out, s->hidden, s->heads * s->head_dim, 1);
}

static void activate(const Work *w) {
  const int64_t size = w->stack->between, each = (size + GRAIN - 1) / GRAIN;
  for (int64_t i, end; kv_take(w->team, w->step->rows * each, &i, &end);)
    for (; i < end; i++) {
      int64_t r = i / each, at = i % each * GRAIN, n = size - at < GRAIN ? size - at : GRAIN;
      const uint16_t *gate = w->out + 2 * r * size + at;
      w->level->silu_times(gate, gate + size, w->in + r * size + at, n);
      ready(w, r * size + at, n);
    }
  kv_meet(w->team);
}

static void feed_forward(const Work *w) {
  const KvStack *s = w->stack;
  norm(w, w->layer->mlp_norm);
  multiply(w, w->layer->gate_up, w->out, 2 * s->between, s->hidden, 0);
  activate(w);
  multiply(w, w->layer->down, w->out, s->hidden, s->between, 1);
}

static void run_halves(Work w, int64_t first, int64_t end) {
  for (int64_t half = first; half < end; half++) {
    w.layer = w.stack->layers + half / 2;
    w.pages.pages = w.step->pool + half / 2 * w.step->layer_stride;
    if (half % 2)
      feed_forward(&w);
    else
      attention(&w);
  }
}

/* Elements of a row of each of the four kinds of rows that a step needs. */
static void row_sizes(const KvStack *s, int64_t sizes[4]) {
  sizes[0] = largest(largest(s->hidden, s->between), s->heads * s->head_dim);
  sizes[1] = heads_of(s) * s->head_dim;
  sizes[2] = s->heads * s->head_dim;
  sizes[3] = largest(s->hidden, 2 * s->between);
}

int kv_run_layers(const KvStack *stack, const KvStep *step, int64_t first, int64_t end) {
  const int64_t group = stack->heads / stack->kv_heads;
  KvTeam team = {0};
  Work work = {.team = &team, .level = kv_used_level(), .stack = stack, .step = step};
  work.pages = (KvLayer){NULL, stack->kv_heads, step->page_size, stack->head_dim, group, stack->scale};
  int64_t sizes[4];
  row_sizes(stack, sizes);
  const int64_t narrow = sizes[0] + sizes[1] + sizes[2] + sizes[3];
  char *memory = malloc((size_t)step->rows * ((size_t)sizes[0] * sizeof(float) + (size_t)narrow * sizeof(uint16_t)));
  if (!memory) return -1;
  work.spread = (float *)memory;
  work.in = (uint16_t *)(work.spread + step->rows * sizes[0]);
  work.qkv = work.in + step->rows * sizes[0];
  work.q = work.qkv + step->rows * sizes[1];
  work.out = work.q + step->rows * sizes[2];
#pragma omp parallel
  {
    /* Each says it to itself: nobody would come to meet the others before they have been counted. */
    atomic_store(&team.threads, omp_get_num_threads());
    run_halves(work, first, end);
  }
  free(memory);
  return 0;
}

#endif
