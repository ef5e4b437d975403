/* NICs, or what stands for one, and what differs between providers. A domain is the libfabric objects of one NIC. */
#ifndef KF_DOMAIN_H
#define KF_DOMAIN_H

#include "base.h"

#define KF_CQ_ENTRIES 8192

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
  uint64_t least_piece; /* smaller ones do not share a write */
  uint64_t rest_ns;     /* from a look into the queue that found something to the next */
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
void kf_health_check(kf_engine *engine, uint64_t now);

typedef struct kf_cut kf_cut;

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
  uint64_t found_ns; /* when its queue last had something */
  char interface[IF_NAMESIZE]; /* that has its address; "": not known */
  bool link_down;
  kf_health health;
  _Atomic bool out; /* link_down, for other threads */
  kf_cut *cuts;     /* connections that are to be closed before their peers are written to again */
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

/* ---- sockets.c: the network interface below it ---- */
void kf_link_find(kf_domain *domain);
bool kf_link_is_up(const char *interface);

#endif
