"""The Llama family as pure data: a table of named dimensions, and the settings that override them.

`resolve_shape` overrides a row of `VARIANTS` with the flags of `ModelConfig` and checks that the result can be built.
The model, checkpoints and exports all read the same `LlamaShape`.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any

from pretraining.config.training import ModelConfig
from pretraining.config.values import did_you_mean
from pretraining.errors import ConfigError


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies to a longer context, as in the code released with Llama 3.1.

    Wavelengths above original context / low_freq_factor become `factor` times as long. Wavelengths below original
    context / high_freq_factor stay. A linear blend connects both. The original context is in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LlamaShape:
    """The dimensions of a Llama, under their Hugging Face names.

    Attributes:
        hidden_size: D, width of the residual stream.
        intermediate_size: F, width of the feed-forward layer.
        num_hidden_layers: L, number of blocks.
        num_attention_heads: H, query heads.
        num_key_value_heads: K, divides H.
        head_dim: E = D / H; even, because rotary embeddings rotate pairs.
        vocab_size: V, rows of the embedding.
        max_position_embeddings: context length of the variant, which training sequences may exceed.
        rope_theta: base of the rotary frequencies.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope_scaling: RopeScaling | None = None


def _shape(
    hidden: int, heads: int, kv_heads: int, layers: int, feed_forward: int, context: int, theta: float, vocab: int
) -> LlamaShape:
    return LlamaShape(hidden, feed_forward, layers, heads, kv_heads, hidden // heads, vocab, context, theta)


def _llama32(hidden: int, heads: int, layers: int) -> LlamaShape:
    """Return a small Llama 3.2: tied embeddings, and a context of 131072 tokens scaled from 8192."""
    shape = _shape(hidden, heads, 8, layers, 8192, 131072, 5e5, 128256)
    return replace(shape, tie_word_embeddings=True, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192))


