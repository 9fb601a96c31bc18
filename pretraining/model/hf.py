"""Hugging Face's config.json and generation_config.json of a Llama.

    LlamaShape  <->  config.json of a `LlamaForCausalLM`

A config.json with features that this Llama lacks (biases, another activation, sliding windows, …) is refused: the
weights would load, but give wrong results. The error names the entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from pretraining.config.training import ModelConfig
from pretraining.config.variants import LlamaShape, resolve_shape, shown
from pretraining.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MODEL_FILES = ("*.json", "*.safetensors")
"""Files of a model to download from the Hub."""
GENERATION_CONFIG_FILE = "generation_config.json"

INNER_MODEL = (
    "the inner model alone, without a head. If its head is the embedding, write it again: "
    "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other)"
)
"""Content of a folder of `LlamaModel`, and the way on, for messages."""

_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

_ORIGINAL_CONTEXT = "original_max_position_embeddings"
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL_CONTEXT)

# The only supported value of an entry, which is also the default of `LlamaConfig`.
_SUPPORTED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "the activation is SwiGLU's silu"),
    "attention_bias": (False, "attention has no biases"),
    "mlp_bias": (False, "the feed-forward layer has no biases"),
    "attention_dropout": (0, "there is no dropout; set it to 0 to train without"),
    "sliding_window": (None, "attention covers all earlier tokens"),
    "partial_rotary_factor": (1, "the rotary embedding covers the whole head"),
    "quantization_config": (None, "weights are plain floating-point numbers"),
}


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
) -> dict[str, Any]:
    """Return the config.json of a Llama.

    Rotary embedding and dtype appear twice: in the form of transformers 5 (`rope_parameters`, `dtype`), and in that of
    earlier versions and other programs (`rope_theta`, `rope_scaling`, `torch_dtype`).

    Args:
        dtype: dtype of the weights: "float32" or "bfloat16".
        context: sequence length of training.
        bos_token, eos_token: ids that begin and end a document; None = no such token.
        pad_token: padding id. It is left out if it equals bos_token or eos_token, because transformers gives the
            embedding of a padding token no gradient.
    """
    scaling = None if shape.rope_scaling is None else {"rope_type": "llama3", **asdict(shape.rope_scaling)}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **vars(shape),
        "max_position_embeddings": max(context, shape.max_position_embeddings),
        "rope_parameters": {"rope_theta": shape.rope_theta, **(scaling or {"rope_type": "default"})},
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": bos_token,  # written even if None: LlamaConfig would assume 1 and 2
        "eos_token_id": eos_token,
        "pad_token_id": None if pad_token in (bos_token, eos_token) else pad_token,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def generation_document(
    bos_token: int | None, eos_token: int | list[int] | None, pad_token: int | None = None
) -> dict[str, Any]:
    """Return the generation_config.json: the tokens that begin, end and pad a text."""
    return {"bos_token_id": bos_token, "eos_token_id": eos_token, "pad_token_id": pad_token}


def shape_of_document(document: Any, path: str) -> LlamaShape:
    """Return the shape in a config.json; `path` is for messages.

    Raises:
        CheckpointError: the model is not a supported Llama; the message names every unsupported entry.
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
    raise CheckpointError(f"not the config of a supported Llama:{listed}", path=path)


def _problems(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield one problem per unsupported entry."""
    kind, architectures = document.get("model_type"), document.get("architectures") or ["LlamaForCausalLM"]
    if kind == "llama" and architectures == ["LlamaModel"]:
        yield f"architectures {shown(architectures)}: {INNER_MODEL}"
        return
    if kind != "llama" or architectures != ["LlamaForCausalLM"]:
        yield f"model_type {shown(kind)}, architectures {shown(architectures)}: only llama, LlamaForCausalLM works"
        return
    missing = [name for name in _REQUIRED if document.get(name) is None]
    if missing:
        yield f"it lacks {', '.join(missing)}"
    rope = _rope(document)
    for name, (supported, reason) in _SUPPORTED.items():
        value = document.get(name, rope.get(name))
        if value is not None and value != supported:
            yield f"{name} is {shown(value)}, but here {reason}"
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        yield f"rope_type is {shown(kind)}, but only default and llama3 are supported"
    elif any(isinstance(each, Mapping) for each in rope.values()):
        yield "its rotary embedding differs between layers, but here all layers have the same"
    elif kind == "llama3":
        missing = [name for name in _SCALING if rope.get(name) is None]
        if missing:
            yield f"rope_type is llama3, but {', '.join(missing)} is missing"


def _read_shape(document: Mapping[str, Any]) -> LlamaShape:
    """Return the shape of a supported document, with the defaults of `LlamaConfig`; `resolve_shape` checks values."""
    rope = _rope(document)

    def value(name: str, default: Any) -> Any:
        return default if document.get(name) is None else document[name]

    scaling: tuple[float, ...] = (1, 1, 2, 1)  # a factor of 1: no scaling
    if rope.get("rope_type", rope.get("type")) == "llama3":
        scaling = tuple(float(rope[name]) for name in _SCALING)
    theta = rope.get("rope_theta")
    shape = resolve_shape(
        ModelConfig(
            **{name: document[name] for name in _REQUIRED},
            num_key_value_heads=value("num_key_value_heads", document["num_attention_heads"]),
            max_position_embeddings=value("max_position_embeddings", 2048),
            rope_theta=value("rope_theta", 1e4) if theta is None else theta,
            rms_norm_eps=value("rms_norm_eps", 1e-6),
            tie_word_embeddings=value("tie_word_embeddings", False),
            rope_scaling=scaling,
        )
    )
    if value("head_dim", shape.head_dim) != shape.head_dim:
        head_dim = shown(document["head_dim"])
        raise ConfigError(f"head_dim is {head_dim}, but hidden_size / num_attention_heads is {shape.head_dim}")
    # Whole numbers in JSON may be too large for torch's integers.
    return replace(shape, rope_theta=float(shape.rope_theta), rms_norm_eps=float(shape.rms_norm_eps))


def _rope(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entries of the rotary embedding, in the form of transformers 5 or of earlier versions.

    With both, transformers reads `rope_scaling`, and `rope_theta` beside it. The original context beside them goes
    before that in them.
    """
    rope = document.get("rope_scaling") or document.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        return {"rope_type": rope}
    context = document.get(_ORIGINAL_CONTEXT)
    return rope if context is None else {**rope, _ORIGINAL_CONTEXT: context}
