/* The engine, and with it all that the files of the fabric share. Fields are owned by whoever holds the engine's helm, its
 * thread most of the time, unless a lock or `_Atomic` is named. */
#ifndef KF_INTERNAL_H
#define KF_INTERNAL_H

#include "posting.h"
#include "waiting.h"

/* ---- engine.c, thread.c, pin.c ---- */
struct kf_engine {
  kf_options options;
  char provider_name[16];
  kf_domain domains[KF_MAX_DOMAINS];
  uint32_t domain_count;
  kf_local *local; /* NULL: peers on this host are peers like all others */
  char seat[KF_SEAT];
  uint32_t gather;

  pthread_t thread;
  pthread_mutex_t helm; /* who holds it may call libfabric; the thread lets go of it while it waits */
  int wake_fd;
  _Atomic bool sleeping;
  _Atomic bool stopping;
  _Atomic uint64_t armed_ns; /* when a slot was armed last */

  pthread_mutex_t command_lock;
  pthread_cond_t command_done;
  kf_command *command_head; /* command_lock */
  kf_command *command_tail; /* command_lock */
  bool commands_open;       /* command_lock */
  bool opened;              /* command_lock: the thread has tried to open the domains */
  int open_result;          /* command_lock */
  kf_error *open_error;     /* the opener's, until `opened` */
  _Atomic uint32_t command_count;

  kf_events events;
  kf_slots slots;
  kf_registry registry;
  kf_faults faults;

  kf_peer *peers;
  kf_region *region_list;
  kf_counter *counter_list;
  kf_transfer active; /* sentinel of a ring */
  kf_write *writes;
  uint32_t write_count;
  kf_write *free_writes;
  uint64_t deadline_ns;   /* no transfer's comes earlier; 0: none has one */
  uint64_t hold_until_ns; /* earliest write that the DELAY fault holds back; 0: none */
  bool stalled;           /* the provider refused a write for want of room in the last round */
  kf_pace pace;
  uint64_t nap_ns;
  uint64_t dead_check_ns;
  uint64_t health_check_ns;

  _Atomic uint64_t active_transfers;
  _Atomic uint64_t held_transfers;
  _Atomic uint64_t in_flight;
  _Atomic uint64_t regions;
  _Atomic uint64_t peer_count;
  _Atomic uint64_t counters;
  _Atomic uint64_t total_writes;
  _Atomic uint64_t total_pages;
  _Atomic uint64_t total_bytes;
  _Atomic uint64_t local_bytes;
  _Atomic uint64_t errors;
  _Atomic uint64_t sleeps;
  _Atomic uint64_t outages;
};

void *kf_thread_main(void *engine);
int kf_pin(const kf_options *options, kf_error *error);
void kf_wake(kf_engine *engine);

/* ---- local.c and its neighbours, which share local.h: peers on the same host ---- */
int kf_local_open(kf_engine *engine, kf_error *error);
void kf_local_close(kf_engine *engine);
int kf_local_share(kf_engine *engine, kf_region *region, kf_error *error);
void kf_local_unshare(kf_region *region);
int kf_local_revoke(kf_engine *engine, kf_region *region);
bool kf_local_round(kf_engine *engine);
void kf_local_set_asleep(kf_engine *engine, bool asleep);
bool kf_local_waiting(const kf_engine *engine);
int kf_local_fd(const kf_engine *engine);
bool kf_local_turn(kf_engine *engine, kf_transfer *transfer);
int kf_link_get(kf_engine *engine, const char *name, bool needed, kf_link **link, kf_error *error);
void kf_link_hold(kf_link *link);
bool kf_link_is_lost(const kf_link *link);
void kf_link_forget(kf_engine *engine, const char *name);
void kf_link_drop(kf_engine *engine, kf_link *link);

#endif
