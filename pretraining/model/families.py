"""The families of models that Hugging Face folders hold: a row per `model_type` of their config.json.

    config.json, Family -> fields of LlamaShape          an entry that is absent, or null, means what transformers means
    LlamaShape          -> the family that can hold it -> entries of config.json

`hf.py` reads and writes what all families share. A family whose switches exist is one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pretraining.config.variants import NEUTRAL, SWITCHES, LlamaShape, has_rotation, shown
from pretraining.errors import ConfigError

_COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1e4}
"""Values of entries that are absent, in most families."""


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        architecture: class of transformers.
        context: `max_position_embeddings` where the entry is absent.
        key_value_heads: `num_key_value_heads` where the entry is absent; None = as many as query heads.
        absent: values of other entries where they are absent.
        implied: fields of the shape that all models of the family have.
        entries: switches that config.json has entries for, under the names of the shape.
        window: entry that must be true for `sliding_window` to count; "" = it always counts, None = no window.
    """

    architecture: str
    context: int
    key_value_heads: int | None = None
    absent: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    entries: tuple[str, ...] = ()
    window: str | None = None

    def default(self, entry: str) -> Any:
        """Return the value of an absent entry, which also a null means, unless the entry may be null."""
        return {**NEUTRAL, **_COMMON, **self.absent}.get(entry)


_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_WINDOW = {"sliding_window": 4096}
_LAYER_TYPES = {"full_attention": False, "attention": False, "sliding_attention": True}
"""Whether a type of layers has the sliding window; `attention` is an earlier name."""

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", 2048, entries=("attention_bias", "mlp_bias")),
    "mistral": Family("MistralForCausalLM", 131072, 8, absent=_WINDOW, window=""),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        32768,
        32,
        absent=_WINDOW,
        implied={"attention_bias": "qkv"},
        window="use_sliding_window",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        32768,
        32,
        absent={"head_dim": 128, **_WINDOW},
        implied={"qk_norm": "head"},
        entries=("attention_bias",),
        window="use_sliding_window",
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        2048,
        absent={"rms_norm_eps": 1e-5},
        implied={"qk_norm": "whole", "norm_position": "post"},
        entries=("attention_bias",),
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        32768,
        4,
        absent={"rope_theta": 2e6, "tie_word_embeddings": True},
        entries=("attention_bias", "mlp_bias", "no_rope_interval"),
        window="use_sliding_window",
    ),
    "granite": Family(
        "GraniteForCausalLM",
        2048,
        absent={"attention_multiplier": 1.0},
        entries=("attention_bias", "mlp_bias", *_MULTIPLIERS),
    ),
}
_SWITCHES = tuple(name for name in SWITCHES if name not in ("sliding_window", "model_family", "block"))


# Reading


