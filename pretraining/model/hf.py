"""Door to models of Hugging Face: the only module that knows config.json and generation_config.json.

    config.json                         -> LlamaShape, or an error with every entry that is not computed here
    config.json, generation_config.json -> what an export keeps: entries that no setting of the model stands for
    LlamaShape, kept entries            -> config.json and generation_config.json of an export

`families` knows what differs between families. `checkpoint.hf_import` reads the files of a folder, and asks here;
starts, `pretrain import` and `pretrain export` ask `hf_import`. Entries of the shape are read as transformers reads
them. Everything else is kept as it is, unless it names files or code of the folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pretraining.config.plugins import plugin_errors
from pretraining.config.training import ModelConfig
from pretraining.config.variants import (
    LLAMA3_FIELDS,
    NEUTRAL,
    ORIGINAL_CONTEXT,
    SCALING_FIELDS,
    YARN_OPTIONS,
    LlamaShape,
    RopeScaling,
    load_block,
    resolve_shape,
    shown,
    yarn_attention_factor,
)
from pretraining.errors import CheckpointError, ConfigError
from pretraining.model.families import FAMILIES, family_for, has_window, read_switches, switch_entries

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "README.md")
"""Files of a model and its tokenizer to download from the Hub."""
GENERATION_CONFIG_FILE = "generation_config.json"
ORIGIN_FILE = "imported.json"
"""File in a run's folder: what exports keep of the model that the run began with."""

INNER_MODEL = (
    "the inner model alone, without a head. If its head is the embedding, write it again: "
    "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other)"
)
"""Content of a folder of `LlamaModel`, and the way on, for messages."""

_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


# The only supported value of an entry, which is also the default of `LlamaConfig`.
_SUPPORTED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "the activation is SwiGLU's silu"),
    "attention_dropout": (0, "there is no dropout; set it to 0 to train without"),
    "partial_rotary_factor": (1, "the rotary embedding covers the whole head"),
    "quantization_config": (None, "weights are plain floating-point numbers"),
    "is_causal": (True, "attention sees no later tokens"),
    "per_layer_config": ({}, "all layers are alike"),
    "transformers_weights": (None, f"weights are those of {WEIGHTS_FILE}"),
}
_WITHOUT_ENTRY = {
    "attention_bias": (False, "attention has biases as its family has them"),
    "mlp_bias": (False, "the feed-forward layer has no biases"),
    "sliding_window": (None, "attention covers all earlier tokens"),
}
"""The same for entries that only some families have."""


