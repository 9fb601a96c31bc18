"""Convert an export to a GGUF file for llama.cpp (needs `pip install gguf safetensors`).

    pretrain export runs/mine --output_path=exported --dtype=float32
    python scripts/to_gguf.py exported mine.gguf

llama.cpp's own converter identifies tokenizers by name. A tokenizer trained here has no name, so this script writes how
it splits text. Weights keep their dtype; llama.cpp's `llama-quantize` makes them smaller.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open

from pretraining.config.variants import NEUTRAL, LlamaShape
from pretraining.data.tokenizer import load_tokenizer
from pretraining.errors import PretrainError
from pretraining.files import read_json
from pretraining.model.frequencies import rotary_frequencies
from pretraining.model.hf import CONFIG_FILE, shape_of_document

# llama.cpp's names for the rules that split text into words before byte-pair merges.
GPT2_SPLIT = "gpt-2"
LLAMA3_SPLIT = "llama-bpe"


def convert(folder: Path, output: Path) -> None:
    """Convert a folder; an existing file is replaced when the new one is complete.

    Raises:
        SystemExit: the folder is no export of a Llama with a tokenizer, or the file cannot be written.
    """
    unfinished = output.with_name(f".{output.name}.tmp")
    try:
        config = read_json(folder / CONFIG_FILE)
        shape = shape_of_document(config, str(folder / CONFIG_FILE))
        if problem := unsupported(shape):
            raise ValueError(f"its {problem} need llama.cpp's own convert_hf_to_gguf.py")
        writer = gguf.GGUFWriter(unfinished, "llama")
        add_dimensions(writer, shape)
        add_tokenizer(writer, folder, config)
        add_weights(writer, folder, shape)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        unfinished.replace(output)
    except (OSError, ValueError, PretrainError) as error:
        raise SystemExit(f"error: {folder} cannot be written as {output}: {error}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def unsupported(shape: LlamaShape) -> str:
    """Return what llama.cpp's architecture "llama" cannot express here; "" if nothing."""
    plain = replace(shape, attention_bias="false", mlp_bias=False, model_family="llama", sliding_window=None)
    switches = [name for name, neutral in NEUTRAL.items() if getattr(plain, name) != neutral]
    found = [name for name in switches if name not in ("rms_norm_eps", "tie_word_embeddings", "rope_scaling")]
    has_bias = shape.attention_bias != "false" or shape.mlp_bias
    other_scaling = shape.rope_scaling is not None and shape.rope_scaling.rope_type != "llama3"
    return ", ".join([*sorted(found), *["biases"] * has_bias, *["rope_scaling"] * other_scaling])


def add_dimensions(writer: gguf.GGUFWriter, shape: LlamaShape) -> None:
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_vocab_size(shape.vocab_size)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    document = read_json(folder / "tokenizer.json")
    model = document["model"]
    if model["type"] != "BPE":
        raise SystemExit(f"{folder}/tokenizer.json has the type {model['type']}; only byte-level BPE is supported.")
    # The model's vocabulary may be larger than the tokenizer's; the other rows are unused.
    tokens = [f"[UNUSED_{number}]" for number in range(config["vocab_size"])]
    kinds = [gguf.TokenType.UNUSED] * config["vocab_size"]
    for token, number in model["vocab"].items():
        tokens[number], kinds[number] = token, gguf.TokenType.NORMAL
    for added in document["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split_of(document["pre_tokenizer"]))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    if config["bos_token_id"] is not None:
        writer.add_bos_token_id(config["bos_token_id"])
    if config["eos_token_id"] is not None:
        writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(config["bos_token_id"] is not None)
    template = load_tokenizer(folder).chat_template
    if template is not None:
        writer.add_chat_template(template)


def split_of(pre_tokenizer: dict[str, Any]) -> str:
    """Return llama.cpp's name for the way in which a tokenizer splits text."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True) and not steps[0]["add_prefix_space"]:
        return GPT2_SPLIT
    pattern = steps[0].get("pattern", {}).get("Regex", "")
    if kinds == ["Split", "ByteLevel"] and r"\p{N}{1,3}" in pattern and "(?i:'s|'t|'re|'ve|'m|'ll|'d)" in pattern:
        return LLAMA3_SPLIT
    raise SystemExit(f"The tokenizer splits text by {' + '.join(kinds)}; supported are GPT-2's and Llama 3's rules.")


def add_weights(writer: gguf.GGUFWriter, folder: Path, shape: LlamaShape) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.num_hidden_layers)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                base, suffix = name.rsplit(".", 1)
                tensor = file.get_tensor(name)
                if base.endswith(("q_proj", "k_proj")):
                    tensor = with_neighbours_as_pairs(tensor, shape.head_dim)
                add_tensor(writer, f"{names.get_name(base)}.{suffix}", tensor)
    if shape.rope_scaling is not None:
        plain = replace(shape, rope_scaling=None)
        add_tensor(writer, "rope_freqs.weight", rotary_frequencies(plain) / rotary_frequencies(shape))


def with_neighbours_as_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of each head: llama.cpp rotates dims 2i and 2i+1 together, Hugging Face i and i + E/2."""
    # (H E) D -> H 2 E/2 D -> H E/2 2 D -> (H E) D
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.bfloat16 and tensor.dim() > 1:
        raw = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:  # tensors of one dim are float32, as llama.cpp requires
        writer.add_tensor(name, tensor.float().numpy())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python scripts/to_gguf.py EXPORTED_FOLDER FILE.gguf")
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
