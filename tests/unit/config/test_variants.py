"""Model variants: published dimensions, and how settings override them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pretraining.config.training import ModelConfig
from pretraining.config.variants import VARIANTS, RopeScaling, name_of_model, resolve_shape, size_problems
from pretraining.errors import ConfigError
from pretraining.estimate.costs import parameter_count

# variant: hidden, heads, kv heads, layers, feed-forward, context, theta, vocabulary, parameters in units of 10^7
PUBLISHED = {
    "7b": (4096, 32, 32, 32, 11008, 4096, 1e4, 32000, 674),
    "13b": (5120, 40, 40, 40, 13824, 4096, 1e4, 32000, 1302),
    "34b": (8192, 64, 8, 48, 22016, 16384, 1e6, 32000, 3374),
    "70b": (8192, 64, 8, 80, 28672, 4096, 1e4, 32000, 6898),
    "llama2_1.4b": (2048, 16, 4, 24, 6144, 4096, 1e4, 32000, 129),
    "llama3_194m": (1024, 8, 8, 10, 2816, 8192, 5e5, 128256, 39),
    "llama3_1.8b": (2048, 16, 8, 24, 7168, 8192, 5e5, 128256, 188),
    "llama3_3.2b": (3072, 24, 8, 24, 8192, 8192, 5e5, 128256, 320),
    "llama3_8b": (4096, 32, 8, 32, 14336, 8192, 5e5, 128256, 803),
    "llama3_70b": (8192, 64, 8, 80, 28672, 8192, 5e5, 128256, 7055),
    "llama3.2_1b": (2048, 32, 8, 16, 8192, 131072, 5e5, 128256, 124),
    "llama3.2_3b": (3072, 24, 8, 28, 8192, 131072, 5e5, 128256, 321),
    "qwen3_0.6b": (1024, 16, 8, 28, 3072, 32768, 1e6, 151936, 60),
    "qwen3_1.7b": (2048, 16, 8, 28, 6144, 32768, 1e6, 151936, 172),
    "qwen3_4b": (2560, 32, 8, 36, 9728, 32768, 1e6, 151936, 402),
    "qwen3_8b": (4096, 32, 8, 36, 12288, 32768, 1e6, 151936, 819),
    "mistral_7b": (4096, 32, 8, 32, 14336, 32768, 1e6, 32768, 725),
    "olmo2_1b": (2048, 16, 16, 16, 8192, 4096, 5e5, 100352, 148),
    "olmo2_7b": (4096, 32, 32, 32, 11008, 4096, 5e5, 100352, 730),
    "smollm2_135m": (576, 9, 3, 30, 1536, 8192, 1e5, 49152, 13),
    "smollm2_360m": (960, 15, 5, 32, 2560, 8192, 1e5, 49152, 36),
    "smollm2_1.7b": (2048, 32, 32, 24, 8192, 8192, 1.3e5, 49152, 171),
    "smollm3_3b": (2048, 16, 4, 36, 11008, 65536, 5e6, 128256, 308),
    "granite3_2b": (2048, 32, 8, 40, 8192, 4096, 1e4, 49155, 253),
    "granite3_8b": (4096, 32, 8, 40, 12800, 4096, 1e4, 49155, 817),
    "tiny": (256, 4, 4, 6, 768, 2048, 1e4, 32000, 2),
    "small": (256, 4, 4, 4, 768, 2048, 1e4, 32000, 2),
    "medium": (768, 12, 12, 12, 2048, 2048, 1e4, 32000, 13),
    "large": (1024, 16, 16, 24, 2816, 2048, 1e4, 32000, 37),
    "125m": (768, 12, 12, 12, 2048, 2048, 1e4, 32000, 13),
    "350m": (1024, 16, 16, 24, 2816, 2048, 1e4, 32000, 37),
    "760m": (1536, 16, 16, 24, 4096, 2048, 1e4, 32000, 78),
    "1b": (2048, 16, 16, 24, 5632, 2048, 1e4, 32000, 136),
    "demo": (192, 4, 4, 4, 512, 2048, 1e4, 4096, 0),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_its_published_dimensions_and_parameters(name: str) -> None:
    shape = VARIANTS[name]
    dimensions = (
        *(shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads, shape.num_hidden_layers),
        *(shape.intermediate_size, shape.max_position_embeddings, shape.rope_theta, shape.vocab_size),
    )
    assert dimensions == PUBLISHED[name][:-1]
    assert round(parameter_count(shape) / 1e7) == PUBLISHED[name][-1]


STRETCHED = RopeScaling(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (ModelConfig(), {"hidden_size": 4096, "rope_scaling": None}),
        (ModelConfig(model_variant="Llama3.2_1B"), {"tie_word_embeddings": True, "rope_scaling": STRETCHED}),
        (ModelConfig(model_variant="llama3.2_1b", rope_scaling=("1", "1", "4", "8192")), {"rope_scaling": None}),
        (
            ModelConfig(model_variant="tiny", rope_scaling=("8", "1", "4", "8192")),
            {"rope_scaling": RopeScaling(8, 1, 4, 8192)},
        ),
        (ModelConfig(model_variant="tiny", num_attention_heads=8), {"num_key_value_heads": 8}),
        (ModelConfig(model_variant="llama3_8b", num_attention_heads=16), {"num_key_value_heads": 8}),
        (ModelConfig(model_variant="tiny", hidden_size=36, head_dim=64), {"head_dim": 64, "query_width": 256}),
        (ModelConfig(model_variant="qwen3_0.6b", hidden_size=512), {"head_dim": 128, "qk_norm": "head"}),
        (ModelConfig(rope_scaling=("linear:4",)), {"rope_scaling": RopeScaling(4, 1, 4, 1, "linear")}),
        (ModelConfig(rope_scaling=("linear:1",)), {"rope_scaling": None}),
        (ModelConfig(sliding_window=0), {"sliding_window": None}),
    ],
)
def test_dimensions_that_are_not_given_are_the_variants_or_derived(
    model: ModelConfig, values: dict[str, object]
) -> None:
    shape = resolve_shape(model)
    assert {name: getattr(shape, name) for name in values} == values


SCALINGS = """
    8 0.5,1,4,8e3 8,4,4,8e3 8,0,4,8e3 8,1,4,0.5 inf,1,4,8e3 linear:0.5 linear:4,8192 linear:4,truncate=false yarn:4
    yarn:4,8192,mscale=1 yarn:4,8192,beta_fast=1 yarn:nan,8192 dynamic:4