def parameter_shapes(shape: LlamaShape) -> dict[str, torch.Size]:
    """Return the shape of every parameter by name, in the model's order; a tied head has no entry."""
    import torch  # here: reading a config.json does not need torch

    from pretraining.model.llama import Llama

    with torch.device("meta"):
        model = Llama(shape)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def config_document(
    shape: LlamaShape,
    dtype: str,
    context: int,
    bos_token: int | None,
    eos_token: int | list[int] | None,
    pad_token: int | None = None,
    kept: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the config.json of a model, in the form of its family; raise a ConfigError if no family can hold it.

    Rotary embedding and dtype appear twice: in the form of transformers 5 (`rope_parameters`, `dtype`), and in that of
    earlier versions and other programs (`rope_theta`, `rope_scaling`, `torch_dtype`).

    Args:
        dtype: dtype of the weights: "float32" or "bfloat16".
        context: sequence length of training.
        bos_token, eos_token: ids that begin and end a document; None = no such token.
        pad_token: padding id. It is left out if it equals bos_token or eos_token, because transformers gives the
            embedding of a padding token no gradient.
        kept: entries of the imported model (`kept_entries`).
    """
    if shape.block is not None:
        return _document_of_block(shape, shape.block)
    scaling, family = None if shape.rope_scaling is None else _scaling_entries(shape.rope_scaling), family_for(shape)
    dimensions = {name: value for name, value in vars(shape).items() if name not in _NOT_WRITTEN}
    ends = (bos_token, *(eos_token if isinstance(eos_token, list) else [eos_token]))
    return {
        "initializer_range": 0.02,
        "use_cache": True,
        **kept,
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        **dimensions,
        **switch_entries(shape, family),
        "max_position_embeddings": max(context, shape.max_position_embeddings),
        "rope_parameters": {"rope_theta": shape.rope_theta, **(scaling or {"rope_type": "default"})},
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "bos_token_id": bos_token,  # written even if None: LlamaConfig would assume 1 and 2
        "eos_token_id": eos_token,
        "pad_token_id": None if pad_token in ends else pad_token,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _document_of_block(shape: LlamaShape, path: str) -> dict[str, Any]:
    """Return the config.json that the class of a user-defined block gives."""
    describe = getattr(load_block(path), "config_document", None)
    if describe is None:
        raise ConfigError(
            f"no library knows --block={path}: give the class a static method config_document(shape) that returns its "
            "config.json, or export with --format=full"
        )
    with plugin_errors("block", path):
        return dict(describe(shape))


_NOT_WRITTEN = NEUTRAL.keys() - {"rms_norm_eps", "tie_word_embeddings"}
"""Fields of the shape that are written as `switch_entries`, or with the rotary embedding."""


def _scaling_entries(scaling: RopeScaling) -> dict[str, Any]:
    names = (*SCALING_FIELDS[scaling.rope_type], *(YARN_OPTIONS if scaling.rope_type == "yarn" else ()))
    return {"rope_type": scaling.rope_type, **{name: getattr(scaling, name) for name in names}}


TOKEN_ENTRIES = ("bos_token_id", "eos_token_id", "pad_token_id")
_NOT_KEPT = {
    "auto_map",
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", ORIGINAL_CONTEXT),
    *("seq_length", "max_seq_len", "max_sequence_length", "model_max_length", "transformers_version"),
}
"""Entries that name code, or would contradict those of an export: of the shape, and other names of the context."""


def kept_entries(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a config.json or generation_config.json that exports keep, unless they write their own."""
    return {name: value for name, value in document.items() if name not in _NOT_KEPT and not name.startswith("_")}


def token_ids(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens that begin, end and pad a text in a config.json or generation_config.json, where valid.

    A text may end with one of several tokens; then the entry is a list.
    """
    given = {name: document.get(name) for name in TOKEN_ENTRIES}
    several = {name: ids if isinstance(ids, list) and name == "eos_token_id" else [ids] for name, ids in given.items()}
    valid = {name for name, ids in several.items() if ids and all(type(each) is int and each >= 0 for each in ids)}
    return {name: ids for name, ids in given.items() if name in valid}


def generation_document(
    bos_token: int | None,
    eos_tokens: Sequence[int],
    pad_token: int | None = None,
    kept: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the generation_config.json: the tokens that begin, end and pad a text, and what the imported model had."""
    eos = list(eos_tokens) if len(eos_tokens) > 1 else next(iter(eos_tokens), None)
    return {**kept, "bos_token_id": bos_token, "eos_token_id": eos, "pad_token_id": pad_token}


def shape_of_document(document: Any, path: str) -> LlamaShape:
    """Return the shape in a config.json; `path` is for messages.

    Raises:
        CheckpointError: the model is not supported; the message names every unsupported entry.
    """
    if not isinstance(document, Mapping):
        raise CheckpointError("not the config.json of a model: it has no object", path=path)
    problems = list(_problems(document))
    try:
        if not problems:
            return _read_shape(document)
    except ConfigError as error:
        problems = list(error.problems)
    except (TypeError, ValueError, OverflowError) as error:
        problems = [f"an entry is not a number: {error}"]
    listed = "".join(f"\n  - {problem}" for problem in problems)
    raise CheckpointError(f"not the config of a supported model:{listed}", path=path)


def _problems(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield one problem per unsupported entry."""
    kind = document.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    architectures = document.get("architectures") or [family and family.architecture]
    if family is not None and architectures == [family.architecture.replace("ForCausalLM", "Model")]:
        yield f"architectures {shown(architectures)}: {INNER_MODEL}"
        return
    if family is None or architectures != [family.architecture]:
        known = ", ".join(f"{name} ({each.architecture})" for name, each in FAMILIES.items())
        yield f"model_type {shown(kind)}, architectures {shown(architectures)}: not one of {known}"
        return
    missing = [name for name in _REQUIRED if document.get(name) is None]
    if missing:
        yield f"it lacks {', '.join(missing)}"
    elif type(document["num_hidden_layers"]) is not int:
        yield f"num_hidden_layers is {shown(document['num_hidden_layers'])}"
    rope = _rope(document)
    entries = (*family.entries, *(["sliding_window"] if has_window(document, family) else []))
    without_entry = {name: each for name, each in _WITHOUT_ENTRY.items() if name not in entries}
    for name, (supported, reason) in {**_SUPPORTED, **without_entry}.items():
        for value in (document.get(name), rope.get(name)):
            if value is not None and value != supported:
                yield f"{name} is {shown(value)}, but here {reason}"
    kind = rope.get("rope_type", rope.get("type", "default"))
    needed = {**SCALING_FIELDS, "default": (), "yarn": ("factor",)}.get(str(kind))
    if needed is None:
        yield f"rope_type is {shown(kind)}, but only default, linear, llama3 and yarn are supported"
    elif any(isinstance(each, Mapping) for each in rope.values()):
        yield "its rotary embedding differs between layers, but here all layers have the same"
    else:
        missing = [name for name in needed if rope.get(name) is None]
        if missing:
            yield f"rope_type is {kind}, but {', '.join(missing)} is missing"


def _read_shape(document: Mapping[str, Any]) -> LlamaShape:
    """Return the shape of a supported document; `resolve_shape` checks values."""
    rope, kind = _rope(document), document["model_type"]
    family = FAMILIES[kind]

    def value(name: str, default: Any) -> Any:
        return default if document.get(name) is None else document[name]

    heads = document["num_attention_heads"]
    # An absent entry and a null are two things: where an entry may be null, it means as many as query heads.
    absent = family.key_value_heads or heads
    context = value("max_position_embeddings", family.context)
    theta = rope.get("rope_theta")
    shape = resolve_shape(
        ModelConfig(
            **{name: document[name] for name in _REQUIRED},
            num_key_value_heads=value("num_key_value_heads", heads if "num_key_value_heads" in document else absent),
            head_dim=value("head_dim", family.default("head_dim")),
            max_position_embeddings=context,
            rope_theta=value("rope_theta", family.default("rope_theta")) if theta is None else theta,
            rms_norm_eps=value("rms_norm_eps", family.default("rms_norm_eps")),
            tie_word_embeddings=value("tie_word_embeddings", family.default("tie_word_embeddings")),
            rope_scaling=_read_scaling(rope, context),
            model_family=kind,
            **read_switches(document, family),
        )
    )
    # Whole numbers in JSON may be too large for torch's integers.
    given = {name: getattr(shape, name) for name in _FLOATS}
    numbers: dict[str, Any] = {name: float(number) for name, number in given.items() if number is not None}
    return replace(shape, **numbers)


_FLOATS = (
    *("rope_theta", "rms_norm_eps", "embedding_multiplier", "residual_multiplier", "attention_multiplier"),
    "logits_scaling",
)


def _read_scaling(rope: Mapping[str, Any], context: Any) -> tuple[str, ...]:
    """Return the rotary scaling as a setting; a factor of 1 is none.

    Args:
        context: `max_position_embeddings`, the original context of yarn where that entry is absent.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        return tuple(str(float(rope[name])) for name in LLAMA3_FIELDS)
    if kind == "linear":
        return (f"linear:{float(rope['factor'])}",)
    if kind != "yarn":
        return ("linear:1",)
    factor, original = float(rope["factor"]), rope.get(ORIGINAL_CONTEXT)
    attention = rope.get("attention_factor")
    if attention is None:
        attention = yarn_attention_factor(factor)
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            scales = (yarn_attention_factor(factor, float(rope[name])) for name in ("mscale", "mscale_all_dim"))
            attention = next(scales) / next(scales)
    return (
        f"yarn:{factor}",
        str(float(context if original is None else original)),
        f"attention_factor={float(attention)}",
        f"beta_fast={float(rope.get('beta_fast') or 32)}",
        f"beta_slow={float(rope.get('beta_slow') or 1)}",
        f"truncate={str(rope.get('truncate', True)).lower()}",
    )


def _rope(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entries of the rotary embedding, in the form of transformers 5 or of earlier versions.

    With both, transformers reads `rope_scaling`, and `rope_theta` beside it. The original context beside them goes
    before that in them.
    """
    rope = document.get("rope_scaling") or document.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        return {"rope_type": rope}
    context = document.get(ORIGINAL_CONTEXT)
    return rope if context is None else {**rope, ORIGINAL_CONTEXT: context}
