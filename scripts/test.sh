#!/usr/bin/env bash
# Set up, then lint, check types and run the tests, in four processes, since tests wait as much as they compute. Types are
# checked beside the tests, and the result is shown after theirs.
# Arguments go to pytest (-n 0: in one process). CONTRIBUTING.md says which test is in which tier:
#
#   bash scripts/test.sh                 # the quick tier
#   bash scripts/test.sh tests/unit -k layout
#   bash scripts/test.sh -m thorough     # matrices of layouts, many kills, real SLURM and MPI
#   bash scripts/test.sh -m slow         # with foreign tools, which it installs
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=dev
[[ " $* " != *" -m slow "* ]] || extras=dev,slow
# shellcheck source=scripts/setup.sh
source scripts/setup.sh "$extras"

unset PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes, which need not compile the package each time
ruff check .
ruff format --check .
python scripts/check_sentences.py
types=$(mktemp)
mypy >"$types" &
status=0
python -m pytest -n 4 --dist loadfile --no-loadscope-reorder "$@" || status=$?
wait $! || status=1
cat "$types"
rm "$types"
exit $status
