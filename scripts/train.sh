#!/usr/bin/env bash
# Train on this machine, on all of its GPUs or on the CPU.
#
#   bash scripts/train.sh                                   # the demo: a small Llama on text that every machine has
#   bash scripts/train.sh --model_variant=1b --data_path=/data/tokens --seq_length=2048
#   bash scripts/train.sh --help
#
# Flags go to main_training.py: those of the block below, then those of the command line, which win. As it stands, the
# block is the demo. Edit it to train something else; while it is unedited, it is left out where the command line names
# a recipe, data or a model.
# Several machines: run it on each, with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set, or use train.slurm.
# NPROC sets the number of processes on this machine; by default one a GPU. MAX_RESTARTS=3 starts them again up to three
# times when one fails. NNODES=2:4 goes on with two to four machines, whichever are there (docs/launching.md).
# Exit code 75: the run was told to end and is saved; the same command goes on.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# One flag a line; behind # is what fms-fsdp, whose flags these are, has there by default. Its own block, MODEL_ARGS="…",
# may be pasted below in place of these lines.
FLAGS=(
    --model_variant=demo                            # 7b
    --ckpt_load_path=none                           # a folder, commonly that of ckpt_save_path
    --ckpt_save_path="$root/runs/demo"              # a folder
    --use_dummy_dataset=false                       # false
    --data_path="$root/data/demo"                   # a folder
    --datasets=stdlib                               # lang=en/dataset=commoncrawl,lang=en/dataset=webhose,...
    --weights=1                                     # 7725,500,550,28,17,22,25,8,100,500,175,250,100
    --tokenizer_path="$root/data/demo/tokenizer.json" # a folder
    --file_type=auto                                # arrow
    --col_name=tokens                               # tokens
    --seq_length=256                                # 4096
    --bos_token=none                                # none
    --sep_token=0                                   # 1 (its eos_token: 0)
    --strip_tokens=                                 # empty
    --logical_shards=256                            # 1024 (older: 768)
    --num_workers=1                                 # 1
    --held_out_fraction=0.05                        # it does not evaluate
    --eval_interval=150                             # it does not evaluate
    --eval_batches=16                               # it does not evaluate
    --sharding_strategy=fsdp                        # hsdp
    --hsdp_group_size=none                          # none (its sharding_group_size)
    --mixed_precision=false                         # true
    --mp_dtype=bfloat16                             # bfloat16
    --fsdp_activation_checkpointing=false           # false
    --selective_checkpointing=1                     # 1
    --low_cpu_fsdp=true                             # false
    --use_torch_compile=false                       # true (older: false)
    --seed=2023                                     # 2023
    --batch_size=4                                  # 2
    --num_steps=600                                 # 1000000 (older: 2000000)
    --optimizer=muon                                # adamw: it has no other
    --learning_rate=6e-3                            # 3e-4
    --min_lr_ratio=0.05                             # 0.1
    --grad_clip_thresh=1                            # 1
    --training_stage=initial                        # initial
    --report_interval=25                            # 100 (older: 200)
    --checkpoint_interval=300                       # 10000 (older: 20000)
    --use_profiler=false                            # false
    --profiler_rank0_only=true                      # true
    --tracker=tensorboard                           # none; wandb, aim
    --tracker_dir=none                              # a folder
    --tracker_project_name=none                     # llama
    --tracker_run_id=none                           # none
)
MODEL_ARGS=""

# shellcheck source=scripts/setup.sh
source "$root/scripts/setup.sh" ""

# Whether any argument is --name, --name=..., name=..., or one of these with the section in front, with - or _.
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

# Whether the first argument is a file of settings.
is_recipe() {
    [[ $1 != -* && $1 != *=* && $1 =~ \.(ya?ml|json|toml|py)$ ]]
}

# A flag's name with the others that mean the same setting, of dotted ones the last part: optimizer.lr_config.lr is lr.
names_of() {
    local names
    for names in "num_steps max_tokens max_steps" "sep_token eos_token" "hsdp_group_size sharding_group_size" \
        "tracker report_to wandb_project" "keep_last save_total_limit" "ckpt_load_path resume_from_checkpoint load_path" \
        "ckpt_save_path save_path" "checkpoint_interval save_steps save" "learning_rate lr" "seed random_seed" \
        "seq_length context_length seq_len" "grad_clip_thresh gradient_clip_val grad_clip max_grad_norm" \
        "mixed_precision use_amp precision" "mp_dtype precision" "num_workers dataloader_workers" \
        "report_interval log_interval log_steps" "eval_interval eval_steps" "tracker_project_name wandb_project" \
        "tracker_run_id wandb_runid" "use_torch_compile compile"; do
        [[ " $names " != *" $1 "* ]] || { echo "$names"; return; }
    done
    echo "$1"
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
if gives "help h" "$@"; then
    exec python "$root/main_training.py" "$@"
fi

# What `cksum` makes of the block as it stands above, without the path of this checkout.
DEMO_BLOCK=768312047
checksum=$(printf '%s\n' ${FLAGS[@]+"${FLAGS[@]//"$root"/}"} | cksum)
is_demo=false
[[ ${checksum%% *} != "$DEMO_BLOCK" ]] || is_demo=true
if [[ -n $MODEL_ARGS ]]; then
    read -r -d '' -a pasted <<<"$MODEL_ARGS" || true
    [[ $is_demo == false ]] || FLAGS=()
    is_demo=false
    FLAGS+=("${pasted[@]}")
elif [[ $is_demo == true ]] && { gives "recipe config data_path use_dummy_dataset model_variant" "$@" || is_recipe "${1-}"; }; then
    echo "train: a recipe, data or a model is chosen: the block of flags in train.sh, which is the demo, is left out" >&2 || true
    is_demo=false
    FLAGS=()
fi

# Of one flag, in whatever spelling, the command line's counts.
arguments=()
for flag in ${FLAGS[@]+"${FLAGS[@]}"}; do
    name=${flag%%=*}
    gives "$(names_of "${name#--}")" "$@" || arguments+=("$flag")
done
arguments+=("$@")

demo_data=$root/data/demo
if [[ " ${arguments[*]-} " == *" --data_path=$demo_data "* && ! -f $demo_data/stdlib/prepare.json ]]; then
    pretrain prepare --source=stdlib --vocab_size=4096 --output_path="$demo_data" >&2 # like all set-up
fi
[[ $is_demo == false ]] || echo "train: no recipe, data or model chosen: this is the demo (bash scripts/train.sh --help lists the flags)" >&2 || true

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
elif [[ $nodes == *:* ]]; then
    # Machines may come and go, all but the one that the others meet at.
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
child=
early= # a signal that comes while torchrun is being started
for signal in TERM INT HUP USR1; do
    # shellcheck disable=SC2064  # the signal's name now, not when it comes
    trap "if [[ -n \$child ]]; then kill -s $signal \$child 2>/dev/null || true; else early=$signal; fi" "$signal"
done
PRETRAINING_SCRIPT_PID=$$ python "$root/scripts/torchrun.py" "${meeting[@]}" --nproc-per-node="$processes" --max-restarts="$restarts" \
    "$root/main_training.py" "${arguments[@]}" &
child=$!
[[ -z $early ]] || kill -s "$early" "$child" 2>/dev/null || true
# A signal ends `wait` early; the exit code is there once the child is gone.
status=0
wait "$child" || status=$?
while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
done
exit "$status"
