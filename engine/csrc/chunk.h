/* A chunk's attention in pieces, each for one thread: first all keys and values are packed, then tokens attend to them. */
#ifndef KV_CHUNK_H
#define KV_CHUNK_H

#include "level.h"

static inline int64_t kv_chunk_len(const KvChunk *chunk) { return chunk->start + chunk->tokens; }

/* Bytes of all packed keys of one KV head, or of its values. */
static inline int64_t kv_packed(const KvLevel *level, const KvLayer *layer, const KvChunk *chunk) {
  return kv_padded(kv_chunk_len(chunk), level->keys) * layer->head_dim * level->packed;
}

static inline int64_t kv_pack_pieces(const KvLevel *level, const KvLayer *layer, const KvChunk *chunk) {
  return layer->kv_heads * kv_blocks(kv_chunk_len(chunk), level->keys);
}

/* `work` has kv_chunk_work bytes. */
static inline void kv_pack_piece(const KvLevel *level, const KvLayer *layer, const KvChunk *chunk, uint8_t *work,
                                 int64_t piece) {
  const int64_t each = kv_blocks(kv_chunk_len(chunk), level->keys), head = piece / each, block = piece % each;
  const int64_t all = kv_packed(level, layer, chunk);
  uint8_t *k = work + 2 * head * all + block * (all / each);
  level->pack_block(layer, head, chunk->table, block * level->keys, kv_chunk_len(chunk), k, k + all);
}

static inline int64_t kv_attend_pieces(const KvLevel *level, const KvLayer *layer, const KvChunk *chunk) {
  return kv_blocks(chunk->tokens, level->queries) * layer->kv_heads * layer->group;
}

/* From the last tokens on, which see the most: what is left in the end is small. `q`, tokens `stride` apart, and `out`,
 * dense, are those of the chunk's first token. */
static inline void kv_attend_piece(const KvLevel *level, const KvLayer *layer, const KvChunk *chunk, const uint16_t *q,
                                   int64_t stride, uint16_t *out, const uint8_t *work, int64_t piece) {
  const int64_t heads = layer->kv_heads * layer->group, dim = layer->head_dim, h = piece % heads;
  const int64_t first = (kv_blocks(chunk->tokens, level->queries) - 1 - piece / heads) * level->queries;
  const int64_t left = chunk->tokens - first, all = kv_packed(level, layer, chunk);
  const uint8_t *k = work + 2 * (h / layer->group) * all;
  level->attend_block(layer, q + first * stride + h * dim, out + (first * heads + h) * dim, stride, heads * dim,
                      left < level->queries ? left : level->queries, chunk->start + first, k, k + all);
}

#endif
