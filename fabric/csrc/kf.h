/* kvferry's fabric: one-sided page writes over libfabric, posted by one thread that follows layer counters.
 *
 * Every function but kf_open and kf_close may be called from any thread. A kf_error that is passed in is filled on
 * failure only. Functions that return int give 0 or a negative errno value (libfabric's share the number space).
 */
#ifndef KF_H
#define KF_H

#include <stdint.h>

/* The text between the two marks is also what cffi reads: plain C, no macros but integers. */
/* cffi: begin */

/* Immediate: [slot][generation][pages], as in kvferry_proto.immediate. */
#define KF_SLOT_BITS 10
#define KF_GENERATION_BITS 10
#define KF_PAGES_BITS 12
#define KF_MAX_SLOTS 1024
#define KF_MAX_GENERATIONS 1024
#define KF_MAX_PAGES_PER_WRITE 4095
#define KF_TEXT 232
#define KF_MAX_DOMAINS 8
#define KF_SEAT 48

typedef struct kf_engine kf_engine;
typedef struct kf_region kf_region;
typedef struct kf_peer kf_peer;
typedef struct kf_counter kf_counter;

typedef struct {
  int code; /* negative errno */
  char text[KF_TEXT];
} kf_error;

typedef struct {
  const char *provider;     /* tcp, net, shm, efa or verbs; local: none, peers on this host alone */
  const char *const *binds; /* one a domain: the local address, for providers over IP; NULL or "": the provider's choice */
  uint32_t domains;         /* 1..KF_MAX_DOMAINS; 0 with provider local */
  int local;                /* peers on this host may write to shared memory without a domain */
  uint64_t spin_ns;         /* how long the thread spins after the last progress */
  uint64_t max_write_bytes; /* neighbouring pages are merged up to this size */
  uint64_t window_bytes;    /* no more is posted to a domain while this much is in flight on it; 0: as the provider needs */
  uint32_t window;          /* the same in writes */
  uint32_t gather;          /* scattered pages in one write; 0: as many as the provider takes */
  uint64_t stall_ns;        /* a transfer that cannot post anything for this long fails */
  uint64_t silence_ns;      /* a connection with writes in flight that confirms none for this long is cut; one
                             * that was accepted is closed when its host gives no sign of life for four times as long */
  int trace;                /* keep per-layer times */
  const uint32_t *cpus;     /* logical CPUs that the thread is pinned to before it opens anything */
  uint32_t cpu_count;       /* 0: it runs wherever its opener may */
  int device_memory;        /* memory of GPUs may be registered, too */
} kf_options;

typedef struct {
  uint64_t address; /* where the GPU, and nobody else, reads and writes it */
  uint64_t length;
  int32_t device; /* number of the GPU, as CUDA counts */
  int32_t dma_buf; /* a file descriptor of it, whose first byte is at `address`; -1: none */
} kf_device_memory;

typedef struct {
  int32_t source;      /* first page at the sender */
  int32_t destination; /* first page at the receiver */
  int32_t count;       /* neighbouring pages on both sides */
} kf_run;

typedef struct {
  uint64_t base; /* what offsets are added to: an address, or 0 */
  uint64_t key;
} kf_key;

typedef struct {
  uint64_t length;
  uint64_t local_key; /* for a writer on the same host; 0: not for them */
  uint32_t domains; /* of the owner, in the order in which its addresses are connected to */
  kf_key keys[KF_MAX_DOMAINS];
} kf_remote;

/* What a transfer does now; transfer.c has the moves. */
typedef enum { KF_WAITING, KF_POSTING, KF_DRAINING, KF_END_DONE, KF_END_CANCELLED, KF_END_FAILED, KF_STATES } kf_state;

typedef struct {
  kf_counter *counter;  /* NULL: everything may be posted at once */
  uint64_t first_value; /* layer l may be posted when the counter is at least first_value + l */
  uint32_t layers;
  uint32_t slot;
  uint32_t generation;
  uint32_t run_count;
  kf_region *region; /* NULL: no bytes travel, only an immediate that counts the pages of the one run */
  kf_peer *peer;
  kf_remote remote;
  uint64_t source_start; /* bytes from the start of the region to layer 0, page 0 */
  uint64_t destination_start;
  uint64_t source_layer_stride;
  uint64_t destination_layer_stride;
  uint64_t source_page_stride;
  uint64_t destination_page_stride;
  uint64_t source_offset; /* bytes from the start of a page */
  uint64_t destination_offset;
  uint64_t length;    /* bytes of the piece that travels for every page */
  const kf_run *runs; /* copied */
  uint64_t timeout_ns; /* it fails if it has not ended so long after its start; 0: it takes what it takes */
} kf_schedule;

enum kf_event_kind { KF_ARRIVED = 1, KF_OVERRUN = 2, KF_DONE = 3, KF_CANCELLED = 4, KF_FAILED = 5 };

typedef struct {
  uint32_t kind;
  uint32_t slot;
  uint32_t generation;
  uint32_t error;           /* FAILED: errno */
  uint64_t transfer;        /* 0 for slot events */
  uint64_t pages;           /* arrived, or posted */
  uint64_t bytes;           /* posted */
  uint64_t writes;          /* posted */
  uint64_t first_ns;        /* slot events: first arrival; CLOCK_MONOTONIC, as all times */
  uint64_t last_ns;         /* slot events: the arrival that completed the count */
  uint64_t registered_ns;   /* transfers */
  uint64_t first_post_ns;   /* 0: nothing was posted */
  uint64_t last_counter_ns; /* when the last layer was seen done; 0: never */
  uint64_t last_completion_ns;
  char text[KF_TEXT]; /* FAILED: what went wrong */
} kf_event;

