from __future__ import annotations

from dataclasses import replace

import torch
from tiny_shape import TINY_SHAPE
from torch import nn

from pretraining.config.training import OptimizerConfig
from pretraining.model.init import initialize_weights
from pretraining.model.llama import Llama
from pretraining.optim.optimizer import (
    build_adamw,
    materialise_state,
    parameter_groups,
    set_learning_rate,
    skip_update_if,
)


def tiny_llama(tied: bool) -> Llama:
    shape = replace(TINY_SHAPE, tie_word_embeddings=tied)
    model = Llama(shape)
    initialize_weights(model, shape, 0, torch.device("cpu"))
    return model


def names_in(model: nn.Module, group: dict) -> set[str]:
    members = {id(parameter) for parameter in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in members}


def test_matrices_decay_and_norms_and_embeddings_do_not() -> None:
    model = tiny_llama(tied=False)
    decaying, fixed = parameter_groups(model, 0.1)
    assert decaying["weight_decay"] == 0.1 and fixed["weight_decay"] == 0.0
    kept = {name for name, _ in model.named_parameters() if name.endswith("norm.weight")} | {
        "model.embed_tokens.weight"
    }
    assert names_in(model, fixed) == kept
    assert "lm_head.weight" in names_in(model, decaying)
    assert len(names_in(model, decaying)) == 2 * 7 + 1


def test_a_tied_head_counts_as_the_embedding() -> None:
    model = tiny_llama(tied=True)
    decaying, fixed = parameter_groups(model, 0.1)
    assert "model.embed_tokens.weight" in names_in(model, fixed)
    assert not any("embed" in name or "lm_head" in name for name in names_in(model, decaying))


def test_a_model_without_matrices_has_one_group() -> None:
    assert len(parameter_groups(nn.LayerNorm(4), 0.1)) == 1


def backward(model: Llama) -> None:
    tokens = torch.arange(8).reshape(1, 8)
    loss, _, _ = model(tokens, tokens)
    loss.backward()


def snapshot(model: Llama, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [parameter.detach().clone() for parameter in model.parameters()]
    return tensors + [value.clone() for state in optimizer.state.values() for value in state.values()]


def test_a_skipped_update_leaves_parameters_moments_and_step_untouched() -> None:
    model = tiny_llama(tied=False)
    optimizer = build_adamw(model, OptimizerConfig(learning_rate=0.1))
    backward(model)
    optimizer.step()
    before = snapshot(model, optimizer)
    next(model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]

    skip_update_if(optimizer, torch.tensor(True))
    optimizer.step()
    assert all(torch.equal(was, now) for was, now in zip(before, snapshot(model, optimizer), strict=True))

    backward_again = torch.tensor(False)
    optimizer.zero_grad()
    backward(model)
    skip_update_if(optimizer, backward_again)
    optimizer.step()
    assert not all(torch.equal(was, now) for was, now in zip(before, snapshot(model, optimizer), strict=True))


def test_materialised_state_is_that_of_an_optimizer_that_has_not_stepped() -> None:
    model = tiny_llama(tied=True)
    values = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = build_adamw(model, OptimizerConfig(learning_rate=0.1))
    materialise_state(optimizer)
    assert all(torch.equal(was, now) for was, now in zip(values, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    states = list(optimizer.state.values())
    assert len(states) == len(values)
    assert all(
        float(state["step"]) == 0 and not state["exp_avg"].any() and not state["exp_avg_sq"].any() for state in states
    )


def test_the_learning_rate_reaches_every_group() -> None:
    optimizer = build_adamw(tiny_llama(tied=False), OptimizerConfig())
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
