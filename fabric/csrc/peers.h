/* Who is written to, and the paths there: one from each of our domains to each of theirs. */
#ifndef KF_PEERS_H
#define KF_PEERS_H

#include "domain.h"

enum { KF_SOCKET_NONE = -1 /* not ours to see */, KF_SOCKET_UNKNOWN = -2 /* not looked for since it was connected */ };

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
  const char *cut;           /* why we have cut it under its writes in flight; NULL: we have not */
  uint32_t breaks;           /* grows with the loss of its connection: what was not sealed by then never will be */
  int socket;                /* the fd of its connection, or KF_SOCKET_NONE or _UNKNOWN */
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

/* ---- peers.c ---- */
bool kf_same_address(const kf_address_bytes *a, const kf_address_bytes *b);
kf_peer *kf_peers_insert(kf_engine *engine, const kf_address_bytes *addresses, uint32_t domains, const char *seat,
                         kf_error *error);
int kf_peers_drop(kf_engine *engine, kf_peer *peer, kf_error *error);
void kf_peers_broken(kf_engine *engine, const kf_domain *domain, const kf_address_bytes *address);
void kf_peers_cut(kf_engine *engine, kf_domain *domain, const kf_address_bytes *address);
void kf_peers_forget(kf_engine *engine, const kf_address_bytes *addresses, uint32_t domains, const char *seat);
void kf_peers_close(kf_engine *engine);
const char *kf_peer_name(const kf_peer *peer, char *text, size_t room);

/* ---- paths.c; those of their health: health.c ---- */
void kf_path_add(kf_path *path, uint64_t bytes);
void kf_path_sub(kf_path *path, uint64_t bytes);
kf_path *kf_paths_choose(const kf_engine *engine, const kf_peer *peer);
bool kf_paths_left(const kf_peer *peer);
const char *kf_path_name(const kf_transfer *transfer, const kf_path *path, char *text, size_t room);
void kf_path_failed(kf_engine *engine, kf_path *path);
void kf_path_completed(kf_path *path, uint64_t now);
void kf_path_cut(kf_engine *engine, kf_path *path, const kf_peer *peer, const char *why);
void kf_path_refused(kf_engine *engine, kf_path *path);
bool kf_path_unconnected(const kf_path *path);
bool kf_path_rests(const kf_path *path);
bool kf_path_usable(const kf_path *path);

/* ---- sockets.c: the connections below them, over tcp and net ---- */
int kf_sockets_abort(kf_domain *domain, const kf_address_bytes *peer);
int kf_sockets_keep_alive(kf_domain *domain, uint64_t silence_ns);
void kf_sockets_sweep(kf_domain *domain);
void kf_sockets_find(kf_path *path, const kf_peer *peer);
int kf_sockets_cork(const kf_path *path);
void kf_sockets_uncork(int fd);

/* ---- cuts.c ---- */
void kf_cuts_add(kf_domain *domain, const kf_address_bytes *peer, int fd);
bool kf_cuts_pending(kf_domain *domain, const kf_address_bytes *peer);
void kf_cuts_close(kf_domain *domain);

#endif
