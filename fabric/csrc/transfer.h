/* The life of a transfer, and the registry by whose numbers callers name them. */
#ifndef KF_TRANSFER_H
#define KF_TRANSFER_H

#include "events.h"
#include "regions.h"
#include "peers.h"

/* ---- transfer.c ---- */
struct kf_transfer {
  uint64_t id;
  uint32_t index; /* in the registry */
  kf_state state;
  kf_state end; /* where draining leads */
  kf_schedule plan;
  kf_run *runs;
  bool whole_pages;      /* neighbouring pages of a run are one contiguous range on both sides */
  uint32_t layers_seen;  /* done by the model */
  uint32_t layer;        /* next to post: layer, run, page within the run */
  uint32_t run;
  int32_t page;
  uint64_t left_bytes; /* not yet posted, of all layers */
  uint32_t in_flight;
  uint64_t in_flight_bytes; /* posted, and not known to have landed */
  bool by_link;             /* to a peer on this host, without a domain */
  uint64_t copied;          /* there, of a write that takes several turns */
  kf_path *path;            /* of the last write; it is kept to while `unsealed` */
  uint32_t unsealed;        /* writes posted after the last one whose completion means that it has landed */
  uint64_t unsealed_bytes;
  uint32_t breaks; /* of the path, when the first of them was posted */
  bool ended; /* registry's lock: the last event is out, and all of this is fixed but `notify_fd` */
  int notify_fd; /* registry's lock: written to at the end; -1: nobody waits */
  uint64_t deadline_ns; /* 0: none, or it has passed */
  uint64_t stalled_ns; /* since when the provider takes nothing; 0: it does */
  uint64_t *seen_ns;   /* [layers] */
  uint64_t *post_ns;   /* [layers], only when tracing */
  kf_event_node node;  /* also holds the running totals */
  kf_transfer *next;
  kf_transfer *previous;
};

kf_transfer *kf_transfer_new(const kf_schedule *plan, bool trace);
void kf_transfer_free(kf_transfer *transfer);
bool kf_state_allows(kf_state from, kf_state to);
void kf_transfer_move(kf_transfer *transfer, kf_state to);
void kf_transfer_begin(kf_engine *engine, kf_transfer *transfer);
void kf_transfer_stop(kf_engine *engine, kf_transfer *transfer, kf_state end, int error, const char *what);
void kf_transfer_lose(kf_transfer *transfer);
void kf_transfers_cut_off(kf_engine *engine, const kf_path *path, const kf_peer *peer);
bool kf_transfer_is_cut_off(const kf_transfer *transfer);
bool kf_transfer_end_cut_off(kf_engine *engine, kf_transfer *transfer);
void kf_transfer_settle(kf_engine *engine, kf_transfer *transfer);

/* ---- registry.c ---- */
typedef struct {
  pthread_mutex_t lock;
  kf_transfer **items;
  uint32_t *free_indices;
  uint32_t room;
  uint32_t free_count;
  uint64_t serial;
} kf_registry;

int kf_registry_open(kf_registry *registry);
void kf_registry_close(kf_registry *registry);
int kf_registry_add(kf_registry *registry, kf_transfer *transfer);
kf_transfer *kf_registry_get(kf_registry *registry, uint64_t id);
void kf_registry_remove(kf_registry *registry, kf_transfer *transfer);

/* ---- deadline.c ---- */
void kf_deadlines_add(kf_engine *engine, const kf_transfer *transfer);
bool kf_deadlines_round(kf_engine *engine);

#endif
