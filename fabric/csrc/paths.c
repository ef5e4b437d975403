/* Which way the next turn of a transfer goes: over the domain, ours and the peer's, that has the least to do. */
#include "internal.h"

/* Domains of the two sides belong together by number, as cables do; the longer side's are dealt out to the shorter's. */
static bool belongs(const kf_engine *engine, const kf_peer *peer, const kf_path *path) {
  uint32_t fewer = engine->domain_count < peer->domains ? engine->domain_count : peer->domains;
  return path->domain->index % fewer == path->remote % fewer;
}

static uint64_t read_own(const _Atomic uint64_t *total) { return atomic_load_explicit(total, memory_order_relaxed); }

/* Least in flight first; of two that are equal, the one that has carried less, so that idle ones take turns. */
static bool is_better(const kf_path *path, const kf_path *best) {
  uint64_t flying = path->in_flight_bytes, other = best->in_flight_bytes;
  uint64_t carried = path->carried_bytes, other_carried = best->carried_bytes;
  if (path->domain != best->domain) {
    flying = read_own(&path->domain->in_flight_bytes);
    other = read_own(&best->domain->in_flight_bytes);
    carried = read_own(&path->domain->total_bytes);
    other_carried = read_own(&best->domain->total_bytes);
  }
  return flying < other || (flying == other && carried < other_carried);
}

kf_path *kf_paths_choose(const kf_engine *engine, const kf_peer *peer) {
  kf_path *best = NULL;
  for (uint32_t i = 0; i < peer->path_count; i++) {
    kf_path *path = &peer->paths[i];
    if (belongs(engine, peer, path) && (!best || is_better(path, best))) best = path;
  }
  return best;
}

void kf_path_add(kf_path *path, uint64_t bytes) {
  path->in_flight_bytes += bytes;
  path->carried_bytes += bytes;
  kf_add(&path->domain->in_flight_bytes, bytes);
}

void kf_path_sub(kf_path *path, uint64_t bytes) {
  path->in_flight_bytes -= bytes;
  kf_sub(&path->domain->in_flight_bytes, bytes);
}
