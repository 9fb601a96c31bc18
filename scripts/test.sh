#!/usr/bin/env bash
# Set up, then lint, check types and run the tests in two processes. Arguments go to pytest (-n 0: in one process):
#
#   bash scripts/test.sh
#   bash scripts/test.sh tests/unit -k layout
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh dev

ruff check .
ruff format --check .
mypy
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
