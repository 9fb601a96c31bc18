#!/usr/bin/env bash
# Train on this machine, on all of its GPUs or on the CPU.
#
#   bash scripts/train.sh                                   # the demo: a small Llama on text that every machine has
#   bash scripts/train.sh --model_variant=1b --data_path=/data/tokens --seq_length=2048
#   bash scripts/train.sh --help
#
# Flags go to main_training.py. Without one that chooses a recipe, data or a model, the demo is prepared and trained.
# Several machines: run it on each, with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set, or use train.slurm.
# NPROC sets the number of processes on this machine; by default one a GPU. MAX_RESTARTS=3 starts them again up to three
# times when one fails; NNODES=2:4 then goes on with two to four machines, whichever are there.
# Exit code 75: the run was told to end and is saved; the same command goes on.
set -euo pipefail

# Flags of your own runs, one a line. What is given on the command line comes after them and wins
# over the same flag.
FLAGS=(
    # --model_variant=1b
    # --data_path=/data/tokens
    # --seq_length=2048
    # --batch_size=4
    # --global_batch_size=512
    # --num_steps=20Btok
    # --ckpt_save_path=runs/my-first-1b
)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/setup.sh
source "$root/scripts/setup.sh" ""

# Whether any argument is --name, --name=..., name=..., or one of these with the section in front, with - or _.
gives() {
    local wanted=" $1 " argument name
    shift
    for argument in "$@"; do
        [[ $argument == -* || $argument == *=* ]] || continue
        name=${argument%%=*}
        name=${name##*.}
        name=${name#-}
        name=${name#-}
        if [[ $wanted == *" ${name//-/_} "* ]]; then
            return 0
        fi
    done
    return 1
}

count_gpus() {
    local devices
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        [[ -n $CUDA_VISIBLE_DEVICES && $CUDA_VISIBLE_DEVICES != -1 ]] || return 0
        IFS=, read -r -a devices <<<"$CUDA_VISIBLE_DEVICES"
        echo "${#devices[@]}"
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    fi
}

# The form with + lets an empty list pass `set -u` on old bash.
arguments=(${FLAGS[@]+"${FLAGS[@]}"} "$@")

if gives "help h" ${arguments[@]+"${arguments[@]}"}; then
    exec python "$root/main_training.py" "${arguments[@]}"
fi

if ! gives "recipe config data_path use_dummy_dataset model_variant" ${arguments[@]+"${arguments[@]}"}; then
    echo "train: no recipe, data or model chosen: this is the demo (bash scripts/train.sh --help lists the flags)" >&2 || true
    if [[ ! -f $root/data/demo/stdlib/prepare.json ]]; then
        pretrain prepare --source=stdlib --vocab_size=4096 --output_path="$root/data/demo" >&2 # like all set-up
    fi
    arguments=(
        --recipe=demo
        --data_path="$root/data/demo"
        --tokenizer_path="$root/data/demo/tokenizer.json"
        --ckpt_save_path="$root/runs/demo"
        ${arguments[@]+"${arguments[@]}"}
    )
fi

processes=${NPROC:-$(count_gpus)}
[[ ${processes:=1} != 0 ]] || processes=1
nodes=${NNODES:-1}
restarts=${MAX_RESTARTS:-0}

if [[ $processes == 1 && $nodes == 1 && $restarts == 0 ]]; then
    exec python "$root/main_training.py" "${arguments[@]}"
fi

if [[ $nodes == 1 ]]; then
    meeting=(--standalone)
elif [[ $nodes == *:* ]]; then
    # Machines may come and go, all but the one that the others meet at.
    meeting=(--nnodes="$nodes" --rdzv-backend=c10d --rdzv-id="${JOB_ID:-pretraining}"
        --rdzv-endpoint="${MASTER_ADDR:?host that the machines meet at}:${MASTER_PORT:-29500}")
else
    meeting=(--nnodes="$nodes" --node-rank="${NODE_RANK:?number of this machine, from 0}"
        --master-addr="${MASTER_ADDR:?host of machine 0}" --master-port="${MASTER_PORT:-29500}")
fi
echo "train: $processes processes on this machine, $nodes machine(s)" >&2 || true

# In a process group of its own torchrun does not see Ctrl-C itself: it gets each signal once, from here, and hands it to
# its workers. It ends with this shell, however that ends.
set -m
PRETRAINING_SCRIPT_PID=$$ python "$root/scripts/torchrun.py" "${meeting[@]}" --nproc-per-node="$processes" --max-restarts="$restarts" \
    "$root/main_training.py" "${arguments[@]}" &
child=$!
for signal in TERM INT HUP USR1; do
    # shellcheck disable=SC2064  # the signal's name now, not when it comes
    trap "kill -s $signal $child 2>/dev/null || true" "$signal"
done
# A signal ends `wait` early; the exit code is there once the child is gone.
status=0
wait "$child" || status=$?
while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
done
exit "$status"
