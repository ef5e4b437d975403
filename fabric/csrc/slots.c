/* Slots count the pages that arrive for a request. Nothing here calls libfabric; a lock of its own lets a receiver
 * arm a slot without waiting for the engine's thread. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

uint32_t kf_immediate_pack(uint32_t slot, uint32_t generation, uint32_t pages) {
  return slot << (KF_GENERATION_BITS + KF_PAGES_BITS) | generation << KF_PAGES_BITS | pages;
}

void kf_immediate_unpack(uint32_t value, uint32_t *slot, uint32_t *generation, uint32_t *pages) {
  *slot = value >> (KF_GENERATION_BITS + KF_PAGES_BITS);
  *generation = value >> KF_PAGES_BITS & (KF_MAX_GENERATIONS - 1);
  *pages = value & KF_MAX_PAGES_PER_WRITE;
}

int kf_slots_open(kf_slots *slots, kf_events *events) {
  slots->events = events;
  return -pthread_mutex_init(&slots->lock, NULL);
}

void kf_slots_close(kf_slots *slots) {
  for (int i = 0; i < KF_MAX_SLOTS; i++) free(slots->slots[i].nodes);
  (void)pthread_mutex_destroy(&slots->lock);
}

static void report(kf_slots *slots, uint32_t index, kf_event_node *node, uint32_t kind, uint64_t now_ns) {
  const kf_slot *slot = &slots->slots[index];
  node->event = (kf_event){.kind = kind,
                           .slot = index,
                           .generation = slot->generation,
                           .pages = slot->arrived,
                           .first_ns = slot->first_ns,
                           .last_ns = now_ns};
  kf_events_push(slots->events, node);
}

int kf_slots_expect(kf_slots *slots, uint32_t index, uint32_t generation, uint64_t pages) {
  if (index >= KF_MAX_SLOTS || generation >= KF_MAX_GENERATIONS) return -EINVAL;
  kf_event_node *nodes = calloc(2, sizeof *nodes);
  if (!nodes) return -ENOMEM;
  kf_slot *slot = &slots->slots[index];
  pthread_mutex_lock(&slots->lock);
  bool busy = slot->armed;
  if (!busy) {
    *slot = (kf_slot){.armed = true, .generation = generation, .expected = pages, .nodes = nodes};
    atomic_fetch_add(&slots->armed, 1);
    if (pages == 0) report(slots, index, nodes, KF_ARRIVED, 0); /* an empty transfer is complete as it stands */
  }
  pthread_mutex_unlock(&slots->lock);
  if (busy) free(nodes);
  return busy ? -EBUSY : 0;
}

int kf_slots_disarm(kf_slots *slots, uint32_t index, uint32_t generation) {
  if (index >= KF_MAX_SLOTS) return -EINVAL;
  kf_slot *slot = &slots->slots[index];
  pthread_mutex_lock(&slots->lock);
  bool match = slot->armed && slot->generation == generation;
  if (match) {
    kf_events_remove(slots->events, &slot->nodes[0]);
    kf_events_remove(slots->events, &slot->nodes[1]);
    free(slot->nodes);
    *slot = (kf_slot){.armed = false};
    atomic_fetch_sub(&slots->armed, 1);
  }
  pthread_mutex_unlock(&slots->lock);
  return match;
}

uint64_t kf_slots_arrived(kf_slots *slots, uint32_t index) {
  if (index >= KF_MAX_SLOTS) return 0;
  pthread_mutex_lock(&slots->lock);
  uint64_t arrived = slots->slots[index].arrived;
  pthread_mutex_unlock(&slots->lock);
  return arrived;
}

static void add_pages(kf_slots *slots, uint32_t index, uint32_t pages, uint64_t now_ns) {
  kf_slot *slot = &slots->slots[index];
  uint64_t before = slot->arrived;
  slot->arrived += pages;
  if (slot->first_ns == 0) slot->first_ns = now_ns;
  if (before < slot->expected && slot->arrived == slot->expected)
    report(slots, index, &slot->nodes[0], KF_ARRIVED, now_ns);
  if (before <= slot->expected && slot->arrived > slot->expected) /* once; never reported as complete */
    report(slots, index, &slot->nodes[1], KF_OVERRUN, now_ns);
}

static void count_one(kf_slots *slots, uint32_t immediate, uint64_t now_ns) {
  uint32_t index, generation, pages;
  kf_immediate_unpack(immediate, &index, &generation, &pages);
  const kf_slot *slot = &slots->slots[index];
  if (slot->armed && slot->generation == generation) {
    kf_add(&slots->counted, 1);
    add_pages(slots, index, pages, now_ns);
  } else {
    kf_add(&slots->stale, 1);
  }
}

void kf_slots_count(kf_slots *slots, const uint32_t *immediates, uint32_t count, uint64_t now_ns) {
  pthread_mutex_lock(&slots->lock);
  for (uint32_t i = 0; i < count; i++) count_one(slots, immediates[i], now_ns);
  pthread_mutex_unlock(&slots->lock);
}
