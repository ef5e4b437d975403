/* Peers: engines that we write to. The addresses of each are in our address vectors once, however often it is
 * connected. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

bool kf_same_address(const kf_address_bytes *a, const kf_address_bytes *b) {
  return a->length == b->length && memcmp(a->bytes, b->bytes, a->length) == 0;
}

/* Without domains it is the link that tells them apart. */
static bool is_at(const kf_peer *peer, const kf_address_bytes *addresses, uint32_t domains, const kf_link *link) {
  if (peer->domains != domains || (domains == 0 && peer->link != link)) return false;
  for (uint32_t i = 0; i < domains; i++)
    if (!kf_same_address(&peer->addresses[i], &addresses[i])) return false;
  return true;
}

static kf_peer *find(const kf_engine *engine, const kf_address_bytes *addresses, uint32_t domains, const kf_link *link) {
  for (kf_peer *peer = engine->peers; peer; peer = peer->next)
    if (is_at(peer, addresses, domains, link)) return peer;
  return NULL;
}

/* Providers read as many bytes as their format has, or up to a NUL (shm); an address off the wire is checked first.
 * libfabric's address vector takes the family of whatever comes first for its own, then refuses all others: one wrong
 * address, refused as it is, would be the last that this endpoint hears of anybody. */
static bool plausible(const kf_domain *domain, const kf_address_bytes *address) {
  if (address->length == 0 || address->length >= KF_ADDRESS_MAX) return false;
  uint32_t format = domain->info->addr_format;
  if (format == FI_ADDR_STR) return address->bytes[address->length - 1] == 0;
  if (address->length != domain->address_length) return false;
  bool is_sockaddr = format == FI_SOCKADDR || format == FI_SOCKADDR_IN || format == FI_SOCKADDR_IN6;
  return !is_sockaddr || memcmp(address->bytes, domain->address, sizeof(sa_family_t)) == 0;
}

static int check(const kf_engine *engine, const kf_address_bytes *addresses, uint32_t domains, kf_error *error) {
  if ((domains == 0) != (engine->domain_count == 0) || domains > KF_MAX_DOMAINS)
    return kf_fail(error, -EINVAL, "a peer over '%s' has %s addresses of domains, not %u", engine->provider_name,
                   engine->domain_count ? "1 to 8" : "no", domains);
  for (uint32_t i = 0; i < domains; i++)
    if (!plausible(&engine->domains[0], &addresses[i]))
      return kf_fail(error, -EINVAL, "%u bytes are not an address of provider '%s', or of another family than ours",
                     addresses[i].length, engine->provider_name);
  return 0;
}

/* Takes a peer's addresses out of our address vectors; gives the first error. */
static int forget_paths(kf_peer *peer) {
  int first = 0;
  for (uint32_t i = 0; i < peer->path_count; i++) {
    int rc = fi_av_remove(peer->paths[i].domain->av, &peer->paths[i].address, 1, 0);
    if (first == 0) first = rc;
  }
  peer->path_count = 0;
  return first;
}

static int add_path(kf_engine *engine, kf_domain *domain, kf_peer *peer, uint32_t remote, kf_error *error) {
  kf_path *path = &peer->paths[peer->path_count];
  *path = (kf_path){.domain = domain, .remote = remote, .socket = KF_SOCKET_UNKNOWN};
  int n = fi_av_insert(domain->av, peer->addresses[remote].bytes, 1, &path->address, 0, NULL);
  if (n != 1)
    return kf_fail(error, n < 0 ? n : -FI_EADDRNOTAVAIL, "provider '%s' refused the peer's address: %s",
                   engine->provider_name, n < 0 ? fi_strerror(-n) : "not a usable address");
  peer->path_count++;
  return 0;
}

static int add_paths(kf_engine *engine, kf_peer *peer, kf_error *error) {
  size_t paths = (size_t)engine->domain_count * peer->domains;
  peer->paths = calloc(paths ? paths : 1, sizeof *peer->paths);
  if (!peer->paths) return kf_fail(error, -ENOMEM, "out of memory for a peer");
  for (uint32_t i = 0; i < engine->domain_count; i++)
    for (uint32_t j = 0; j < peer->domains; j++) {
      int rc = add_path(engine, &engine->domains[i], peer, j, error);
      if (rc) return rc;
    }
  return 0;
}

static void free_peer(kf_peer *peer) {
  free(peer->paths);
  free(peer);
}

