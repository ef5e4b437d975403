/* Where a token's key is in the pages of its sequence; its value is page_size * head_dim elements behind. */

static inline const uint16_t *key_of(const KvLayer *layer, int64_t head, const int64_t *table, int64_t at) {
  int64_t page = table[at / layer->page_size], tokens = layer->page_size;
  return layer->pages + ((page * layer->kv_heads + head) * 2 * tokens + at % tokens) * layer->head_dim;
}
