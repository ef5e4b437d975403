/* Opens and closes the libfabric objects of an engine, in order. */
#include "internal.h"

#include <signal.h>
#include <string.h>

#define CQ_ENTRIES 8192

static int open_domain(kf_endpoint *ep) {
  int rc = fi_fabric(ep->info->fabric_attr, &ep->fabric, NULL);
  return rc ? rc : fi_domain(ep->fabric, ep->info, &ep->domain, NULL);
}

static int open_queue(kf_endpoint *ep) {
  struct fi_cq_attr attr = {.size = CQ_ENTRIES, .format = FI_CQ_FORMAT_DATA};
  attr.wait_obj = ep->provider->has_wait_fd ? FI_WAIT_FD : FI_WAIT_NONE;
  int rc = fi_cq_open(ep->domain, &attr, &ep->cq, NULL);
  if (rc || !ep->provider->has_wait_fd) return rc;
  return fi_control(&ep->cq->fid, FI_GETWAIT, &ep->wait_fd);
}

static int open_addresses(kf_endpoint *ep) {
  struct fi_av_attr attr = {.type = FI_AV_TABLE};
  return fi_av_open(ep->domain, &attr, &ep->av, NULL);
}

static int open_ep(kf_endpoint *ep) {
  int rc = fi_endpoint(ep->domain, ep->info, &ep->ep, NULL);
  if (rc) return rc;
  if ((rc = fi_ep_bind(ep->ep, &ep->av->fid, 0))) return rc;
  if ((rc = fi_ep_bind(ep->ep, &ep->cq->fid, FI_TRANSMIT | FI_RECV))) return rc;
  if ((rc = fi_enable(ep->ep))) return rc;
  ep->address_length = sizeof ep->address;
  return fi_getname(&ep->ep->fid, ep->address, &ep->address_length);
}

static int open_all(kf_endpoint *ep, const kf_options *options, kf_error *error) {
  static const struct {
    int (*open)(kf_endpoint *);
    const char *what;
  } steps[] = {{open_domain, "fabric domain"}, {open_queue, "completion queue"}, {open_addresses, "address vector"},
               {open_ep, "endpoint"}};
  ep->wait_fd = -1;
  ep->provider = kf_provider_find(options->provider);
  if (!ep->provider) return kf_fail(error, -FI_EINVAL, "provider '%s' is not known", options->provider);
  int rc = kf_provider_info(ep->provider, options->bind, &ep->info);
  if (rc)
    return kf_fail(error, rc, "libfabric on this machine offers no provider '%s' (bind address %s): %s", options->provider,
                   options->bind, fi_strerror(-rc));
  bool any_size = ep->info->ep_attr->max_order_waw_size >= options->max_write_bytes;
  ep->ordered = any_size && (ep->info->tx_attr->msg_order & FI_ORDER_WAW) && ep->provider->msg_order == FI_ORDER_WAW;
  for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
    if ((rc = steps[i].open(ep)))
      return kf_fail(error, rc, "cannot open the %s of provider '%s' (bind address %s): %s", steps[i].what,
                     options->provider, options->bind, fi_strerror(-rc));
  return 0;
}

/* The shm provider takes SIGTERM, SIGINT and others for itself and ends the process on them. What a signal means is
 * the application's to say, so its handlers are put back. */
int kf_endpoint_open(kf_endpoint *ep, const kf_options *options, kf_error *error) {
  struct sigaction before[NSIG];
  bool saved[NSIG] = {false};
  for (int number = 1; number < NSIG; number++) saved[number] = sigaction(number, NULL, &before[number]) == 0;
  int rc = open_all(ep, options, error);
  for (int number = 1; number < NSIG; number++)
    if (saved[number] && number != SIGKILL && number != SIGSTOP) (void)sigaction(number, &before[number], NULL);
  return rc;
}

/* The order matters: what uses goes before what is used. Failures leave nothing to be done about them. */
void kf_endpoint_close(kf_endpoint *ep) {
  if (ep->ep) (void)fi_close(&ep->ep->fid);
  if (ep->av) (void)fi_close(&ep->av->fid);
  if (ep->cq) (void)fi_close(&ep->cq->fid);
  if (ep->domain) (void)fi_close(&ep->domain->fid);
  if (ep->fabric) (void)fi_close(&ep->fabric->fid);
  if (ep->info) fi_freeinfo(ep->info);
  memset(ep, 0, sizeof *ep);
  ep->wait_fd = -1;
}
