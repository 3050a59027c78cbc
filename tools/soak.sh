#!/usr/bin/env bash
# Runs the tests again and again, each round with another seed and with more examples, until SOAK_MINUTES (30) are
# over or a test fails. A failure prints the command that repeats it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${VENV:-.venv}/bin/python
minutes=${SOAK_MINUTES:-30}

rounds=0
while [ "$SECONDS" -lt $((minutes * 60)) ]; do
  seed=$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')
  rounds=$((rounds + 1))
  printf 'soak: round %d, seed %s, %d of %d minutes over\n' "$rounds" "$seed" $((SECONDS / 60)) "$minutes"
  LONG=1 "$python" -m pytest -q -x --soak --timeout 1800 --seed "$seed" --hypothesis-seed "$seed" "$@"
done
printf 'soak: %d rounds passed\n' "$rounds"