static kf_peer *insert_new(kf_engine *engine, const kf_address_bytes *addresses, uint32_t domains, kf_error *error) {
  kf_peer *peer = calloc(1, sizeof *peer);
  if (!peer) {
    kf_fail(error, -ENOMEM, "out of memory for a peer");
    return NULL;
  }
  memcpy(peer->addresses, addresses, domains * sizeof *addresses);
  peer->domains = domains;
  if (add_paths(engine, peer, error)) {
    (void)forget_paths(peer);
    free_peer(peer);
    return NULL;
  }
  peer->next = engine->peers;
  engine->peers = peer;
  atomic_fetch_add(&engine->peer_count, 1);
  return peer;
}

static void link_to(kf_engine *engine, kf_peer *peer, kf_link *link) {
  if (!link || (peer->link && !kf_link_is_lost(peer->link))) return;
  if (peer->link) kf_link_drop(engine, peer->link);
  peer->link = link;
  kf_link_hold(link);
}

/* `seat`: where an engine on this host is found; if it is there, what is shared goes to it without a domain. */
kf_peer *kf_peers_insert(kf_engine *engine, const kf_address_bytes *addresses, uint32_t domains, const char *seat,
                         kf_error *error) {
  kf_link *link;
  if (check(engine, addresses, domains, error)) return NULL;
  if (kf_link_get(engine, seat, domains == 0, &link, error)) return NULL;
  kf_peer *peer = find(engine, addresses, domains, link);
  if (!peer) peer = insert_new(engine, addresses, domains, error);
  if (!peer) return NULL;
  link_to(engine, peer, link);
  peer->users++;
  return peer;
}

static int remove_peer(kf_engine *engine, kf_peer *peer, kf_error *error) {
  kf_peer **link = &engine->peers;
  while (*link != peer) link = &(*link)->next;
  *link = peer->next;
  int rc = forget_paths(peer);
  if (peer->link) kf_link_drop(engine, peer->link);
  free_peer(peer);
  atomic_fetch_sub(&engine->peer_count, 1);
  return rc ? kf_fail(error, rc, "cannot remove a peer: %s", fi_strerror(-rc)) : 0;
}

int kf_peers_drop(kf_engine *engine, kf_peer *peer, kf_error *error) {
  return --peer->users ? 0 : remove_peer(engine, peer, error);
}

static bool has_address(const kf_peer *peer, const kf_address_bytes *addresses, uint32_t domains) {
  for (uint32_t i = 0; i < peer->domains; i++)
    for (uint32_t j = 0; j < domains; j++)
      if (kf_same_address(&peer->addresses[i], &addresses[j])) return true;
  return false;
}

static void mark_broken(kf_peer *peer, const kf_domain *domain, const kf_address_bytes *address) {
  for (uint32_t i = 0; i < peer->path_count; i++)
    if (peer->paths[i].domain == domain && kf_same_address(&peer->addresses[peer->paths[i].remote], address)) {
      peer->paths[i].breaks++;
      peer->paths[i].socket = KF_SOCKET_UNKNOWN;
    }
}

/* The connection to an address is gone: who has written over it and has no seal will not get one by the next. */
void kf_peers_broken(kf_engine *engine, const kf_domain *domain, const kf_address_bytes *address) {
  for (kf_peer *peer = engine->peers; peer; peer = peer->next) mark_broken(peer, domain, address);
}

/* Cuts the connection to an address, over sockets: what was posted, and is not known to have landed, cannot land any more. */
void kf_peers_cut(kf_engine *engine, kf_domain *domain, const kf_address_bytes *address) {
  if (!domain->provider->over_sockets) return;
  if (kf_sockets_abort(domain, address) < 0) kf_add(&engine->errors, 1);
  kf_peers_broken(engine, domain, address);
}

static void cut_all(kf_engine *engine, const kf_address_bytes *addresses, uint32_t domains) {
  for (uint32_t i = 0; i < engine->domain_count; i++)
    for (uint32_t j = 0; j < domains; j++) kf_peers_cut(engine, &engine->domains[i], &addresses[j]);
}

/* Providers without sockets of ours confirm, or fail, what is in flight by themselves. */
void kf_peers_forget(kf_engine *engine, const kf_address_bytes *addresses, uint32_t domains, const char *seat) {
  cut_all(engine, addresses, domains);
  for (kf_transfer *t = engine->active.next, *next; t != &engine->active; t = next) {
    next = t->next;
    if (!has_address(t->plan.peer, addresses, domains)) continue;
    kf_transfer_stop(engine, t, KF_END_FAILED, ECONNRESET, "the receiver is held to be lost");
  }
  kf_link_forget(engine, seat);
}

/* The endpoints and their address vectors are closed already, and every connection with them. */
void kf_peers_close(kf_engine *engine) {
  while (engine->peers) {
    kf_peer *peer = engine->peers;
    engine->peers = peer->next;
    free_peer(peer);
  }
}
