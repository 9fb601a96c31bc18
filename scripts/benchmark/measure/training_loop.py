"""Tokens/s of the project's training loop against a bare PyTorch loop.

    python -m scripts.benchmark.measure.training_loop
    python -m scripts.benchmark.measure.training_loop --processes=2
    python -m scripts.benchmark.measure.training_loop --model_variant=125m --seq_length=1024 --batch_size=16

Both train the same model class with the same layout and fused AdamW on the same micro-batches, reduce
gradients in the same of them, clip, and report every 10 steps. The project does it with all that belongs to a run:
loader, observer, metrics and TensorBoard files, evaluator, checkpoint manager. The bare loop does nothing else, and has
its batches in memory.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from pretraining.config.training import TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.distributed.grad_norm import clip_gradients, gradient_norm, local_gradients
from pretraining.distributed.mesh import build_mesh
from pretraining.optim.registry import build_optimizer
from pretraining.train.build import build_model
from scripts.benchmark.common import batches_in_memory, join
from scripts.benchmark.race import Turn, parse_race, project, race


def bare(config: TrainConfig, turn: Turn) -> None:
    """What one would write by hand."""
    with join() as processes:
        device, ranks = processes.device, processes.world_size
        shape = resolve_shape(config.model)
        mesh = build_mesh(config.parallel, ranks, ranks, device.type)
        model = build_model(shape, config, mesh, device, initialize=True)
        optimizer = build_optimizer(model.parameters, config.optimizer)
        steps = batches_in_memory(config, shape, processes.rank, ranks)
        report_steps = int(config.report.report_interval.amount)
        reported: float | None = None
        losses = torch.zeros((), device=device)
        for number, step in enumerate(steps, start=1):
            turn.before_step(reported)
            for index, micro_batch in enumerate(step):
                model.next_backward(is_last=index == len(step) - 1)
                inputs = micro_batch.to(device, non_blocking=True).model_inputs()
                loss_sum, valid_tokens, *_ = model.module(*inputs)
                loss = loss_sum / (valid_tokens * len(step) * ranks)
                loss.backward()
                losses += loss.detach()
            model.finish_gradients()
            gradients = local_gradients(model.parameters.values())
            norm = gradient_norm(gradients, mesh["shard"].get_group())
            clip_gradients(gradients, norm, config.optimizer.grad_clip_thresh)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if number % report_steps == 0:
                if ranks > 1:
                    dist.all_reduce(losses)
                reported = losses.item() / report_steps
                losses.zero_()
                print(f"step {number}  loss {reported:.4f}", flush=True)


if __name__ == "__main__":
    flags, settings = parse_race("The project's training loop against a bare PyTorch loop.")
    race({"project": project, "bare loop": bare}, settings, flags)
