/* A write behind all others of a transfer, that tells when they have landed. It carries no immediate. One is posted
 *
 * - when a transfer was stopped in the middle of a turn, or its path is to be left;
 * - behind a small write, which then arrives earlier: over sockets the receiver sends a confirmation before it tells of
 *   the write that asked for it. That takes 5 of 36 us, for 64 KiB over tcp.
 *
 * Over sockets it has no bytes, as who counts pages may give them to somebody else before it comes. Over shm, where 1.17
 * never completes a write of nothing, it is the transfer's first byte once more; none follows a small write there. */
#include "internal.h"

/* Alone on its path: with others in flight the confirmation of the last is as good, and spares a message. */
bool kf_flush_may_follow(const kf_transfer *t, const kf_path *path) {
  return t->plan.region && path->domain->ordered && path->domain->provider->over_sockets && path->in_flight == 0;
}

static ssize_t post_nothing(const kf_transfer *t, const kf_path *path, kf_write *write) {
  const kf_key *key = &t->plan.remote.keys[path->remote];
  struct fi_rma_iov nowhere = {key->base, 0, key->key};
  struct fi_msg_rma message = {.addr = path->address, .rma_iov = &nowhere, .rma_iov_count = 1, .context = &write->context};
  return fi_writemsg(path->domain->ep, &message, FI_COMPLETION | FI_DELIVERY_COMPLETE);
}

static ssize_t post_first_byte(const kf_transfer *t, const kf_path *path, kf_write *write) {
  kf_batch first;
  kf_batch_first(t, path, &first);
  struct iovec local = {first.local[0].iov_base, 1};
  struct fi_rma_iov remote = {first.remote[0].addr, 1, first.remote[0].key};
  struct fi_msg_rma message = {.msg_iov = &local, .desc = first.descriptors, .iov_count = 1, .addr = path->address,
                               .rma_iov = &remote, .rma_iov_count = 1, .context = &write->context};
  return fi_writemsg(path->domain->ep, &message, FI_COMPLETION | FI_DELIVERY_COMPLETE);
}

static void give_up(kf_engine *engine, kf_transfer *t, kf_path *path, int error) {
  kf_path_cut(engine, path, t->plan.peer, "the receiver takes nothing"); /* what a socket still holds is not to land either */
  kf_transfer_lose(t);
  kf_transfer_stop(engine, t, KF_END_FAILED, error,
                   "the receiver does not confirm what was written: it has died, or its connection is lost");
}

bool kf_flush(kf_engine *engine, kf_transfer *t) {
  kf_path *path = t->path;
  if (path->domain->in_flight >= engine->options.window) return false;
  kf_write *write = engine->free_writes;
  ssize_t rc = path->domain->provider->over_sockets ? post_nothing(t, path, write) : post_first_byte(t, path, write);
  if (rc == 0) {
    kf_post_take_off(engine, t, path, write, 0, true);
    return true;
  }
  /* A new connection would confirm what the old one has lost. */
  bool lost = rc == -FI_EAGAIN && kf_path_unconnected(path);
  if (rc == -FI_EAGAIN && !lost && !kf_post_stalled_too_long(engine, t)) return false;
  give_up(engine, t, path, lost ? ECONNRESET : rc == -FI_EAGAIN ? FI_ETIMEDOUT : (int)-rc);
  return true;
}
