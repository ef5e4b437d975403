/* The halves of a layer for many rows, at a level where few and many are one product. What each thread does for itself
 * where rows are few is dealt out here as well, and products are dealt out in blocks of rows by outputs: what a block
 * gives is still in the cache for what is made of it at once, and its inputs for the next block. Pieces are in the order
 * of rows, of which a thread has about the same in each phase. */

#define BLOCK_ROWS 256
#define BLOCK_OUTPUTS 64 /* added to the residual stream at a time */
#define BLOCK_GATES 32   /* elements between the halves of the MLP at a time: a whole step of what is arranged */

/* Rows [row, row + rows) by outputs [first, first + outputs). */
typedef struct {
  int64_t row, rows, first, outputs;
} Block;

static int64_t blocks_of(const Work *w, int64_t outputs, int64_t most) {
  return kv_blocks(w->step->rows, BLOCK_ROWS) * kv_blocks(outputs, most);
}

/* Piece i of those: pieces side by side have the same rows. */
static Block block_at(const Work *w, int64_t i, int64_t outputs, int64_t most) {
  const int64_t each = kv_blocks(outputs, most), row = i / each * BLOCK_ROWS, first = i % each * most;
  return (Block){row, least(w->step->rows - row, BLOCK_ROWS), first, least(outputs - first, most)};
}

/* The block's outputs, dense, to y; those of `weights` begin with the block's first. */
static void multiply_block(const Work *w, const uint16_t *weights, const void *x, int64_t inputs, const Block *b,
                           uint16_t *y) {
  const char *rows = (const char *)x + kv_arranged(w->level, b->row, inputs);
  w->level->few_rows(weights, rows, y, b->rows, b->outputs, inputs, 0, b->outputs);
}

/* Arranges rows from row `first` on, one group of them, [rows][inputs]. */
static void arrange_group(const Work *w, const uint16_t *x, int64_t first, int64_t inputs) {
  const int64_t rows = least(w->step->rows - first, w->level->together);
  w->level->arrange(x, (char *)w->arranged + kv_arranged(w->level, first, inputs), rows, inputs);
}

static const void *norm_many(const Work *w, const uint16_t *weights) {
  const int64_t size = w->stack->hidden, group = w->level->together, rows = w->step->rows;
  for (int64_t i; kv_take_near(w->team, w->thread, kv_blocks(rows, group), &i);) {
    const uint16_t *x = w->step->x + i * group * size;
    for (int64_t r = 0; r < least(rows - i * group, group); r++)
      w->level->rms_norm(x + r * size, weights, w->block + r * size, size, w->stack->eps);
    arrange_group(w, w->block, i * group, size);
  }
  kv_meet(w->team);
  return w->arranged;
}

/* Adds x times W to the residual stream; x is arranged. */
static void project_many(const Work *w, const uint16_t *weights, const void *x, int64_t inputs) {
  const int64_t size = w->stack->hidden;
  for (int64_t i; kv_take_near(w->team, w->thread, blocks_of(w, size, BLOCK_OUTPUTS), &i);) {
    const Block b = block_at(w, i, size, BLOCK_OUTPUTS);
    multiply_block(w, weights + b.first * inputs, x, inputs, &b, w->block);
    for (int64_t r = 0; r < b.rows; r++)
      w->level->add(w->step->x + (b.row + r) * size + b.first, w->block + r * b.outputs, b.outputs);
  }
  kv_meet(w->team);
}

static void make_heads_many(const Work *w) {
  const int64_t dim = w->stack->head_dim, size = heads_of(w->stack) * dim, inputs = w->stack->hidden;
  for (int64_t i; kv_take_near(w->team, w->thread, blocks_of(w, size, dim), &i);) {
    const Block b = block_at(w, i, size, dim);
    multiply_block(w, w->layer->qkv + b.first * inputs, w->arranged, inputs, &b, w->block);
    for (int64_t r = 0; r < b.rows; r++) place_head(w, b.row + r, b.first / dim, w->block + r * dim);
  }
  kv_meet(w->team);
}

typedef int64_t Pieces(const KvLevel *level, const KvLayer *layer, const KvChunk *chunk);

/* Goes from piece *i of all chunks to the chunk that it is of, where it is piece *i, and from *packed to what is packed of
 * that. NULL behind the last. */
static const KvChunk *chunk_at(const Work *w, Pieces *pieces, int64_t *i, uint8_t **packed) {
  for (int64_t c = 0; c < w->step->chunk_count; c++) {
    const KvChunk *chunk = w->step->chunks + c;
    const int64_t mine = pieces(w->level, &w->pages, chunk);
    if (*i < mine) return chunk;
    *i -= mine;
    *packed += kv_padded(kv_chunk_work(&w->pages, kv_chunk_len(chunk)), KV_LINE);
  }
  return NULL;
}

