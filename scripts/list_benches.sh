#!/usr/bin/env bash
# Names the measuring programs in bench/ with the first line of what they say about themselves.
set -euo pipefail
cd "$(dirname "$0")/.."
shopt -s nullglob
benches=(bench/*.py)
if [ ${#benches[@]} -eq 0 ]; then
  echo "There are no benches yet."
  exit 0
fi
echo "Run one with .venv/bin/python bench/NAME.py --help:"
for bench in "${benches[@]}"; do
  printf '  %-28s %s\n' "$bench" "$(sed -n '/^"""/{s/^"""//;s/"""$//;p;q}' "$bench")"
done
