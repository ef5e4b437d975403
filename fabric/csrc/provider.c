/* The one place that knows how providers differ. */
#include "internal.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KIB 1024u
#define MIB (1u << 20)
#define MODES_NIC (FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY)

/* A write over tcp is complete, by itself, once its bytes are in a socket buffer. From there they may still reach the
 * target after a cancel was confirmed, and a write that the target refuses looks like a success. So post.c asks for
 * FI_DELIVERY_COMPLETE: of every write, or, where writes to one peer land in order (FI_ORDER_WAW), of the last in a turn,
 * or of an empty one behind it (flush.c).
 * efa's datagrams take many paths; verbs would keep the order, on its reliable connections, but has not been tried.
 *
 * A small write waits behind what is outstanding. Over tcp, 64 KiB beside 2 GiB took 148, 158, 205, 373, 734 us with windows
 * of 1/2, 1, 2, 4, 8 MiB; throughput was the same within the noise from 1 MiB up, for pages of 4, 64 and 256 KiB.
 * On another machine, over loopback with reno, pages of 256 KiB went at 0.93 of plain libfabric with 2 MiB in four turns, and in
 * the same runs 5 to 6 % faster with 3 MiB in three turns, 3 % with 2 MiB in two, 5 % with 4 MiB in four.
 * The price: 64 KiB beside 2 GiB took 93 us (p99 416) with the former and 76 (p99 1150) with 3 MiB, medians of three runs.
 * Over loopback with bbr, pages of 256 KiB went at about 5.1 GB/s with windows of 1/2 to 2 MiB; with 4 or 8 they stayed at 3.6
 * in three of four connections. Why was not shown.
 *
 * Scattered pages that share a write, against pages one by one through plain libfabric: over shm four of 4, 16, 64 KiB went at
 * 0.75, 1.52, 1.25 (one by one 0.93, 1.11, 1.14), since it copies up to 4 KiB by itself and asks the kernel for more.
 *
 * Over shm whoever reads the queue holds the lock that its senders want, to copy what they wrote. A receiver that leaves it
 * alone for 3 us after each look that found something finds more at once: pages of 4, 16, 64, 256 KiB, one a write, go at
 * 1.22, 1.11, 1.07, 1.04 times their speed so; with 10 us at 1.46, 0.91, 0.83. */
static const kf_provider table[] = {
    {.name = "efa", .prov = "efa", .mr_mode = MODES_NIC, .has_wait_fd = true, .takes_hmem = true, .window_bytes = 8 * MIB},
    {.name = "verbs", .prov = "verbs;ofi_rxm", .mr_mode = MODES_NIC, .over_ip = true, .has_wait_fd = true, .takes_hmem = true,
     .window_bytes = 8 * MIB},
    {.name = "tcp", .prov = "tcp;ofi_rxm", .mr_mode = MODES_NIC, .over_ip = true, .over_sockets = true, .has_wait_fd = true,
     .msg_order = FI_ORDER_WAW, .window_bytes = 3 * MIB},
    /* net has an fd, but in 1.17 it stays readable once a connection stands: sleeping on it would never sleep */
    {.name = "net", .prov = "net", .mr_mode = MODES_NIC, .over_ip = true, .over_sockets = true, .msg_order = FI_ORDER_WAW,
     .window_bytes = 3 * MIB},
    {.name = "shm", .prov = "shm", .mr_mode = FI_MR_VIRT_ADDR, .msg_order = FI_ORDER_WAW, .window_bytes = 2 * MIB,
     .least_piece = 4 * KIB + 1, .rest_ns = 3000},
};

const kf_provider *kf_provider_find(const char *name) {
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    if (strcmp(table[i].name, name) == 0) return &table[i];
  return NULL;
}

/* FI_HMEM is asked for where it is wanted alone: some providers give up faster ways of their own for it. */
static struct fi_info *hints_for(const kf_provider *provider, bool hmem) {
  struct fi_info *hints = fi_allocinfo();
  if (!hints) return NULL;
  hints->caps = FI_RMA | FI_MSG | (hmem ? FI_HMEM : 0);
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->tx_attr->msg_order = hints->rx_attr->msg_order = provider->msg_order;
  hints->domain_attr->mr_mode = (int)provider->mr_mode | (hmem ? FI_MR_HMEM : 0);
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL; /* our thread makes progress; a second one would compete */
  hints->fabric_attr->prov_name = strdup(provider->prov);
  if (hints->fabric_attr->prov_name) return hints;
  fi_freeinfo(hints);
  return NULL;
}

int kf_provider_info(const kf_provider *provider, const char *bind, bool hmem, struct fi_info **info) {
  if (hmem && !provider->takes_hmem) return -FI_ENOSYS;
  struct fi_info *hints = hints_for(provider, hmem);
  if (!hints) return -FI_ENOMEM;
  const char *node = provider->over_ip && bind && bind[0] ? bind : NULL;
  int rc = fi_getinfo(FI_VERSION(1, 17), node, NULL, node ? FI_SOURCE : 0, hints, info);
  fi_freeinfo(hints);
  return rc;
}

/* Over shm the end of a process breaks no connection. Its address names its pid, which can be asked about. */
bool kf_provider_peer_dead(const kf_provider *provider, const unsigned char *address) {
  int pid = 0;
  if (provider->over_ip || sscanf((const char *)address, "fi_shm://%d:", &pid) != 1 || pid <= 0) return false;
  return kill(pid, 0) != 0 && errno == ESRCH;
}

int kf_available(const char *provider, const char *bind) {
  if (strcmp(provider, "local") == 0) return 1;
  const kf_provider *row = kf_provider_find(provider);
  struct fi_info *info = NULL;
  if (!row || kf_provider_info(row, bind, false, &info) != 0) return 0;
  fi_freeinfo(info);
  return 1;
}

int kf_takes_device_memory(const char *provider, const char *bind) {
  const kf_provider *row = kf_provider_find(provider);
  struct fi_info *info = NULL;
  if (!row || kf_provider_info(row, bind, true, &info) != 0) return 0;
  fi_freeinfo(info);
  return 1;
}
