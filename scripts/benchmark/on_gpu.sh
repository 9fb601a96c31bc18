#!/usr/bin/env bash
# Run what only a GPU can tell, a part at a time, each in at most nine minutes and without a network.
#
#   bash scripts/benchmark/on_gpu.sh --list                      # the parts and their commands, with their time limits
#   bash scripts/benchmark/on_gpu.sh tests --output=results
#
# PYTHON names the interpreter, by default that of .venv, or python3.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$root/.venv/bin/python
[[ -x $python ]] || python=python3
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-$python}" -m scripts.benchmark.gpu_parts "$@"
