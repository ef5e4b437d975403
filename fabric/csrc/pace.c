/* How long the engine's thread waits awake for what comes next. Waking up costs some tens of us, so progress that comes
 * in short, steady steps is waited for awake, a little longer than the longest of them; every time that this was in vain
 * the step that is waited for is halved. Layers that will be posted may take their time, since a forward pass runs. Other
 * long steps, as requests have, are slept through, and so is idleness: then nothing is spent.
 *
 * Two steps are learnt: from progress to progress, and from a slot's arming to what then arrives. */
#include "internal.h"

#include <sched.h>

#define STRETCH 8                 /* steps are waited for awake up to so many times spin_ns */
#define STRETCH_OF_LAYERS 80      /* the same, while a forward pass runs whose layers will be posted */
#define CROWDED_NS (300 * 1000u)  /* to yield took this long: somebody else had the core, */
#define CROWDED_FIRST_NS (2 * 1000000u) /* so nothing is waited for awake for this long; each time twice as long... */
#define CROWDED_LONGEST_NS (256 * 1000000u) /* ...up to this; what is waited for with success shortens it again */
#define FADES_IN 16               /* steps until a long one is nearly forgotten */

static void learn(uint64_t *step, uint64_t taken) {
  uint64_t faded = *step - *step / FADES_IN;
  *step = taken > faded ? taken : faded;
}

static uint64_t longest(const kf_pace *pace) { return (pace->layers ? STRETCH_OF_LAYERS : STRETCH) * pace->spin_ns; }

void kf_pace_progress(kf_pace *pace, uint64_t now) {
  uint64_t taken = now - pace->since_ns;
  if (taken <= longest(pace)) learn(pace->armed ? &pace->arrival_ns : &pace->step_ns, taken);
  if (pace->crowded_until_ns < pace->since_ns) pace->crowded_for_ns -= pace->crowded_for_ns / FADES_IN;
  if (pace->crowded_for_ns < CROWDED_FIRST_NS) pace->crowded_for_ns = CROWDED_FIRST_NS;
  pace->since_ns = now;
  pace->armed = false;
}

void kf_pace_armed(kf_pace *pace, uint64_t when) {
  if (when <= pace->since_ns) return;
  pace->since_ns = when;
  pace->armed = true;
}

void kf_pace_in_vain(kf_pace *pace) {
  uint64_t *step = pace->armed ? &pace->arrival_ns : &pace->step_ns;
  *step /= 2;
}

/* Whether the thread still waits awake; `least_ns` is waited in any case, but not in a crowd: who has yielded there gets the
 * core back ms later, after the next layer, and who sleeps has it as soon as he is woken. */
bool kf_pace_awake(const kf_pace *pace, uint64_t now, uint64_t least_ns) {
  uint64_t step = pace->armed ? pace->arrival_ns : pace->step_ns;
  uint64_t stretched = step + step / 2;
  if (now < pace->crowded_until_ns) return false;
  if (stretched > longest(pace)) stretched = longest(pace);
  return now - pace->since_ns < (stretched > least_ns ? stretched : least_ns);
}

/* The core is offered to others at once: what has just come may be what they wait for. (Kept for the first 50 us, it made
 * the receiver's callback on the same core 50 us later.) If one keeps the core, sleeping is better: who is woken runs at
 * once, who has yielded waits for his turn. */
void kf_pace_yield(kf_pace *pace, uint64_t now) {
  (void)sched_yield();
  uint64_t after = kf_now();
  if (after - now <= CROWDED_NS) return;
  pace->crowded_until_ns = after + pace->crowded_for_ns;
  pace->crowded_for_ns = 2 * pace->crowded_for_ns;
  if (pace->crowded_for_ns > CROWDED_LONGEST_NS) pace->crowded_for_ns = CROWDED_LONGEST_NS;
}
