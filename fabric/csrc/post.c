/* Posts the writes of layers that are done, a few of each transfer in turn, within a window of outstanding bytes.
 *
 * A transfer may end only when nothing of it can land any more. Over ordered providers one write in a turn is enough to
 * know that: the last write of every turn (the seal) completes when it is in the target's memory, and then so are those
 * before it; those complete as soon as their source may be reused, which spares an acknowledgement each. The queue is
 * not read within a turn, so no new connection can slip in between a write and its seal: if the connection is lost, so
 * is the seal, and the transfer fails. Where writes land in any order, every write is its own seal. A small write that its
 * caller posts goes without one, and flush.c seals it in the thread's next round, before the queue is read. */
#include "internal.h"

#include <stdio.h>

#define TURN_WRITES 128 /* of one transfer, before the next has its turn */
#define TURNS 3 /* in a window of outstanding bytes; each ends with a confirmation, which takes the receiver some us */
#define LITTLE_BYTES (256u << 10) /* a transfer with no more than this left goes first */
#define RESERVE 4 /* one in so many writes is kept for transfers that have little left */

static ssize_t post(const kf_transfer *t, const kf_path *path, const kf_batch *b, kf_write *write, bool seal) {
  if (path->domain->cuts && kf_cuts_pending(path->domain, &t->plan.peer->addresses[path->remote])) return -FI_EAGAIN;
  struct fi_msg_rma message = {.msg_iov = b->local,
                               .desc = (void **)b->descriptors,
                               .iov_count = b->parts,
                               .addr = path->address,
                               .rma_iov = b->remote,
                               .rma_iov_count = b->parts ? b->parts : 1,
                               .context = &write->context,
                               .data = kf_immediate_pack(t->plan.slot, t->plan.generation, b->pages)};
  uint64_t flags = FI_COMPLETION | FI_REMOTE_CQ_DATA | (seal ? FI_DELIVERY_COMPLETE : 0);
  return fi_writemsg(path->domain->ep, &message, flags);
}

static ssize_t post_with_faults(kf_engine *engine, const kf_transfer *t, const kf_path *path, const kf_batch *b,
                                kf_write *write, bool seal) {
  if (__builtin_expect(atomic_load_explicit(&engine->faults.on, memory_order_relaxed), false)) {
    if (kf_faults_fail(&engine->faults)) return -FI_EIO;
    if (b->parts && !t->plan.region->on_device && kf_faults_corrupt(&engine->faults)) write->flipped = (unsigned char *)b->local[0].iov_base + b->bytes / b->parts / 2;
  }
  if (write->flipped) *write->flipped ^= 0xff;
  ssize_t rc = post(t, path, b, write, seal);
  if (rc == -FI_EAGAIN) kf_faults_uncount(&engine->faults);
  if (rc && write->flipped) *write->flipped ^= 0xff; /* stays set on EAGAIN: the fault is still owed */
  return rc;
}

/* A write is out: it holds the bytes that have landed once it completes. */
void kf_post_take_off(kf_engine *engine, kf_transfer *t, kf_path *path, kf_write *write, uint64_t bytes, bool seal) {
  engine->free_writes = write->next;
  write->transfer = t;
  write->path = t->path = path;
  write->bytes = seal ? t->unsealed_bytes + bytes : 0;
  if (t->unsealed == 0) t->breaks = path->breaks;
  t->unsealed_bytes = seal ? 0 : t->unsealed_bytes + bytes;
  t->unsealed = seal ? 0 : t->unsealed + 1;
  t->in_flight++;
  if (path->in_flight++ == 0) {
    path->progress_ns = kf_now();
    path->cut = NULL;
  }
  path->refused_ns = path->refused_since_ns = 0;
  t->in_flight_bytes += bytes;
  t->stalled_ns = 0;
  kf_path_add(path, bytes);
  kf_add(&path->domain->in_flight, 1);
  kf_add(&engine->in_flight, 1);
}

