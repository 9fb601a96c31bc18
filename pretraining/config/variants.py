"""The Llama family as pure data: a table of named dimensions, and the settings that override them.

`resolve_shape` overrides a row of `VARIANTS` with the flags of `ModelConfig` and checks that the result can be built.
The model, checkpoints and exports all read the same `LlamaShape`.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from pretraining.config.fields import settings_of
from pretraining.config.plugins import PLUGIN_PATH, load_plugin
from pretraining.config.training import AttentionBias, ModelConfig, ModelFamily, NormPosition, QkNorm
from pretraining.config.values import did_you_mean, limit_problem
from pretraining.errors import ConfigError, Problem


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies to a longer context.

    - linear: all wavelengths become `factor` times as long (Chen et al. 2023, Position Interpolation)
    - llama3: wavelengths above original context / low_freq_factor become `factor` times as long, those below original
      context / high_freq_factor stay, and a linear blend connects both (the code released with Llama 3.1)
    - yarn: pairs with more than `beta_fast` turns in the original context stay, and those with fewer than `beta_slow`
      turns become `factor` times as slow. A blend in between is linear in the number of the pair. Cosines and sines are
      multiplied by `attention_factor` (Peng et al. 2023, YaRN)

    Attributes:
        original_max_position_embeddings: original context, in tokens.
        truncate: whether the blend of yarn begins and ends at whole pairs.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    rope_type: str = "llama3"
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LlamaShape:
    """The dimensions and switches of a model of the Llama family; the defaults of the switches are those of a Llama.

    Names are those of Hugging Face's Llama, else those of the settings.

    Attributes:
        hidden_size: D, width of the residual stream.
        intermediate_size: F, width of the feed-forward layer.
        num_hidden_layers: L, number of blocks.
        num_attention_heads: H, query heads.
        num_key_value_heads: K, divides H.
        head_dim: E, often D / H; even, because rotary embeddings rotate pairs.
        vocab_size: V, rows of the embedding.
        max_position_embeddings: context length of the variant, which training sequences may exceed.
        rope_theta: base of the rotary frequencies.
        no_rope_interval: the last of each group of this many blocks has no rotary embedding; 0 = all have it.
        attention_multiplier: factor of attention scores; None = 1 / sqrt(E).
        block: class of a user-defined block, as package.module:Class; None = the project's.
        sliding_window: tokens that attention sees; training sequences fit in it. None = all.
        model_family: row of `model.families` in whose form the model is exported.
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
    no_rope_interval: int = 0
    attention_bias: AttentionBias = "false"
    mlp_bias: bool = False
    qk_norm: QkNorm = "off"
    norm_position: NormPosition = "pre"
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_scaling: float = 1.0
    sliding_window: int | None = None
    block: str | None = None
    model_family: ModelFamily = "llama"

    def rotates(self, layer: int) -> bool:
        """Return whether a block, counted from 0, has a rotary embedding."""
        return has_rotation(self.no_rope_interval, layer)

    @property
    def query_width(self) -> int:
        """H·E."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """K·E."""
        return self.num_key_value_heads * self.head_dim


def has_rotation(no_rope_interval: int, layer: int) -> bool:
    """Return whether a block, counted from 0, has a rotary embedding."""
    return no_rope_interval == 0 or (layer + 1) % no_rope_interval > 0


NEUTRAL = {field.name: field.default for field in fields(LlamaShape) if field.default is not MISSING}
"""Values of the switches in a plain Llama, and in checkpoints of versions that did not have the switch."""
SWITCHES = tuple(name for name in NEUTRAL if name not in ("rms_norm_eps", "tie_word_embeddings", "rope_scaling"))
"""Fields that a plain Llama does not have."""
WITHOUT_WEIGHTS = ("max_position_embeddings", "sliding_window", "model_family")
"""Fields that no weight depends on: models with the same weights may differ in them."""


def _research(hidden: int, heads: int, layers: int) -> LlamaShape:
    """Return a shape for experiments: no grouped queries, feed-forward 8/3 of the width, rounded up to 256."""
    feed_forward = -(-hidden * 8 // (3 * 256)) * 256
    return LlamaShape(hidden, feed_forward, layers, heads, heads, hidden // heads, 32000, 2048, 1e4)


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_LLAMA32 = _TIED | {"rope_scaling": RopeScaling(32.0, 1.0, 4.0, 8192)}
_QWEN3: dict[str, Any] = {"rms_norm_eps": 1e-6, "qk_norm": "head", "model_family": "qwen3"}
_OLMO2: dict[str, Any] = {"rms_norm_eps": 1e-6, "qk_norm": "whole", "norm_position": "post", "model_family": "olmo2"}
_SMOLLM3 = _TIED | {"rms_norm_eps": 1e-6, "no_rope_interval": 4, "model_family": "smollm3"}
_GRANITE3 = _TIED | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "model_family": "granite"}
_GRANITE3_2B = _GRANITE3 | {"attention_multiplier": 0.015625, "logits_scaling": 8.0}
_GRANITE3_8B = _GRANITE3 | {"attention_multiplier": 0.0078125, "logits_scaling": 16.0}

VARIANTS: dict[str, LlamaShape] = {
    # hidden, feed-forward, layers, heads, key/value heads, head, vocabulary, context, theta
    "7b": LlamaShape(4096, 11008, 32, 32, 32, 128, 32000, 4096, 1e4),
    "13b": LlamaShape(5120, 13824, 40, 40, 40, 128, 32000, 4096, 1e4),
    "34b": LlamaShape(8192, 22016, 48, 64, 8, 128, 32000, 16384, 1e6),
    "70b": LlamaShape(8192, 28672, 80, 64, 8, 128, 32000, 4096, 1e4),
    "llama2_1.4b": LlamaShape(2048, 6144, 24, 16, 4, 128, 32000, 4096, 1e4),
    "llama3_194m": LlamaShape(1024, 2816, 10, 8, 8, 128, 128256, 8192, 5e5),
    "llama3_1.8b": LlamaShape(2048, 7168, 24, 16, 8, 128, 128256, 8192, 5e5),
    "llama3_3.2b": LlamaShape(3072, 8192, 24, 24, 8, 128, 128256, 8192, 5e5),
    "llama3_8b": LlamaShape(4096, 14336, 32, 32, 8, 128, 128256, 8192, 5e5),
    "llama3_70b": LlamaShape(8192, 28672, 80, 64, 8, 128, 128256, 8192, 5e5),
    "llama3.2_1b": LlamaShape(2048, 8192, 16, 32, 8, 64, 128256, 131072, 5e5, **_LLAMA32),
    "llama3.2_3b": LlamaShape(3072, 8192, 28, 24, 8, 128, 128256, 131072, 5e5, **_LLAMA32),
    "qwen3_0.6b": LlamaShape(1024, 3072, 28, 16, 8, 128, 151936, 32768, 1e6, **_QWEN3, **_TIED),
    "qwen3_1.7b": LlamaShape(2048, 6144, 28, 16, 8, 128, 151936, 32768, 1e6, **_QWEN3, **_TIED),
    "qwen3_4b": LlamaShape(2560, 9728, 36, 32, 8, 128, 151936, 32768, 1e6, **_QWEN3, **_TIED),
    "qwen3_8b": LlamaShape(4096, 12288, 36, 32, 8, 128, 151936, 32768, 1e6, **_QWEN3),
    "mistral_7b": LlamaShape(4096, 14336, 32, 32, 8, 128, 32768, 32768, 1e6, model_family="mistral"),
    "olmo2_1b": LlamaShape(2048, 8192, 16, 16, 16, 128, 100352, 4096, 5e5, **_OLMO2),
    "olmo2_7b": LlamaShape(4096, 11008, 32, 32, 32, 128, 100352, 4096, 5e5, **_OLMO2),
    "smollm2_135m": LlamaShape(576, 1536, 30, 9, 3, 64, 49152, 8192, 1e5, **_TIED),
    "smollm2_360m": LlamaShape(960, 2560, 32, 15, 5, 64, 49152, 8192, 1e5, **_TIED),
    "smollm2_1.7b": LlamaShape(2048, 8192, 24, 32, 32, 64, 49152, 8192, 1.3e5, **_TIED),
    "smollm3_3b": LlamaShape(2048, 11008, 36, 16, 4, 128, 128256, 65536, 5e6, **_SMOLLM3),
    "granite3_2b": LlamaShape(2048, 8192, 40, 32, 8, 64, 49155, 4096, 1e4, **_GRANITE3_2B),
    "granite3_8b": LlamaShape(4096, 12800, 40, 32, 8, 128, 49155, 4096, 1e4, **_GRANITE3_8B),
    "tiny": _research(256, 4, 6),
    "small": _research(256, 4, 4),
    "medium": _research(768, 12, 12),
    "large": _research(1024, 16, 24),
    "125m": _research(768, 12, 12),
    "350m": _research(1024, 16, 24),
    "760m": _research(1536, 16, 24),
    "1b": _research(2048, 16, 24),
    "demo": LlamaShape(192, 512, 4, 4, 4, 48, 4096, 2048, 1e4),  # for the recipe demo
}


DEFAULT_VARIANT = "7b"
VOCABULARY_MULTIPLE = 128

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

    given = {name: value for name, value in vars(model).items() if value is not None and name not in _NOT_TAKEN}
    if given.get("sliding_window") == 0:
        given["sliding_window"] = None
    shape = replace(variant, **given)
    if problems := list(size_problems(shape)):
        raise ConfigError(problems)
    # A variant without grouped queries keeps one key/value head per query head; heads usually share the width.
    if variant.num_key_value_heads == variant.num_attention_heads and model.num_key_value_heads is None:
        shape = replace(shape, num_key_value_heads=shape.num_attention_heads)
    shares_width = variant.query_width == variant.hidden_size and model.head_dim is None
    if shares_width:
        shape = replace(shape, head_dim=shape.hidden_size // shape.num_attention_heads)
    if misfits := list(_head_problems(shape, shares_width)):
        raise ConfigError(misfits)
    return replace(shape, rope_scaling=parse_scaling(model.rope_scaling, variant.rope_scaling))


_NOT_TAKEN = ("model_variant", "rope_scaling")


def size_problems(shape: LlamaShape) -> Iterator[str]:
    """Yield the impossible values of an untrusted shape; check before use."""
    settings = settings_of(ModelConfig)
    for name, value in vars(shape).items():
        if name == "rope_scaling":
            yield from () if value is None else _scaling_problems(value)
            continue
        is_missing = value is None and NEUTRAL.get(name, 0) is not None
        if problem := "a value is needed" if is_missing else limit_problem(settings[name], value):
            yield f"{name}={shown(value)}: {problem}"
    if shape.block is not None and not PLUGIN_PATH.fullmatch(str(shape.block)):
        yield f"block={shown(shape.block)} is not of the form package.module:Class"


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
    base = VARIANTS[names[0] if names else DEFAULT_VARIANT]
    dimensions = {name: value for name, value in vars(shape).items() if name not in SWITCHES}
    switches = {name: getattr(shape, name) for name in SWITCHES if getattr(shape, name) != getattr(base, name)}
    given: dict[str, Any] = {**dimensions, **switches, "rope_scaling": format_scaling(shape.rope_scaling)}
    if shape.query_width == shape.hidden_size:
        del given["head_dim"]
    if given.get("sliding_window", 0) is None:
        given["sliding_window"] = 0
    return ModelConfig(model_variant=names[0] if names else None, **given)


def name_of_model(model: ModelConfig) -> str:
    """Return the name of the matching variant, or else the family; vocabulary, context and tying may differ."""
    shape = resolve_shape(model)
    given = (model.model_variant or DEFAULT_VARIANT).lower()
    alike = [name for name, variant in VARIANTS.items() if _is_alike(variant, shape)]
    return given if given in alike else (alike or [shape.model_family])[0]


_SAME_VARIANT = ("vocab_size", "tie_word_embeddings", *WITHOUT_WEIGHTS)


def _is_alike(variant: LlamaShape, shape: LlamaShape) -> bool:
    return replace(variant, **{field: getattr(shape, field) for field in _SAME_VARIANT}) == shape


def rounded_vocabulary(entries: int) -> int:
    """Return an embedding size for a tokenizer: a multiple of 128, which makes matrix products faster."""
    return -(-entries // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def name_block(path: str | None) -> None:
    """Allow `load_block` to import a class, because the user has named it."""
    if path is not None:
        _NAMED_BLOCKS.add(path)


_NAMED_BLOCKS: set[str] = set()


def load_block(path: str) -> type[Any]:
    """Import the class of a user-defined block.

    A checkpoint may come from anywhere, so its word alone imports nothing.

    Raises:
        ConfigError: neither the user has named the class, nor is its module imported; or it is no torch module.
    """
    import torch  # a user-defined block needs it in any case

    if path not in _NAMED_BLOCKS and path.partition(":")[0] not in sys.modules:
        raise ConfigError(
            f"the model has blocks of the class {path}, which a checkpoint does not contain: give --block={path} to "
            "import it, or in Python import its module first"
        )
    block = load_plugin("block", path)
    if not (isinstance(block, type) and issubclass(block, torch.nn.Module)):
        raise ConfigError(f"--block={path} is no torch.nn.Module: give a class, such as a subclass of DecoderBlock")
    return block


# Rotary scaling


def parse_scaling(items: tuple[str, ...], default: RopeScaling | None) -> RopeScaling | None:
    """Return the scaling of `--rope_scaling`, without problems; empty = the default.

    Raises:
        ConfigError: the items have another form, or their values are out of range.
    """
    if not items:
        return default
    kind, colon, first = items[0].rpartition(":")
    positions = [first, *(item for item in items[1:] if "=" not in item)]
    named = dict(item.split("=", 1) for item in items[1:] if "=" in item)
    names = SCALING_FIELDS.get(kind if colon else "llama3", ())
    try:
        if len(positions) != len(names) or not named.keys() <= set(YARN_OPTIONS if kind == "yarn" else ()):
            raise ValueError
        values = {**_UNUSED, **{name: float(text) for name, text in zip(names, positions, strict=True)}}
        values |= {name: text == "true" if name == "truncate" else float(text) for name, text in named.items()}
        if kind == "yarn":
            values = {"attention_factor": yarn_attention_factor(values["factor"]), **values}
        if math.isfinite(values[ORIGINAL_CONTEXT]) and values[ORIGINAL_CONTEXT] == int(values[ORIGINAL_CONTEXT]):
            values[ORIGINAL_CONTEXT] = int(values[ORIGINAL_CONTEXT])
        scaling = RopeScaling(rope_type=kind if colon else "llama3", **values)
    except (ValueError, OverflowError):
        raise ConfigError(f"--rope_scaling={','.join(items)}: {_SCALING_FORMS}") from None
    if problem := next(_scaling_problems(scaling), None):
        raise ConfigError(f"--rope_scaling={','.join(items)}: {problem}. {_SCALING_FORMS}")
    return None if scaling.factor == 1 and kind != "yarn" else scaling  # a factor of 1 changes nothing


def format_scaling(scaling: RopeScaling | None) -> tuple[str, ...]:
    """Return a scaling as `parse_scaling` reads it; () without scaling."""
    if scaling is None:
        return ()
    values = [str(float(getattr(scaling, name))) for name in SCALING_FIELDS[scaling.rope_type]]
    if scaling.rope_type == "llama3":
        return tuple(values)
    neutral = RopeScaling(1.0, **_UNUSED, attention_factor=yarn_attention_factor(scaling.factor))
    options = {name: getattr(scaling, name) for name in YARN_OPTIONS if scaling.rope_type == "yarn"}
    changed = [f"{name}={value}".lower() for name, value in options.items() if value != getattr(neutral, name)]
    return (f"{scaling.rope_type}:{values[0]}", *values[1:], *changed)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Return the factor of cosines and sines for a scaling factor (Peng et al. 2023, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


ORIGINAL_CONTEXT = "original_max_position_embeddings"
_UNUSED: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL_CONTEXT: 1}
"""Values of fields that a type of scaling does not have."""
LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL_CONTEXT)
SCALING_FIELDS = {
    "llama3": LLAMA3_FIELDS,
    "linear": ("factor",),
    "yarn": ("factor", ORIGINAL_CONTEXT),
}
YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "truncate")
_SCALING_FORMS = (
    "give linear:4 (a factor of 1 or more), yarn:4,8192 (and the tokens of the original context), or the four numbers "
    "of llama3, as in 32,1,4,8192: factor, 0 < low_freq_factor < high_freq_factor, original context"
)


def _scaling_problems(scaling: RopeScaling) -> Iterator[str]:
    """Yield the problems of an untrusted scaling."""
    values = {field.name: getattr(scaling, field.name) for field in fields(scaling)}
    kind, is_truncated = values.pop("rope_type"), values.pop("truncate")
    if kind not in SCALING_FIELDS or type(is_truncated) is not bool:
        yield f"rope_type={shown(kind)} is none of {', '.join(SCALING_FIELDS)}"
    for name, value in values.items():
        smallest = 1 if name in ("factor", ORIGINAL_CONTEXT) else 0
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not smallest <= value <= sys.float_info.max or value == 0:
            yield f"{name}={shown(value)} is out of range: give a finite number, at least {smallest}"
            return
    if type(scaling.original_max_position_embeddings) is not int:
        yield f"{ORIGINAL_CONTEXT}={shown(scaling.original_max_position_embeddings)} is no whole number"
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        yield "low_freq_factor must be below high_freq_factor"
    if scaling.beta_slow >= scaling.beta_fast:
        yield "beta_slow must be below beta_fast"


def _head_problems(shape: LlamaShape, shares_width: bool) -> Iterator[Problem]:
    hidden, heads, kv_heads = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads
    if shares_width and hidden % heads:
        yield Problem(
            ("hidden_size", "num_attention_heads"),
            f"hidden_size={hidden} / num_attention_heads={heads} = {hidden / heads:.2f} must be a whole number. "
            "Change one, or give --head_dim",
        )
    elif shape.head_dim % 2:
        yield Problem(
            ("head_dim", "hidden_size"),
            f"head_dim={shape.head_dim} must be even, since rotary embeddings rotate pairs. Change --head_dim, or "
            f"--hidden_size to a multiple of {2 * heads}",
        )
    if heads % kv_heads:
        yield Problem(
            ("num_attention_heads", "num_key_value_heads"),
            f"num_attention_heads={heads} / num_key_value_heads={kv_heads} = {heads / kv_heads:.2f} must be a whole "
            "number. Change --num_attention_heads or --num_key_value_heads (a divisor of it)",
        )
