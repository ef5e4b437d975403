/* What libfabric itself can do on this machine: one process writes pages with immediates into another's memory, and
 * nothing else. bench_fabric.py builds it and holds the fabric against it.
 *
 *   fabric_limit PROVIDER stream PAGE_BYTES PAGES DEPTH PAGES_PER_WRITE 0
 *   fabric_limit PROVIDER ping   PAGE_BYTES COUNT 1     1               PAUSE_US
 *
 * PROVIDER is libfabric's name. It connects, writes everything once, checks every byte at the receiver, and prints
 * {"ready": true}. Then each line on stdin runs one round: {"seconds": ...} from the first write to the moment when both
 * sides have seen the last completion, or {"median_us": ...} from a write to its immediate; between two both sides wait,
 * awake, for so many us. It ends with stdin. */
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(call)                                                                           \
  do {                                                                                        \
    int rc_ = (int)(call);                                                                    \
    if (rc_) {                                                                                \
      fprintf(stderr, "%s:%d %s: %s\n", __FILE__, __LINE__, #call, fi_strerror(abs(rc_)));    \
      exit(1);                                                                                \
    }                                                                                         \
  } while (0)

enum { BATCH = 64, VECTORS = 8, NAME = 256, MOST_PINGS = 20000, MOST_FDS = 256 };

/* Both processes see it: a line through the pipes wakes the other side, the numbers are here. */
typedef struct {
  _Atomic uint64_t received; /* immediates of this round */
  _Atomic uint64_t end_ns;
  _Atomic uint64_t sent_ns[MOST_PINGS];
  uint64_t arrival_ns[MOST_PINGS];
  unsigned char name[2][NAME]; /* receiver, sender */
  uint64_t key, base;
} shared;

typedef struct {
  struct fi_info *info;
  struct fid_fabric *fabric;
  struct fid_domain *domain;
  struct fid_cq *cq;
  struct fid_av *av;
  struct fid_ep *ep;
  struct fid_mr *mr;
  fi_addr_t peer;
  unsigned char *pool;
  shared *both;
  int from_peer, to_peer;
  const char *provider;
  bool ping;
  uint64_t page, pages, depth, gather, pause_us;
} side;

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Multiplication by an odd number permutes the pages, as their number is a power of two. */
static uint64_t source_page(const side *s, uint64_t i) { return i * 104729 % s->pages; }
static uint64_t target_page(const side *s, uint64_t i) { return i * 7919 % s->pages; }
static unsigned char byte_of(uint64_t page, uint64_t offset) { return (unsigned char)(page * 31 + offset * 7 + (page >> 8)); }

static void tell(const side *s) { CHECK(write(s->to_peer, "x", 1) != 1); }
static void hear(const side *s) {
  char c;
  if (read(s->from_peer, &c, 1) != 1) exit(0); /* the other side has ended */
}

static void open_side(side *s) {
  bool shm = strcmp(s->provider, "shm") == 0;
  struct fi_info *hints = fi_allocinfo();
  hints->caps = FI_RMA | FI_MSG;
  hints->mode = FI_CONTEXT;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = shm ? FI_MR_VIRT_ADDR : FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->fabric_attr->prov_name = strdup(s->provider);
  CHECK(fi_getinfo(FI_VERSION(1, 17), shm ? NULL : "127.0.0.1", NULL, shm ? 0 : FI_SOURCE, hints, &s->info));
  CHECK(fi_fabric(s->info->fabric_attr, &s->fabric, NULL));
  CHECK(fi_domain(s->fabric, s->info, &s->domain, NULL));
  struct fi_cq_attr queue = {.size = 8192, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE};
  CHECK(fi_cq_open(s->domain, &queue, &s->cq, NULL));
  struct fi_av_attr addresses = {.type = FI_AV_TABLE};
  CHECK(fi_av_open(s->domain, &addresses, &s->av, NULL));
  CHECK(fi_endpoint(s->domain, s->info, &s->ep, NULL));
  CHECK(fi_ep_bind(s->ep, &s->av->fid, 0));
  CHECK(fi_ep_bind(s->ep, &s->cq->fid, FI_TRANSMIT | FI_RECV));
  CHECK(fi_enable(s->ep));
  CHECK(fi_mr_reg(s->domain, s->pool, s->page * s->pages, FI_READ | FI_WRITE | FI_REMOTE_WRITE, 0, 0, 0, &s->mr, NULL));
}

static void meet(side *s, int me) {
  size_t length = NAME;
  CHECK(fi_getname(&s->ep->fid, s->both->name[me], &length));
  if (me == 0) {
    s->both->key = fi_mr_key(s->mr);
    s->both->base = s->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uintptr_t)s->pool : 0;
  }
  tell(s);
  hear(s);
  CHECK(fi_av_insert(s->av, s->both->name[!me], 1, &s->peer, 0, NULL) != 1);
}

