/* Posts the writes of layers that are done, a few of each transfer in turn. */
#include "internal.h"

#include <stdio.h>
#include <string.h>

#define TURN 8 /* writes of one transfer before the next has its turn */

typedef struct {
  struct iovec local[KF_GATHER_MAX];
  void *descriptors[KF_GATHER_MAX];
  struct fi_rma_iov remote[KF_GATHER_MAX];
  uint32_t parts;
  uint32_t pages;
  uint64_t bytes;
  uint32_t run; /* where the next write of this layer begins */
  int32_t page;
} batch;

static uint32_t pages_at_once(const kf_engine *engine, const kf_transfer *t, const batch *b) {
  if (!t->whole_pages) return 1;
  uint64_t by_bytes = engine->options.max_write_bytes / t->plan.length;
  uint64_t left = (uint64_t)(t->runs[b->run].count - b->page);
  uint64_t by_count = KF_MAX_PAGES_PER_WRITE - b->pages;
  uint64_t n = left < by_bytes ? left : by_bytes;
  if (n > by_count) n = by_count;
  return n ? (uint32_t)n : 1;
}

static void add_part(kf_transfer *t, batch *b, uint32_t pages) {
  const kf_schedule *p = &t->plan;
  const kf_run *run = &t->runs[b->run];
  uint64_t source = p->source_start + t->layer * p->source_layer_stride + p->source_offset +
                    (uint64_t)(run->source + b->page) * p->source_page_stride;
  uint64_t target = p->destination_start + t->layer * p->destination_layer_stride + p->destination_offset +
                    (uint64_t)(run->destination + b->page) * p->destination_page_stride;
  uint64_t bytes = pages * p->length;
  b->local[b->parts] = (struct iovec){(char *)p->region->start + source, bytes};
  b->descriptors[b->parts] = p->region->local_descriptor;
  b->remote[b->parts] = (struct fi_rma_iov){p->remote.base + target, bytes, p->remote.key};
  b->parts++;
  b->pages += pages;
  b->bytes += bytes;
  b->page += (int32_t)pages;
  if (b->page == run->count) {
    b->run++;
    b->page = 0;
  }
}

/* As many scattered pages as the provider takes in one operation: below some tens of KiB operations are the limit. */
static void fill(const kf_engine *engine, kf_transfer *t, batch *b) {
  b->run = t->run;
  b->page = t->page;
  while (b->parts < engine->gather && b->run < t->plan.run_count && b->pages < KF_MAX_PAGES_PER_WRITE) {
    uint32_t pages = pages_at_once(engine, t, b);
    if (b->parts && b->bytes + pages * t->plan.length > engine->options.max_write_bytes) break;
    add_part(t, b, pages);
  }
}

static ssize_t post(kf_engine *engine, const kf_transfer *t, const batch *b, kf_write *write) {
  struct fi_msg_rma message = {.msg_iov = b->local,
                               .desc = (void **)b->descriptors,
                               .iov_count = b->parts,
                               .addr = t->plan.peer->address,
                               .rma_iov = b->remote,
                               .rma_iov_count = b->parts,
                               .context = &write->context,
                               .data = kf_immediate_pack(t->plan.slot, t->plan.generation, b->pages)};
  uint64_t flags = FI_COMPLETION | FI_REMOTE_CQ_DATA | engine->endpoint.provider->write_flags;
  return fi_writemsg(engine->endpoint.ep, &message, flags);
}

static ssize_t post_with_faults(kf_engine *engine, const kf_transfer *t, const batch *b, kf_write *write) {
  if (__builtin_expect(atomic_load_explicit(&engine->faults.on, memory_order_relaxed), false)) {
    if (kf_faults_fail(&engine->faults)) return -FI_EIO;
    if (kf_faults_corrupt(&engine->faults)) write->flipped = (unsigned char *)b->local[0].iov_base + b->bytes / b->parts / 2;
  }
  if (write->flipped) *write->flipped ^= 0xff;
  ssize_t rc = post(engine, t, b, write);
  if (rc && write->flipped) *write->flipped ^= 0xff; /* stays set on EAGAIN: the fault is still owed */
  return rc;
}

