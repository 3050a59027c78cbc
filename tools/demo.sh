#!/usr/bin/env bash
# What `make demo` runs: the two-node DDP script on a deployment of its own, which is gone again afterwards,
# however this ends. Everything it writes is in ./.demo.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export GANGMESH_STATE=$PWD/.demo
PATH=$(cd "${VENV:-.venv}/bin" && pwd):$PATH

stopped=no
stop() {
  [ "$stopped" = no ] || return 0
  stopped=yes
  trap '' INT TERM # the deployment is stopped in any case; a third Ctrl-C must not leave it half-way
  mesh down --yes || printf 'demo: `mesh down` failed; what is left is described in %s/head.log\n' "$GANGMESH_STATE" >&2
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

name=demo-$(date +%H%M%S)
command=(mesh run --name "$name" --nodes 2 --launcher torchrun -- torchrun examples/ddp_demo.py)
printf '$ %s\n' "${command[*]}"
code=0
"${command[@]}" || code=$?

if mesh get runs "$name" >/dev/null 2>&1; then # a deployment that could not start has said so already
  printf '\n$ mesh describe %s\n' "$name"
  mesh describe "$name"
  printf '\n$ mesh get attempts %s\n' "$name"
  mesh get attempts "$name"
fi
if [ "$code" = 0 ]; then
  printf '\ndemo: two machines, one gang, exit code 0. The logs stay in .demo until the next `make clean`.\n'
else
  printf '\ndemo: the run ended with exit code %s; its logs are in .demo.\n' "$code" >&2
fi
stop
exit "$code"
