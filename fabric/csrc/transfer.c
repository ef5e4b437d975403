/* The life of a transfer, from registration to its one last event. */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TO(state) (1u << (state))

/* WAITING: for the next layer. POSTING: layers are done that have not been posted. DRAINING: nothing more is posted,
 * writes are still in flight, or not yet known to have landed. An end is reached from DRAINING alone, so nothing is in flight at the end. */
static const unsigned transitions[KF_STATES] = {
    [KF_WAITING] = TO(KF_POSTING) | TO(KF_DRAINING),
    [KF_POSTING] = TO(KF_WAITING) | TO(KF_DRAINING),
    [KF_DRAINING] = TO(KF_END_DONE) | TO(KF_END_CANCELLED) | TO(KF_END_FAILED),
};

bool kf_state_allows(kf_state from, kf_state to) { return (transitions[from] & TO(to)) != 0; }

void kf_transfer_move(kf_transfer *transfer, kf_state to) {
  if (!kf_state_allows(transfer->state, to)) abort(); /* a defect here could give pages away under a write */
  transfer->state = to;
}

kf_transfer *kf_transfer_new(const kf_schedule *plan, bool trace) {
  kf_transfer *transfer = calloc(1, sizeof *transfer);
  if (!transfer) return NULL;
  transfer->plan = *plan;
  transfer->runs = calloc(plan->run_count ? plan->run_count : 1, sizeof *transfer->runs);
  transfer->seen_ns = calloc(plan->layers, sizeof *transfer->seen_ns);
  if (trace) transfer->post_ns = calloc(plan->layers, sizeof *transfer->post_ns);
  if (!transfer->runs || !transfer->seen_ns || (trace && !transfer->post_ns)) {
    kf_transfer_free(transfer);
    return NULL;
  }
  if (plan->run_count) memcpy(transfer->runs, plan->runs, plan->run_count * sizeof *plan->runs);
  transfer->plan.runs = transfer->runs;
  for (uint32_t i = 0; i < plan->run_count; i++) transfer->left_bytes += (uint64_t)plan->runs[i].count * plan->length;
  transfer->left_bytes *= plan->layers;
  transfer->whole_pages = plan->length == plan->source_page_stride && plan->length == plan->destination_page_stride;
  transfer->node.event.slot = plan->slot;
  transfer->node.event.generation = plan->generation;
  transfer->node.event.registered_ns = kf_now();
  transfer->notify_fd = -1;
  if (plan->timeout_ns) transfer->deadline_ns = transfer->node.event.registered_ns + plan->timeout_ns;
  return transfer;
}

void kf_transfer_free(kf_transfer *transfer) {
  free(transfer->runs);
  free(transfer->seen_ns);
  free(transfer->post_ns);
  free(transfer);
}

void kf_transfer_begin(kf_engine *engine, kf_transfer *transfer) {
  kf_health_check(engine, kf_now());
  if (transfer->plan.region) transfer->plan.region->readers++;
  transfer->plan.peer->users++;
  transfer->by_link = transfer->plan.peer->link && transfer->plan.remote.local_key;
  if (transfer->plan.counter) transfer->plan.counter->waiters++;
  transfer->next = &engine->active;
  transfer->previous = engine->active.previous;
  transfer->previous->next = transfer;
  engine->active.previous = transfer;
  kf_deadlines_add(engine, transfer);
  if (transfer->plan.run_count == 0) kf_transfer_stop(engine, transfer, KF_END_DONE, 0, "");
}

static void leave(kf_engine *engine, kf_transfer *transfer) {
  transfer->next->previous = transfer->previous;
  transfer->previous->next = transfer->next;
  if (transfer->plan.region) transfer->plan.region->readers--;
  if (transfer->plan.counter) transfer->plan.counter->waiters--;
  if (kf_peers_drop(engine, transfer->plan.peer, NULL)) kf_add(&engine->errors, 1);
}

static uint32_t event_kind(kf_state end) {
  if (end == KF_END_DONE) return KF_DONE;
  return end == KF_END_CANCELLED ? KF_CANCELLED : KF_FAILED;
}

void kf_transfer_settle(kf_engine *engine, kf_transfer *transfer) {
  if (transfer->state != KF_DRAINING || transfer->in_flight || transfer->unsealed) return;
  kf_transfer_move(transfer, transfer->end);
  leave(engine, transfer);
  transfer->node.event.kind = event_kind(transfer->end);
  atomic_fetch_add(&engine->held_transfers, 1);
  atomic_fetch_sub(&engine->active_transfers, 1);
  pthread_mutex_lock(&engine->registry.lock); /* over both: a release in between would free the event's node */
  transfer->ended = true;
  kf_events_push(&engine->events, &transfer->node);
  if (transfer->notify_fd >= 0) kf_signal(transfer->notify_fd);
  pthread_mutex_unlock(&engine->registry.lock);
}

/* Its connection is gone: nothing can be learnt any more about writes that were not sealed, and nothing of them lands. */
void kf_transfer_lose(kf_transfer *transfer) {
  if (transfer->unsealed) kf_path_sub(transfer->path, transfer->unsealed_bytes);
  transfer->in_flight_bytes -= transfer->unsealed_bytes;
  transfer->unsealed_bytes = 0;
  transfer->unsealed = 0;
}

/* A path has no connection: whoever wrote over it and has no seal must not get one by the next. Cut, to be sure of it. */
void kf_transfers_cut_off(kf_engine *engine, const kf_path *path, const kf_peer *peer) {
  const kf_address_bytes *address = &peer->addresses[path->remote];
  for (const kf_transfer *t = engine->active.next; t != &engine->active; t = t->next) {
    if (!t->unsealed || t->path->domain != path->domain || kf_transfer_is_cut_off(t)) continue;
    if (!kf_same_address(&t->plan.peer->addresses[t->path->remote], address)) continue;
    kf_peers_cut(engine, path->domain, address);
    return;
  }
}

/* Its connection was cut under writes that were not sealed: the next connection would confirm its own alone. */
bool kf_transfer_is_cut_off(const kf_transfer *transfer) {
  return transfer->unsealed && transfer->breaks != transfer->path->breaks;
}

bool kf_transfer_end_cut_off(kf_engine *engine, kf_transfer *transfer) {
  char text[KF_TEXT], way[KF_WAY];
  snprintf(text, sizeof text, "%s: connection cut before all writes were confirmed",
           kf_path_name(transfer, transfer->path, way, sizeof way));
  kf_transfer_lose(transfer);
  kf_transfer_stop(engine, transfer, KF_END_FAILED, ECONNRESET, text);
  return true;
}

/* Stops posting for good. An error that comes while draining turns any end into a failure; the first error is kept. */
void kf_transfer_stop(kf_engine *engine, kf_transfer *transfer, kf_state end, int error, const char *what) {
  kf_event *event = &transfer->node.event;
  if (transfer->state != KF_DRAINING) {
    kf_transfer_move(transfer, KF_DRAINING);
    transfer->end = end;
  } else if (end == KF_END_FAILED) {
    transfer->end = end;
  }
  if (end == KF_END_FAILED && event->error == 0) {
    event->error = (uint32_t)error;
    snprintf(event->text, sizeof event->text, "%s", what);
    kf_add(&engine->errors, 1);
  }
  kf_transfer_settle(engine, transfer);
}
