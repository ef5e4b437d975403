/* Whole layers in one parallel region: waking a thread takes as long as a small product. */
#include "kernels.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "chunk.h"
#include "level.h"
#include "team.h"
#include "work.h"

#if defined(__x86_64__)

#include "many_rows_layers.h"

#define MOST_FEW 64  /* rows up to which each thread computes norms for itself, in fewer phases */
#define GRAIN 48     /* elements between the halves of the MLP, or tokens, at a time: whole tiles, and vectors */
#define TILE 32768   /* bytes of weights that are multiplied at a time where they are read more than once */

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
  for (int64_t i, last; kv_take(w->team, kv_blocks(size, grain), &i, &last);) {
    const int64_t first = i * grain, end = least(last * grain, size);
    multiply(w, weights, x, w->out, size, inputs, first, end);
    for (int64_t r = 0; r < w->step->rows; r++)
      w->level->add(w->step->x + r * size + first, w->out + r * size + first, end - first);
  }
  kv_meet(w->team);
}

static void make_heads(const Work *w, const void *x) {
  const int64_t dim = w->stack->head_dim, all = heads_of(w->stack);
  for (int64_t h, end; kv_take(w->team, all, &h, &end);) {
    multiply(w, w->layer->qkv, x, w->heads, all * dim, w->stack->hidden, h * dim, end * dim);
    for (; h < end; h++)
      for (int64_t r = 0; r < w->step->rows; r++) place_head(w, r, h, w->heads + (r * all + h) * dim);
  }
  kv_meet(w->team);
}

static void attend_heads(const Work *w) {
  const int64_t heads = w->stack->kv_heads;
  for (int64_t i, end; kv_take(w->team, w->step->alone_count * heads, &i, &end);)
    for (; i < end; i++) attend_alone(w, i / heads, i % heads);
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
  make_heads(w, norm(w, w->layer->attention_norm));
  attend_heads(w);
  project(w, w->layer->output, w->stack->heads * w->stack->head_dim);
}

/* The first half of the MLP: gate and up of the same elements, and what is made of the two. */
static void gate(const Work *w, const void *x) {
  const int64_t size = w->stack->between, inputs = w->stack->hidden;
  for (int64_t i, last; kv_take(w->team, kv_blocks(size, GRAIN), &i, &last);) {
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

static void score(const Work *w, const void *x) {
  const KvStack *s = w->stack;
  const int64_t rows = w->step->rows;
  for (int64_t i, last; kv_take(w->team, kv_blocks(s->vocabulary, GRAIN), &i, &last);)
    kv_score_part(s->head, x, w->step->logits, rows, s->vocabulary, s->hidden, i * GRAIN,
                  least(last * GRAIN, s->vocabulary));
}

/* What a step's rows go through, as few or as many. */
typedef struct {
  void (*attention)(const Work *w);
  void (*feed_forward)(const Work *w);
  const void *(*norm)(const Work *w, const uint16_t *weights); /* arranged */
  void (*own)(Work *w, uintptr_t *at), (*shared)(Work *w, uintptr_t *at);
} Way;

static void own_of_few(Work *w, uintptr_t *at) {
  const KvStack *s = w->stack;
  const int64_t rows = w->step->rows, inputs = largest(largest(s->hidden, s->between), s->heads * s->head_dim);
  w->arranged = part(at, kv_arranged(w->level, rows, inputs));
  w->normal = elements(at, rows * s->hidden);
}

static void shared_of_few(Work *w, uintptr_t *at) {
  const KvStack *s = w->stack;
  const int64_t rows = w->step->rows, q = s->heads * s->head_dim;
  w->inner = w->attended = elements(at, rows * largest(s->between, q));
  w->heads = elements(at, rows * heads_of(s) * s->head_dim);
  w->q = elements(at, rows * q);
  w->out = elements(at, rows * largest(s->hidden, 2 * s->between));
}

static const Way few = {attention, feed_forward, norm, own_of_few, shared_of_few};
static const Way many = {attention_many, feed_forward_many, norm_many, own_of_many, shared_of_many};

static void run_halves(Work w, const Way *way, int64_t first, int64_t end) {
  if (w.level->begin) w.level->begin();
  for (int64_t half = first; half < end; half++) {
    w.layer = w.stack->layers + half / 2;
    w.pages.pages = w.step->pool + half / 2 * w.step->layer_stride;
    if (half % 2)
      way->feed_forward(&w);
    else {
      if (w.step->opened_pages) clear(&w);
      way->attention(&w);
    }
  }
  if (w.step->logits) score(&w, way->norm(&w, w.stack->norm));
  if (w.level->end) w.level->end();
}

static void embed(const KvStack *stack, const KvStep *step) {
  const size_t size = (size_t)stack->hidden * sizeof(*step->x);
  for (int64_t r = 0; r < step->rows; r++)
    memcpy(step->x + r * stack->hidden, stack->embedding + step->tokens[r] * stack->hidden, size);
}

int kv_run_layers(const KvStack *s, const KvStep *step, int64_t first, int64_t end) {
  const int threads = omp_get_max_threads();
  const KvLevel *level = kv_used_level();
  const Way *way = step->chunk_count || (step->rows > MOST_FEW && step->rows <= level->once) ? &many : &few;
  KvTeam team = {.threads = threads};
  Work work = {.team = &team, .level = level, .stack = s, .step = step};
  work.pages = (KvLayer){NULL, s->kv_heads, step->page_size, s->head_dim, s->heads / s->kv_heads, s->scale};
  uintptr_t own = 0, shared = 0;
  way->own(&work, &own);
  way->shared(&work, &shared);
  char *memory = aligned_alloc(KV_LINE, (uintptr_t)threads * own + shared);
  if (!memory) return -1;
  if (step->tokens) embed(s, step);
  shared = (uintptr_t)memory + (uintptr_t)threads * own;
  way->shared(&work, &shared);
  if (team.shares) memset(team.shares, 0, (size_t)threads * sizeof(*team.shares));
#pragma omp parallel num_threads(threads)
  {
    Work mine = work;
    mine.thread = omp_get_thread_num();
    uintptr_t at = (uintptr_t)memory + (uintptr_t)mine.thread * own;
    way->own(&mine, &at);
    /* Each says it to itself: nobody would come to meet the others before they have been counted. */
    atomic_store(&team.threads, omp_get_num_threads());
    run_halves(mine, way, first, end);
  }
  free(memory);
  return 0;
}

#endif