"""


@pytest.mark.parametrize(
    ("model", "problems"),
    [
        (ModelConfig(model_variant="llama3_8"), ["did you mean llama3_8b?"]),
        (
            ModelConfig(model_variant="7b", num_attention_heads=30, num_key_value_heads=7),
            ["4096 / num_attention_heads=30 = 136.53", "30 / num_key_value_heads=7 = 4.29"],
        ),
        (ModelConfig(model_variant="tiny", hidden_size=36), ["head_dim=9 must be even"]),
        *((ModelConfig(rope_scaling=tuple(scaling.split(","))), ["--rope_scaling="]) for scaling in SCALINGS.split()),
    ],
)
def test_an_impossible_model_is_refused_with_the_arithmetic(model: ModelConfig, problems: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_shape(model)
    assert len(error.value.problems) == len(problems) and all(part in str(error.value) for part in problems)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"vocab_size": None}, "vocab_size=None: a value is needed"),
        ({"logits_scaling": 0.0}, "logits_scaling=0.0: it must be above 0"),
        ({"qk_norm": "x" * 10**6}, "qk_norm='xxx"),
        ({"block": "my_blocks"}, "block='my_blocks' is not of the form"),
        ({"rope_scaling": replace(STRETCHED, factor=10**400)}, "factor=10000"),
        ({"sliding_window": None, "attention_multiplier": None, "block": "a.b:C", "rope_scaling": STRETCHED}, None),
    ],
)
def test_an_untrusted_shape_is_checked_by_the_limits_of_the_settings(
    changed: dict[str, Any], problem: str | None
) -> None:
    problems = list(size_problems(replace(VARIANTS["tiny"], **changed)))
    assert len(problems) == (problem is not None) and "".join(problems).startswith(problem or "")
    assert len("".join(problems)) < 1000


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (ModelConfig(), "7b"),
        (ModelConfig(model_variant="125M", vocab_size=50257, max_position_embeddings=4096), "125m"),
        (ModelConfig(model_variant="medium", tie_word_embeddings=True), "medium"),
        (ModelConfig(num_hidden_layers=4), "llama"),
        (ModelConfig(model_variant="llama3.2_1b", rope_scaling=("1", "1", "4", "8192")), "llama"),
        (ModelConfig(None, 5120, 13824, 40, 40, vocab_size=99), "13b"),
    ],
)
def test_a_model_is_named_after_its_shape(model: ModelConfig, name: str) -> None:
    assert name_of_model(model) == name
