/* The raw limit on one host: copies scattered pages from private memory to shared memory with memcpy, and nothing else.
 *
 * memcpy_limit PAGE_BYTES PAGES: prints a line once its bytes are right, then, for every line on stdin, runs a round and
 * prints {"seconds": ...}. Memory of both kinds is what the fabric's bench uses: huge pages for the source where the
 * machine gives them, a memfd for the target. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define SOURCE_STEP 104729u /* the same permutations as bench/fabric_bench/receiver.py makes */
#define TARGET_STEP 7919u

typedef struct {
  unsigned char *source, *target;
  size_t page, pages;
} work;

static void *map(size_t size, int fd) {
  void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) exit(2);
  return memory;
}

static size_t place(const work *w, size_t i, size_t step) { return i * step % w->pages * w->page; }

static void copy_all(const work *w) {
  for (size_t i = 0; i < w->pages; i++)
    memcpy(w->target + place(w, i, TARGET_STEP), w->source + place(w, i, SOURCE_STEP), w->page);
}

static void check(const work *w) {
  for (size_t i = 0; i < w->pages; i++)
    if (memcmp(w->target + place(w, i, TARGET_STEP), w->source + place(w, i, SOURCE_STEP), w->page)) exit(3);
}

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int main(int argc, char **argv) {
  if (argc != 3) return 1;
  work w = {.page = strtoull(argv[1], NULL, 10), .pages = strtoull(argv[2], NULL, 10)};
  size_t size = w.page * w.pages;
  int fd = memfd_create("memcpy-limit", MFD_CLOEXEC);
  if (size == 0 || fd < 0 || ftruncate(fd, (off_t)size)) return 2;
  w.source = map(size, -1);
  w.target = map(size, fd);
  (void)madvise(w.source, size, MADV_HUGEPAGE);
  for (size_t i = 0; i < size; i++) w.source[i] = (unsigned char)(i * 7 + i / 4096);
  copy_all(&w);
  check(&w);
  for (int c = '\n'; c != EOF; c = getchar()) {
    double start = seconds();
    copy_all(&w);
    printf("{\"seconds\": %.9f}\n", seconds() - start);
    (void)fflush(stdout);
  }
  return 0;
}