static int64_t in_all(const Work *w, Pieces *pieces) {
  int64_t sum = 0;
  for (int64_t c = 0; c < w->step->chunk_count; c++) sum += pieces(w->level, &w->pages, w->step->chunks + c);
  return sum;
}

/* Packs what chunks attend to, and has those rows attend that do so by themselves: both need no more than the pool. */
static void pack_and_attend(const Work *w) {
  const int64_t heads = w->stack->kv_heads, alone = heads * w->step->alone_count;
  for (int64_t i; kv_take_near(w->team, w->thread, alone + in_all(w, kv_pack_pieces), &i);) {
    if (i < alone) {
      attend_alone(w, i / heads, i % heads);
      continue;
    }
    int64_t piece = i - alone;
    uint8_t *packed = w->packed;
    const KvChunk *chunk = chunk_at(w, kv_pack_pieces, &piece, &packed);
    kv_pack_piece(w->level, &w->pages, chunk, packed, piece);
  }
  kv_meet(w->team);
}

static void attend_chunks(const Work *w) {
  const int64_t size = w->stack->heads * w->stack->head_dim;
  for (int64_t i; kv_take_near(w->team, w->thread, in_all(w, kv_attend_pieces), &i);) {
    int64_t piece = i;
    uint8_t *packed = w->packed;
    const KvChunk *chunk = chunk_at(w, kv_attend_pieces, &piece, &packed);
    const int64_t at = chunk->first * size;
    kv_attend_piece(w->level, &w->pages, chunk, w->q + at, size, w->attended + at, packed, piece);
  }
  kv_meet(w->team);
}

static void arrange_attended(const Work *w) {
  const int64_t size = w->stack->heads * w->stack->head_dim, group = w->level->together;
  for (int64_t i; kv_take_near(w->team, w->thread, kv_blocks(w->step->rows, group), &i);)
    arrange_group(w, w->attended + i * group * size, i * group, size);
  kv_meet(w->team);
}

static void attention_many(const Work *w) {
  norm_many(w, w->layer->attention_norm);
  make_heads_many(w);
  pack_and_attend(w);
  attend_chunks(w);
  arrange_attended(w);
  project_many(w, w->layer->output, w->arranged, w->stack->heads * w->stack->head_dim);
}

/* Puts the block's rows of `inner`, dense, where the second half of the MLP wants them. */
static void arrange_inner(const Work *w, const uint16_t *inner, const Block *b) {
  const KvLevel *level = w->level;
  char *to = (char *)w->inner + kv_arranged(level, level->together, b->first);
  for (int64_t r = 0; r < b->rows; r += level->together)
    level->arrange(inner + r * b->outputs, to + kv_arranged(level, b->row + r, w->stack->between),
                   least(b->rows - r, level->together), b->outputs);
}

static void gate_many(const Work *w) {
  const int64_t size = w->stack->between, inputs = w->stack->hidden;
  const uint16_t *gates = w->layer->gate_up, *ups = gates + size * inputs;
  uint16_t *gate = w->block, *up = gate + BLOCK_ROWS * BLOCK_GATES;
  for (int64_t i; kv_take_near(w->team, w->thread, blocks_of(w, size, BLOCK_GATES), &i);) {
    const Block b = block_at(w, i, size, BLOCK_GATES);
    multiply_block(w, gates + b.first * inputs, w->arranged, inputs, &b, gate);
    multiply_block(w, ups + b.first * inputs, w->arranged, inputs, &b, up);
    w->level->silu_times(gate, up, gate, b.rows * b.outputs);
    arrange_inner(w, gate, &b);
  }
  kv_meet(w->team);
}

static void feed_forward_many(const Work *w) {
  norm_many(w, w->layer->mlp_norm);
  gate_many(w);
  project_many(w, w->layer->down, w->inner, w->stack->between);
}

static int64_t chunks_work(const Work *w) {
  int64_t bytes = 0;
  for (int64_t c = 0; c < w->step->chunk_count; c++)
    bytes += kv_padded(kv_chunk_work(&w->pages, kv_chunk_len(w->step->chunks + c)), KV_LINE);
  return bytes;
}

/* A thread's own. */
static void own_of_many(Work *w, uintptr_t *at) {
  const int64_t outputs = largest(largest(BLOCK_OUTPUTS, 2 * BLOCK_GATES), w->stack->head_dim);
  w->block = elements(at, largest(BLOCK_ROWS * outputs, w->level->together * w->stack->hidden));
}

static void shared_of_many(Work *w, uintptr_t *at) {
  const KvStack *s = w->stack;
  const int64_t rows = w->step->rows, q = s->heads * s->head_dim;
  w->arranged = part(at, kv_arranged(w->level, rows, largest(s->hidden, q)));
  w->inner = part(at, kv_arranged(w->level, rows, s->between));
  w->q = elements(at, rows * q);
  w->attended = elements(at, rows * q);
  w->packed = part(at, chunks_work(w));
  w->team->shares = part(at, w->team->threads * (int64_t)sizeof(*w->team->shares));
}
