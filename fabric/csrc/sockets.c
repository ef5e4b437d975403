/* What libfabric does not tell or do for providers over sockets: whether a link is up, to cut one connection, and to
 * notice that the far end of one has vanished. */
#include "internal.h"

#include <dirent.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define LONGEST_NS 3600000000000u /* of a silence, as TCP's options have bounds */
#define SILENCES 4 /* an accepted connection that hears nothing for so many of them is closed */

static bool same_host(const struct sockaddr *a, const struct sockaddr *b) {
  if (a->sa_family != b->sa_family) return false;
  if (a->sa_family == AF_INET)
    return memcmp(&((const struct sockaddr_in *)a)->sin_addr, &((const struct sockaddr_in *)b)->sin_addr, 4) == 0;
  return a->sa_family == AF_INET6 &&
         memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr, &((const struct sockaddr_in6 *)b)->sin6_addr, 16) == 0;
}

static in_port_t port_of(const struct sockaddr *a) {
  return a->sa_family == AF_INET ? ((const struct sockaddr_in *)a)->sin_port : ((const struct sockaddr_in6 *)a)->sin6_port;
}

static int find_interface(const struct sockaddr *address, char *name, size_t room) {
  struct ifaddrs *all;
  int rc = -ENODEV;
  if (getifaddrs(&all)) return -errno;
  for (const struct ifaddrs *one = all; one && rc; one = one->ifa_next)
    if (one->ifa_addr && same_host(one->ifa_addr, address))
      rc = snprintf(name, room, "%s", one->ifa_name) < (int)room ? 0 : -ENOBUFS;
  freeifaddrs(all);
  return rc;
}

/* The interface that has the domain's address; "" if it is not to be found. */
void kf_link_find(kf_domain *domain) {
  bool found = domain->provider->over_ip && find_interface((const struct sockaddr *)domain->address, domain->interface,
                                                           sizeof domain->interface) == 0;
  if (!found) domain->interface[0] = 0;
}

int kf_interface(const char *address, char *name, uint32_t room) {
  struct addrinfo *all, hints = {.ai_socktype = SOCK_STREAM};
  int rc = -ENODEV;
  if (getaddrinfo(address, NULL, &hints, &all)) return -ENODEV;
  for (const struct addrinfo *one = all; one && rc == -ENODEV; one = one->ai_next)
    rc = find_interface(one->ai_addr, name, room);
  freeaddrinfo(all);
  return rc;
}

/* What cannot be asked is taken to be up: the writes will tell. */
bool kf_link_is_up(const char *interface) {
  struct ifreq request = {0};
  if (!interface[0]) return true;
  int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return true;
  snprintf(request.ifr_name, sizeof request.ifr_name, "%s", interface);
  int rc = ioctl(fd, SIOCGIFFLAGS, &request);
  int wrong = errno;
  (void)close(fd);
  if (rc) return wrong != ENODEV; /* unplugged */
  return (request.ifr_flags & IFF_UP) && (request.ifr_flags & IFF_RUNNING);
}

/* We connect to the address that the peer listens on, so that the far end of a connection tells whose it is. Not if the peer
 * wrote to us first: libfabric then writes over the connection that it accepted, which is neither found here, nor cut. */
static bool is_to(int fd, const kf_domain *domain, const kf_address_bytes *address) {
  struct sockaddr_storage near, far, to = {0};
  socklen_t near_length = sizeof near, far_length = sizeof far;
  const struct sockaddr *peer = (const struct sockaddr *)&to;
  memcpy(&to, address->bytes, address->length < sizeof to ? address->length : sizeof to);
  if (getpeername(fd, (struct sockaddr *)&far, &far_length) || !same_host((struct sockaddr *)&far, peer)) return false;
  if (port_of((struct sockaddr *)&far) != port_of(peer)) return false;
  return getsockname(fd, (struct sockaddr *)&near, &near_length) == 0 &&
         same_host((struct sockaddr *)&near, (const struct sockaddr *)domain->address);
}

/* libfabric sees the end of the stream and closes the socket; without lingering, that throws away what was not sent. */
static bool cut(int fd) {
  const struct linger none = {.l_onoff = 1, .l_linger = 0};
  return setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none) == 0 && shutdown(fd, SHUT_RDWR) == 0;
}

/* Returns for how many fds of this process `take` says yes. */
static int each_fd(bool (*take)(int fd, kf_domain *domain, const void *what), kf_domain *domain, const void *what) {
  DIR *folder = opendir("/proc/self/fd");
  int count = 0;
  if (!folder) return -errno;
  for (const struct dirent *entry = readdir(folder); entry; entry = readdir(folder))
    if (take(atoi(entry->d_name), domain, what)) count++; /* "." and "..": 0, which is no socket of ours */
  (void)closedir(folder);
  return count;
}

static bool cut_if_to(int fd, kf_domain *domain, const void *peer) {
  if (!is_to(fd, domain, peer) || !cut(fd)) return false;
  kf_cuts_add(domain, peer, fd);
  return true;
}