static void account(kf_engine *engine, kf_transfer *t, const batch *b, kf_write *write, uint64_t now) {
  kf_event *event = &t->node.event;
  engine->free_writes = write->next;
  write->transfer = t;
  write->pages = b->pages;
  write->bytes = b->bytes;
  if (event->first_post_ns == 0) event->first_post_ns = now;
  if (t->post_ns && t->post_ns[t->layer] == 0) t->post_ns[t->layer] = now;
  event->pages += b->pages;
  event->bytes += b->bytes;
  event->writes++;
  t->in_flight++;
  t->stalled_ns = 0;
  engine->in_flight_bytes += b->bytes;
  kf_add(&engine->in_flight, 1);
  kf_add(&engine->total_writes, 1);
  kf_add(&engine->total_pages, b->pages);
  kf_add(&engine->total_bytes, b->bytes);
}

static void advance(kf_engine *engine, kf_transfer *t, const batch *b) {
  t->run = b->run;
  t->page = b->page;
  if (t->run < t->plan.run_count) return;
  t->run = 0;
  t->layer++;
  if (t->layer == t->plan.layers)
    kf_transfer_stop(engine, t, KF_END_DONE, 0, "");
  else if (t->layer == t->layers_seen)
    kf_transfer_move(t, KF_WAITING);
}

static void fail(kf_engine *engine, kf_transfer *t, int error) {
  char text[KF_TEXT];
  snprintf(text, sizeof text, "write of layer %u could not be posted: %s", t->layer, fi_strerror(error));
  kf_transfer_stop(engine, t, KF_END_FAILED, error, text);
}

/* The provider has no room, or no connection yet. That passes, or the peer is gone. */
static void stall(kf_engine *engine, kf_transfer *t) {
  uint64_t now = kf_now();
  engine->stalled = true;
  if (t->stalled_ns == 0 || t->in_flight) t->stalled_ns = now;
  if (now - t->stalled_ns > engine->options.stall_ns) fail(engine, t, FI_ETIMEDOUT);
}

static bool held_back(kf_engine *engine, const kf_transfer *t) {
  uint64_t until = kf_faults_hold_until(&engine->faults, t->seen_ns[t->layer]);
  if (until == 0 || kf_now() >= until) return false;
  if (engine->hold_until_ns == 0 || until < engine->hold_until_ns) engine->hold_until_ns = until;
  return true;
}

static bool window_open(const kf_engine *engine) {
  return engine->free_writes && engine->in_flight_bytes < engine->options.window_bytes;
}

static bool post_turn(kf_engine *engine, kf_transfer *t) {
  int posted = 0;
  while (posted < TURN && t->state == KF_POSTING && window_open(engine) && !held_back(engine, t)) {
    batch b;
    b.parts = b.pages = 0;
    b.bytes = 0;
    fill(engine, t, &b);
    kf_write *write = engine->free_writes;
    uint64_t now = kf_now(); /* before: over sockets the call itself sends */
    ssize_t rc = post_with_faults(engine, t, &b, write);
    if (rc == -FI_EAGAIN) {
      stall(engine, t);
      break;
    }
    if (rc) {
      write->flipped = NULL;
      fail(engine, t, (int)-rc);
      return true;
    }
    account(engine, t, &b, write, now);
    posted++;
    advance(engine, t, &b);
  }
  return posted > 0;
}

/* The first in line moves to the end, so that a large transfer does not starve the others. */
static void rotate(kf_transfer *ring) {
  kf_transfer *first = ring->next;
  if (first == ring || first->next == ring) return;
  ring->next = first->next;
  first->next->previous = ring;
  first->next = ring;
  first->previous = ring->previous;
  ring->previous->next = first;
  ring->previous = first;
}

bool kf_post_round(kf_engine *engine) {
  bool progress = false;
  engine->stalled = false;
  engine->hold_until_ns = 0;
  for (kf_transfer *t = engine->active.next, *next; t != &engine->active; t = next) {
    next = t->next;
    if (t->state == KF_POSTING && post_turn(engine, t)) progress = true;
  }
  rotate(&engine->active);
  return progress;
}