void kf_post_account(kf_engine *engine, kf_transfer *t, const kf_batch *b, uint64_t now) {
  kf_event *event = &t->node.event;
  if (event->first_post_ns == 0) event->first_post_ns = now;
  if (t->post_ns && t->post_ns[t->layer] == 0) t->post_ns[t->layer] = now;
  event->pages += b->pages;
  event->bytes += b->bytes;
  event->writes++;
  t->left_bytes -= b->bytes;
  kf_add(&engine->total_writes, 1);
  kf_add(&engine->total_pages, b->pages);
  kf_add(&engine->total_bytes, b->bytes);
  if (t->by_link) return;
  kf_add(&t->path->domain->total_writes, 1);
  kf_add(&t->path->domain->total_bytes, b->bytes);
}

void kf_post_advance(kf_engine *engine, kf_transfer *t, const kf_batch *b) {
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

static void fail(kf_engine *engine, kf_transfer *t, const kf_path *path, int error) {
  char text[KF_TEXT], way[KF_WAY];
  snprintf(text, sizeof text, "%s: write of layer %u could not be posted: %s",
           kf_path_name(t, path, way, sizeof way), t->layer, fi_strerror(error));
  kf_transfer_stop(engine, t, KF_END_FAILED, error, text);
}

/* The provider has no room, or no connection yet. That passes, or the peer is gone. */
bool kf_post_stalled_too_long(kf_engine *engine, kf_transfer *t) {
  uint64_t now = kf_now();
  engine->stalled = true;
  if (t->stalled_ns == 0 || t->in_flight) t->stalled_ns = now;
  return now - t->stalled_ns > engine->options.stall_ns;
}

bool kf_post_held_back(kf_engine *engine, const kf_transfer *t) {
  uint64_t until = kf_faults_hold_until(&engine->faults, t->seen_ns[t->layer]);
  if (until == 0 || kf_now() >= until) return false;
  if (engine->hold_until_ns == 0 || until < engine->hold_until_ns) engine->hold_until_ns = until;
  return true;
}

static bool has_little_left(const kf_transfer *t) { return t->left_bytes <= LITTLE_BYTES; }

/* A transfer whose layers are all done is waited for: nothing hides it any more. Its turns are twice as long. */
static uint64_t turn_bytes(const kf_engine *engine, const kf_transfer *t) {
  uint32_t weight = t->layers_seen == t->plan.layers ? 2 : 1;
  return engine->options.window_bytes / TURNS / 2 * weight;
}

/* Whether the domain's window is open for one more write once `writes` more with `bytes` are out. For transfers with little left
 * it is twice as large: they need not wait until the large ones have emptied it. */
static bool window_open(const kf_engine *engine, const kf_transfer *t, const kf_domain *domain, uint32_t writes,
                        uint64_t bytes) {
  bool little = has_little_left(t);
  uint64_t limit = engine->options.window_bytes * (little ? 2 : 1);
  uint32_t kept = little ? 0 : engine->options.window / RESERVE;
  return domain->in_flight + writes + kept < engine->options.window && domain->in_flight_bytes + bytes < limit;
}

/* Whether another write follows in this turn. A wrong yes costs a flush, a wrong no an acknowledgement. */
static bool turn_goes_on(const kf_engine *engine, const kf_transfer *t, const kf_domain *domain, const kf_batch *b,
                         uint32_t posted, uint64_t bytes) {
  if (posted + 1 == TURN_WRITES || bytes + b->bytes >= turn_bytes(engine, t)) return false;
  if (b->run == t->plan.run_count && t->layer + 1 == t->layers_seen) return false;
  if (b->run == t->plan.run_count && atomic_load_explicit(&engine->faults.on, memory_order_relaxed)) return false;
  return window_open(engine, t, domain, 1, b->bytes);
}

static kf_path *path_of(kf_engine *engine, const kf_transfer *t) {
  return t->unsealed ? t->path : kf_paths_choose(engine, t->plan.peer);
}

/* A socket that is corked for more than one write is left in `corked`. */
static bool post_writes(kf_engine *engine, kf_transfer *t, kf_path *path, bool hurry, int *corked) {
  const kf_domain *domain = path->domain;
  bool seal_later = hurry && kf_flush_may_follow(t, path);
  uint32_t posted = 0;
  uint64_t bytes = 0;
  kf_batch b;
  for (bool more = true; more && window_open(engine, t, domain, 0, 0) && !kf_post_held_back(engine, t);) {
    kf_batch_fill(engine, t, path, &b);
    more = turn_goes_on(engine, t, domain, &b, posted, bytes);
    if (more && !posted) *corked = kf_sockets_cork(path);
    bool seal = (!more && !seal_later) || !domain->ordered;
    kf_write *write = engine->free_writes;
    uint64_t now = posted ? 0 : kf_now(); /* before: over sockets the call itself sends */
    if (!now && t->post_ns && t->post_ns[t->layer] == 0) now = kf_now();
    ssize_t rc = post_with_faults(engine, t, path, &b, write, seal);
    if (rc == -FI_EAGAIN) {
      kf_path_refused(engine, path);
      if (kf_path_unconnected(path)) kf_transfers_cut_off(engine, path, t->plan.peer);
      if (kf_post_stalled_too_long(engine, t)) fail(engine, t, path, FI_ETIMEDOUT);
      break;
    }
    if (rc) {
      write->flipped = NULL;
      kf_path_failed(engine, path);
      if (!kf_paths_left(t->plan.peer)) fail(engine, t, path, (int)-rc); /* else it goes another way: it has not left */
      return true;
    }
    kf_post_take_off(engine, t, path, write, b.bytes, seal);
    kf_post_account(engine, t, &b, now);
    posted++;
    bytes += b.bytes;
    kf_post_advance(engine, t, &b);
  }
  return posted > 0;
}

/* `hurry`: the last write of the turn is not to wait for its seal, where that can follow it. */
static bool post_turn(kf_engine *engine, kf_transfer *t, bool hurry) {
  int corked = KF_SOCKET_NONE;
  bool progress = post_writes(engine, t, path_of(engine, t), hurry, &corked);
  kf_sockets_uncork(corked);
  return progress;
}

bool kf_post_turn(kf_engine *engine, kf_transfer *t) {
  if (t->by_link) return t->state == KF_POSTING && kf_local_turn(engine, t);
  if (kf_transfer_is_cut_off(t)) return t->in_flight == 0 && kf_transfer_end_cut_off(engine, t);
  bool leaves = t->unsealed && !kf_path_usable(t->path) && kf_paths_left(t->plan.peer);
  if (t->state == KF_POSTING) return leaves ? kf_flush(engine, t) : post_turn(engine, t, false);
  return t->state == KF_DRAINING && t->unsealed && kf_flush(engine, t);
}

void kf_post_at_once(kf_engine *engine, kf_transfer *t) {
  if (t->state != KF_POSTING) return;
  (void)(t->by_link ? kf_local_turn(engine, t) : post_turn(engine, t, true));
}

/* To the end of the line. */
static void requeue(kf_transfer *ring, kf_transfer *t) {
  t->previous->next = t->next;
  t->next->previous = t->previous;
  t->next = ring;
  t->previous = ring->previous;
  ring->previous->next = t;
  ring->previous = t;
}

static bool can_post(kf_engine *engine, const kf_transfer *t) {
  return t->state == KF_POSTING && (t->by_link || window_open(engine, t, path_of(engine, t)->domain, 0, 0));
}

/* Those that can post go to the end of the line first: afterwards they may be gone. */
static bool post_all(kf_engine *engine, bool little) {
  bool progress = false;
  kf_transfer *ring = &engine->active, *last = ring->previous;
  for (kf_transfer *t = ring->next, *next; t != ring; t = next) {
    next = t == last ? ring : t->next;
    if (has_little_left(t) != little) continue;
    if (can_post(engine, t)) requeue(ring, t);
    progress |= kf_post_turn(engine, t);
  }
  return progress;
}

/* Transfers with little left, as contexts and tail chunks have, do not wait for the others, which take turns. */
bool kf_post_round(kf_engine *engine) {
  engine->stalled = false;
  engine->hold_until_ns = 0;
  bool little = post_all(engine, true);
  return post_all(engine, false) || little;
}
