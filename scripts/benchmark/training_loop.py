"""Tokens/s of the project's training loop against a bare PyTorch loop.

    python scripts/benchmark/training_loop.py
    python scripts/benchmark/training_loop.py --model_variant=125m --seq_length=1024 --batch_size=16

Both train the same model class with the same fully_shard wrapping and fused AdamW on the same micro-batches, clip
gradients and report every 10 steps. The project does it with all that belongs to a run: loader, observer, metrics and
TensorBoard files, evaluator, checkpoint manager. The bare loop does nothing else, and has its batches in memory.
"""

from __future__ import annotations

import torch
from common import Turn, batches_in_memory, parse, race, train_project

from pretraining.config.training import TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.optim.adamw import build_adamw
from pretraining.parallel.mesh import build_mesh
from pretraining.parallel.processes import join_processes
from pretraining.train.build_model import build_model


def project(config: TrainConfig, turn: Turn) -> None:
    train_project(config, turn.before_step)


def bare(config: TrainConfig, turn: Turn) -> None:
    """What one would write by hand for a single device."""
    with join_processes(0, 1, 0, 1, {}) as processes:
        device = processes.device
        shape = resolve_shape(config.model)
        mesh = build_mesh(config.parallel, 1, 1, device.type)
        model = build_model(shape, config, mesh, device, initialize=True)
        optimizer = build_adamw(model, config.optimizer)
        steps = batches_in_memory(config, shape)
        report_steps = int(config.report.report_interval.amount)
        reported: float | None = None
        losses = torch.zeros((), device=device)
        for number, step in enumerate(steps, start=1):
            turn.before_step(reported)
            for micro_batch in step:
                inputs = micro_batch.to(device, non_blocking=True).model_inputs()
                loss_sum, valid_tokens, _ = model(
                    inputs.tokens_BS, inputs.labels_BS, inputs.positions_BS, inputs.document_lengths
                )
                loss = loss_sum / (valid_tokens * len(step))
                loss.backward()
                losses += loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip_thresh)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if number % report_steps == 0:
                reported = losses.item() / report_steps
                losses.zero_()
                print(f"step {number}  loss {reported:.4f}", flush=True)


if __name__ == "__main__":
    flags, settings = parse(
        "The project's training loop against a bare PyTorch loop.",
        rounds=(16, "turns of each that count"),
        steps=(10, "optimizer steps of a turn"),
    )
    race({"project": project, "bare loop": bare}, settings, flags.rounds, flags.steps)
