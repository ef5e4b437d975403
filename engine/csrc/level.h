/* One set of kernels for each set of instructions; every function does a piece of the work, on one thread. */
#ifndef KV_LEVEL_H
#define KV_LEVEL_H

#include <stdint.h>

#include "kernels.h"

typedef struct {
  /* Around all that a thread does of the rest: may be NULL. */
  void (*begin)(void), (*end)(void);
  /* Rows of inputs in the form that few_rows wants, in kv_arranged bytes that begin with a cache line; NULL where it takes
   * them as they are. */
  void (*arrange)(const uint16_t *x, void *to, int64_t rows, int64_t inputs);
  int64_t wide, together, step; /* bytes of an element there; rows and inputs come in multiples of these */
  /* Outputs [first, end) of the product. */
  void (*few_rows)(const uint16_t *w, const void *x, uint16_t *y, int64_t rows, int64_t outputs, int64_t inputs,
                   int64_t first, int64_t end);
  int64_t once;  /* rows that it reads weights once for; beyond any number it is also the product of many rows */
  int64_t grain; /* outputs that it takes as many of as it does of one */
  void (*widen)(const uint16_t *x, float *y, int64_t size);
  /* x += y. */
  void (*add)(uint16_t *x, const uint16_t *y, int64_t size);
  void (*rms_norm)(const uint16_t *x, const uint16_t *w, uint16_t *y, int64_t size, float eps);
  void (*silu_times)(const uint16_t *gate, const uint16_t *up, uint16_t *y, int64_t size);
  void (*rotate)(const uint16_t *x, const uint16_t *cos, const uint16_t *sin, uint16_t *y, int64_t size);
  /* One KV head of one token. */
  void (*attend_row)(const KvLayer *layer, int64_t head, const uint16_t *q, uint16_t *out, const int64_t *table,
                     int64_t len);
  /* `rows` rows, up to KV_ROWS, by up to KV_COLUMNS outputs of the product, y `stride` apart; x is what arrange_many makes
   * of it. NULL where the library is as fast. */
  void (*many_rows)(const uint16_t *w, const void *x, uint16_t *y, int64_t stride, int64_t rows, int64_t outputs,
                    int64_t inputs);
  void (*arrange_many)(const uint16_t *x, void *to, int64_t rows, int64_t inputs);
  int64_t keys; /* tokens of a block of keys */
  /* `keys` tokens from `first` on of one KV head, of `len` in all, into packed keys and values. */
  void (*pack_block)(const KvLayer *layer, int64_t head, const int64_t *table, int64_t first, int64_t len, void *k,
                     void *v);
  int64_t packed; /* bytes of an element of those */
  /* Up to `queries` tokens, of which the first is at position `start`, of one query head. */
  void (*attend_block)(const KvLayer *layer, const uint16_t *q, uint16_t *out, int64_t stride, int64_t out_stride,
                       int64_t rows, int64_t start, const void *k, const void *v);
  int64_t queries;
} KvLevel;

#define KV_ROWS 516
#define KV_COLUMNS 32
#define KV_QUERIES 32
#define KV_LINE 64 /* bytes of a line of the cache */

extern const KvLevel kv_avx2, kv_avx512, kv_amx;

static inline int64_t kv_blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

static inline int64_t kv_padded(int64_t count, int64_t to) { return kv_blocks(count, to) * to; }

/* Bytes of rows of inputs, arranged. */
static inline int64_t kv_arranged(const KvLevel *level, int64_t rows, int64_t inputs) {
  return kv_padded(rows, level->together) * kv_padded(inputs, level->step) * level->wide;
}

/* Outputs [first, end) of kv_score, x as few_rows wants it. */
void kv_score_part(const uint16_t *w, const void *x, float *y, int64_t rows, int64_t outputs, int64_t inputs,
                   int64_t first, int64_t end);

/* What kv_level has chosen. */
const KvLevel *kv_used_level(void);

#endif
