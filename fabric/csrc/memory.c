/* Memory regions. Every registration has keys of its own, one a domain, so that each can be revoked by itself. */
#include "internal.h"

#include <stdlib.h>
#include <sys/random.h>

#define KEY_TRIES 16

/* Where we choose the keys they are random: a key of an earlier region or incarnation never opens a later one. */
static int random_key(const kf_domain *domain, uint64_t *key) {
  if (getrandom(key, sizeof *key, 0) != (ssize_t)sizeof *key) return -errno;
  size_t size = domain->info->domain_attr->mr_key_size;
  if (size < sizeof *key) *key &= (UINT64_C(1) << (8 * size)) - 1;
  return 0;
}

#define ACCESS (FI_READ | FI_WRITE | FI_REMOTE_WRITE)

static int register_device(const kf_domain *domain, const kf_region *region, uint64_t key, struct fid_mr **mr) {
  const struct iovec piece = {region->start, region->length};
  struct fi_mr_attr attr = {.mr_iov = &piece, .iov_count = 1, .access = ACCESS, .requested_key = key,
                            .iface = FI_HMEM_CUDA, .device.cuda = region->device};
  uint64_t flags = 0;
#ifdef FI_MR_DMABUF /* since libfabric 1.20; without it a provider asks CUDA for the dma-buf itself, or does without */
  const struct fi_mr_dmabuf buffer = {.fd = region->dma_buf, .len = region->length, .base_addr = region->start};
  if (region->dma_buf >= 0) {
    attr.dmabuf = &buffer;
    flags = FI_MR_DMABUF;
  }
#endif
  return fi_mr_regattr(domain->domain, &attr, flags, mr);
}

static int register_memory(const kf_domain *domain, const kf_region *region, uint64_t key, struct fid_mr **mr) {
  if (region->on_device) return register_device(domain, region, key, mr);
  return fi_mr_reg(domain->domain, region->start, region->length, ACCESS, 0, key, 0, mr, NULL);
}

static int open_mr(const kf_domain *domain, kf_region *region) {
  struct fid_mr **mr = &region->mr[domain->index];
  int rc = -FI_ENOKEY;
  for (int i = 0; i < KEY_TRIES && rc == -FI_ENOKEY; i++) {
    uint64_t key = 0;
    int failed = random_key(domain, &key);
    if (failed) return failed;
    rc = register_memory(domain, region, key, mr);
  }
  if (rc) return rc;
  bool by_address = (domain->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
  region->descriptors[domain->index] = fi_mr_desc(*mr);
  region->remote.keys[domain->index] = (kf_key){by_address ? (uint64_t)(uintptr_t)region->start : 0, fi_mr_key(*mr)};
  return 0;
}

/* What cannot be closed stays, so that it can be tried again. */
static int close_mrs(kf_region *region) {
  int first = 0;
  for (uint32_t i = 0; i < KF_MAX_DOMAINS; i++) {
    int rc = region->mr[i] ? fi_close(&region->mr[i]->fid) : 0;
    if (rc == 0) region->mr[i] = NULL;
    if (first == 0) first = rc;
  }
  return first;
}

int kf_memory_register(kf_engine *engine, kf_region *region, kf_error *error) {
  if (region->on_device && (!engine->options.device_memory || engine->domain_count == 0))
    return kf_fail(error, -FI_ENOSYS, "an engine that was not opened for it does not take the memory of GPUs");
  for (uint32_t i = 0; i < engine->domain_count; i++) {
    int rc = open_mr(&engine->domains[i], region);
    if (rc == 0) continue;
    (void)close_mrs(region);
    return kf_fail(error, rc, "cannot register %llu bytes with provider '%s' (domain %u, %s): %s%s",
                   (unsigned long long)region->length, engine->provider_name, i, engine->domains[i].bind, fi_strerror(-rc),
                   rc == -FI_ENOMEM ? " (is the memlock limit, ulimit -l, large enough?)" : "");
  }
  int rc = kf_local_share(engine, region, error);
  if (rc) {
    (void)close_mrs(region);
    kf_local_unshare(region);
    return rc;
  }
  region->remote.length = region->length;
  region->remote.domains = engine->domain_count;
  region->next = engine->region_list;
  engine->region_list = region;
  atomic_fetch_add(&engine->regions, 1);
  return 0;
}

static int close_region(kf_engine *engine, kf_region *region) {
  int rc = close_mrs(region);
  if (rc) return rc;
  kf_region **link = &engine->region_list;
  while (*link != region) link = &(*link)->next;
  *link = region->next;
  kf_local_unshare(region);
  free(region);
  atomic_fetch_sub(&engine->regions, 1);
  return 0;
}

int kf_memory_unregister(kf_engine *engine, kf_region *region, kf_error *error) {
  if (region->readers)
    return kf_fail(error, -EBUSY, "memory region is the source of %u transfers: cancel them and wait for their end first",
                   region->readers);
  int rc = kf_local_revoke(engine, region);
  if (rc) return kf_fail(error, rc, "a process of this host was stopped in the middle of a copy to it: close it again later");
  rc = close_region(engine, region);
  return rc ? kf_fail(error, rc, "cannot unregister memory: %s", fi_strerror(-rc)) : 0;
}

/* Ends all access, ours and the peers'; the regions themselves stay, as transfers still name them. */
void kf_memory_revoke(kf_engine *engine) {
  for (kf_region *region = engine->region_list; region; region = region->next)
    if (close_mrs(region)) kf_add(&engine->errors, 1);
}

/* Whether no peer on this host copies to us any more; none begins to. */
bool kf_memory_at_rest(kf_engine *engine) {
  bool rest = true;
  for (kf_region *region = engine->region_list; region; region = region->next)
    if (kf_local_revoke(engine, region)) rest = false;
  return rest;
}

void kf_memory_close(kf_engine *engine) {
  while (engine->region_list && close_region(engine, engine->region_list) == 0) continue;
}

void kf_region_remote(const kf_region *region, kf_remote *remote) { *remote = region->remote; }
