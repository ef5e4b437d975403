/* What a thread knows of a step that runs through whole layers, and what steps of few rows and of many do alike. */
#ifndef KV_WORK_H
#define KV_WORK_H

#include <string.h>

#include "level.h"
#include "team.h"

/* One thread's view of a step. All that is not const is written in one phase and read in others, but for what is said to
 * be its own. */
typedef struct {
  KvTeam *team;
  const KvLevel *level;
  const KvStack *stack;
  const KvStep *step;
  const KvDense *layer;
  KvLayer pages;
  void *arranged;     /* inputs of a product, arranged; its own where rows are few */
  uint16_t *q;        /* after turning */
  uint16_t *attended; /* what attention gives, [rows][heads][head_dim] */
  uint16_t *inner;    /* between the halves of the MLP: arranged where rows are many, else where `attended` is */
  /* Of few rows. */
  uint16_t *normal; /* the norm of the residual stream, its own */
  uint16_t *heads;  /* before turning */
  uint16_t *out;    /* of a product, [rows][outputs] */
  /* Of many rows. */
  int thread;      /* its number */
  uint16_t *block; /* of a product's outputs, or rows of a norm; its own */
  uint8_t *packed; /* keys and values of all chunks, one chunk behind the other */
} Work;

static inline int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t heads_of(const KvStack *stack) { return stack->heads + 2 * stack->kv_heads; }

/* Turns a head of row r, a query for attention, a key into the pool; a value is put beside its key. */
static inline void place_head(const Work *w, int64_t r, int64_t h, uint16_t *head) {
  const KvStack *s = w->stack;
  const KvStep *step = w->step;
  const int64_t dim = s->head_dim, tokens = w->pages.page_size, slot = step->slots[r], turned = s->heads + s->kv_heads;
  uint16_t *to = w->q + (r * s->heads + h) * dim;
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

/* One KV head of the i'th row that attends by itself. */
static inline void attend_alone(const Work *w, int64_t i, int64_t head) {
  const KvStep *step = w->step;
  const int64_t row = step->alone[i], size = w->pages.group * w->stack->head_dim;
  const int64_t at = (row * w->stack->kv_heads + head) * size;
  w->level->attend_row(&w->pages, head, w->q + at, w->attended + at, step->tables + i * step->width, step->lens[i]);
}

/* Lines of the cache for so many bytes from *at on, which moves behind them: no two threads write to one. From 0 on it
 * tells how much is needed. */
static inline void *part(uintptr_t *at, int64_t bytes) {
  void *begin = (void *)*at;
  *at += (uintptr_t)kv_padded(bytes, KV_LINE);
  return begin;
}

static inline void *elements(uintptr_t *at, int64_t count) { return part(at, count * (int64_t)sizeof(uint16_t)); }

#endif
