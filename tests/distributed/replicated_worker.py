"""One rank of test_replicated.py: the summed gradients of all ranks are those of one device that sees every batch.

Each parameter has a bucket of its own, then all are in one. A rank fails where its gradients differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.distributed as dist
from tiny_shape import TINY_SHAPE

from pretraining.config.training import ParallelConfig
from pretraining.config.variants import LlamaShape
from pretraining.distributed import gradient_buckets
from pretraining.distributed.activation_checkpointing import checkpoint_activations
from pretraining.distributed.compile import compile_blocks
from pretraining.distributed.replicated import ReplicatedModel
from pretraining.launch.program import run_as_program
from pretraining.model.init import initialize_parameters
from pretraining.model.llama import Llama

CPU = torch.device("cpu")
MICRO_BATCHES = 2


class OneDevice:
    """In place of a process group: nobody to send to."""

    def size(self) -> int:
        return 1


def make_model(shape: LlamaShape, dtype: torch.dtype, lever: str, replicas: dist.ProcessGroup) -> ReplicatedModel:
    with torch.device("meta"):
        module = Llama(shape)
    if lever == "checkpointed":
        checkpoint_activations(module.model.layers, ParallelConfig(fsdp_activation_checkpointing=True))
    if lever == "compiled":
        compile_blocks(module.model.layers)
    model = ReplicatedModel(module, dtype, CPU, replicas)
    initialize_parameters(model.parameters, shape, 0, CPU)
    return model


def backward(model: ReplicatedModel, seeds: Iterable[int]) -> None:
    seeds = list(seeds)
    for seed in seeds:
        model.next_backward(is_last=seed == seeds[-1])
        tokens = torch.randint(TINY_SHAPE.vocab_size, (2, 9), generator=torch.Generator().manual_seed(seed))
        loss, *_ = model.module(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
    model.finish_gradients()


def check(shape: LlamaShape, dtype: torch.dtype, lever: str) -> None:
    rank, ranks, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert world is not None
    among_all = make_model(shape, dtype, lever, world)
    alone = make_model(shape, dtype, lever, OneDevice())  # type: ignore[arg-type]
    for step in range(2):
        first = step * ranks * MICRO_BATCHES
        backward(among_all, range(first + rank * MICRO_BATCHES, first + (rank + 1) * MICRO_BATCHES))
        backward(alone, range(first, first + ranks * MICRO_BATCHES))
        for (name, one), other in zip(alone.parameters.items(), among_all.parameters.values(), strict=True):
            assert one.grad is not None and other.grad is not None
            assert torch.allclose(other.grad, one.grad, rtol=1e-5, atol=1e-6), f"{name}, {shape}, {dtype}, {lever}"
            one.grad = other.grad = None


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    tied = replace(TINY_SHAPE, tie_word_embeddings=True)
    with torch.compiler.set_stance(force_backend="aot_eager"):
        for bucket_bytes in (1, gradient_buckets.BUCKET_BYTES):
            gradient_buckets.BUCKET_BYTES = bucket_bytes
            for dtype in (torch.float32, torch.bfloat16):
                check(TINY_SHAPE, dtype, "none")
                check(tied, dtype, "none")
                check(tied, dtype, "checkpointed")
        check(tied, torch.bfloat16, "compiled")
    if dist.get_rank() == 0:
        print("the same everywhere", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_as_program(main)
