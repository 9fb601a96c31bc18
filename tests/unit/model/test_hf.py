"""A Llama's config.json reads back equal, in transformers too; other models are refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_shape import TINY_SHAPE
from unit.checkpoint.checkpoint_files import SCALED

from pretraining.config.variants import VARIANTS, LlamaShape, model_settings, resolve_shape
from pretraining.errors import CheckpointError
from pretraining.model.families import FAMILIES
from pretraining.model.hf import config_document, generation_document, parameter_shapes, shape_of_document
from pretraining.model.llama import Llama

LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": SCALED.factor, "low_freq_factor": SCALED.low_freq_factor} | {
    "high_freq_factor": SCALED.high_freq_factor,
    "original_max_position_embeddings": SCALED.original_max_position_embeddings,
}
MISTRAL, QWEN3, SMOLLM3, GRANITE = (
    {"model_type": name, "architectures": [FAMILIES[name].architecture]}
    for name in ("mistral", "qwen3", "smollm3", "granite")
)
WINDOW = {"use_sliding_window": True, "sliding_window": 8}
SLIDING, MIXED = ["sliding_attention"] * 2, ["sliding_attention", "full_attention"]


def document(shape: LlamaShape = TINY_SHAPE, **changes: Any) -> dict[str, Any]:
    return {**config_document(shape, "bfloat16", 16, None, 5), **changes}


@pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_shape_reads_back_equal_from_its_document_and_from_its_settings(shape: LlamaShape) -> None:
    assert shape_of_document(json.loads(json.dumps(document(shape))), "c") == shape
    assert resolve_shape(model_settings(shape)) == shape
    other = replace(shape, intermediate_size=7, rope_scaling=SCALED)
    assert model_settings(other).model_variant is None and resolve_shape(model_settings(other)) == other
    assert model_settings(replace(shape, vocab_size=11)).model_variant is not None


def test_transformers_read_the_same_from_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for shape in (TINY_SHAPE, replace(TINY_SHAPE, rope_scaling=SCALED, tie_word_embeddings=True, rope_theta=5e5)):
        (tmp_path / "config.json").write_text(json.dumps(document(shape)))
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_document(None, [5])))
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        assert config.rope_parameters["rope_theta"] == shape.rope_theta
        expected = LLAMA3 if shape.rope_scaling else {"rope_type": "default"}
        assert {**expected, "rope_theta": shape.rope_theta} == dict(config.rope_parameters)
        assert config.tie_word_embeddings == shape.tie_word_embeddings
        assert str(config.dtype) in ("torch.bfloat16", "bfloat16")
        assert (config.bos_token_id, config.eos_token_id) == (None, 5)
        assert transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id == 5
        # A config.json of transformers is read here.
        config.save_pretrained(tmp_path)
        assert shape_of_document(json.loads((tmp_path / "config.json").read_text()), "c") == shape


def test_the_context_is_the_longer_one_of_shape_and_training() -> None:
    assert config_document(TINY_SHAPE, "float32", 4096, None, None)["max_position_embeddings"] == 4096


def test_earlier_spellings_and_missing_entries_mean_what_they_mean_in_transformers() -> None:
    old = document(rms_norm_eps=None, num_key_value_heads=None, head_dim=None, tie_word_embeddings=None)
    del old["rope_parameters"], old["hidden_act"]
    old |= {"rope_theta": None, "max_position_embeddings": None}
    shape = shape_of_document(old, "c")
    assert (shape.rms_norm_eps, shape.num_key_value_heads, shape.rope_theta) == (1e-6, 2, 1e4)
    assert shape.max_position_embeddings == 2048 and not shape.tie_word_embeddings
    scaling = {"type": "llama3", **{name: LLAMA3[name] for name in LLAMA3 if name != "rope_type"}}
    scaled = shape_of_document({**old, "rope_theta": 5e5, "rope_scaling": scaling}, "c")
    assert (scaled.rope_theta, scaled.rope_scaling) == (5e5, SCALED)
    large = shape_of_document({**old, "rope_theta": 10**30}, "c")
    assert type(large.rope_theta) is float  # torch cannot compute with an integer of this size


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma3"}, "gemma3"),
        ({"model_type": "mistral"}, "mistral"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        *(({"hidden_size": size}, "hidden_size") for size in (None, "16")),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": "some"}, "attention_bias"),
        ({"mlp_bias": 3}, "mlp_bias"),
        ({**MISTRAL, "attention_bias": True}, "attention_bias"),
        ({**MISTRAL, "sliding_window": 0.5}, "sliding_window"),
        ({**QWEN3, "mlp_bias": True}, "mlp_bias"),
        ({**QWEN3, **WINDOW, "layer_types": MIXED}, "in some layers only"),
        ({**QWEN3, **WINDOW, "max_window_layers": 1}, "in some layers only"),
        ({**SMOLLM3, **WINDOW, "no_rope_layers": [1, 0]}, "in some layers only"),
        ({**MISTRAL, **WINDOW, "layer_types": MIXED}, "in some layers only"),
        ({**MISTRAL, "sliding_window": None, "layer_types": SLIDING}, "layer_types has sliding_attention"),
        ({**SMOLLM3, "sliding_window": 8, "layer_types": SLIDING}, "layer_types has sliding_attention"),
        ({"layer_types": SLIDING}, "layer_types has sliding_attention"),
        ({**GRANITE, "layer_types": MIXED, "sliding_window": 8}, "sliding_window"),
        ({**QWEN3, **WINDOW, "layer_types": SLIDING[:1]}, "for each of 2 layers"),
        *(({"layer_types": [each] * 2}, "layer_types is") for each in ("chunked_attention", ["full_attention"])),
        ({**QWEN3, **WINDOW, "max_window_layers": "all"}, "not a number"),
        ({**SMOLLM3, "no_rope_layers": [1]}, "for each of 2 layers"),
        ({**SMOLLM3, "no_rope_layers": [0, 1]}, "at regular intervals"),
        ({**SMOLLM3, "no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ({**GRANITE, "logits_scaling": 0}, "logits_scaling"),
        ({**GRANITE, "residual_multiplier": math.nan}, "residual_multiplier"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": ["yarn"], "factor": 4.0}}, "rope_type"),
        ({"rope_parameters": "linear"}, "factor is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"is_causal": False}, "is_causal"),
        ({"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}, "per_layer_config"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
        ({"rope_parameters": {"rope_theta": "much"}}, "rope_theta"),
        ({"head_dim": 5}, "head_dim=5"),
        ({"hidden_size": 15, "head_dim": None}, "hidden_size=15 / num_attention_heads=2"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        shape_of_document(document(**changes), "m/config.json")


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(CheckpointError) as raised:
        shape_of_document(document(hidden_act="gelu", attention_dropout=0.5, sliding_window=8), "m/config.json")
    assert raised.value.path == Path("m/config.json")
    assert all(name in str(raised.value) for name in ("hidden_act", "attention_dropout", "sliding_window"))
    with pytest.raises(CheckpointError):
        shape_of_document([], "m/config.json")


@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_are_those_of_the_model(tied: bool) -> None:
    shape = replace(TINY_SHAPE, tie_word_embeddings=tied)
    state = Llama(shape).state_dict()
    if tied:
        del state["lm_head.weight"]
    assert parameter_shapes(shape) == {name: tensor.shape for name, tensor in state.items()}
