#!/usr/bin/env bash
# Makes the environment that everything in the Makefile runs in, or does nothing when it is there already.
#
#   tools/environment.sh            make or bring up to date ./.venv
#   VENV=dir PYTHON=python3.12 …    somewhere else, or with another Python (3.11 is what constraints.txt was made with)
#
# "Already" means: the stamp in the environment names the hash of everything that decides what is in it.
# So a second call costs a few milliseconds and needs no network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
stamp=$venv/.gangmesh-environment

# Debian packages that tests need and that are not on every Debian machine, as `command:package`. Installed only as
# root, and only those whose command is missing.
debian_packages=(nft:nftables)

say() { printf 'environment: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3 python}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      printf '%s' "$candidate"
      return
    fi
  done
  die "needs Python 3.11 or newer; none of '${PYTHON:-python3.11 python3 python}' is one." \
    "Install it (Debian 12: apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3.11 …"
}

may_use_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_install() {
  say "installing Debian packages: $*"
  apt-get update -qq >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2
}

ensure_debian_packages() {
  local entry missing=()
  for entry in "${debian_packages[@]}"; do
    command -v "${entry%%:*}" >/dev/null || missing+=("${entry#*:}")
  done
  [ "${#missing[@]}" = 0 ] && return
  if may_use_apt; then
    apt_install "${missing[@]}"
  else
    say "not root, so these Debian packages stay uninstalled and the tests that need them will say so: ${missing[*]}"
  fi
}

make_venv() {
  local python=$1
  if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    local package
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    may_use_apt || die "$python cannot make virtual environments (no ensurepip)." \
      "Debian and Ubuntu keep that apart: apt-get install $package, then the same command again."
    apt_install "$package"
  fi
  say "creating $venv with $("$python" --version 2>&1)"
  "$python" -m venv --clear "$venv"
}

wanted() {
  { "$1" --version; cat pyproject.toml setup.py constraints.txt tools/environment.sh mesh/net/shim/native/*.[ch]; } 2>&1 | sha256sum | cut -d' ' -f1
}

install() {
  local log=$venv/install.log
  say "installing what constraints.txt pins (minutes the first time; log: $log)"
  # Not compiled: of torch and Ray a fraction is ever imported, and Python compiles that when it first is.
  # setuptools first and then no isolated build: also the builder is the pinned one, and nothing is fetched unpinned.
  if ! {
    "$venv/bin/python" -m pip install --no-compile --progress-bar off -c constraints.txt 'setuptools>=77' &&
      "$venv/bin/python" -m pip install --no-compile --progress-bar off -c constraints.txt \
        --no-build-isolation -e '.[test]'
  } >"$log"; then
    die "pip failed; the lines above say why. Behind a mirror set PIP_INDEX_URL; README.md, 'When something is wrong', has more."
  fi
  if "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; then
    say "note: this torch is the CUDA build (gigabytes, works too). README.md, 'When something is wrong', says how to get the CPU build."
  fi
}

# One at a time: `make -j`, or two terminals. The folder itself is the lock, so nothing is left lying around.
exec 9<.
flock 9

# What would make pip install somewhere else than into the environment, or Python forget what it has compiled.
unset PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

# An environment knows its own path: one that was moved or copied has commands that point to the old place.
if ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1 || { [ -e "$stamp" ] && [ "$(tail -n 1 "$stamp")" != "$PWD" ]; }; then
  python=$(find_python) # on a line of its own: as an argument its failure would not end the script
  make_venv "$python"
fi
want=$(wanted "$venv/bin/python")
if [ "$(head -n 1 "$stamp" 2>/dev/null)" != "$want" ]; then
  ensure_debian_packages
  install
  printf '%s\n' "$want" "$PWD" >"$stamp"
fi
