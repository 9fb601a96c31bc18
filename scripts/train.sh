#!/usr/bin/env bash
# Train on this machine, on all of its GPUs or on the CPU; with the same flags on many machines, as sbatch starts it.
#
#   bash scripts/train.sh                                   # the demo: a small Llama on text that every machine has
#   bash scripts/train.sh --model_variant=1b --data_path=/data/tokens --seq_length=2048
#   bash scripts/train.sh --help
#
# Flags go to main_training.py: those of the block below, then those of the command line, which win. While neither names
# a recipe, a model or data, this is the demo (--recipe=demo).
# Several machines: `sbatch scripts/train.slurm`; under srun, SLURM says which machine this is. Without SLURM, run this
# on each, with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set.
# NPROC sets the number of processes on this machine; by default one per GPU. MAX_RESTARTS=3 starts them again up to
# three times when one fails. NNODES=2:4 goes on with two to four machines, whichever are there (docs/launching.md).
# Exit code 75: the run was told to end and is saved; the same command resumes it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The flags of your runs: remove the # of a line to pass it. Paths, datasets and weights are examples; the other lines
# show what a run with AdamW does without them.
FLAGS=(
    #--model_variant=7b
    #--ckpt_load_path=/shared/runs/7b
    #--ckpt_save_path=/shared/runs/7b
    #--use_dummy_dataset=true         # speed without data
    #--data_path=/data/tokens
    #--datasets=web,code,books
    #--weights=6,3,1
    #--tokenizer_path=/data/tokenizer.json
    #--file_type=auto
    #--col_name=tokens
    #--seq_length=4096
    #--bos_token=none
    #--sep_token=none                 # the id that ends documents; of `pretrain prepare`, prepare.json says it
    #--strip_tokens=
    #--logical_shards=1024
    #--num_workers=1
    #--held_out_fraction=0
    #--eval_interval=1000
    #--eval_batches=16
    #--sharding_strategy=fsdp         # ddp, zero2, fsdp, hsdp
    #--hsdp_group_size=none
    #--mixed_precision=none           # where the device has units for it
    #--mp_dtype=bfloat16
    #--fsdp_activation_checkpointing=false
    #--selective_checkpointing=1
    #--low_cpu_fsdp=true
    #--use_torch_compile=false
    #--seed=2023
    #--batch_size=2                   # sequences per GPU
    #--num_steps=1000                 # or 500Btok, 2ep
    #--training_stage=initial
    #--learning_rate=3e-4             # the peak
    #--grad_clip_thresh=1
    #--report_interval=10
    #--checkpoint_interval=1000
    #--use_profiler=false
    #--profiler_rank0_only=true
    #--tracker=tensorboard
    #--tracker_dir=none
    #--tracker_project_name=none
    #--tracker_run_id=none
)
MODEL_ARGS=""                          # the block of fms-fsdp may be pasted here

# Ends what runs on a signal: torchrun gets it; before it is started, nothing has begun.
child=
pass_on() {
    if [[ -n $child ]]; then
        kill -s "$1" "$child" 2>/dev/null || true
    else
        exit "$2"
    fi
}
trap 'pass_on TERM 75' TERM
trap 'pass_on USR1 75' USR1
trap 'pass_on INT 130' INT
trap 'pass_on HUP 129' HUP

# shellcheck source=scripts/setup.sh
source "$root/scripts/setup.sh" ""

