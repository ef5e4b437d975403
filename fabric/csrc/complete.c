/* Reads the completion queue: immediates that arrived, writes that ended. */
#include "internal.h"

#include <stdio.h>
#include <string.h>

#define BATCH 64
#define BATCHES 4 /* before the thread looks at counters and commands again */

static void retire(kf_engine *engine, kf_write *write, uint64_t now) {
  kf_transfer *transfer = write->transfer;
  if (write->flipped) *write->flipped ^= 0xff; /* the source is right again */
  kf_path_sub(write->path, write->bytes);
  kf_sub(&write->path->domain->in_flight, 1);
  write->path->in_flight--;
  kf_sub(&engine->in_flight, 1);
  transfer->in_flight_bytes -= write->bytes;
  transfer->in_flight--;
  transfer->node.event.last_completion_ns = now;
  write->transfer = NULL;
  write->flipped = NULL;
  write->next = engine->free_writes;
  engine->free_writes = write;
}

static void complete(kf_engine *engine, kf_write *write, uint64_t now) {
  if (!write || !write->transfer) return;
  kf_transfer *transfer = write->transfer;
  kf_path_completed(write->path, now);
  if (write->path->socket == KF_SOCKET_UNKNOWN) kf_sockets_find(write->path, transfer->plan.peer);
  retire(engine, write, now);
  kf_transfer_settle(engine, transfer);
}

static void complete_all(kf_engine *engine, kf_domain *domain, const struct fi_cq_data_entry *entries, ssize_t count) {
  uint32_t immediates[BATCH], arrived = 0;
  uint64_t now = domain->found_ns = kf_now();
  for (ssize_t i = 0; i < count; i++)
    if (entries[i].flags & FI_REMOTE_CQ_DATA)
      immediates[arrived++] = (uint32_t)entries[i].data;
    else
      complete(engine, entries[i].op_context, now);
  if (arrived) kf_slots_count(&engine->slots, immediates, arrived, now);
}

/* A write that ended in an error, with what libfabric and the provider say about it. */
static void complete_failed(kf_engine *engine, kf_write *write, int error, int provider_code) {
  kf_transfer *transfer = write->transfer;
  char text[KF_TEXT], way[KF_WAY];
  const char *cut = write->path->cut;
  const kf_domain *domain = write->path->domain;
  bool same_way = write->path == transfer->path; /* what is not sealed went this way */
  kf_path_name(transfer, write->path, way, sizeof way);
  kf_path_failed(engine, write->path);
  if (error == FI_ECANCELED && domain->provider->over_sockets)
    kf_peers_broken(engine, domain, &transfer->plan.peer->addresses[write->path->remote]);
  retire(engine, write, kf_now());
  if (same_way) kf_transfer_lose(transfer);
  if (error == FI_ECANCELED) { /* the provider flushed it with its connection */
    error = ECONNRESET;
    snprintf(text, sizeof text, "%s: connection %s with writes in flight: %s (provider code %d)", way, cut ? "cut" : "lost",
             cut ? cut : "the receiver has died or refused the key, or the link is down", provider_code);
  } else {
    snprintf(text, sizeof text, "%s: write did not complete: %s (provider code %d)", way, fi_strerror(error), provider_code);
  }
  kf_transfer_stop(engine, transfer, KF_END_FAILED, error, text);
}

/* An error entry with one of our contexts is the end of that write; without, it is the connection's own trouble. */
static bool complete_error(kf_engine *engine, kf_domain *domain) {
  struct fi_cq_err_entry entry = {0};
  if (fi_cq_readerr(domain->cq, &entry, 0) != 1) return false;
  kf_write *write = entry.op_context;
  if (write && write->transfer)
    complete_failed(engine, write, entry.err, entry.prov_errno);
  else
    kf_add(&engine->errors, 1);
  return true;
}

static bool read_queue(kf_engine *engine, kf_domain *domain) {
  struct fi_cq_data_entry entries[BATCH];
  bool progress = false;
  for (int i = 0; i < BATCHES; i++) {
    ssize_t n = fi_cq_read(domain->cq, entries, BATCH);
    if (n == -FI_EAGAIN) break;
    if (n == -FI_EAVAIL) {
      progress |= complete_error(engine, domain);
      continue;
    }
    if (n < 0) {
      kf_add(&engine->errors, 1);
      break;
    }
    complete_all(engine, domain, entries, n);
    progress = true;
    if (n < BATCH) break;
  }
  return progress;
}

/* All that was there by now: older entries come first. */
static void read_through(kf_engine *engine, kf_domain *domain) {
  for (int i = 0; i < KF_CQ_ENTRIES / BATCH / BATCHES && read_queue(engine, domain); i++) continue;
}

static bool find_orphans(kf_engine *engine) {
  bool any = false;
  for (uint32_t i = 0; i < engine->write_count; i++) {
    kf_write *write = &engine->writes[i];
    write->orphan = false;
    if (!write->transfer) continue;
    const kf_address_bytes *address = &write->transfer->plan.peer->addresses[write->path->remote];
    write->orphan = kf_provider_peer_dead(write->path->domain->provider, address->bytes);
    any |= write->orphan;
  }
  return any;
}

/* For providers that do not notice a process's end: its writes cannot land any more, nor will they complete. What it
 * confirmed before is read first, though the queue may rest: a completion that came after its write was given up would
 * complete whatever has taken that one's place. */
bool kf_complete_dead_peers(kf_engine *engine) {
  if (!find_orphans(engine)) return false;
  for (uint32_t i = 0; i < engine->domain_count; i++) read_through(engine, &engine->domains[i]);
  for (uint32_t i = 0; i < engine->write_count; i++) {
    kf_write *write = &engine->writes[i];
    if (write->transfer && write->orphan) complete_failed(engine, write, FI_ECANCELED, ESRCH);
  }
  return true;
}

static bool rests(const kf_domain *domain) {
  uint64_t rest = domain->provider->rest_ns;
  return rest && kf_now() - domain->found_ns < rest;
}

bool kf_complete_round(kf_engine *engine) {
  bool progress = false;
  for (uint32_t i = 0; i < engine->domain_count; i++)
    if (!rests(&engine->domains[i])) progress |= read_queue(engine, &engine->domains[i]);
  return progress;
}