/* Cuts the domain's connections to a peer; libfabric sees them break, and ends their writes in errors. Returns how many. */
int kf_sockets_abort(kf_domain *domain, const kf_address_bytes *peer) { return each_fd(cut_if_to, domain, peer); }

static bool is_on_this_host(const struct sockaddr *near, const struct sockaddr *far) {
  const struct sockaddr_in *address = (const struct sockaddr_in *)far;
  bool loops_back = far->sa_family == AF_INET && ntohl(address->sin_addr.s_addr) >> IN_CLASSA_NSHIFT == IN_LOOPBACKNET;
  return loops_back || same_host(near, far);
}

/* Nothing is lost or shared within a host, but bbr, which is the default on some, paces what goes there as well, by what it
 * sees us send between two confirmations: with it, pages of 256 KiB went at half the speed. */
static void unpace(int fd, const kf_domain *domain) {
  static const char reno[] = "reno"; /* part of every Linux, and allowed to everybody */
  struct sockaddr_storage far;
  socklen_t length = sizeof far;
  if (getpeername(fd, (struct sockaddr *)&far, &length)) return;
  if (is_on_this_host((const struct sockaddr *)domain->address, (const struct sockaddr *)&far))
    (void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, reno, sizeof reno - 1); /* refused: slower */
}

typedef struct {
  const kf_address_bytes *peer;
  int *fd;
} wanted;

static bool take_if_to(int fd, kf_domain *domain, const void *what) {
  const wanted *want = what;
  if (!is_to(fd, domain, want->peer)) return false;
  *want->fd = fd;
  unpace(fd, domain);
  return true;
}

/* Finds a path's socket, and has it set up, once its connection stands. */
void kf_sockets_find(kf_path *path, const kf_peer *peer) {
  const wanted want = {&peer->addresses[path->remote], &path->socket};
  path->socket = KF_SOCKET_NONE;
  if (path->domain->provider->over_sockets) (void)each_fd(take_if_to, path->domain, &want);
}

/* libfabric sends every write by itself. Until kf_sockets_uncork, Linux gathers them to full segments: scattered pages of 4
 * KiB went at 2.3 times the speed over tcp and 2.4 over net, of 16 KiB at 1.1, of 64 KiB at 1.1. Returns what to uncork.
 * If the connection has been lost meanwhile, and its fd is another's, that one is none the worse for it. */
int kf_sockets_cork(const kf_path *path) {
  const int on = 1;
  if (path->socket >= 0) (void)setsockopt(path->socket, IPPROTO_TCP, TCP_CORK, &on, sizeof on); /* refused: slower */
  return path->socket;
}

void kf_sockets_uncork(int fd) {
  const int off = 0;
  if (fd >= 0) (void)setsockopt(fd, IPPROTO_TCP, TCP_CORK, &off, sizeof off);
}

/* Whether this end of a socket is where the domain listens: that socket itself, and those of callers. */
static bool is_at(int fd, const kf_domain *domain) {
  struct sockaddr_storage near;
  socklen_t near_length = sizeof near;
  if (getsockname(fd, (struct sockaddr *)&near, &near_length)) return false;
  const struct sockaddr *own = (const struct sockaddr *)domain->address;
  return same_host((struct sockaddr *)&near, own) && port_of((struct sockaddr *)&near) == port_of(own);
}

static bool listens(int fd, kf_domain *domain, const void *unused) {
  (void)unused;
  socklen_t flag_length = sizeof(int);
  int listening = 0;
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &flag_length) == 0 && listening && is_at(fd, domain);
}

static bool close_if_at(int fd, kf_domain *domain, const void *unused) {
  (void)unused;
  return is_at(fd, domain) && close(fd) == 0;
}

/* After the endpoint was closed. A caller who had not been answered by then has libfabric 1.17 (tcp) forget its socket:
 * one of a thousand endpoints closed under callers left one. If somebody listens there, the port is another's by now. */
void kf_sockets_sweep(kf_domain *domain) {
  if (each_fd(listens, domain, NULL) == 0) (void)each_fd(close_if_at, domain, NULL);
}

/* Probes where nothing was said last, a limit to retransmissions where a confirmation was. */
static bool keep_alive(int fd, kf_domain *domain, const void *silence_ms) {
  const int on = 1, most_ms = SILENCES * *(const int *)silence_ms, seconds = (*(const int *)silence_ms + 999) / 1000;
  return listens(fd, domain, NULL) && setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on) == 0 &&
         setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds) == 0 &&
         setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds) == 0 &&
         setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &most_ms, sizeof most_ms) == 0;
}

/* Connections to us are only read from: one from a host that vanished without a word would be kept for ever. They inherit
 * this from the socket that listens. Returns whether it was found, or a negative errno. */
int kf_sockets_keep_alive(kf_domain *domain, uint64_t silence_ns) {
  const int silence_ms = (int)((silence_ns < LONGEST_NS ? silence_ns : LONGEST_NS) / 1000000u) + 1;
  return each_fd(keep_alive, domain, &silence_ms);
}