# Whether an argument after the first gives one of the settings named in the first, in any of their spellings: --name,
# --name=…, name=…, with its section in front, with - or _, in any case.
gives() {
    local wanted=" $1 " argument name
    shift
    shopt -s nocasematch
    for argument in "$@"; do
        [[ $argument == -* || $argument == *=* ]] || continue
        name=${argument%%=*}
        name=${name##*.}
        name=${name#-}
        name=${name#-}
        if [[ $wanted == *" ${name//-/_} "* ]]; then
            shopt -u nocasematch
            return 0
        fi
    done
    shopt -u nocasematch
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
    elif [[ -e /dev/kfd ]]; then # AMD's driver
        python -c 'import torch; print(torch.cuda.device_count())'
    fi
}

# The form with + lets an empty list pass `set -u` on old bash.
if gives "help h" "$@"; then
    exec python "$root/main_training.py" "$@"
fi

read -r -d '' -a pasted <<<"$MODEL_ARGS" || true
FLAGS+=(${pasted[@]+"${pasted[@]}"})
if ! gives "recipe config model_variant data_path datasets use_dummy_dataset" ${FLAGS[@]+"${FLAGS[@]}"} "$@" &&
    [[ ! (${1-} != -* && ${1-} != *=* && ${1-} =~ \.(ya?ml|json|toml|py)$) ]]; then
    echo "train: no recipe, model or data chosen: this is the demo (bash scripts/train.sh --help lists the flags)" >&2 || true
    FLAGS=(--recipe=demo --data_path="$root/data/demo" --tokenizer_path="$root/data/demo/tokenizer.json"
        --ckpt_save_path="$root/runs/demo" ${FLAGS[@]+"${FLAGS[@]}"})
    if [[ ! -f $root/data/demo/stdlib/prepare.json ]]; then
        mkdir -p "$root/data"
        exec 9>"$root/data/.demo.lock" # tasks and machines that start at the same time prepare it once
        ! command -v flock >/dev/null || flock 9
        [[ -f $root/data/demo/stdlib/prepare.json ]] ||
            # By this task alone: the others wait for the lock. What it prints is like all set-up.
            env -u SLURM_STEP_NUM_TASKS -u OMPI_COMM_WORLD_RANK -u MPI_LOCALRANKID -u PALS_RANKID -u PMI_RANK \
                -u RANK -u WORLD_SIZE \
                pretrain prepare --source=stdlib --vocab_size=4096 --output_path="$root/data/demo" >&2
        exec 9>&-
    fi
fi

# Of a setting that is given twice, in whatever spelling or by another of its names, the command line's counts.
arguments=()
for flag in ${FLAGS[@]+"${FLAGS[@]}"}; do
    name=${flag%%=*}
    name=${name#--}
    for names in "num_steps max_tokens" "sep_token eos_token" "hsdp_group_size sharding_group_size" \
        "tracker report_to" "keep_last save_total_limit"; do
        [[ " $names " != *" $name "* ]] || name=$names
    done
    gives "$name" "$@" || arguments+=("$flag")
done
arguments+=("$@")

# Whether this was started in a shell of srun --pty: it has that shell's terminal, which what srun starts there has not,
# and that shell leads the session.
in_shell_of_srun() {
    local stat
    [[ -n ${SLURM_PTY_PORT:-} ]] && (: </dev/tty) 2>/dev/null && read -r -a stat </proc/$$/stat && [[ ${stat[5]} != "$$" ]]
}

if [[ -n ${SLURM_STEP_NUM_TASKS:-} ]] && ! in_shell_of_srun; then
    if [[ $SLURM_STEP_NUM_TASKS != "$SLURM_STEP_NUM_NODES" ]]; then # one per process: they find each other
        exec python "$root/main_training.py" "${arguments[@]}"
    fi
    [[ -n ${CUDA_VISIBLE_DEVICES+set} ]] || NPROC=${NPROC:-${SLURM_GPUS_ON_NODE:-}}
    NNODES=$SLURM_STEP_NUM_NODES
    NODE_RANK=$SLURM_NODEID
    JOB_ID=${JOB_ID:-$SLURM_JOB_ID.$SLURM_STEP_ID}
    read -r first_node port < <(cd "$root" && python -c "
from os import environ
from pretraining.launch.layout import first_node, port_of_slurm_step
job, step = (int(environ[f'SLURM_{name}_ID']) for name in ('JOB', 'STEP'))
print(environ.get('MASTER_ADDR') or first_node(environ['SLURM_STEP_NODELIST']), port_of_slurm_step(job, step))")
    MASTER_ADDR=$first_node
    MASTER_PORT=${MASTER_PORT:-$port}
fi

processes=${NPROC:-$(count_gpus)}
[[ ${processes:=1} != 0 ]] || processes=1
nodes=${NNODES:-1}
restarts=${MAX_RESTARTS:-0}
[[ $nodes != *:* ]] || restarts=${MAX_RESTARTS:-3} # a machine that is lost costs one

# Ends the script where a variable is missing: its name, and what it is for.
needs() {
    [[ -z ${!1:-} ]] || return 0
    echo "train: NNODES=$nodes needs $1, the $2" >&2
    exit 1
}

if [[ $processes == 1 && $nodes == 1 && $restarts == 0 ]]; then
    exec python "$root/main_training.py" "${arguments[@]}"
fi

if [[ $nodes == 1 ]]; then
    meeting=(--standalone)
elif [[ $nodes == *:* || $restarts != 0 ]]; then
    # Machines agree on each start anew; they may come and go, all but the one that the others meet at.
    needs MASTER_ADDR "host that the machines meet at"
    meeting=(--nnodes="$nodes" --rdzv-backend=c10d --rdzv-id="${JOB_ID:-pretraining}"
        --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}")
else
    needs NODE_RANK "number of this machine, from 0"
    needs MASTER_ADDR "host of machine 0"
    meeting=(--nnodes="$nodes" --node-rank="$NODE_RANK"
        --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}")
fi
echo "train: $processes processes on this machine, $nodes machine(s)" >&2 || true

# In a process group of its own torchrun does not see Ctrl-C itself: it gets each signal once, from here, and hands it to
# its workers. It ends with this shell, however that ends.
set -m
PRETRAINING_SCRIPT_PID=$$ python "$root/scripts/torchrun.py" "${meeting[@]}" --nproc-per-node="$processes" --max-restarts="$restarts" \
    "$root/main_training.py" "${arguments[@]}" &
child=$!
# A signal ends `wait` early; the exit code is there once the child is gone.
status=0
wait "$child" || status=$?
while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
done
exit "$status"
