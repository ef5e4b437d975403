/* Opens and closes the libfabric objects of a domain, in order. */
#include "internal.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

static int open_domain(kf_domain *d) {
  int rc = fi_fabric(d->info->fabric_attr, &d->fabric, NULL);
  return rc ? rc : fi_domain(d->fabric, d->info, &d->domain, NULL);
}

static int open_queue(kf_domain *d) {
  struct fi_cq_attr attr = {.size = KF_CQ_ENTRIES, .format = FI_CQ_FORMAT_DATA};
  attr.wait_obj = d->provider->has_wait_fd ? FI_WAIT_FD : FI_WAIT_NONE;
  int rc = fi_cq_open(d->domain, &attr, &d->cq, NULL);
  if (rc || !d->provider->has_wait_fd) return rc;
  return fi_control(&d->cq->fid, FI_GETWAIT, &d->wait_fd);
}

static int open_addresses(kf_domain *d) {
  struct fi_av_attr attr = {.type = FI_AV_TABLE};
  return fi_av_open(d->domain, &attr, &d->av, NULL);
}

static int open_endpoint(kf_domain *d) {
  int rc = fi_endpoint(d->domain, d->info, &d->ep, NULL);
  if (rc) return rc;
  if ((rc = fi_ep_bind(d->ep, &d->av->fid, 0))) return rc;
  if ((rc = fi_ep_bind(d->ep, &d->cq->fid, FI_TRANSMIT | FI_RECV))) return rc;
  if ((rc = fi_enable(d->ep))) return rc;
  d->address_length = sizeof d->address;
  return fi_getname(&d->ep->fid, d->address, &d->address_length);
}

static int open_all(kf_domain *d, const kf_options *options, kf_error *error) {
  static const struct {
    int (*open)(kf_domain *);
    const char *what;
  } steps[] = {{open_domain, "fabric domain"}, {open_queue, "completion queue"}, {open_addresses, "address vector"},
               {open_endpoint, "endpoint"}};
  d->provider = kf_provider_find(options->provider);
  if (!d->provider) return kf_fail(error, -FI_EINVAL, "provider '%s' is not known", options->provider);
  if (options->domains > 1 && !d->provider->over_ip)
    return kf_fail(error, -FI_EINVAL, "provider '%s' binds to no address, so that it has one domain: name one address, not %u",
                   options->provider, options->domains);
  int rc = kf_provider_info(d->provider, d->bind, options->device_memory != 0, &d->info);
  if (rc == -FI_ENOSYS && options->device_memory)
    return kf_fail(error, rc, "provider '%s' does not take the memory of GPUs", options->provider);
  if (rc)
    return kf_fail(error, rc, "libfabric on this machine offers no provider '%s' (bind address %s): %s", options->provider,
                   d->bind, fi_strerror(-rc));
  bool any_size = d->info->ep_attr->max_order_waw_size >= options->max_write_bytes;
  d->ordered = any_size && (d->info->tx_attr->msg_order & FI_ORDER_WAW) && d->provider->msg_order == FI_ORDER_WAW;
  for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
    if ((rc = steps[i].open(d)))
      return kf_fail(error, rc, "cannot open the %s of provider '%s' (bind address %s): %s", steps[i].what,
                     options->provider, d->bind, fi_strerror(-rc));
  kf_link_find(d);
  if (d->provider->over_sockets) (void)kf_sockets_keep_alive(d, options->silence_ns); /* without, fds are kept longer */
  return 0;
}

/* The shm provider takes SIGTERM, SIGINT and others for itself and ends the process on them. What a signal means is
 * the application's to say, so its handlers are put back. */
int kf_domain_open(kf_domain *d, const kf_options *options, kf_error *error) {
  struct sigaction before[NSIG];
  bool saved[NSIG] = {false};
  const char *bind = options->binds[d->index];
  snprintf(d->bind, sizeof d->bind, "%s", bind ? bind : "");
  for (int number = 1; number < NSIG; number++) saved[number] = sigaction(number, NULL, &before[number]) == 0;
  int rc = open_all(d, options, error);
  for (int number = 1; number < NSIG; number++)
    if (saved[number] && number != SIGKILL && number != SIGSTOP) (void)sigaction(number, &before[number], NULL);
  return rc;
}

/* The order matters: what uses goes before what is used. Failures leave nothing to be done about them. */
void kf_domain_close(kf_domain *d) {
  kf_cuts_close(d);
  if (d->ep) (void)fi_close(&d->ep->fid);
  if (d->av) (void)fi_close(&d->av->fid);
  if (d->cq) (void)fi_close(&d->cq->fid);
  if (d->domain) (void)fi_close(&d->domain->fid);
  if (d->fabric) (void)fi_close(&d->fabric->fid);
  if (d->info) fi_freeinfo(d->info);
  if (d->address_length && d->provider->over_sockets) kf_sockets_sweep(d);
}

/* All domains are of one provider. */
bool kf_domains_have_fds(const kf_engine *engine) {
  return engine->domain_count == 0 || engine->domains[0].wait_fd >= 0;
}

int kf_domain_stats(kf_engine *engine, uint32_t index, kf_domain_values *values) {
  if (index >= engine->domain_count) return -EINVAL;
  const kf_domain *d = &engine->domains[index];
  *values = (kf_domain_values){.out = atomic_load(&d->out),
                               .in_flight_writes = atomic_load(&d->in_flight),
                               .in_flight_bytes = atomic_load(&d->in_flight_bytes),
                               .writes = atomic_load(&d->total_writes),
                               .bytes = atomic_load(&d->total_bytes)};
  return 0;
}
