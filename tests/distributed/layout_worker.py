"""One rank of test_layouts.py: initial weights, and bytes of the state after a real step, for each list of flags."""

from __future__ import annotations

import json
import sys
from dataclasses import astuple

import torch
from torch.distributed.tensor import DTensor

from pretraining.config.read import load_train_config
from pretraining.config.variants import LlamaShape, resolve_shape
from pretraining.distributed.grad_norm import local_gradients, local_part
from pretraining.distributed.parallelize import ParallelModel
from pretraining.distributed.processes import gather_from_every_rank, join_processes
from pretraining.estimate.memory import Rank, estimate_memory
from pretraining.launch.layout import resolve_layout
from pretraining.launch.program import run_as_program
from pretraining.model.init import initialize_parameters, initialize_weights
from pretraining.model.llama import Llama
from pretraining.optim.optimizer import update
from pretraining.optim.registry import build_optimizer
from pretraining.train.build import build_model
from pretraining.train.opening import build_run_dims

# Rows that two or three devices do not share evenly, and some of which the fourth has none.
FLAGS = (
    *("use_dummy_dataset=true", "model_variant=tiny", "hidden_size=10", "intermediate_size=37", "num_hidden_layers=2"),
    *("num_attention_heads=5", "num_key_value_heads=1", "vocab_size=65", "seq_length=16"),
)


def starts_like_a_plain_model(model: ParallelModel, shape: LlamaShape, seed: int) -> bool:
    plain = Llama(shape)
    initialize_weights(plain, shape, seed, torch.device("cpu"))
    expected = dict(plain.named_parameters())
    found = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in model.parameters.items()}
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def main() -> None:
    torch.set_num_threads(1)
    with join_processes(resolve_layout()) as processes:
        for flags in json.loads(sys.argv[1]):
            config = load_train_config([*FLAGS, *flags])
            shape, dims = resolve_shape(config.model), build_run_dims(config, processes)
            model = build_model(shape, config, dims, processes.device)
            initialize_parameters(model.parameters, shape, config.run.seed, processes.device)
            is_same = starts_like_a_plain_model(model, shape, config.run.seed)
            optimizer = build_optimizer(model.parameters, config.optimizer)
            tokens = torch.zeros(2, 16, dtype=torch.int64)
            model.next_backward(is_last=True)
            model.module(tokens, tokens).objective_sum.backward()
            model.finish_gradients()
            gradients = sum(each.nbytes for each in local_gradients(model.parameters.values()))
            update(optimizer, torch.tensor(False))
            kept = [local_part(value) for state in optimizer.state.values() for value in state.values()]
            sizes = (
                sum(local_part(each).nbytes for each in model.parameters.values()),
                gradients,
                sum(each.nbytes for each in kept if each.dim() > 0),
            )
            of_ranks = gather_from_every_rank(lambda found=(is_same, *sizes): found)  # type: ignore[misc]
            estimate = estimate_memory(config, shape, Rank(dims.shard, 4, "cpu"))
            if processes.is_main:
                same, *fullest = (list(column) for column in zip(*of_ranks, strict=True))
                measured = [max(each) for each in fullest]
                print(json.dumps({"same": all(same), "measured": measured, "estimated": astuple(estimate)[:3]}))


if __name__ == "__main__":
    run_as_program(main)