def read_switches(document: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the switches that a config.json sets, as settings of the model.

    Raises:
        ConfigError: a value of an entry is not supported.
    """
    found: dict[str, Any] = dict(family.implied)
    for name in family.entries:
        if name == "no_rope_interval":
            found[name] = _read_no_rope(document)
        else:
            value = document.get(name)
            found[name] = family.default(name) if value is None else value
    if type(bias := found.get("attention_bias")) is bool:
        found["attention_bias"] = str(bias).lower()
    found["sliding_window"] = _read_window(document, family)
    return found


def _read_no_rope(document: Mapping[str, Any]) -> int:
    """Return every how many blocks one has no rotary embedding; a list of blocks goes before the interval."""
    layers, listed = document["num_hidden_layers"], document.get("no_rope_layers")
    interval = document.get("no_rope_layer_interval", 4)
    if listed is None:
        if type(interval) is not int or interval < 1:
            raise ConfigError(f"no_rope_layer_interval is {shown(interval)}, not a whole number of at least 1")
        return interval if interval <= layers else 0
    if not isinstance(listed, list) or len(listed) < layers or not all(each in (0, 1) for each in listed):
        raise ConfigError(f"no_rope_layers is {shown(listed)}, not a 0 or 1 for each of {layers} layers")
    rotated = [bool(each) for each in listed[:layers]]
    first = rotated.index(False) + 1 if False in rotated else 0
    if rotated != [has_rotation(first, layer) for layer in range(layers)]:
        raise ConfigError(f"no_rope_layers is {shown(listed)}: layers without rotation must be at regular intervals")
    return first


def has_window(document: Mapping[str, Any], family: Family) -> bool:
    """Return whether a sliding window in a config.json is one that this family has, or that is switched off."""
    return family.window is not None or document.get("use_sliding_window") is False


def _read_window(document: Mapping[str, Any], family: Family) -> int:
    """Return the sliding window that all layers have; 0 = none."""
    layers_have_it = _find_windows(document, family)
    is_on = family.window == "" or bool(family.window and document.get(family.window))
    window = document.get("sliding_window", family.default("sliding_window")) if is_on else None
    if window is None:
        if document.get("layer_types") is not None and True in layers_have_it:
            raise ConfigError("layer_types has sliding_attention, but no sliding_window is switched on")
        return 0
    if len(layers_have_it) > 1:
        raise ConfigError("attention has a sliding window in some layers only, but here all layers are alike")
    if False in layers_have_it:
        return 0
    if type(window) is not int or window < 1:
        raise ConfigError(f"sliding_window is {shown(window)}, not a whole number of at least 1")
    return window


def _find_windows(document: Mapping[str, Any], family: Family) -> set[bool]:
    """Return whether layers have the sliding window: all (True), none (False) or some (both).

    As in transformers, `layer_types` decides where it stands (it reads such a mistral as a ministral); else
    `max_window_layers`, or the layers without rotation.
    """
    layers, types = document["num_hidden_layers"], document.get("layer_types")
    if types is not None:
        known = isinstance(types, list) and all(isinstance(each, str) and each in _LAYER_TYPES for each in types)
        if not known or len(types) != layers:
            raise ConfigError(
                f"layer_types is {shown(types)}, not full or sliding_attention for each of {layers} layers"
            )
        return {_LAYER_TYPES[each] for each in types}
    if not family.window:
        return {family.window is not None}
    if "no_rope_interval" in family.entries:
        interval = _read_no_rope(document)
        return {False} if interval == 0 else {True} if interval == 1 else {False, True}
    first = document.get("max_window_layers", 28)
    return {False} if first >= layers else {True} if first <= 0 else {False, True}


# Writing


def family_for(shape: LlamaShape) -> str:
    """Return the family in whose form a model is exported: its own, else the first that can hold it.

    Raises:
        ConfigError: none can hold it; names what is in the way of its own.
    """
    problems: list[str] = []
    for name in (shape.model_family, *FAMILIES):
        found = list(_not_held(shape, name))
        if not found:
            return name
        problems = problems or found
    raise ConfigError(
        f"no family of models in transformers has all of this: a {shape.model_family} has no {', '.join(problems)}"
    )


def _not_held(shape: LlamaShape, name: str) -> Iterator[str]:
    """Yield what a family does not have of a shape."""
    family = FAMILIES[name]
    for switch in sorted(_SWITCHES):
        value = getattr(shape, switch)
        expected = family.implied.get(switch, NEUTRAL[switch])
        if value != expected and (switch not in family.entries or (switch == "attention_bias" and value == "qkv")):
            yield f"{switch}={value}"
    if name == "llama" and shape.hidden_size % shape.num_attention_heads:
        yield f"hidden_size={shape.hidden_size} for {shape.num_attention_heads} heads"
    if family.window is None and shape.sliding_window is not None:
        yield f"sliding_window={shape.sliding_window}"


def switch_entries(shape: LlamaShape, name: str) -> dict[str, Any]:
    """Return the entries of config.json for the switches of a shape that a family holds."""
    family, entries = FAMILIES[name], {}
    for switch in family.entries:
        entries[switch] = getattr(shape, switch)
    if "attention_bias" in entries:
        entries["attention_bias"] = shape.attention_bias == "true"
    if "attention_multiplier" in entries and shape.attention_multiplier is None:
        entries["attention_multiplier"] = shape.head_dim**-0.5
    if "no_rope_interval" in entries:
        interval, layers = entries.pop("no_rope_interval"), shape.num_hidden_layers
        entries["no_rope_layers"] = [int(shape.rotates(layer)) for layer in range(layers)]
        entries["no_rope_layer_interval"] = interval or layers + 1
    if family.window is not None:
        entries["sliding_window"] = shape.sliding_window
    if family.window:
        has_window, layers = shape.sliding_window is not None, shape.num_hidden_layers
        entries |= {
            family.window: has_window,
            "layer_types": layers * [f"{'sliding' if has_window else 'full'}_attention"],
        }
        if "no_rope_layers" not in entries:
            entries["max_window_layers"] = 0 if has_window else layers
    return entries
