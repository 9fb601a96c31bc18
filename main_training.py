"""Train a Llama: recipe and flags in, checkpoints out.

The same as `pretrain train`; run it under torchrun, srun, mpirun or alone.

    python main_training.py --recipe=demo
    torchrun --nproc-per-node=8 main_training.py --model_variant=llama3_8b --data_path=/data --sharding_strategy=fsdp
    python main_training.py --help
"""

from __future__ import annotations

import sys

from pretraining.launch.signals import exit_at_interrupt

if __name__ == "__main__":
    with exit_at_interrupt("interrupted; nothing has begun"):
        from pretraining.cli import main
        from pretraining.launch.program import run_as_program

    run_as_program(lambda: main(["train", *sys.argv[1:]]))
