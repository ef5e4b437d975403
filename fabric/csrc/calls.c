/* Calls that become commands of the engine's thread: memory, peers, transfers. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

#define NAP_NS 1000000
#define NAPS 5

static void run_register(kf_engine *engine, kf_command *command) {
  command->result = kf_memory_register(engine, command->subject, command->error);
}

static kf_region *register_as(kf_engine *engine, const kf_region *wanted, kf_error *error) {
  kf_region *region = malloc(sizeof *region);
  if (!region) {
    kf_fail(error, -ENOMEM, "out of memory for a memory region");
    return NULL;
  }
  *region = *wanted;
  kf_command command = {.run = run_register, .subject = region, .error = error};
  if (kf_command_call(engine, &command) == 0) return region;
  free(region);
  return NULL;
}

kf_region *kf_register(kf_engine *engine, void *start, uint64_t length, int shared_fd, uint64_t shared_offset,
                       kf_error *error) {
  const kf_region region = {.start = start, .length = length, .share_fd = shared_fd, .share_offset = shared_offset};
  return register_as(engine, &region, error);
}

kf_region *kf_register_device(kf_engine *engine, const kf_device_memory *memory, kf_error *error) {
  const kf_region region = {.start = (void *)(uintptr_t)memory->address, .length = memory->length, .share_fd = -1,
                            .on_device = true, .device = memory->device, .dma_buf = memory->dma_buf};
  return register_as(engine, &region, error);
}

static void run_unregister(kf_engine *engine, kf_command *command) {
  command->result = kf_memory_unregister(engine, command->subject, command->error);
}

/* A copy under way on this host takes less than a millisecond, unless its process does not run. */
int kf_unregister(kf_engine *engine, kf_region *region, kf_error *error) {
  const struct timespec nap = {0, NAP_NS};
  int rc = -EAGAIN;
  for (int i = 0; rc == -EAGAIN && i < NAPS; i++) {
    if (i) (void)nanosleep(&nap, NULL);
    kf_command command = {.run = run_unregister, .subject = region, .error = error};
    rc = kf_command_call(engine, &command);
  }
  return rc;
}

static void run_connect(kf_engine *engine, kf_command *command) {
  command->subject = kf_peers_insert(engine, command->addresses, command->count, command->seat, command->error);
}

/* Too many, or too long: as far as there is room. Returns how many. */
static uint32_t copy_addresses(kf_address_bytes *copies, const unsigned char *addresses, const uint32_t *lengths, uint32_t domains) {
  uint32_t count = domains < KF_MAX_DOMAINS ? domains : KF_MAX_DOMAINS;
  for (uint32_t i = 0; i < count; addresses += lengths[i++]) {
    copies[i].length = lengths[i];
    memcpy(copies[i].bytes, addresses, lengths[i] < KF_ADDRESS_MAX ? lengths[i] : KF_ADDRESS_MAX);
  }
  return count;
}

kf_peer *kf_connect(kf_engine *engine, const unsigned char *addresses, const uint32_t *lengths, uint32_t domains,
                    const char *seat, kf_error *error) {
  kf_address_bytes copies[KF_MAX_DOMAINS];
  (void)copy_addresses(copies, addresses, lengths, domains); /* what there was no room for is refused by peers.c */
  kf_command command = {.run = run_connect, .addresses = copies, .count = domains, .seat = seat, .error = error};
  return kf_command_call(engine, &command) == 0 ? command.subject : NULL;
}

static void run_forget(kf_engine *engine, kf_command *command) {
  kf_peers_forget(engine, command->addresses, command->count, command->seat);
}

int kf_forget(kf_engine *engine, const unsigned char *addresses, const uint32_t *lengths, uint32_t domains, const char *seat,
              kf_error *error) {
  kf_address_bytes copies[KF_MAX_DOMAINS];
  uint32_t count = copy_addresses(copies, addresses, lengths, domains);
  kf_command command = {.run = run_forget, .addresses = copies, .count = count, .seat = seat, .error = error};
  return kf_command_call(engine, &command);
}

static void run_disconnect(kf_engine *engine, kf_command *command) {
  command->result = kf_peers_drop(engine, command->subject, command->error);
}

int kf_disconnect(kf_engine *engine, kf_peer *peer, kf_error *error) {
  kf_command command = {.run = run_disconnect, .subject = peer, .error = error};
  return kf_command_call(engine, &command);
}

static void run_begin(kf_engine *engine, kf_command *command) { kf_transfer_begin(engine, command->subject); }

static void forget(kf_engine *engine, kf_transfer *transfer) {
  pthread_mutex_lock(&engine->registry.lock);
  kf_registry_remove(&engine->registry, transfer);
  pthread_mutex_unlock(&engine->registry.lock);
  kf_transfer_free(transfer);
}

