/* How long the engine's thread waits awake, by a clock of our own. */
#include "internal.h"

#include "check.h"

#define US 1000ull
#define MS 1000000ull

enum { LEAST = 50 * 1000 };

static kf_pace pace;
static uint64_t now;

static void start(void) {
  pace = (kf_pace){.spin_ns = LEAST};
  now = 3600 * 1000 * MS;
}

/* Who yields a core that another keeps gets it back ms later; who sleeps there runs as soon as he is woken. */
static void nothing_is_waited_for_awake_in_a_crowd(void) {
  start();
  kf_pace_progress(&pace, now);
  CHECK(kf_pace_awake(&pace, now + 20 * US, LEAST) && !kf_pace_awake(&pace, now + 60 * US, LEAST));
  pace.crowded_until_ns = now + 10 * MS;
  CHECK(!kf_pace_awake(&pace, now + 20 * US, LEAST));
}

int main(void) {
  nothing_is_waited_for_awake_in_a_crowd();
  return 0;
}
