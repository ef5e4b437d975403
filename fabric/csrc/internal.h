/* What the files of the fabric share. Fields are owned by whoever holds the engine's helm, its thread most of the time,
 * unless a lock or `_Atomic` is named. */
#ifndef KF_INTERNAL_H
#define KF_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* ppoll, pthread_setname_np */
#endif

#include "kf.h"

#include <errno.h>
#include <net/if.h>
#include <pthread.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>

#define KF_ADDRESS_MAX 256
#define KF_GATHER_MAX 8
#define KF_CACHE_LINE 64
#define KF_WAY 96 /* text that names a path */

/* ---- provider.c: what differs between providers ---- */
typedef struct {
  const char *name;     /* what users say */
  const char *prov;     /* what libfabric calls it */
  uint64_t mr_mode;     /* memory registration modes that we can serve */
  bool over_ip;         /* binds to an IP address */
  bool over_sockets;    /* its connections are TCP sockets of this process */
  bool has_wait_fd;     /* its completion queue can wake poll() */
  bool takes_hmem;      /* registers memory of GPUs: FI_HMEM */
  uint64_t msg_order;   /* FI_ORDER_WAW: writes to one peer land in the order in which they were posted */
  uint64_t window_bytes; /* outstanding at most: what its speed needs; more would only be a longer queue */
} kf_provider;

const kf_provider *kf_provider_find(const char *name);
bool kf_provider_peer_dead(const kf_provider *provider, const unsigned char *address);
int kf_provider_info(const kf_provider *provider, const char *bind, bool hmem, struct fi_info **info);

/* ---- health.c: whether a domain, or a path, is used ---- */
typedef enum { KF_HEALTHY, KF_OUT, KF_TRIED, KF_HEALTHS } kf_health_state;

typedef struct {
  kf_health_state state;
  uint64_t out_since_ns;
  uint64_t pause_ns; /* before it is tried again; doubles with every time that this was in vain */
} kf_health;

bool kf_health_allows(kf_health_state from, kf_health_state to);

/* ---- domain.c: a NIC, or what stands for one: the libfabric objects that an engine has for it ---- */
typedef struct {
  uint32_t index;
  char bind[64]; /* "": the provider's choice */
  const kf_provider *provider;
  struct fi_info *info;
  struct fid_fabric *fabric;
  struct fid_domain *domain;
  struct fid_cq *cq;
  struct fid_av *av;
  struct fid_ep *ep;
  int wait_fd;  /* -1: none */
  char interface[IF_NAMESIZE]; /* that has its address; "": not known */
  bool link_down;
  kf_health health;
  _Atomic bool out; /* link_down, for other threads */
  bool ordered; /* a write that is known to have landed has everything before it landed too */
  _Alignas(max_align_t) unsigned char address[KF_ADDRESS_MAX]; /* it may hold a struct sockaddr */
  size_t address_length;
  _Atomic uint64_t in_flight;       /* writes */
  _Atomic uint64_t in_flight_bytes; /* posted, and not known to have landed */
  _Atomic uint64_t total_writes;
  _Atomic uint64_t total_bytes;
} kf_domain;

int kf_domain_open(kf_domain *domain, const kf_options *options, kf_error *error);
void kf_domain_close(kf_domain *domain);
bool kf_domains_have_fds(const kf_engine *engine);

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

/* ---- memory.c, peers.c, counter.c ---- */
typedef struct kf_local kf_local;
typedef struct kf_link kf_link;

struct kf_region {
  kf_region *next;
  void *start;
  uint64_t length;
  struct fid_mr *mr[KF_MAX_DOMAINS];
  void *descriptors[KF_MAX_DOMAINS];
  kf_remote remote;
  uint32_t readers; /* transfers that read from it */
  int share_fd;     /* its memfd, ours once registered; -1: no peer on this host may have it */
  uint64_t share_offset;
  bool on_device; /* in a GPU's memory: the host must not touch it */
  int device;
  int dma_buf;
  bool revoked; /* nobody on this host is granted it any more */
};

/* The way from one of our domains to one of a peer's. */
typedef struct {
  kf_domain *domain;
  uint32_t remote; /* index of the peer's domain */
  fi_addr_t address;
  kf_health health;
  uint32_t in_flight; /* writes */
  uint64_t in_flight_bytes;
  uint64_t carried_bytes;
  uint64_t progress_ns;      /* last completion, or post into silence */
  uint64_t refused_ns;       /* when it last took no write; 0: it took the last one */
  uint64_t refused_since_ns; /* the first such time with nothing in flight */
} kf_path;

