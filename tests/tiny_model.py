"""A tiny model as a run lays it out on one process, and what a backward pass finds."""

from __future__ import annotations

import torch
from torch import Tensor
from training_runs import TINY, VOCABULARY

from pretraining.config.read import load_train_config
from pretraining.config.training import ParallelConfig
from pretraining.config.variants import resolve_shape
from pretraining.distributed.dims import Dims, build_dims
from pretraining.distributed.parallelize import ParallelModel
from pretraining.distributed.processes import Processes
from pretraining.model.init import initialize_parameters, parameter_name
from pretraining.train.build import build_model


def single_dims(parallel: ParallelConfig = ParallelConfig()) -> Dims:  # noqa: B008  # frozen
    return build_dims(parallel, Processes(0, 1, 0, 1, torch.device("cpu")))


def model_with(*flags: str) -> ParallelModel:
    config = load_train_config([*TINY, "use_dummy_dataset=true", *flags])
    shape, device = resolve_shape(config.model), torch.device("cpu")
    model = build_model(shape, config, single_dims(config.parallel), device)
    initialize_parameters(model.parameters, shape, config.run.seed, device)
    return model


def loss_and_gradients(model: ParallelModel, seed: int = 0) -> dict[str, Tensor]:
    """Of a batch with positions of its own, as documents in rows have them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (2, 33), generator=generator)
    positions = torch.randint(32, (2, 32), generator=generator)
    for parameter in model.parameters.values():
        parameter.grad = None
    loss, *_ = model.module(tokens[:, :-1], tokens[:, 1:], positions)
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.parameters.items():
        assert parameter.grad is not None
        found[parameter_name(name)] = parameter.grad
    return found
