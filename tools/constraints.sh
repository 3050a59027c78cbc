#!/usr/bin/env bash
# Writes constraints.txt from what the environment holds: run the tests first, then pin what they ran with.
# To move a version: install it by hand into ./.venv, `make test`, `make constraints`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-.venv}

if ! "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
  printf 'constraints: this environment has a CUDA build of torch; the pins are made with the CPU build.\n' >&2
  exit 1
fi
# A local version label (2.13.0+cpu) names one builder's file; without it the pin fits every build of that version.
frozen=$("$venv/bin/python" -m pip freeze --all --exclude-editable --exclude pip --exclude gangmesh |
  sed -E 's/\+[A-Za-z0-9.]+$//')
if grep -nE ' @ |://' <<<"$frozen"; then
  printf 'constraints: the lines above were installed from a path or an address and cannot be pinned.\n' >&2
  exit 1
fi
{
  printf '# Every package that the tests ran with. Made by `make constraints`; not edited by hand.\n'
  printf '# torch is pinned to one version because any range would admit a CUDA build of several gigabytes.\n'
  printf '%s\n' "$frozen"
} >constraints.txt
printf 'constraints: %s packages pinned.\n' "$(grep -c == constraints.txt)"
