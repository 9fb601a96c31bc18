#!/usr/bin/env bash
# Train under mpirun, Open MPI's or Hydra's (MPICH, Intel MPI):
#
#   NPROC=8 bash scripts/train_mpi.sh --model_variant=1b --data_path=/data/tokens
#   NPROC=16 HOSTFILE=hosts bash scripts/train_mpi.sh --recipe=my.yaml
#
# Only the starting of processes is MPI's: gradients travel through NCCL, or gloo on CPUs.
set -euo pipefail

NPROC=${NPROC:?number of processes over all hosts, one a GPU}
HOSTFILE=${HOSTFILE:-}     # one line a host: "node01 slots=8" for Open MPI, "node01:8" for Hydra; empty = this machine
MPIRUN=${MPIRUN:-mpirun}   # which one, where a machine has several
# Where rank 0 answers. On one machine both are derived; over several, rank 0 is on the first host of the file.
MASTER_ADDR=${MASTER_ADDR:-}
MASTER_PORT=${MASTER_PORT:-}

# Flags of your runs, one a line. What is given on the command line comes after them and wins
# over the same flag.
FLAGS=(
    # --model_variant=1b
    # --data_path=/data/tokens
)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/setup.sh
source "$root/scripts/setup.sh" ""

if [[ -n $HOSTFILE ]]; then
    first_line=$(grep -m 1 -v -E '^[[:space:]]*(#|$)' "$HOSTFILE") || {
        echo "train_mpi: no host in HOSTFILE=$HOSTFILE" >&2
        exit 1
    }
    read -r first_host _ <<<"$first_line" # without blanks before it
    first_host=${first_host%%:*}
    MASTER_ADDR=${MASTER_ADDR:-$first_host}
    MASTER_PORT=${MASTER_PORT:-29500}
fi

options=(-n "$NPROC")
version=$("$MPIRUN" --version)
if [[ $version == *"Open MPI"* || $version == *"OpenRTE"* || $version == *"PRRTE"* ]]; then
    # Open MPI binds each process to a core or two unless told otherwise, and the data threads with it.
    options+=(--bind-to none -x PATH)
    [[ -z $HOSTFILE ]] || options+=(--hostfile "$HOSTFILE")
    [[ -z $MASTER_ADDR ]] || options+=(-x "MASTER_ADDR=$MASTER_ADDR")
    [[ -z $MASTER_PORT ]] || options+=(-x "MASTER_PORT=$MASTER_PORT")
else
    [[ -z $HOSTFILE ]] || options+=(-f "$HOSTFILE")
    [[ -z $MASTER_ADDR ]] || options+=(-genv MASTER_ADDR "$MASTER_ADDR")
    [[ -z $MASTER_PORT ]] || options+=(-genv MASTER_PORT "$MASTER_PORT")
fi

exec "$MPIRUN" "${options[@]}" python "$root/main_training.py" ${FLAGS[@]+"${FLAGS[@]}"} "$@"
