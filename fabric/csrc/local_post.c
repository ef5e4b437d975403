/* A turn of a transfer that goes to a peer on this host: copied here and now, so nothing of it is ever in flight. */
#include "local.h"

#include <stdio.h>

#define TURN_BYTES KF_PIECE /* copied for one transfer before counters, commands and the others are looked at: some 50 us */

static void fail(kf_engine *engine, kf_transfer *t, int error) {
  static const struct {
    int error;
    const char *text;
  } known[] = {{EACCES, "the receiver, on this host, has closed the memory key, or never gave it"},
               {ECONNRESET, "the receiver, a process of this host, has died or closed its fabric"},
               {ETIMEDOUT, "the receiver, on this host, takes nothing: it hangs or is stopped"},
               {ERANGE, "the receiver's memory on this host is smaller than its descriptor says"}};
  char text[KF_TEXT];
  snprintf(text, sizeof text, "write of layer %u could not be posted: %s", t->layer, kf_strerror(error));
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].error == error) snprintf(text, sizeof text, "%s", known[i].text);
  kf_transfer_stop(engine, t, KF_END_FAILED, error, text);
}

static bool fits(const kf_map *map, const kf_batch *b) {
  for (uint32_t i = 0; i < b->parts; i++)
    if (b->remote[i].addr > map->length || b->local[i].iov_len > map->length - b->remote[i].addr) return false;
  return true;
}

/* Copies bytes `from` to `to` of a write, KF_PIECE of them at most: the key is looked at once. */
static int copy_range(kf_board *board, const kf_map *map, const kf_batch *b, uint64_t from, uint64_t to) {
  if (!fits(map, b)) return -ERANGE;
  if (!kf_board_enter(board, map->grant)) return -EACCES;
  uint64_t start = 0, end; /* of the part, in the write */
  for (uint32_t i = 0; i < b->parts && start < to; i++, start = end) {
    end = start + b->local[i].iov_len;
    uint64_t first = from > start ? from - start : 0, last = (to < end ? to : end) - start;
    if (first < last)
      kf_copy(map->start + b->remote[i].addr + first, (const char *)b->local[i].iov_base + first, last - first);
  }
  kf_copy_end();
  kf_board_leave(board);
  return 0;
}

/* Turns a byte at the receiver: the source is right, what arrived is not. */
static int corrupt(kf_board *board, const kf_map *map, const kf_batch *b) {
  size_t middle = b->local[0].iov_len / 2;
  unsigned char byte = ((unsigned char *)b->local[0].iov_base)[middle] ^ 0xff;
  const kf_batch wrong = {.parts = 1, .local[0] = {&byte, 1}, .remote[0] = {.addr = b->remote[0].addr + middle}};
  return copy_range(board, map, &wrong, 0, 1);
}

/* -EINPROGRESS: a page larger than a piece is copied over several turns; its immediate follows the last. */
static int write_batch(kf_engine *engine, kf_transfer *t, const kf_map *map, const kf_batch *b) {
  kf_board *board = t->plan.peer->link->board;
  if (t->copied == 0 && kf_faults_fail(&engine->faults)) return -EIO;
  uint64_t from = t->copied, to = b->bytes - from > KF_PIECE ? from + KF_PIECE : b->bytes;
  int rc = copy_range(board, map, b, from, to);
  if (rc) return rc;
  t->copied = to < b->bytes ? to : 0;
  if (t->copied) return -EINPROGRESS;
  if (b->parts && kf_faults_corrupt(&engine->faults)) rc = corrupt(board, map, b);
  if (rc == 0) kf_board_put(board, kf_immediate_pack(t->plan.slot, t->plan.generation, b->pages));
  return rc;
}

/* -EAGAIN: not now. */
static int ready(kf_transfer *t, kf_map **map) {
  int rc = kf_link_map(t->plan.peer->link, t->plan.remote.local_key, map);
  return rc == 0 && kf_board_full(t->plan.peer->link->board) ? -EAGAIN : rc;
}

static bool wait_or_fail(kf_engine *engine, kf_transfer *t, int rc) {
  if (rc != -EAGAIN)
    fail(engine, t, -rc);
  else if (kf_post_stalled_too_long(engine, t))
    fail(engine, t, ETIMEDOUT);
  else
    return false;
  return true;
}

/* One write: counted, and the transfer moved on. False if nothing more follows in this turn: a large page is not done
 * yet, or the transfer has left POSTING, and may be gone already. */
static bool write_next(kf_engine *engine, kf_transfer *t, const kf_map *map, uint64_t *bytes, uint64_t *now) {
  kf_batch b;
  kf_batch_fill(engine, t, NULL, &b);
  if (t->node.event.first_post_ns == 0) t->node.event.first_post_ns = *now;
  int rc = write_batch(engine, t, map, &b);
  if (rc && rc != -EINPROGRESS) fail(engine, t, -rc);
  if (rc) return false;
  bool goes_on = b.run < t->plan.run_count || t->layer + 1 < t->layers_seen;
  kf_post_account(engine, t, &b, *now);
  *now = t->node.event.last_completion_ns = kf_now();
  *bytes += b.bytes;
  t->stalled_ns = 0;
  kf_add(&engine->local_bytes, b.bytes);
  kf_post_advance(engine, t, &b);
  return goes_on;
}

bool kf_local_turn(kf_engine *engine, kf_transfer *t) {
  kf_link *link = t->plan.peer->link;
  kf_map *map = NULL;
  uint64_t bytes = 0, now = kf_now();
  if (kf_post_held_back(engine, t)) return false;
  int rc = ready(t, &map);
  if (rc) return wait_or_fail(engine, t, rc);
  kf_link_hold(link); /* the transfer may end here, and be its last user */
  for (bool more = true; more && bytes < TURN_BYTES && !kf_board_full(link->board) && !kf_post_held_back(engine, t);)
    more = write_next(engine, t, map, &bytes, &now);
  kf_link_ring(engine, link);
  kf_link_drop(engine, link);
  return true;
}