typedef struct {
  uint64_t out; /* 1: its link is down */
  uint64_t in_flight_writes;
  uint64_t in_flight_bytes;
  uint64_t writes; /* posted */
  uint64_t bytes;  /* posted */
} kf_domain_values;

typedef struct {
  uint64_t armed_slots;
  uint64_t active_transfers; /* not yet ended */
  uint64_t held_transfers;   /* ended, not yet released */
  uint64_t in_flight_writes;
  uint64_t regions;
  uint64_t peers;
  uint64_t counters;
  uint64_t stale_immediates;
  uint64_t writes;
  uint64_t pages;
  uint64_t bytes;
  uint64_t local_bytes; /* of these, to peers on this host without a domain */
  uint64_t arrivals; /* immediates that counted */
  uint64_t errors;
  uint64_t sleeps;
  uint64_t outages; /* times that a domain, or the way to a peer's, was taken out */
} kf_stats_values;

enum kf_fault_kind { KF_FAULT_CORRUPT = 1, KF_FAULT_DELAY = 2, KF_FAULT_FAIL = 3 };

kf_engine *kf_open(const kf_options *options, kf_error *error);
void kf_close(kf_engine *engine);
int kf_available(const char *provider, const char *bind);
int kf_takes_device_memory(const char *provider, const char *bind);
int kf_address(kf_engine *engine, uint32_t domain, unsigned char *bytes, uint32_t room, uint32_t *length);
int kf_event_fd(kf_engine *engine);

const char *kf_seat(const kf_engine *engine); /* where engines on this host find it; "": it is not to be found */

/* `shared_fd`: a sealed memfd that has the memory at `shared_offset`, for writers on the same host; -1: none. */
kf_region *kf_register(kf_engine *engine, void *start, uint64_t length, int shared_fd, uint64_t shared_offset,
                       kf_error *error);
/* -EBUSY while a transfer reads from it. -EAGAIN: nobody begins to write to it any more, but a process of this host was
 * stopped in the middle of a copy to it: it stays registered, close it again later. */
kf_region *kf_register_device(kf_engine *engine, const kf_device_memory *memory, kf_error *error);
int kf_unregister(kf_engine *engine, kf_region *region, kf_error *error);
void kf_region_remote(const kf_region *region, kf_remote *remote);

kf_peer *kf_connect(kf_engine *engine, const unsigned char *addresses, const uint32_t *lengths, uint32_t domains,
                    const char *seat, kf_error *error); /* one address a domain of the peer, one behind the other */
int kf_disconnect(kf_engine *engine, kf_peer *peer, kf_error *error); /* takes effect when its transfers have ended */
/* Who is there is held to be gone: transfers to it fail, and no connection to it is kept. Connecting again is allowed. */
int kf_forget(kf_engine *engine, const unsigned char *addresses, const uint32_t *lengths, uint32_t domains, const char *seat,
              kf_error *error);

kf_counter *kf_counter_new(kf_engine *engine, kf_error *error);
kf_counter *kf_counter_over(kf_engine *engine, uint64_t *word, kf_error *error); /* of the caller's, who need not bump */
int kf_counter_free(kf_counter *counter, kf_error *error); /* -EBUSY while a schedule waits on it */
uint64_t kf_counter_address(kf_counter *counter);
uint64_t kf_counter_value(kf_counter *counter);
void kf_counter_bump(kf_counter *counter, uint64_t n);

int kf_expect(kf_engine *engine, uint32_t slot, uint32_t generation, uint64_t pages);
int kf_disarm(kf_engine *engine, uint32_t slot, uint32_t generation); /* 1: was armed so, 0: was not */
uint64_t kf_arrived(kf_engine *engine, uint32_t slot);

uint64_t kf_start(kf_engine *engine, const kf_schedule *schedule, kf_error *error); /* transfer id, or 0 */
uint64_t kf_write_one(kf_engine *engine, kf_region *region, uint64_t source_offset, kf_peer *peer,
                      const kf_remote *remote, uint64_t destination_offset, uint64_t length, uint32_t slot,
                      uint32_t generation, uint64_t timeout_ns, kf_error *error); /* one piece at once, as one page; transfer id, or 0 */
uint64_t kf_write_immediate(kf_engine *engine, kf_peer *peer, const kf_remote *remote, uint32_t slot, uint32_t generation,
                            uint32_t pages, uint64_t timeout_ns, kf_error *error); /* no bytes; transfer id, or 0 */
int kf_cancel(kf_engine *engine, uint64_t transfer);
/* The state, and the event as it would be now; its kind is 0 before the end. -ENOENT: released. */
int kf_look(kf_engine *engine, uint64_t transfer, kf_event *event);
/* An eventfd that becomes readable when the transfer ends; -1: none any more, and the former may be closed. 1: it has ended. */
int kf_notify(kf_engine *engine, uint64_t transfer, int fd);
int kf_trace(kf_engine *engine, uint64_t transfer, uint64_t *seen_ns, uint64_t *post_ns, uint32_t room);
int kf_release(kf_engine *engine, uint64_t transfer); /* after its last event */

int kf_poll_events(kf_engine *engine, kf_event *events, int room);
void kf_stats(kf_engine *engine, kf_stats_values *values);
int kf_domain_stats(kf_engine *engine, uint32_t domain, kf_domain_values *values);
int kf_fault(kf_engine *engine, int kind, uint64_t value);

uint32_t kf_immediate_pack(uint32_t slot, uint32_t generation, uint32_t pages);
void kf_immediate_unpack(uint32_t value, uint32_t *slot, uint32_t *generation, uint32_t *pages);
const char *kf_strerror(int code);

/* The network interface that has a local address or host name; -ENODEV: none has. */
int kf_interface(const char *address, char *name, uint32_t room);

/* cffi: end */
#endif