static int begin(kf_engine *engine, kf_transfer *transfer) {
  if (kf_small_begin(engine, transfer)) return 0;
  kf_command *command = calloc(1, sizeof *command);
  if (!command) return -ENOMEM;
  command->run = run_begin;
  command->subject = transfer;
  atomic_fetch_add(&engine->active_transfers, 1);
  int rc = kf_command_send(engine, command);
  if (rc == 0) return 0;
  atomic_fetch_sub(&engine->active_transfers, 1);
  free(command);
  return rc;
}

uint64_t kf_start(kf_engine *engine, const kf_schedule *schedule, kf_error *error) {
  if (kf_schedule_check(schedule, error)) return 0;
  kf_transfer *transfer = kf_transfer_new(schedule, engine->options.trace);
  int rc = transfer ? kf_registry_add(&engine->registry, transfer) : -ENOMEM;
  if (rc) {
    if (transfer) kf_transfer_free(transfer);
    kf_fail(error, rc, "cannot keep one more transfer: %s", fi_strerror(-rc));
    return 0;
  }
  uint64_t id = transfer->id; /* once begun, the transfer may end at any time */
  rc = begin(engine, transfer);
  if (rc == 0) return id;
  forget(engine, transfer);
  kf_fail(error, rc, "cannot start a transfer: %s", fi_strerror(-rc));
  return 0;
}

uint64_t kf_write_one(kf_engine *engine, kf_region *region, uint64_t source_offset, kf_peer *peer,
                      const kf_remote *remote, uint64_t destination_offset, uint64_t length, uint32_t slot,
                      uint32_t generation, uint64_t timeout_ns, kf_error *error) {
  const kf_run run = {0, 0, 1};
  const kf_schedule plan = {.layers = 1, .slot = slot, .generation = generation, .run_count = 1, .region = region,
                            .peer = peer, .remote = *remote, .source_start = source_offset,
                            .destination_start = destination_offset, .source_page_stride = length,
                            .destination_page_stride = length, .length = length, .runs = &run, .timeout_ns = timeout_ns};
  return kf_start(engine, &plan, error);
}

uint64_t kf_write_immediate(kf_engine *engine, kf_peer *peer, const kf_remote *remote, uint32_t slot, uint32_t generation,
                            uint32_t pages, uint64_t timeout_ns, kf_error *error) {
  const kf_run run = {0, 0, (int32_t)pages};
  const kf_schedule plan = {.layers = 1, .slot = slot, .generation = generation, .run_count = 1, .peer = peer,
                            .remote = *remote, .runs = &run, .timeout_ns = timeout_ns};
  return kf_start(engine, &plan, error);
}

/* A transfer that has ended, or was released, is left alone: its last event tells how it ended. */
static void run_cancel(kf_engine *engine, kf_command *command) {
  pthread_mutex_lock(&engine->registry.lock);
  kf_transfer *transfer = kf_registry_get(&engine->registry, command->id);
  bool live = transfer && !transfer->ended;
  pthread_mutex_unlock(&engine->registry.lock);
  if (live && transfer->state < KF_DRAINING) kf_transfer_stop(engine, transfer, KF_END_CANCELLED, 0, "");
}

int kf_cancel(kf_engine *engine, uint64_t id) {
  kf_command *command = calloc(1, sizeof *command);
  if (!command) return -ENOMEM;
  command->run = run_cancel;
  command->id = id;
  int rc = kf_command_send(engine, command);
  if (rc) free(command);
  return rc;
}

int kf_trace(kf_engine *engine, uint64_t id, uint64_t *seen_ns, uint64_t *post_ns, uint32_t room) {
  pthread_mutex_lock(&engine->registry.lock);
  const kf_transfer *transfer = kf_registry_get(&engine->registry, id);
  int layers = -ENOENT;
  if (transfer && !transfer->ended) layers = -EBUSY;
  if (transfer && transfer->ended) {
    layers = transfer->post_ns ? (int)transfer->plan.layers : 0;
    uint32_t copied = (uint32_t)layers < room ? (uint32_t)layers : room;
    if (copied) memcpy(seen_ns, transfer->seen_ns, copied * sizeof *seen_ns);
    if (copied) memcpy(post_ns, transfer->post_ns, copied * sizeof *post_ns);
  }
  pthread_mutex_unlock(&engine->registry.lock);
  return layers;
}

int kf_release(kf_engine *engine, uint64_t id) {
  pthread_mutex_lock(&engine->registry.lock);
  kf_transfer *transfer = kf_registry_get(&engine->registry, id);
  int rc = !transfer ? -ENOENT : transfer->ended ? 0 : -EBUSY;
  if (rc == 0) kf_registry_remove(&engine->registry, transfer);
  pthread_mutex_unlock(&engine->registry.lock);
  if (rc) return rc;
  kf_events_remove(&engine->events, &transfer->node);
  kf_transfer_free(transfer);
  atomic_fetch_sub(&engine->held_transfers, 1);
  return 0;
}