typedef struct {
  uint32_t length;
  unsigned char bytes[KF_ADDRESS_MAX];
} kf_address_bytes;

struct kf_peer {
  struct kf_peer *next;
  uint32_t users; /* connects and transfers */
  uint32_t domains;
  uint32_t path_count;
  kf_path *paths; /* [our domains][its domains] */
  kf_link *link;  /* the way within this host; NULL: none */
  kf_address_bytes addresses[KF_MAX_DOMAINS];
};

struct kf_counter {
  _Alignas(KF_CACHE_LINE) _Atomic uint64_t value; /* alone in its cache line: compute threads write it */
  _Alignas(KF_CACHE_LINE) _Atomic uint64_t *word; /* `value`, or the caller's: that moves without waking anybody */
  kf_engine *engine;
  kf_counter *next;
  _Atomic uint32_t waiters; /* transfers that follow it */
};

int kf_memory_register(kf_engine *engine, kf_region *region, kf_error *error);
int kf_memory_unregister(kf_engine *engine, kf_region *region, kf_error *error);
kf_peer *kf_peers_insert(kf_engine *engine, const kf_address_bytes *addresses, uint32_t domains, const char *seat,
                         kf_error *error);
int kf_peers_drop(kf_engine *engine, kf_peer *peer, kf_error *error);
void kf_peers_close(kf_engine *engine);
void kf_health_check(kf_engine *engine, uint64_t now);
void kf_path_failed(kf_engine *engine, kf_path *path);
void kf_path_completed(kf_path *path, uint64_t now);
void kf_path_refused(kf_engine *engine, kf_path *path);
bool kf_path_rests(const kf_path *path);
bool kf_path_usable(const kf_path *path);
void kf_link_find(kf_domain *domain);
bool kf_link_is_up(const char *interface);
int kf_sockets_abort(const kf_domain *domain, const kf_address_bytes *peer);
int kf_sockets_keep_alive(const kf_domain *domain, uint64_t silence_ns);
void kf_path_add(kf_path *path, uint64_t bytes);
void kf_path_sub(kf_path *path, uint64_t bytes);
kf_path *kf_paths_choose(const kf_engine *engine, const kf_peer *peer);
bool kf_paths_left(const kf_peer *peer);
void kf_memory_revoke(kf_engine *engine);
bool kf_memory_at_rest(kf_engine *engine);
void kf_memory_close(kf_engine *engine);
void kf_counters_close(kf_engine *engine);
bool kf_counters_silent(const kf_engine *engine);

/* ---- transfer.c: the life of a transfer ---- */
typedef struct kf_transfer {
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
  bool ended; /* registry's lock: the last event is out, and all of this is fixed but `notify_fd` */
  int notify_fd; /* registry's lock: written to at the end; -1: nobody waits */
  uint64_t deadline_ns; /* 0: none, or it has passed */
  uint64_t stalled_ns; /* since when the provider takes nothing; 0: it does */
  uint64_t *seen_ns;   /* [layers] */
  uint64_t *post_ns;   /* [layers], only when tracing */
  kf_event_node node;  /* also holds the running totals */
  struct kf_transfer *next;
  struct kf_transfer *previous;
} kf_transfer;

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

kf_transfer *kf_transfer_new(const kf_schedule *plan, bool trace);
void kf_transfer_free(kf_transfer *transfer);
bool kf_state_allows(kf_state from, kf_state to);
void kf_transfer_move(kf_transfer *transfer, kf_state to);
void kf_transfer_begin(kf_engine *engine, kf_transfer *transfer);
void kf_transfer_stop(kf_engine *engine, kf_transfer *transfer, kf_state end, int error, const char *what);
void kf_transfer_lose(kf_transfer *transfer);
void kf_transfer_settle(kf_engine *engine, kf_transfer *transfer);
void kf_deadlines_add(kf_engine *engine, const kf_transfer *transfer);
bool kf_deadlines_round(kf_engine *engine);
const char *kf_peer_name(const kf_peer *peer, char *text, size_t room);
const char *kf_path_name(const kf_transfer *transfer, const kf_path *path, char *text, size_t room);

/* ---- schedule.c, post.c, complete.c ---- */
int kf_schedule_check(const kf_schedule *plan, kf_error *error);
bool kf_schedule_moved(const kf_engine *engine);
bool kf_schedule_follow(kf_transfer *transfer);
bool kf_schedule_watch(kf_engine *engine);

