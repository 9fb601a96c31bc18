"""The model gives the results of Hugging Face's Llama, from the same weights under the same names."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_shape import TINY_SHAPE
from torch import Tensor

from pretraining.config.variants import VARIANTS, LlamaShape, RopeScaling
from pretraining.model.hf import config_document
from pretraining.model.init import initialize_weights
from pretraining.model.llama import Llama
from pretraining.model.rope import compute_rotation, rotate

WIDE = replace(TINY_SHAPE, hidden_size=48, intermediate_size=112, vocab_size=97, max_position_embeddings=256)
SHAPE = replace(WIDE, num_attention_heads=4, num_key_value_heads=4, head_dim=12)
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
SHAPES = {
    "multi_head": SHAPE,
    "all_at_once": replace(
        SHAPE, num_key_value_heads=2, tie_word_embeddings=True, rope_theta=5e5, rope_scaling=SCALING
    ),
    "biases": replace(SHAPE, attention_bias="true", mlp_bias=True, rms_norm_eps=1e-2),
    "linear_scaling": replace(SHAPE, rope_scaling=RopeScaling(4.0, 1.0, 4.0, 1, "linear")),
    "yarn": replace(SHAPE, rope_scaling=RopeScaling(4.0, 1.0, 4.0, 32, "yarn", 1.1, 16.0, 2.0, truncate=False)),
    "mistral": replace(SHAPE, sliding_window=150, model_family="mistral"),
    "qwen2": replace(SHAPE, attention_bias="qkv", model_family="qwen2"),
    "qwen3": replace(SHAPE, head_dim=24, qk_norm="head", tie_word_embeddings=True, model_family="qwen3"),
    "olmo2": replace(SHAPE, qk_norm="whole", norm_position="post", model_family="olmo2"),
    "smollm3": replace(SHAPE, no_rope_interval=2, tie_word_embeddings=True, model_family="smollm3"),
    "granite": replace(
        SHAPE,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.1,
        logits_scaling=8.0,
        model_family="granite",
    ),
    "other_dimensions": replace(
        SHAPE, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=32, rms_norm_eps=1e-2
    ),
}


def twins(shape: LlamaShape) -> tuple[Any, Llama]:
    """Hugging Face's model and ours with equal weights, large enough that a wrong one shows in the logits."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        **config_document(shape, "float32", 0, None, None) | {"use_cache": False}
    )
    theirs, ours = transformers.AutoModelForCausalLM.from_config(config), Llama(shape)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def draw_tokens(shape: LlamaShape, batch: int, length: int) -> Tensor:
    return torch.randint(shape.vocab_size, (batch, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_loss_and_gradients_equal_hugging_face(shape: LlamaShape) -> None:
    theirs, ours = twins(shape)
    tokens = draw_tokens(shape, batch=2, length=150)  # longer than the original context of the scaling
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=0)

    loss_sum, valid_count, *_ = ours(tokens[:, :-1], tokens[:, 1:])
    loss = loss_sum / valid_count
    loss.backward()
    expected = theirs(tokens, labels=tokens).loss  # shifts the labels itself
    expected.backward()

    assert valid_count == 2 * 149
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, atol=1e-5, rtol=1e-4)


def test_positions_equal_hugging_face() -> None:
    theirs, ours = twins(SHAPE)
    tokens = draw_tokens(SHAPE, batch=2, length=12)
    positions = torch.stack((torch.arange(12), torch.cat((torch.arange(5), torch.arange(7)))))
    # Given an explicit mask, Hugging Face leaves attention causal over the whole sequence, like ours.
    causal = torch.full((12, 12), float("-inf")).triu(1).expand(2, 1, 12, 12)
    expected = theirs(tokens, position_ids=positions, attention_mask=causal).logits
    torch.testing.assert_close(ours(tokens, positions_BS=positions), expected, atol=1e-5, rtol=0)


def test_bfloat16_parameters_leave_rotation_and_loss_in_float32() -> None:
    shape, rotations = SHAPES["all_at_once"], []
    exact = Llama(shape)
    initialize_weights(exact, shape, 0, torch.device("cpu"))
    model = copy.deepcopy(exact).to(torch.bfloat16)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, arguments: rotations.append(arguments[1]))
    tokens = draw_tokens(shape, batch=2, length=33)
    loss_sum, *_ = model(tokens[:, :-1], tokens[:, 1:])
    loss_sum.backward()
    rotation = compute_rotation(shape, torch.arange(32)[None])
    assert len(rotations) == 2 and {each.dtype for each in rotation} == {torch.float32}
    for of_block in rotations:
        torch.testing.assert_close(of_block, rotation, rtol=0, atol=0)
    assert loss_sum.dtype == torch.float32 and model(tokens).dtype == torch.bfloat16
    expected, *_ = exact(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss_sum, expected, rtol=2e-3, atol=0)


LLAMA3_8B = VARIANTS["llama3_8b"]


@pytest.mark.parametrize("position", [255, 257, 4095, 131071])
def test_bfloat16_inputs_turn_by_the_exact_angle(position: int) -> None:
    """Rounded to bfloat16, these positions would rotate fast pairs by a random angle."""
    x = torch.randn(1, 1, 2, LLAMA3_8B.head_dim).bfloat16()
    rotation = compute_rotation(LLAMA3_8B, torch.tensor([[position]]))
    turned = rotate(x, rotation)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), rotation).bfloat16())
    assert rotation[0].flatten()[0].item() == pytest.approx(math.cos(position), abs=1e-6)


def test_norms_take_their_mean_in_float32() -> None:
    """A bfloat16 sum of 4096 nines would stop growing at 2304, and the result would be off by a third."""
    norm = Llama(replace(SHAPE, hidden_size=4096, num_hidden_layers=0)).model.norm.to(torch.bfloat16)
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    assert torch.equal(norm(x), torch.ones_like(x))


def test_nothing_but_parameters_is_state() -> None:
    """So `to_empty` loses only parameters, and checkpoints miss nothing."""
    assert not list(Llama(SHAPES["all_at_once"]).buffers())
