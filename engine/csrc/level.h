/* One set of kernels for each set of instructions; every function does a piece of the work, on one thread. */
#ifndef KV_LEVEL_H
#define KV_LEVEL_H

#include <stdint.h>

#include "kernels.h"

typedef struct {
  /* Outputs [first, end) of the product; x is what `spread` makes of it where that is not NULL. */
  void (*few_rows)(const uint16_t *w, const void *x, uint16_t *y, int64_t rows, int64_t outputs, int64_t inputs,
                   int64_t first, int64_t end);
  /* A row in float32 and in the order that few_rows wants, or a part of it from a multiple of 16 on. NULL at AVX-512. */
  void (*spread)(const uint16_t *x, float *y, int64_t size);
  void (*widen)(const uint16_t *x, float *y, int64_t size);
  /* x += y. */
  void (*add)(uint16_t *x, const uint16_t *y, int64_t size);
  void (*rms_norm)(const uint16_t *x, const uint16_t *w, uint16_t *y, int64_t size, float eps);
  void (*silu_times)(const uint16_t *gate, const uint16_t *up, uint16_t *y, int64_t size);
  void (*rotate)(const uint16_t *x, const uint16_t *cos, const uint16_t *sin, uint16_t *y, int64_t size);
  /* One KV head of one token. */
  void (*attend_row)(const KvLayer *layer, int64_t head, const uint16_t *q, uint16_t *out, const int64_t *table,
                     int64_t len);
  /* `rows` rows, up to KV_ROWS, by up to KV_COLUMNS outputs of the product, y `stride` apart; x is float32. NULL where
   * the library is as fast. */
  void (*many_rows)(const uint16_t *w, const float *x, uint16_t *y, int64_t stride, int64_t rows, int64_t outputs,
                    int64_t inputs);
  /* KV_KEYS tokens from `first` on of one KV head, of `len` in all, into packed keys and values. */
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
#define KV_KEYS 64

extern const KvLevel kv_avx2, kv_avx512;

/* Outputs [first, end) of kv_score, x as few_rows wants it. */
void kv_score_part(const uint16_t *w, const void *x, float *y, int64_t rows, int64_t outputs, int64_t inputs,
                   int64_t first, int64_t end);

/* What kv_level has chosen. */
const KvLevel *kv_used_level(void);

#endif
