"""Tokens/s of the project's training loop against a bare PyTorch loop.

    python -m scripts.benchmark.measure.training_loop
    python -m scripts.benchmark.measure.training_loop --processes=2
    python -m scripts.benchmark.measure.training_loop --model_variant=125m --seq_length=1024 --batch_size=16

Both train the same model class with the same layout and fused AdamW on the same micro-batches, reduce gradients in the
same micro-batches, clip, and report every 10 steps. The project runs all components: loader, observer, metrics and
TensorBoard files, evaluator, checkpoint manager. The bare loop (`train` of `compare/against_ddp.py`) has none of these,
and has its batches in memory.
"""

from __future__ import annotations

from scripts.benchmark.compare.against_ddp import project as bare
from scripts.benchmark.race import parse_race, project, race

if __name__ == "__main__":
    flags, settings = parse_race("The project's training loop against a bare PyTorch loop.")
    race({"project": project, "bare loop": bare}, settings, flags)