/* Entries read, of which `immediates` came from the other side. */
static ssize_t read_queue(side *s, uint64_t *immediates) {
  struct fi_cq_data_entry entries[BATCH];
  ssize_t n = fi_cq_read(s->cq, entries, BATCH);
  if (n == -FI_EAGAIN) return 0;
  if (n < 0) {
    struct fi_cq_err_entry error = {0};
    (void)fi_cq_readerr(s->cq, &error, 0);
    fprintf(stderr, "completion: %s\n", fi_strerror(error.err));
    exit(1);
  }
  *immediates = 0;
  for (ssize_t i = 0; i < n; i++) *immediates += (entries[i].flags & FI_REMOTE_CQ_DATA) != 0;
  return n;
}

static ssize_t post(side *s, uint64_t op, void *context) {
  if (s->gather == 1)
    return fi_writedata(s->ep, s->pool + source_page(s, op) * s->page, s->page, fi_mr_desc(s->mr), 42, s->peer,
                        s->both->base + target_page(s, op) * s->page, s->both->key, context);
  struct iovec local[VECTORS];
  struct fi_rma_iov remote[VECTORS];
  void *descriptors[VECTORS];
  for (uint64_t i = 0; i < s->gather; i++) {
    uint64_t page = op * s->gather + i;
    local[i] = (struct iovec){s->pool + source_page(s, page) * s->page, s->page};
    remote[i] = (struct fi_rma_iov){s->both->base + target_page(s, page) * s->page, s->page, s->both->key};
    descriptors[i] = fi_mr_desc(s->mr);
  }
  struct fi_msg_rma message = {.msg_iov = local, .desc = descriptors, .iov_count = s->gather, .addr = s->peer,
                               .rma_iov = remote, .rma_iov_count = s->gather, .context = context, .data = 42};
  return fi_writemsg(s->ep, &message, FI_REMOTE_CQ_DATA | FI_COMPLETION);
}

static void send_ops(side *s, uint64_t count, struct fi_context *contexts) {
  uint64_t sent = 0, completed = 0, ignored;
  while (completed < count) {
    while (sent < count && sent - completed < s->depth) {
      ssize_t rc = post(s, sent, &contexts[sent % s->depth]);
      if (rc == -FI_EAGAIN) break;
      CHECK(rc);
      sent++;
    }
    completed += (uint64_t)read_queue(s, &ignored);
  }
}

static void wait_received(side *s, uint64_t count) {
  uint64_t ignored;
  while (atomic_load(&s->both->received) < count) (void)read_queue(s, &ignored); /* the receiver may need our progress */
}

static void pause_awake(side *s) {
  uint64_t end = now_ns() + s->pause_us * 1000, ignored;
  while (now_ns() < end) (void)read_queue(s, &ignored);
}

static uint64_t ops_of(const side *s) { return s->ping ? s->pages : s->pages / s->gather; }

static int compare(const void *a, const void *b) {
  uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return (x > y) - (x < y);
}

