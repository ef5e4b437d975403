#!/usr/bin/env bash
# Installs the transfer systems that bench_peers.py compares with into .venv-peers, which sees what .venv has: NIXL needs
# a PyTorch, and the one that is there serves. What can't be installed is said in one line, and is no error: the bench
# leaves it out.
set -uo pipefail
cd "$(dirname "$0")/.."

VENV=.venv-peers
PEERS=("nixl-cu12==1.5.1" "mooncake-transfer-engine-non-cuda==0.3.13.post1")

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }

if [ ! -x $VENV/bin/python ]; then
  say "Making $VENV"
  .venv/bin/python -m venv $VENV || exit 1
fi
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
printf 'import site; site.addsitedir("%s")\n' "$(site .venv)" > "$(site $VENV)/kvferry.pth"

for peer in "${PEERS[@]}"; do
  # --no-deps: their own requirements would bring a CUDA build of PyTorch, gigabytes that nothing here uses.
  if ! said=$($VENV/bin/python -m pip --disable-pip-version-check install --quiet --no-deps "$peer" 2>&1); then
    echo "setup_peers: $peer can't be installed and is left out: $(tail -n 1 <<< "$said")" >&2
  fi
done
