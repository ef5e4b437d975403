/* Peers: addresses that we write to, in the address vector once each, however often they are connected. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

static kf_peer *find(const kf_engine *engine, const unsigned char *bytes, uint32_t length) {
  for (kf_peer *peer = engine->peers; peer; peer = peer->next)
    if (peer->length == length && memcmp(peer->bytes, bytes, length) == 0) return peer;
  return NULL;
}

/* Providers read as many bytes as their format has, or up to a NUL (shm); an address off the wire is checked first. */
static bool plausible(const kf_engine *engine, const unsigned char *bytes, uint32_t length) {
  if (length == 0 || length >= KF_ADDRESS_MAX) return false;
  if (engine->endpoint.info->addr_format == FI_ADDR_STR) return bytes[length - 1] == 0;
  return length == engine->endpoint.address_length;
}

static kf_peer *insert_new(kf_engine *engine, const unsigned char *bytes, uint32_t length, kf_error *error) {
  kf_peer *peer = calloc(1, sizeof *peer);
  if (!peer) {
    kf_fail(error, -ENOMEM, "out of memory for a peer");
    return NULL;
  }
  memcpy(peer->bytes, bytes, length);
  peer->length = length;
  int n = fi_av_insert(engine->endpoint.av, peer->bytes, 1, &peer->address, 0, NULL);
  if (n != 1) {
    kf_fail(error, n < 0 ? n : -FI_EADDRNOTAVAIL, "provider '%s' refused the peer's address: %s", engine->provider_name,
            n < 0 ? fi_strerror(-n) : "not a usable address");
    free(peer);
    return NULL;
  }
  peer->next = engine->peers;
  engine->peers = peer;
  atomic_fetch_add(&engine->peer_count, 1);
  return peer;
}

kf_peer *kf_peers_insert(kf_engine *engine, const unsigned char *bytes, uint32_t length, kf_error *error) {
  if (!plausible(engine, bytes, length)) {
    kf_fail(error, -EINVAL, "%u bytes are not an address of provider '%s'", length, engine->provider_name);
    return NULL;
  }
  kf_peer *peer = find(engine, bytes, length);
  if (!peer) peer = insert_new(engine, bytes, length, error);
  if (peer) peer->users++;
  return peer;
}

static int remove_peer(kf_engine *engine, kf_peer *peer, kf_error *error) {
  kf_peer **link = &engine->peers;
  while (*link != peer) link = &(*link)->next;
  *link = peer->next;
  int rc = fi_av_remove(engine->endpoint.av, &peer->address, 1, 0);
  free(peer);
  atomic_fetch_sub(&engine->peer_count, 1);
  return rc ? kf_fail(error, rc, "cannot remove a peer: %s", fi_strerror(-rc)) : 0;
}

int kf_peers_drop(kf_engine *engine, kf_peer *peer, kf_error *error) {
  return --peer->users ? 0 : remove_peer(engine, peer, error);
}

/* The endpoint and its address vector are closed already, and every connection with them. */
void kf_peers_close(kf_engine *engine) {
  while (engine->peers) {
    kf_peer *peer = engine->peers;
    engine->peers = peer->next;
    free(peer);
  }
}
