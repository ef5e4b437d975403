/* Transfer ids: a serial number over an index, so that an old id never finds a new transfer. */
#include "internal.h"

#include <stdlib.h>

#define INDEX_BITS 20
#define FIRST_ROOM 64

int kf_registry_open(kf_registry *registry) {
  registry->serial = 0;
  return -pthread_mutex_init(&registry->lock, NULL);
}

void kf_registry_close(kf_registry *registry) {
  for (uint32_t i = 0; i < registry->room; i++)
    if (registry->items[i]) kf_transfer_free(registry->items[i]);
  free(registry->items);
  free(registry->free_indices);
  (void)pthread_mutex_destroy(&registry->lock);
}

static int grow(kf_registry *registry) {
  uint32_t room = registry->room ? 2 * registry->room : FIRST_ROOM;
  if (room > 1u << INDEX_BITS) return -ENOSPC;
  kf_transfer **items = realloc(registry->items, room * sizeof *items);
  if (!items) return -ENOMEM;
  registry->items = items;
  uint32_t *free_indices = realloc(registry->free_indices, room * sizeof *free_indices);
  if (!free_indices) return -ENOMEM;
  registry->free_indices = free_indices;
  for (uint32_t i = room; i > registry->room; i--) {
    items[i - 1] = NULL;
    free_indices[registry->free_count++] = i - 1;
  }
  registry->room = room;
  return 0;
}

int kf_registry_add(kf_registry *registry, kf_transfer *transfer) {
  pthread_mutex_lock(&registry->lock);
  int rc = registry->free_count ? 0 : grow(registry);
  if (rc == 0) {
    transfer->index = registry->free_indices[--registry->free_count];
    transfer->id = ++registry->serial << INDEX_BITS | transfer->index;
    transfer->node.event.transfer = transfer->id;
    registry->items[transfer->index] = transfer;
  }
  pthread_mutex_unlock(&registry->lock);
  return rc;
}

/* The caller holds the lock, or is the engine's thread asking for a transfer that has not ended. */
kf_transfer *kf_registry_get(kf_registry *registry, uint64_t id) {
  uint32_t index = id & ((1u << INDEX_BITS) - 1);
  kf_transfer *transfer = index < registry->room ? registry->items[index] : NULL;
  return transfer && transfer->id == id ? transfer : NULL;
}

/* The caller holds the lock. */
void kf_registry_remove(kf_registry *registry, kf_transfer *transfer) {
  registry->items[transfer->index] = NULL;
  registry->free_indices[registry->free_count++] = transfer->index;
}
