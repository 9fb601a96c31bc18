"""Model variants: the published dimensions, and what may be changed about them."""

from __future__ import annotations

import pytest

from pretraining.config.training import ModelConfig
from pretraining.config.variants import VARIANTS, LlamaShape, RopeScaling, name_of_model, parameter_count, resolve_shape
from pretraining.errors import ConfigError

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


def test_these_variants_are_there() -> None:
    assert list(VARIANTS) == list(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_variant_has_its_published_dimensions_and_parameters(name: str) -> None:
    shape = VARIANTS[name]
    dimensions = (
        *(shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads, shape.num_hidden_layers),
        *(shape.intermediate_size, shape.max_position_embeddings, shape.rope_theta, shape.vocab_size),
    )
    assert dimensions == PUBLISHED[name][:-1]
    assert round(parameter_count(shape) / 1e7) == PUBLISHED[name][-1]


@pytest.mark.parametrize("name", VARIANTS)
def test_heads_fill_the_width_of_every_variant(name: str) -> None:
    shape = VARIANTS[name]
    assert shape.head_dim * shape.num_attention_heads == shape.hidden_size
    assert shape.num_attention_heads % shape.num_key_value_heads == 0
    assert shape.head_dim % 2 == 0


def test_parameters_are_counted_matrix_by_matrix() -> None:
    shape = LlamaShape(8, 16, 2, 4, 2, 2, 32, 64, 1e4, 1e-5, False, None)
    attention = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8
    feed_forward = 3 * 8 * 16
    assert parameter_count(shape) == 2 * (attention + feed_forward + 2 * 8) + 2 * 32 * 8 + 8


def test_a_tied_head_has_no_parameters_of_its_own() -> None:
    tied = resolve_shape(ModelConfig(model_variant="tiny", tie_word_embeddings=True))
    assert parameter_count(VARIANTS["tiny"]) - parameter_count(tied) == 32000 * 256


@pytest.mark.parametrize("name", ["llama3.2_1b", "llama3.2_3b"])
def test_the_small_llamas_of_3_2_are_tied_and_stretched(name: str) -> None:
    assert VARIANTS[name].tie_word_embeddings
    assert VARIANTS[name].rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


def test_without_a_name_it_is_7b() -> None:
    assert resolve_shape(ModelConfig()) == VARIANTS["7b"]


def test_rotary_scaling_is_given_changed_and_taken_away() -> None:
    scaling = (8.0, 1.0, 4.0, 8192.0)
    assert resolve_shape(ModelConfig(model_variant="tiny", rope_scaling=scaling)).rope_scaling == RopeScaling(
        8, 1, 4, 8192
    )
    assert resolve_shape(ModelConfig(model_variant="llama3.2_1b")).rope_scaling is not None
    assert (
        resolve_shape(ModelConfig(model_variant="llama3.2_1b", rope_scaling=(1.0, *scaling[1:]))).rope_scaling is None
    )


@pytest.mark.parametrize(
    ("scaling", "problem"),
    [
        ((8.0,), "--rope_scaling=8 has 1 numbers, not 4"),
        ((0.5, 1.0, 4.0, 8192.0), "the factor 0.5 would shorten the context"),
        ((8.0, 4.0, 4.0, 8192.0), "low_freq_factor 4 must be above 0 and below high_freq_factor 4"),
        ((8.0, 0.0, 4.0, 8192.0), "low_freq_factor 0 must be above 0"),
        ((8.0, 1.0, 4.0, 0.5), "original_max_position_embeddings 0.5 is no number of tokens"),
    ],
)
def test_rotary_scaling_that_makes_no_sense_is_refused(scaling: tuple[float, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolve_shape(ModelConfig(rope_scaling=scaling))


def test_a_variant_is_found_in_any_case() -> None:
    assert resolve_shape(ModelConfig(model_variant="Llama3_8B")) == VARIANTS["llama3_8b"]


def test_every_dimension_can_be_changed() -> None:
    shape = resolve_shape(
        ModelConfig(
            model_variant="llama3_8b",
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=100,
            rope_theta=77.0,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
        )
    )
    assert shape == LlamaShape(64, 96, 3, 8, 4, 8, 100, 8192, 77.0, 1e-6, True, None)


def test_without_grouped_queries_the_kv_heads_follow_the_heads() -> None:
    assert resolve_shape(ModelConfig(model_variant="tiny", num_attention_heads=8)).num_key_value_heads == 8


def test_with_grouped_queries_the_kv_heads_stay() -> None:
    assert resolve_shape(ModelConfig(model_variant="llama3_8b", num_attention_heads=16)).num_key_value_heads == 8


def test_an_unknown_variant_names_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"--model_variant=llama3_8 is not known: did you mean llama3_8b\? .*125m"):
        resolve_shape(ModelConfig(model_variant="llama3_8"))
    with pytest.raises(ConfigError, match="--model_variant=gpt is not known: Known are 7b"):
        resolve_shape(ModelConfig(model_variant="gpt"))


def test_all_heads_that_do_not_divide_are_told_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError) as error:
        resolve_shape(ModelConfig(model_variant="7b", num_attention_heads=30, num_key_value_heads=7))
    assert error.value.problems == (
        "hidden_size=4096 does not divide among num_attention_heads=30: 4096 / 30 = 136.53. "
        "Change --hidden_size (a multiple of 30) or --num_attention_heads",
        "num_attention_heads=30 does not divide among num_key_value_heads=7: 30 / 7 = 4.29. "
        "Change --num_attention_heads or --num_key_value_heads (a divisor of it)",
    )


def test_an_odd_head_cannot_be_rotated() -> None:
    with pytest.raises(ConfigError, match="36 / 4 = 9 is odd"):
        resolve_shape(ModelConfig(model_variant="tiny", hidden_size=36))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (ModelConfig(), "7b"),
        (ModelConfig(model_variant="125M", vocab_size=50257, max_position_embeddings=4096), "125m"),
        (ModelConfig(model_variant="medium", tie_word_embeddings=True), "medium"),
        (ModelConfig(num_hidden_layers=4), "7b with num_hidden_layers=4"),
        (
            ModelConfig(model_variant="7b", hidden_size=5120, num_attention_heads=40),
            "7b with hidden_size=5120, num_attention_heads=40",
        ),
        (
            ModelConfig(model_variant="llama3_8b", num_key_value_heads=4, rope_theta=1e6),
            "llama3_8b with num_key_value_heads=4, rope_theta=1e+06",
        ),
        (ModelConfig(model_variant="llama3.2_1b", rope_scaling=(1, 1, 4, 8192)), "llama3.2_1b with rope_scaling=none"),
        (
            ModelConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4),
            "llama",
        ),
        (
            ModelConfig(
                hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40, vocab_size=99
            ),
            "13b",
        ),
    ],
)
def test_a_model_is_called_what_it_is(model: ModelConfig, name: str) -> None:
    assert name_of_model(model) == name
