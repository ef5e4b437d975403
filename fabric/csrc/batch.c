/* Which pages the next write of a transfer carries: neighbours as one piece, scattered ones as pieces of one write. */
#include "local.h"

/* Within this host a write is copied in one go: a piece at most, so that the others wait no longer than for that. */
static uint64_t most_bytes(const kf_engine *engine, const kf_transfer *t) {
  uint64_t most = engine->options.max_write_bytes;
  return t->by_link && most > KF_PIECE ? KF_PIECE : most;
}

/* Copying takes as many as there is room for, whatever the domains take. */
static uint32_t most_parts(const kf_engine *engine, const kf_transfer *t) {
  return t->by_link && !engine->options.gather ? KF_GATHER_MAX : engine->gather;
}

static uint32_t pages_at_once(const kf_engine *engine, const kf_transfer *t, const kf_batch *b) {
  if (!t->whole_pages) return 1;
  uint64_t by_bytes = most_bytes(engine, t) / t->plan.length;
  uint64_t left = (uint64_t)(t->runs[b->run].count - b->page);
  uint64_t by_count = KF_MAX_PAGES_PER_WRITE - b->pages;
  uint64_t n = left < by_bytes ? left : by_bytes;
  if (n > by_count) n = by_count;
  return n ? (uint32_t)n : 1;
}

static void add_part(const kf_transfer *t, const kf_path *path, uint32_t layer, kf_batch *b, uint32_t pages) {
  const kf_schedule *p = &t->plan;
  const kf_key none = {0, 0}, *key = path ? &p->remote.keys[path->remote] : &none;
  const kf_run *run = &t->runs[b->run];
  uint64_t source = p->source_start + layer * p->source_layer_stride + p->source_offset +
                    (uint64_t)(run->source + b->page) * p->source_page_stride;
  uint64_t target = p->destination_start + layer * p->destination_layer_stride + p->destination_offset +
                    (uint64_t)(run->destination + b->page) * p->destination_page_stride;
  uint64_t bytes = pages * p->length;
  b->local[b->parts] = (struct iovec){(char *)p->region->start + source, bytes};
  b->descriptors[b->parts] = path ? p->region->descriptors[path->domain->index] : NULL;
  b->remote[b->parts] = (struct fi_rma_iov){key->base + target, bytes, key->key};
  b->parts++;
  b->pages += pages;
  b->bytes += bytes;
  b->page += (int32_t)pages;
  if (b->page == run->count) {
    b->run++;
    b->page = 0;
  }
}

/* Nothing of ours, at a place that the key opens: EFA wants one for 0 bytes too. */
static void immediate_alone(const kf_transfer *t, const kf_path *path, kf_batch *b) {
  const kf_key none = {0, 0}, *key = path ? &t->plan.remote.keys[path->remote] : &none;
  b->remote[0] = (struct fi_rma_iov){key->base, 0, key->key};
  b->pages = (uint32_t)t->runs[0].count;
  b->run = 1;
}

/* Whether a piece goes into a write that has others. Whoever says how many pieces a write has gets them. */
static bool shares(const kf_engine *engine, const kf_transfer *t, const kf_path *path, const kf_batch *b, uint64_t bytes) {
  if (b->bytes + bytes > most_bytes(engine, t)) return false;
  if (!path || engine->options.gather) return true;
  uint64_t least = path->domain->provider->least_piece;
  return bytes >= least && b->local[0].iov_len >= least;
}

/* As many scattered pages as the provider takes in one operation: below some tens of KiB operations are the limit.
 * Without a path, for a peer on this host, what is to be written at are offsets into its region. */
void kf_batch_fill(const kf_engine *engine, const kf_transfer *t, const kf_path *path, kf_batch *b) {
  b->parts = b->pages = 0;
  b->bytes = 0;
  b->run = t->run;
  b->page = t->page;
  if (!t->plan.region) {
    immediate_alone(t, path, b);
    return;
  }
  while (b->parts < most_parts(engine, t) && b->run < t->plan.run_count && b->pages < KF_MAX_PAGES_PER_WRITE) {
    uint32_t pages = pages_at_once(engine, t, b);
    if (b->parts && !shares(engine, t, path, b, pages * t->plan.length)) break;
    add_part(t, path, t->layer, b, pages);
  }
}

void kf_batch_first(const kf_transfer *t, const kf_path *path, kf_batch *b) {
  *b = (kf_batch){.parts = 0};
  add_part(t, path, 0, b, 1);
}
