#!/usr/bin/env bash
# Random schedules against kf_schedule_check under AddressSanitizer and UndefinedBehaviorSanitizer, for so many seconds
# (600 unless said otherwise). Each round has a seed of its own and prints it: with it, a failure comes back.
set -euo pipefail
cd "$(dirname "$0")/.."

SECONDS_WANTED=${1:-600}
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
gcc -std=gnu11 -g -O1 -Wall -Wextra -Werror -Ifabric/csrc -Itests/csrc -fsanitize=address,undefined \
  -fno-sanitize-recover=all -pthread -o "$FOLDER/fuzz" tests/csrc/fuzz_schedule.c fabric/csrc/*.c -lfabric

end=$(($(date +%s) + SECONDS_WANTED))
while [ "$(date +%s)" -lt "$end" ]; do
  seed=$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')
  printf 'seed %s: ' "$seed"
  ASAN_OPTIONS=detect_leaks=0 "$FOLDER/fuzz" "$seed" 2000000
done
