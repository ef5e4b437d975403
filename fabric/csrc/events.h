/* Events, and the slots whose counters of arrived pages make some of them. */
#ifndef KF_EVENTS_H
#define KF_EVENTS_H

#include "base.h"

/* ---- events.c: a queue that never loses and never allocates, since every node lives in what caused it ---- */
typedef struct kf_event_node {
  kf_event event;
  struct kf_event_node *next;
  struct kf_event_node *previous;
  bool queued;
} kf_event_node;

typedef struct {
  pthread_mutex_t lock;
  kf_event_node head; /* sentinel of a ring */
  int fd;             /* readable while the queue is not empty */
} kf_events;

void kf_signal(int fd);
int kf_events_open(kf_events *events);
void kf_events_close(kf_events *events);
void kf_events_push(kf_events *events, kf_event_node *node);
void kf_events_remove(kf_events *events, kf_event_node *node);
int kf_events_take(kf_events *events, kf_event *out, int room);

/* ---- slots.c: counters of arrived pages ---- */
typedef struct {
  bool armed;
  uint32_t generation;
  uint64_t expected;
  uint64_t arrived;
  uint64_t first_ns;
  kf_event_node *nodes; /* two: ARRIVED, OVERRUN; allocated by expect, freed by disarm */
} kf_slot;

typedef struct {
  pthread_mutex_t lock; /* taken before the events' lock */
  kf_events *events;
  kf_slot slots[KF_MAX_SLOTS];
  _Atomic uint64_t armed;
  _Atomic uint64_t stale;
  _Atomic uint64_t counted;
} kf_slots;

int kf_slots_open(kf_slots *slots, kf_events *events);
void kf_slots_close(kf_slots *slots);
int kf_slots_expect(kf_slots *slots, uint32_t slot, uint32_t generation, uint64_t pages);
int kf_slots_disarm(kf_slots *slots, uint32_t slot, uint32_t generation);
uint64_t kf_slots_arrived(kf_slots *slots, uint32_t slot);
void kf_slots_count(kf_slots *slots, const uint32_t *immediates, uint32_t count, uint64_t now_ns);

#endif