static void send_round(side *s, struct fi_context *contexts) {
  uint64_t count = ops_of(s), start = now_ns(), ignored;
  if (!s->ping) {
    send_ops(s, count, contexts);
    wait_received(s, count);
    uint64_t end = now_ns(), theirs = atomic_load(&s->both->end_ns);
    printf("{\"seconds\": %.9f}\n", (double)((theirs > end ? theirs : end) - start) / 1e9);
    return;
  }
  static uint64_t taken[MOST_PINGS];
  for (uint64_t i = 0; i < count; i++) {
    pause_awake(s);
    atomic_store(&s->both->sent_ns[i], now_ns());
    while (post(s, i, &contexts[0]) == -FI_EAGAIN) (void)read_queue(s, &ignored);
    uint64_t done = 0;
    while (done == 0 || atomic_load(&s->both->received) <= i) done += (uint64_t)read_queue(s, &ignored);
    taken[i] = s->both->arrival_ns[i] - atomic_load(&s->both->sent_ns[i]);
  }
  qsort(taken, count, sizeof *taken, compare);
  printf("{\"median_us\": %.3f, \"p99_us\": %.3f}\n", (double)taken[count / 2] / 1e3, (double)taken[count * 99 / 100] / 1e3);
}

static void receive_round(side *s) {
  uint64_t count = ops_of(s), got = 0, immediates;
  while (got < count) {
    if (read_queue(s, &immediates) == 0) continue;
    if (s->ping && immediates) s->both->arrival_ns[got] = now_ns();
    got += immediates;
    if (got == count) atomic_store(&s->both->end_ns, now_ns());
    atomic_store(&s->both->received, got);
  }
}

static void check_bytes(const side *s) {
  for (uint64_t i = 0; i < s->pages; i++)
    for (uint64_t k = 0; k < s->page; k++)
      if (s->pool[target_page(s, i) * s->page + k] != byte_of(source_page(s, i), k)) {
        fprintf(stderr, "byte %llu of page %llu is wrong\n", (unsigned long long)k, (unsigned long long)i);
        exit(1);
      }
}

static void run_receiver(side *s) {
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  open_side(s);
  meet(s, 0);
  for (bool first = true;; first = false) {
    hear(s);
    receive_round(s);
    if (first) check_bytes(s);
    tell(s);
  }
}

/* As the fabric asks of its connections within a host: neither side is to be paced where nothing is lost or shared. */
static void unpace(void) {
  for (int fd = 0; fd < MOST_FDS; fd++) (void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4); /* not a socket: refused */
}

static void run_sender(side *s) {
  for (uint64_t i = 0; i < s->pages; i++)
    for (uint64_t k = 0; k < s->page; k++) s->pool[i * s->page + k] = byte_of(i, k);
  open_side(s);
  meet(s, 1);
  struct fi_context *contexts = calloc(s->depth, sizeof *contexts);
  char line[64];
  bool first = true;
  do {
    atomic_store(&s->both->received, 0);
    tell(s);
    if (first) {
      send_ops(s, ops_of(s), contexts);
      wait_received(s, ops_of(s));
      unpace();
      printf("{\"ready\": true}\n");
    } else {
      send_round(s, contexts);
    }
    hear(s); /* after the check */
    fflush(stdout);
    first = false;
  } while (fgets(line, sizeof line, stdin));
}

int main(int argc, char **argv) {
  if (argc != 8) return 2;
  side s = {.provider = argv[1], .ping = strcmp(argv[2], "ping") == 0, .page = strtoull(argv[3], NULL, 0),
            .pages = strtoull(argv[4], NULL, 0), .depth = strtoull(argv[5], NULL, 0), .gather = strtoull(argv[6], NULL, 0),
            .pause_us = strtoull(argv[7], NULL, 0)};
  if (!s.page || !s.pages || (s.pages & (s.pages - 1)) || !s.depth || !s.gather || s.gather > VECTORS || s.pages % s.gather ||
      (s.ping && s.pages > MOST_PINGS))
    return 2;
  int to_sender[2], to_receiver[2], prot = PROT_READ | PROT_WRITE;
  CHECK(pipe(to_sender));
  CHECK(pipe(to_receiver));
  s.both = mmap(NULL, sizeof *s.both, prot, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pid_t child = fork();
  CHECK(child < 0);
  s.pool = mmap(NULL, s.page * s.pages, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  CHECK(s.both == MAP_FAILED || s.pool == MAP_FAILED);
  s.from_peer = child ? to_sender[0] : to_receiver[0];
  s.to_peer = child ? to_receiver[1] : to_sender[1];
  (void)close(child ? to_sender[1] : to_receiver[1]);
  if (child == 0) run_receiver(&s);
  run_sender(&s);
  (void)close(s.to_peer);
  (void)waitpid(child, NULL, 0);
  return 0;
}
