#!/usr/bin/env bash
# Run what only a GPU can tell, a part at a time, each in at most nine minutes and without a network.
#
#   bash scripts/benchmark/on_gpu.sh --list                      # the parts and their commands, with their time limits
#   bash scripts/benchmark/on_gpu.sh tests                       # in this project's environment
#   bash scripts/benchmark/on_gpu.sh races --wheels=wheels --output=results
#
# --wheels: a folder that scripts/benchmark/wheels.py has filled where there is a network; those of its packages that
# are missing here are put into a temporary folder. PYTHON names the interpreter, by default that of .venv, or python3.
# Results: PART.md, PART.jsonl and PART.log in the output folder, by default runs/on_gpu.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-}
if [[ -z $python ]]; then
    python=python3
    [[ ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
fi

arguments=()
wheels=
for argument in "$@"; do
    case $argument in
    --wheels=*) wheels=${argument#*=} ;;
    *) arguments+=("$argument") ;;
    esac
done

export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if [[ -n $wheels ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" "$root/scripts/benchmark/wheels.py" install "$wheels" "$site"
    export PYTHONPATH=$PYTHONPATH:$site
fi
"$python" -m scripts.benchmark.gpu_parts ${arguments[@]+"${arguments[@]}"}
