/* Where the engine's thread runs. It is pinned before it opens anything, so that what it and libfabric allocate lies in
 * memory near those CPUs: Linux gives a page from the NUMA node that touches it first. */
#include "internal.h"

#include <sched.h>

#define MOST_CPUS 65536 /* more than any kernel has; also the room that asking the kernel takes */

/* The kernel leaves out without a word what the process may not use, so that it is asked what was granted. */
static int check_granted(const kf_options *options, cpu_set_t *granted, size_t size, kf_error *error) {
  if (sched_getaffinity(0, size, granted))
    return kf_fail(error, -errno, "cannot see where the fabric's thread runs: %s", kf_strerror(errno));
  for (uint32_t i = 0; i < options->cpu_count; i++)
    if (!CPU_ISSET_S(options->cpus[i], size, granted))
      return kf_fail(error, -EINVAL, "the fabric's thread cannot be pinned to CPU %u: this process may not run there",
                     options->cpus[i]);
  return 0;
}

static int pin_to(const kf_options *options, cpu_set_t *set, size_t size, kf_error *error) {
  CPU_ZERO_S(size, set);
  for (uint32_t i = 0; i < options->cpu_count; i++) {
    if (options->cpus[i] >= MOST_CPUS) return kf_fail(error, -EINVAL, "there is no CPU %u", options->cpus[i]);
    CPU_SET_S(options->cpus[i], size, set);
  }
  if (sched_setaffinity(0, size, set) == 0) return check_granted(options, set, size, error);
  if (errno == EINVAL)
    return kf_fail(error, -EINVAL, "the fabric's thread cannot be pinned to CPU %u: this process may not run there",
                   options->cpus[0]);
  return kf_fail(error, -errno, "the fabric's thread cannot be pinned: %s", kf_strerror(errno));
}

int kf_pin(const kf_options *options, kf_error *error) {
  if (options->cpu_count == 0) return 0;
  cpu_set_t *set = CPU_ALLOC(MOST_CPUS);
  if (!set) return kf_fail(error, -ENOMEM, "no memory for a set of CPUs");
  int rc = pin_to(options, set, CPU_ALLOC_SIZE(MOST_CPUS), error);
  CPU_FREE(set);
  return rc;
}
