"""Initial weights are a function of the seed and the parameter's name."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny_shape import TINY_SHAPE
from torch import Tensor, nn

from pretraining.config.variants import LlamaShape
from pretraining.model.init import initial_values, initialize_weights, parameter_name, stream_seed
from pretraining.model.llama import Llama

CPU = torch.device("cpu")
GOLDEN_SEED = 4713062163890586102
GOLDEN_VALUES = [0.02617712, -0.03312612, -0.01798517, -0.02941476]
WIDE = replace(TINY_SHAPE, hidden_size=128, intermediate_size=320, head_dim=32, vocab_size=384)
SHAPE = replace(WIDE, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)


def initial_weights(shape: LlamaShape = SHAPE, seed: int = 0) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Llama(shape)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # uninitialised memory may hold this
    initialize_weights(model, shape, seed, CPU)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is shape.tie_word_embeddings
    return dict(model.named_parameters())


def test_the_same_seed_gives_the_same_bits_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    first = initial_weights()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = initial_weights()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    others = [*second.values(), *initial_weights(seed=1).values()]
    matrices = {tuple(tensor.flatten()[:8].tolist()) for tensor in others if tensor.dim() == 2}
    assert len(matrices) == sum(tensor.dim() == 2 for tensor in others)  # by name and by seed


@pytest.mark.parametrize(("layers", "tied"), [(1, True), (3, False)])
def test_initial_weights_have_the_deviations_of_the_table(layers: int, tied: bool) -> None:
    shape = replace(SHAPE, num_hidden_layers=layers, tie_word_embeddings=tied)
    for name, tensor in initial_weights(shape).items():
        if name.endswith("norm.weight"):
            assert torch.equal(tensor, torch.ones(shape.hidden_size))
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = 0.02 / math.sqrt(2 * layers) if residual else 0.02
        # The standard error of n normal numbers' deviation is std / sqrt(2n), that of their mean std / sqrt(n).
        count = tensor.numel()
        assert tensor.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * count)), name
        assert abs(tensor.mean().item()) < 5 * expected / math.sqrt(count), name


def test_no_release_changes_the_weights_of_a_seed() -> None:
    """On a CPU, up to the rounding of its cosine and logarithm."""
    assert stream_seed(2023, "model.norm.weight") == GOLDEN_SEED
    values = initial_values("lm_head.weight", torch.Size((4, 8)), SHAPE, 2023, CPU)
    torch.testing.assert_close(values[0, :4], torch.tensor(GOLDEN_VALUES), rtol=1e-4, atol=1e-7)


def test_checkpoint_and_compile_wrappers_do_not_change_the_values() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Llama(SHAPE)
    model.model.layers = nn.ModuleList(torch.compile(checkpoint_wrapper(block)) for block in model.blocks)  # type: ignore[misc]
    names = [name for name, _ in model.named_parameters()]
    assert "model.layers.0._orig_mod._checkpoint_wrapped_module.self_attn.q_proj.weight" in names
    initialize_weights(model, SHAPE, 0, CPU)
    expected = initial_weights()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[parameter_name(name)])
