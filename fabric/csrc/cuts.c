/* Connections that we have cut, until libfabric has closed them. It notices when it next reads them, over tcp up to 10 ms
 * later, and until then would send what is posted to a connection that is none any more: a write to a peer that was cut
 * off, and is back, would fail for our own doing. */
#include "internal.h"

#include <stdlib.h>
#include <sys/stat.h>

#define CLOSES_NS 1000000000u /* not closed by then: the next write may find out why */

struct kf_cut {
  kf_cut *next;
  kf_address_bytes peer;
  int fd;
  ino_t inode; /* a socket's own: its fd may be another's by now */
  uint64_t until_ns;
};

static bool is_open(int fd, ino_t inode) {
  struct stat found;
  return fstat(fd, &found) == 0 && S_ISSOCK(found.st_mode) && found.st_ino == inode;
}

/* Without memory for it, it is not waited for. */
void kf_cuts_add(kf_domain *domain, const kf_address_bytes *peer, int fd) {
  struct stat found;
  kf_cut *made = fstat(fd, &found) == 0 ? malloc(sizeof *made) : NULL;
  if (!made) return;
  *made = (kf_cut){.next = domain->cuts, .peer = *peer, .fd = fd, .inode = found.st_ino, .until_ns = kf_now() + CLOSES_NS};
  domain->cuts = made;
}

static void drop_first(kf_cut **cut) {
  kf_cut *gone = *cut;
  *cut = gone->next;
  free(gone);
}

/* Whether a connection to this peer is still to be closed. */
bool kf_cuts_pending(kf_domain *domain, const kf_address_bytes *peer) {
  bool pending = false;
  for (kf_cut **cut = &domain->cuts; *cut;) {
    if (!is_open((*cut)->fd, (*cut)->inode) || kf_now() > (*cut)->until_ns) {
      drop_first(cut);
      continue;
    }
    pending |= kf_same_address(&(*cut)->peer, peer);
    cut = &(*cut)->next;
  }
  return pending;
}

void kf_cuts_close(kf_domain *domain) {
  while (domain->cuts) drop_first(&domain->cuts);
}
