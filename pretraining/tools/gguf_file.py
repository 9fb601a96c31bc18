"""Writer of a model as one GGUF file, which llama.cpp reads (`pretrain export --format=gguf`).

llama.cpp's own converter identifies tokenizers by name. A tokenizer trained here has no name, so this writer says how
it splits text. Tensors are written one at a time; llama.cpp's `llama-quantize` makes the file smaller.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pretraining.config.variants import NEUTRAL, LlamaShape
from pretraining.data.tokenizer import Tokenizer
from pretraining.errors import ConfigError
from pretraining.model.hf import parameter_shapes
from pretraining.model.rope import rotary_frequencies

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "gpt-2": ["ByteLevel"],
    "llama-bpe": [f"Split pattern={_LLAMA3} behavior=Isolated", "ByteLevel use_regex=False"],
}
"""Rules of tokenizer.json that split text into words before byte-pair merges, by llama.cpp's name for them."""
_UNSAID = {"use_regex=True", "add_prefix_space=False", "invert=False", "trim_offsets=True", "trim_offsets=False"}
"""Settings of rules that are left out above."""


def check_supported(shape: LlamaShape, tokenizer: Tokenizer | None, config: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way in which the tokenizer splits text.

    Args:
        config: content of config.json.

    Raises:
        ConfigError: the package is missing, or llama.cpp's architecture "llama" cannot express model or tokenizer.
    """
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ConfigError("--format=gguf needs the `gguf` package: pip install 'pretraining[gguf]'") from None
    if problem := _unsupported(shape):
        raise ConfigError(f"--format=gguf: its {problem} need llama.cpp's own convert_hf_to_gguf.py, on a --format=hf")
    if tokenizer is None:
        raise ConfigError("--format=gguf needs a tokenizer: give --tokenizer_path")
    document = json.loads(tokenizer.definition)
    model, normalizer, splitter = (document.get(name) or {} for name in ("model", "normalizer", "pre_tokenizer"))
    rules = [_describe(rule) for rule in splitter.get("pretokenizers", [splitter])]
    split = next((name for name, known in _SPLITS.items() if model["type"] == "BPE" and rules == known), "")
    (before, after), (begin, end) = tokenizer.around, begin_and_end(tokenizer, config)
    if not split:
        problem = (
            f"is a {model['type']} that splits text by {' + '.join(rules)}; supported is byte-level BPE with the rules "
            "of GPT-2 or Llama 3"
        )
    elif normalizer:
        problem = f"has the normalizer {_describe(normalizer)}, which GGUF cannot express"
    elif before in ([], [begin]) and after in ([], [end]):
        return split
    else:
        problem = f"puts the tokens {before} and {after} around texts, and config.json has only {begin} and {end}"
    raise ConfigError(f"--format=gguf: the tokenizer {problem}. llama.cpp's own convert_hf_to_gguf.py may know it")


def _describe(rule: Mapping[str, Any]) -> str:
    """Return a rule of tokenizer.json in words: its type, and the settings that are not usual."""
    values = {name: value.get("Regex", value) if isinstance(value, dict) else value for name, value in rule.items()}
    settings = [f"{name}={value}" for name, value in values.items() if name != "type"]
    return " ".join([rule.get("type", "nothing"), *(each for each in settings if each not in _UNSAID)])


def begin_and_end(tokenizer: Tokenizer, config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the tokens that begin and end a text: those of config.json, else the tokenizer's begin."""
    begin, ends = config["bos_token_id"], config["eos_token_id"]
    return tokenizer.begin_of_text if begin is None else begin, ends[0] if isinstance(ends, list) else ends


def _unsupported(shape: LlamaShape) -> str:
    """Return what llama.cpp's architecture "llama" cannot express here; "" if nothing."""
    plain = replace(shape, attention_bias="false", mlp_bias=False, model_family="llama")
    switches = [name for name, neutral in NEUTRAL.items() if getattr(plain, name) != neutral]
    found = [name for name in switches if name not in ("rms_norm_eps", "tie_word_embeddings", "rope_scaling")]
    has_bias = shape.attention_bias != "false" or shape.mlp_bias
    other_scaling = shape.rope_scaling is not None and shape.rope_scaling.rope_type != "llama3"
    return ", ".join([*sorted(found), *["biases"] * has_bias, *["rope_scaling"] * other_scaling])


def write_gguf(
    path: Path,
    shape: LlamaShape,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    split: str,
    dtype: torch.dtype,
    read: Callable[[str], torch.Tensor],
) -> None:
    """Write a model.

    Args:
        config: content of config.json.
        split: of `check_supported`.
        dtype: of matrices; llama.cpp requires float32 for tensors of one dim.
        read: returns a parameter by its Hugging Face name.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    _add_dimensions(writer, shape, config["max_position_embeddings"])
    _add_tokenizer(writer, tokenizer, config, split)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.num_hidden_layers)
    is_bfloat16 = dtype == torch.bfloat16
    for name, size in parameter_shapes(shape).items():
        base, suffix = name.rsplit(".", 1)
        halves = is_bfloat16 and len(size) > 1
        kind = gguf.GGMLQuantizationType.BF16 if halves else gguf.GGMLQuantizationType.F32
        number = int(np.prod(size)) * (2 if halves else 4)
        writer.add_tensor_info(f"{names.get_name(base)}.{suffix}", tuple(size), np.dtype("float32"), number, kind)
    scales = None
    if shape.rope_scaling is not None:
        scales = rotary_frequencies(replace(shape, rope_scaling=None)) / rotary_frequencies(shape)
        kind = gguf.GGMLQuantizationType.F32
        writer.add_tensor_info("rope_freqs.weight", tuple(scales.shape), np.dtype("float32"), 4 * len(scales), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in parameter_shapes(shape):
        tensor = read(name)
        if name.removesuffix(".weight").endswith(("q_proj", "k_proj")):
            tensor = _with_neighbours_as_pairs(tensor, shape.head_dim)
        halves = is_bfloat16 and tensor.dim() > 1
        writer.write_tensor_data((tensor.bfloat16().view(torch.int16) if halves else tensor.float()).numpy())
    if scales is not None:
        writer.write_tensor_data(scales.float().numpy())
    writer.close()


def _add_dimensions(writer: Any, shape: LlamaShape, context: int) -> None:
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_context_length(context)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_vocab_size(shape.vocab_size)


def _add_tokenizer(writer: Any, tokenizer: Tokenizer, config: Mapping[str, Any], split: str) -> None:
    import gguf

    document = json.loads(tokenizer.definition)
    # The model's vocabulary may be larger than the tokenizer's; the other rows are unused.
    tokens = [f"[UNUSED_{number}]" for number in range(config["vocab_size"])]
    kinds = [gguf.TokenType.UNUSED] * config["vocab_size"]
    for token, number in document["model"]["vocab"].items():
        tokens[number], kinds[number] = token, gguf.TokenType.NORMAL
    for added in document["added_tokens"]:
        if added["id"] < len(tokens):
            kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
            tokens[added["id"]], kinds[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = document["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    begin, end = begin_and_end(tokenizer, config)
    if begin is not None:
        writer.add_bos_token_id(begin)
    if end is not None:
        writer.add_eos_token_id(end)
    before, after = tokenizer.around
    writer.add_add_bos_token(bool(before))
    writer.add_add_eos_token(bool(after))
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _with_neighbours_as_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of each head: llama.cpp rotates dims 2i and 2i+1 together, Hugging Face i and i + E/2."""
    # (H E) D -> H 2 E/2 D -> H E/2 2 D -> (H E) D
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
