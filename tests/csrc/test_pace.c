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

/* A forward pass keeps its pace, and what is ready soonest posted is hidden best; requests come when they come. */
static void long_steps_are_waited_for_awake_while_layers_are_to_be_posted(void) {
  start();
  for (int layers = 0; layers < 2; layers++) {
    pace.layers = layers;
    kf_pace_progress(&pace, now);
    kf_pace_progress(&pace, now += 2 * MS);
    CHECK(kf_pace_awake(&pace, now + 2 * MS + 500 * US, LEAST) == layers);
    CHECK(!kf_pace_awake(&pace, now + 4 * MS, LEAST));
  }
  pace.layers = false; /* the last one is posted */
  CHECK(!kf_pace_awake(&pace, now + 500 * US, LEAST));
}

int main(void) {
  long_steps_are_waited_for_awake_while_layers_are_to_be_posted();
  nothing_is_waited_for_awake_in_a_crowd();
  return 0;
}