typedef struct kf_write {
  struct fi_context2 context; /* first: libfabric gives its address back */
  kf_transfer *transfer;
  kf_path *path;
  uint64_t bytes;         /* that have landed once this is complete: of this write and of unsealed ones before it */
  unsigned char *flipped; /* byte that the CORRUPT fault turned, to be turned back */
  struct kf_write *next;
} kf_write;

/* The pages that one write carries. */
typedef struct {
  struct iovec local[KF_GATHER_MAX];
  void *descriptors[KF_GATHER_MAX];
  struct fi_rma_iov remote[KF_GATHER_MAX];
  uint32_t parts;
  uint32_t pages;
  uint64_t bytes;
  uint32_t run; /* where the next write of this layer begins; run_count: there is none */
  int32_t page;
} kf_batch;

void kf_batch_fill(const kf_engine *engine, const kf_transfer *transfer, const kf_path *path, kf_batch *batch);
void kf_batch_first(const kf_transfer *transfer, const kf_path *path, kf_batch *batch); /* the first page of the first layer */
bool kf_post_turn(kf_engine *engine, kf_transfer *transfer);
bool kf_post_round(kf_engine *engine);
void kf_post_account(kf_engine *engine, kf_transfer *transfer, const kf_batch *batch, uint64_t now_ns);
void kf_post_advance(kf_engine *engine, kf_transfer *transfer, const kf_batch *batch);
bool kf_post_stalled_too_long(kf_engine *engine, kf_transfer *transfer);
bool kf_post_held_back(kf_engine *engine, const kf_transfer *transfer);
bool kf_complete_round(kf_engine *engine);
bool kf_complete_dead_peers(kf_engine *engine);

/* ---- fault.c ---- */
typedef struct {
  _Atomic bool on; /* any of the three; the one branch that the hot path pays */
  _Atomic uint64_t corrupt;
  _Atomic uint64_t fail;
  _Atomic uint64_t delay_ns;
} kf_faults;

int kf_faults_set(kf_faults *faults, int kind, uint64_t value);
uint64_t kf_faults_hold_until(const kf_faults *faults, uint64_t seen_ns);
bool kf_faults_fail(kf_faults *faults);
void kf_faults_uncount(kf_faults *faults);
bool kf_faults_corrupt(kf_faults *faults);

/* ---- command.c: how other threads ask the engine's thread to do something; small.c: how they do it themselves ---- */
typedef struct kf_command {
  void (*run)(kf_engine *engine, struct kf_command *command);
  void *subject;
  const kf_address_bytes *addresses;
  uint32_t count;
  const char *seat;
  uint64_t id;
  int result;
  kf_error *error;
  bool waited_for; /* the caller owns it and waits for `done`; otherwise the thread frees it */
  bool done;
  struct kf_command *next;
} kf_command;

int kf_command_call(kf_engine *engine, kf_command *command);
int kf_command_send(kf_engine *engine, kf_command *command);
bool kf_command_round(kf_engine *engine);
bool kf_command_waiting(kf_engine *engine);
void kf_command_refuse_all(kf_engine *engine);
bool kf_small_begin(kf_engine *engine, kf_transfer *transfer);

/* ---- pace.c ---- */
typedef struct {
  uint64_t spin_ns;
  uint64_t since_ns;   /* last progress or arming */
  uint64_t step_ns;    /* from progress to progress, as it has been lately */
  uint64_t arrival_ns; /* from a slot's arming to progress */
  uint64_t crowded_until_ns;
  uint64_t crowded_for_ns; /* the next time */
  bool armed; /* `since_ns` is the time of an arming */
} kf_pace;

void kf_pace_progress(kf_pace *pace, uint64_t now);
void kf_pace_armed(kf_pace *pace, uint64_t when);
void kf_pace_in_vain(kf_pace *pace);
bool kf_pace_awake(const kf_pace *pace, uint64_t now, uint64_t least_ns);
void kf_pace_yield(kf_pace *pace, uint64_t now);

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
void kf_link_drop(kf_engine *engine, kf_link *link);

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
int kf_fail(kf_error *error, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

static inline uint64_t kf_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Totals that only the engine's thread writes: a plain add without a locked instruction. */
static inline void kf_add(_Atomic uint64_t *total, uint64_t n) {
  atomic_store_explicit(total, atomic_load_explicit(total, memory_order_relaxed) + n, memory_order_relaxed);
}
static inline void kf_sub(_Atomic uint64_t *total, uint64_t n) { kf_add(total, (uint64_t)0 - n); }

#endif
