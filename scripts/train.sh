#!/usr/bin/env bash
# Train on this machine, on all of its GPUs or on the CPU; with the same flags on many machines, as sbatch starts it.
#
#   bash scripts/train.sh                                   # the demo: a small Llama on text that every machine has
#   bash scripts/train.sh --model_variant=1b --data_path=/data/tokens --seq_length=2048
#   bash scripts/train.sh --help
#
# main_training.py gets the flags of the block below, then those of the command line, which win. This is the demo unless
# a flag names a recipe, a model or data.
# Several machines: `sbatch scripts/train.slurm`. Without SLURM, run this on each machine, with NNODES, NODE_RANK,
# MASTER_ADDR and MASTER_PORT set. NNODES=2:4 continues with two to four machines (docs/launching.md). Kubeflow sets them
# as PET_NNODES and so on.
# NPROC sets the number of processes on this machine; by default one per GPU. MAX_RESTARTS=3 starts them again up to
# three times when one fails.
# Exit code 75: the run was asked to stop and is saved; the same command resumes it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The flags of your runs: remove the # of a line to pass it. Paths, datasets and weights are examples; the other lines
# show the defaults of a run with AdamW.
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
    #--bos_token=                     # not given: that of prepare.json; none = no token
    #--sep_token=                     # not given: that of prepare.json; none = no token
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

trap 'exit 75' TERM HUP USR1 USR2 XCPU # during set-up; the programs below handle their own signals
trap 'exit 130' INT
# shellcheck source=scripts/setup.sh
source "$root/scripts/setup.sh" ""

# The form with + lets an empty list pass `set -u` on old bash.
read -r -d '' -a pasted <<<"$MODEL_ARGS" || true
program=("$root/main_training.py" ${FLAGS[@]+"${FLAGS[@]}"} ${pasted[@]+"${pasted[@]}"} "$@")
export PRETRAINING_DEMO=$root          # the folder of the demo's data and run
[[ " $* " != *" --help"* && " $* " != *" -h "* ]] || exec python "${program[@]}"

# torchrun's own names, which Kubeflow sets in each pod. torchrun would read those that this script decides itself.
if [[ -n ${PET_RDZV_ENDPOINT:-} ]]; then
    MASTER_ADDR=${MASTER_ADDR:-${PET_RDZV_ENDPOINT%:*}}
    [[ $PET_RDZV_ENDPOINT != *:* ]] || MASTER_PORT=${MASTER_PORT:-${PET_RDZV_ENDPOINT##*:}}
fi
for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT MAX_RESTARTS; do
    of_torchrun=PET_$name
    [[ -n ${!name:-} ]] || printf -v "$name" %s "${!of_torchrun:-}"
    unset "$of_torchrun"
done
JOB_ID=${JOB_ID:-${PET_RDZV_ID:-}}
[[ ! ${PET_NPROC_PER_NODE:-} =~ ^[0-9]+$ ]] || NPROC=${NPROC:-$PET_NPROC_PER_NODE} # else auto: one per GPU
unset PET_NPROC_PER_NODE PET_RDZV_BACKEND PET_RDZV_ENDPOINT PET_RDZV_ID PET_STANDALONE

# The shell of `srun --pty` has a terminal and leads its session; a script in it is no task of the step.
in_shell_of_srun() {
    local stat
    [[ -n ${SLURM_PTY_PORT:-} ]] && (: </dev/tty) 2>/dev/null && read -r -a stat </proc/$$/stat && [[ ${stat[5]} != "$$" ]]
}

if [[ -n ${SLURM_STEP_NUM_TASKS:-} ]] && ! in_shell_of_srun; then
    # A task per process: the processes find each other. A task per node: torchrun starts the processes of the node.
    [[ $SLURM_STEP_NUM_TASKS == "$SLURM_STEP_NUM_NODES" ]] || exec python "${program[@]}"
    [[ -n ${CUDA_VISIBLE_DEVICES+set} ]] || NPROC=${NPROC:-${SLURM_GPUS_ON_NODE:-}}
    NNODES=$SLURM_STEP_NUM_NODES NODE_RANK=$SLURM_NODEID JOB_ID=${JOB_ID:-$SLURM_JOB_ID.$SLURM_STEP_ID}
    read -r MASTER_ADDR MASTER_PORT < <(env -u SLURM_PTY_PORT python -c \
        "from pretraining.launch.layout import resolve_layout as read; print(read().master_addr, read().master_port)")
fi

count_gpus() {
    local devices
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        IFS=, read -r -a devices <<<"${CUDA_VISIBLE_DEVICES/#-1/}"
        echo "${#devices[@]}"
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    elif [[ -e /dev/kfd ]]; then       # AMD's driver
        python -c 'import torch; print(torch.cuda.device_count())'
    fi
}
processes=${NPROC:-$(count_gpus)}
[[ ${processes:-0} != 0 ]] || processes=1

nodes=${NNODES:-1}
restarts=${MAX_RESTARTS:-0}
[[ $nodes != *:* ]] || restarts=${MAX_RESTARTS:-3} # a machine that is lost costs one
if [[ $processes == 1 && $nodes == 1 && $restarts == 0 ]]; then
    exec python "${program[@]}"
elif [[ $nodes == 1 ]]; then
    if [[ ${WORLD_SIZE:-1} != 1 && -z ${NNODES:-} ]]; then
        echo "train: WORLD_SIZE=$WORLD_SIZE is set and NNODES is not, so this machine would train alone. Set" \
            "NNODES=<machines> and NODE_RANK=<number of this machine, from 0>; NNODES=1 is this machine alone" >&2
        exit 1
    fi
    rendezvous=(--standalone)
elif [[ $nodes == *:* || $restarts != 0 ]]; then # machines may leave, except that of MASTER_ADDR, and join
    : "${MASTER_ADDR:?NNODES=$nodes needs the host that the machines meet at}"
    rendezvous=(--nnodes="$nodes" --rdzv-backend=c10d --rdzv-id="${JOB_ID:-pretraining}"
        --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}")
else
    : "${NODE_RANK:?NNODES=$nodes needs the number of this machine, from 0}"
    : "${MASTER_ADDR:?NNODES=$nodes needs the host of machine 0}"
    rendezvous=(--nnodes="$nodes" --node-rank="$NODE_RANK"
        --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}")
fi
machines="$nodes machine(s)"
[[ $nodes == 1 ]] || machines+=", which meet at $MASTER_ADDR:${MASTER_PORT:-29500}"
echo "train: $processes processes on this machine, $machines" >&2 || true
exec python "$root/scripts/torchrun.py" "${rendezvous[@]}" --nproc-per-node="$processes" --max-restarts="$restarts" \
    "${program[@]}"