def _research(hidden: int, heads: int, layers: int) -> LlamaShape:
    """Return a shape for experiments: no grouped queries, feed-forward 8/3 of the width, rounded up to 256."""
    feed_forward = -(-hidden * 8 // (3 * 256)) * 256
    return _shape(hidden, heads, heads, layers, feed_forward, 2048, 1e4, 32000)


VARIANTS: dict[str, LlamaShape] = {
    #                      hidden heads kv layers  feed-f. context theta  vocab
    "7b": _shape(4096, 32, 32, 32, 11008, 4096, 1e4, 32000),
    "13b": _shape(5120, 40, 40, 40, 13824, 4096, 1e4, 32000),
    "34b": _shape(8192, 64, 8, 48, 22016, 16384, 1e6, 32000),
    "70b": _shape(8192, 64, 8, 80, 28672, 4096, 1e4, 32000),
    "llama2_1.4b": _shape(2048, 16, 4, 24, 6144, 4096, 1e4, 32000),
    "llama3_194m": _shape(1024, 8, 8, 10, 2816, 8192, 5e5, 128256),
    "llama3_1.8b": _shape(2048, 16, 8, 24, 7168, 8192, 5e5, 128256),
    "llama3_3.2b": _shape(3072, 24, 8, 24, 8192, 8192, 5e5, 128256),
    "llama3_8b": _shape(4096, 32, 8, 32, 14336, 8192, 5e5, 128256),
    "llama3_70b": _shape(8192, 64, 8, 80, 28672, 8192, 5e5, 128256),
    "llama3.2_1b": _llama32(2048, 32, 16),
    "llama3.2_3b": _llama32(3072, 24, 28),
    "tiny": _research(256, 4, 6),
    "small": _research(256, 4, 4),
    "medium": _research(768, 12, 12),
    "large": _research(1024, 16, 24),
    "125m": _research(768, 12, 12),
    "350m": _research(1024, 16, 24),
    "760m": _research(1536, 16, 24),
    "1b": _research(2048, 16, 24),
    "demo": _shape(192, 4, 4, 4, 512, 2048, 1e4, 4096),  # for the recipe demo
}


DEFAULT_VARIANT = "7b"
VOCABULARY_MULTIPLE = 128

LARGEST_SIZES = {
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 4096,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "vocab_size": 2**31,
    "max_position_embeddings": 2**40,
}
"""Limits far beyond any trained model: larger sizes are mistakes, and could take forever to build."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


def resolve_shape(model: ModelConfig) -> LlamaShape:
    """Return the named variant with the given dimensions in place of its own.

    Raises:
        ConfigError: the variant is unknown, or dimensions do not fit each other; every problem.
    """
    name = DEFAULT_VARIANT if model.model_variant is None else model.model_variant
    variant = VARIANTS.get(name.lower())
    if variant is None:
        hint = did_you_mean(name, VARIANTS, "did you mean {}? ")
        raise ConfigError(f"--model_variant={name} is not known: {hint}Give one of {', '.join(VARIANTS)}")

    others = ("model_variant", "rope_scaling")
    given = {name: value for name, value in vars(model).items() if value is not None and name not in others}
    shape = replace(variant, **given)
    if beyond := list(size_problems(shape)):
        raise ConfigError(beyond)
    # A variant without grouped queries keeps one key/value head per query head.
    if variant.num_key_value_heads == variant.num_attention_heads and model.num_key_value_heads is None:
        shape = replace(shape, num_key_value_heads=shape.num_attention_heads)
    if problems := [*_head_problems(shape), *_scaling_problems(model.rope_scaling)]:
        raise ConfigError(problems)
    scaling = variant.rope_scaling
    if model.rope_scaling:
        factor, low, high, context = model.rope_scaling
        scaling = None if factor == 1 else RopeScaling(factor, low, high, int(context))  # 1 = no scaling
    return replace(shape, head_dim=shape.hidden_size // shape.num_attention_heads, rope_scaling=scaling)


def size_problems(shape: LlamaShape) -> Iterator[str]:
    """Yield the impossible dimensions of an untrusted shape; check before use."""
    for name, largest in LARGEST_SIZES.items():
        size = getattr(shape, name)
        if type(size) is not int or not 1 <= size <= largest:
            yield f"{name}={shown(size)} is out of range: give a whole number from 1 to {largest:,}"
    scaling = {} if shape.rope_scaling is None else vars(shape.rope_scaling)
    for name, value in {"rms_norm_eps": shape.rms_norm_eps, "rope_theta": shape.rope_theta, **scaling}.items():
        smallest = 1 if name == "rope_theta" else 0
        if not is_number(value) or value < smallest:
            yield f"{name}={shown(value)} is out of range: give a finite number, at least {smallest}"
    tied: object = shape.tie_word_embeddings
    if type(tied) is not bool:
        yield f"tie_word_embeddings={shown(tied)} is neither true nor false"


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number in the range of floats."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def shown(value: Any) -> str:
    """Return the beginning of an untrusted value of any size, as one line for messages."""
    try:
        return " ".join(_SHORT.repr(value).split())
    except ValueError:  # Python refuses to print numbers of more than 4300 digits
        return "a huge number"


def model_settings(shape: LlamaShape) -> ModelConfig:
    """Return settings that `resolve_shape` turns into this shape, with every dimension given.

    They name the matching variant, if any; vocabulary, context and tying may differ from the variant's.
    """
    names = [name for name, variant in VARIANTS.items() if _is_alike(variant, shape)]
    scaling = shape.rope_scaling
    return ModelConfig(
        model_variant=names[0] if names else None,
        rope_scaling=() if scaling is None else tuple(float(value) for value in astuple(scaling)),
        **{field: value for field, value in vars(shape).items() if field not in ("head_dim", "rope_scaling")},
    )


def name_of_model(model: ModelConfig) -> str:
    """Return the name of the matching variant, or "llama"; vocabulary, context and tying may differ."""
    shape = resolve_shape(model)
    given = (model.model_variant or DEFAULT_VARIANT).lower()
    alike = [name for name, variant in VARIANTS.items() if _is_alike(variant, shape)]
    return given if given in alike else (alike or ["llama"])[0]


_SAME_VARIANT = ("vocab_size", "max_position_embeddings", "tie_word_embeddings")


def _is_alike(variant: LlamaShape, shape: LlamaShape) -> bool:
    return replace(variant, **{field: getattr(shape, field) for field in _SAME_VARIANT}) == shape


def rounded_vocabulary(entries: int) -> int:
    """Return an embedding size for a tokenizer: a multiple of 128, which makes matrix products faster."""
    return -(-entries // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def parameter_count(shape: LlamaShape) -> int:
    """Return the number of trained parameters.

    Besides the blocks: the embedding (V x D), the last norm (D) and, unless tied, the head (V x D).
    """
    width = shape.hidden_size
    matrices_of_vocabulary = 1 if shape.tie_word_embeddings else 2
    blocks = shape.num_hidden_layers * block_parameters(shape)
    return blocks + matrices_of_vocabulary * shape.vocab_size * width + width


def block_parameters(shape: LlamaShape) -> int:
    """Return the parameters of a block: q, o (D x HE each), k, v (D x KE), gate, up, down (D x F), two norms (D)."""
    width = shape.hidden_size
    heads_width = (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
    return 2 * width * heads_width + 3 * width * shape.intermediate_size + 2 * width


def _scaling_problems(values: tuple[float, ...]) -> Iterator[str]:
    factor, low, high, context = values if len(values) == 4 else (0.0, 0.0, 0.0, 0.0)
    is_context = 1 <= context <= LARGEST_SIZES["max_position_embeddings"] and context == int(context)
    if values and not (1 <= factor < math.inf and 0 < low < high < math.inf and is_context):
        yield (
            f"--rope_scaling={','.join(f'{value:g}' for value in values)}: give four numbers, as in 32,1,4,8192: a "
            "factor of 1 or more, 0 < low_freq_factor < high_freq_factor, and the tokens of the original context"
        )


def _head_problems(shape: LlamaShape) -> Iterator[str]:
    hidden, heads, kv_heads = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads
    if hidden % (2 * heads):
        yield (
            f"hidden_size={hidden} / num_attention_heads={heads} = {hidden / heads:.2f} must be an even number. "
            f"Change --hidden_size (a multiple of {2 * heads}) or --num_attention_heads"
        )
    if heads % kv_heads:
        yield (
            f"num_attention_heads={heads} / num_key_value_heads={kv_heads} = {heads / kv_heads:.2f} must be a whole "
            "number. Change --num_attention_heads or --num_key_value_heads (a divisor of it)"
        )
