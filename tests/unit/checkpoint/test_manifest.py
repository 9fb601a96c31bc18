from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.checkpoint.examples import SHAPE, manifest_of

from pretraining.checkpoint.manifest import FileEntry, Manifest, check_same_model, shape_of
from pretraining.checkpoint.run_folder import checkpoint_name
from pretraining.errors import CheckpointError
from pretraining.files import with_checksum


def test_a_manifest_reads_back_equal() -> None:
    manifest = replace(
        manifest_of(3, {"a.safetensors": FileEntry(5, "0000abcd")}), loss=0.1, state={"guard": {"a": [1, 2.5]}}
    )
    assert Manifest.parse(json.loads(json.dumps(manifest.document())), "m.json") == manifest


DOCUMENT = manifest_of(3).document()
VALUES = {name: value for name, value in DOCUMENT.items() if name != "checksum"}
DATA = VALUES["data"]
PHASE = DATA["phases"][-1]
NO_COUNTS: list[Any] = [None, "9", [], {}, 2.5, True, -1, 10**30]
FORGED: dict[str, list[Any]] = {
    "step": ["3", 10**30, -1, True],
    "tokens_seen": [2.0],
    "seconds": [float("nan"), float("inf"), "1"],
    "loss": ["2.5"],
    "kind": [["final"]],
    "global_batch_size": [None],
    "config": [None],
    "state": [{"guards": float("inf")}],
    "world": ["two"],
    "files": [[1], {"a": 1}, {"a": {"bytes": 1}}, {"a": {"bytes": -1, "crc32": "0"}}, {"a": {"bytes": 1, "crc32": 0}}],
    "data": [
        *(3, {"next_sample": 12}, {**DATA, "phases": []}, {**DATA, "counts": {}}),
        *(
            {**DATA, "datasets": datasets}
            for datasets in ([1], {}, *({"a": value} for value in NO_COUNTS if value != {}))
        ),
        *({**DATA, "datasets": {"a": {"tokens": value}}} for value in NO_COUNTS),
        *({**DATA, "next_sample": value} for value in NO_COUNTS),
        *({**DATA, "counts": {"a": [[64, value]]}} for value in NO_COUNTS),
        *({**DATA, "phases": [{**PHASE, "weights": {"a": value}}]} for value in NO_COUNTS),
        *({**DATA, "phases": [{**PHASE, key: value}]} for key in PHASE if key != "weights" for value in NO_COUNTS),
        *({**DATA, "phases": [{key: PHASE[key] for key in PHASE if key != gone}]} for gone in PHASE),
    ],
}
REFUSED: list[Any] = [
    *([], {"step": 3}, {"format_version": 99}, {"format_version": 2, "step": 3}, {**DOCUMENT, "format_version": 2.0}),
    # Changed, without another checksum; and forged, with the right one.
    *({**DOCUMENT, name: value + 1 if isinstance(value, int) else "another"} for name, value in DOCUMENT.items()),
    *(with_checksum({**VALUES, name: value}) for name, values in FORGED.items() for value in values),
]


@pytest.mark.parametrize("document", REFUSED)
def test_a_damaged_or_forged_manifest_is_refused_by_its_path(document: Any) -> None:
    is_of_version_2 = isinstance(document, dict) and document.get("format_version") == 2
    with pytest.raises(CheckpointError, match="damaged" if is_of_version_2 else "has format version") as refused:
        Manifest.parse(document, "m.json")
    assert refused.value.path == Path("m.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=9), values, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(DOCUMENT)), json_values, st.data())
def test_any_content_of_a_manifest_is_read_or_is_one_error(name: str, value: Any, data: st.DataObject) -> None:
    if isinstance(VALUES.get(name), dict) and VALUES[name] and data.draw(st.booleans()):
        value = {**VALUES[name], data.draw(st.sampled_from(sorted(VALUES[name]))): value}
    try:
        manifest = Manifest.parse(with_checksum({**VALUES, name: value}), "m.json")
        shape_of(manifest)
        checkpoint_name("tokens", manifest)
    except CheckpointError:
        return
    assert Manifest.parse(json.loads(json.dumps(manifest.document())), "m.json") == manifest


SCALING = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "256"},
        {"num_hidden_layers": 10**9},
        {"vocab_size": 2**60},
        {"vocab_size": True},
        {"num_attention_heads": 0},
        {"head_dim": 7},
        {"qk_norm": "both"},
        {"mlp_bias": 1},
        {"logits_scaling": 0.0},
        {"attention_multiplier": float("nan")},
        {"no_rope_interval": -1},
        {"sliding_window": 0},
        {"rope_scaling": {**SCALING, "rope_type": "dynamic"}},
        {"num_key_value_heads": 3},
        {"rope_theta": 10**400},
        {"rope_theta": None},
        {"tie_word_embeddings": 1},
        {"rope_scaling": {"factor": 2}},
        {"rope_scaling": {**SCALING, "factor": float("nan")}},
        {"rope_scaling": {**SCALING, "low_freq_factor": "1"}},
        {"width": 3},
    ],
)
def test_a_forged_model_is_refused_before_anything_is_built_of_it(changes: dict[str, Any]) -> None:
    manifest = manifest_of(3)
    assert shape_of(manifest) == SHAPE
    with pytest.raises(CheckpointError):
        shape_of(replace(manifest, model=manifest.model | changes))


def test_a_checkpoint_of_another_model_is_refused_with_each_difference() -> None:
    check_same_model(manifest_of(3), SHAPE, Path("here"))
    other = replace(SHAPE, hidden_size=512, vocab_size=7)
    with pytest.raises(CheckpointError) as raised:
        check_same_model(manifest_of(3), other, Path("runs/a"))
    assert "hidden_size: 256 in the checkpoint, 512 in this run" in str(raised.value)
    assert "vocab_size" in str(raised.value) and raised.value.path == Path("runs/a")
