/* Transfers that must have ended by a time: those that have not, fail. */
#include "internal.h"

#include <stdio.h>

void kf_deadlines_add(kf_engine *engine, const kf_transfer *transfer) {
  uint64_t when = transfer->deadline_ns;
  if (when && (engine->deadline_ns == 0 || when < engine->deadline_ns)) engine->deadline_ns = when;
}

/* What is in flight must still land or fail before the event: it is the receiver's memory. */
static void fail(kf_engine *engine, kf_transfer *t) {
  char peer[KF_WAY], text[KF_TEXT];
  snprintf(text, sizeof text, "not over within %.3f s: of %llu bytes to %s, %llu were not posted, %llu not confirmed",
           (double)t->plan.timeout_ns / 1e9, (unsigned long long)(t->node.event.bytes + t->left_bytes),
           kf_peer_name(t->plan.peer, peer, sizeof peer), (unsigned long long)t->left_bytes,
           (unsigned long long)t->in_flight_bytes);
  t->deadline_ns = 0;
  kf_transfer_stop(engine, t, KF_END_FAILED, ETIMEDOUT, text);
}

/* A thread that has transfers sleeps 10 ms at most, so no deadline is late by more. */
bool kf_deadlines_round(kf_engine *engine) {
  if (engine->deadline_ns == 0) return false;
  uint64_t now = kf_now();
  if (now < engine->deadline_ns) return false;
  engine->deadline_ns = 0;
  for (kf_transfer *t = engine->active.next, *next; t != &engine->active; t = next) {
    next = t->next;
    if (t->deadline_ns && now >= t->deadline_ns)
      fail(engine, t);
    else
      kf_deadlines_add(engine, t);
  }
  return true;
}
