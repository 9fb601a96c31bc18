from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.checkpoint.examples import SHAPE, manifest_of

from pretraining.checkpoint.manifest import FileEntry, Manifest, _checksum, check_same_model, checkpoint_name, shape_of
from pretraining.errors import CheckpointError


def test_a_manifest_reads_back_equal() -> None:
    manifest = replace(manifest_of(3, {"a.safetensors": FileEntry(5, "0000abcd")}), loss=0.1, state={"guard": [1, 2.5]})
    assert Manifest.parse(json.loads(json.dumps(manifest.document())), "m.json") == manifest


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "not the manifest of a checkpoint"),
        ({"step": 3}, "no format_version"),
        ({"format_version": 99}, "format version 99; this version of pretraining reads 2"),
        ({"format_version": 2, "step": 3}, "damaged: it lacks best_evaluation_loss, checksum, config, data"),
    ],
)
def test_what_is_no_manifest_is_refused_by_name(document: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Manifest.parse(document, "m.json")


def test_any_changed_value_of_a_manifest_is_noticed() -> None:
    document = manifest_of(3).document()
    for name, value in document.items():
        if name != "format_version":
            changed = {**document, name: value + 1 if isinstance(value, int) else "another"}
            with pytest.raises(CheckpointError, match=r"m\.json is damaged.*checksum"):
                Manifest.parse(changed, "m.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": "3"}, "step has another form"),
        ({"files": [1]}, "files has another form"),
        ({"files": {"a": 1}}, "files has another form"),
        ({"files": {"a": {"bytes": 1}}}, "files has another form"),
        ({"config": None, "data": 3}, "config has another form, None, not a text; data has another form, 3, not"),
        ({"step": 10**30}, "step has another form, 1000.*, not a whole number from 0"),
        ({"step": -1}, "step has another form, -1"),
        ({"step": True}, "step has another form, True"),
        ({"tokens_seen": 2.0}, "tokens_seen has another form"),
        ({"global_batch_size": None}, "global_batch_size has another form"),
        ({"seconds": float("nan")}, "seconds has another form, nan, not a finite number from 0"),
        ({"seconds": float("inf")}, "seconds has another form"),
        ({"seconds": -1.0}, "seconds has another form"),
        ({"loss": "2.5"}, "loss has another form, '2.5', not a finite number or null"),
        ({"evaluation_loss": float("nan")}, "evaluation_loss has another form"),
        ({"best_evaluation_loss": []}, "best_evaluation_loss has another form"),
        ({"kind": "spare"}, "kind has another form, 'spare', not one of interval, final, preempt, best"),
        ({"kind": ["final"]}, "kind has another form"),
        ({"global_batch_size": 0}, "global_batch_size is 0, and that of the data 0"),
        (
            {"data": {**manifest_of(3).data, "phases": [{**manifest_of(3).data["phases"][0], "global_batch_size": 8}]}},
            "global_batch_size is 4, and that of the data 8",
        ),
        ({"state": {"guards": float("inf")}}, "state has another form"),
        ({"world": "two"}, "world has another form"),
        ({"data": {"next_sample": 12}}, "data has another form"),
        ({"data": {**manifest_of(3).data, "phases": []}}, "data has another form"),
        ({"data": {**manifest_of(3).data, "phases": [{"first_step": "0", "weights": {}}]}}, "data has another form"),
        ({"data": {**manifest_of(3).data, "counts": {"a": -1}}}, "data has another form"),
        ({"data": {**manifest_of(3).data, "counts": {}}}, "data has another form"),
        ({"data": {**manifest_of(3).data, "datasets": [1]}}, "data has another form"),
        ({"files": {"a": {"bytes": True, "crc32": "0"}}}, "files has another form"),
        ({"files": {"a": {"bytes": -1, "crc32": "0"}}}, "files has another form"),
        ({"files": {"a": {"bytes": 1, "crc32": 0}}}, "files has another form"),
    ],
)
def test_a_forged_manifest_of_another_form_is_refused(changes: dict[str, Any], message: str) -> None:
    values = {**manifest_of(3).document(), **changes}
    del values["checksum"]
    with pytest.raises(CheckpointError, match=message):
        Manifest.parse({**values, "checksum": _checksum(values)}, "m.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=9), values, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(manifest_of(3).document())), json_values, st.data())
def test_whatever_stands_in_a_manifest_it_is_read_or_refused_with_one_error(
    name: str, value: Any, data: st.DataObject
) -> None:
    values = manifest_of(3).document()
    del values["checksum"]
    if isinstance(values.get(name), dict) and values[name] and data.draw(st.booleans()):
        value = {**values[name], data.draw(st.sampled_from(sorted(values[name]))): value}
    values[name] = value
    try:
        manifest = Manifest.parse({**values, "checksum": _checksum(values)}, "m.json")
        shape_of(manifest)
        checkpoint_name("tokens", manifest)
    except CheckpointError:
        return
    assert Manifest.parse(json.loads(json.dumps(manifest.document())), "m.json") == manifest


SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "256"}, "hidden_size='256'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is no size"),
        ({"vocab_size": 2**60}, f"vocab_size={2**60}"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"head_dim": 8}, "its dimensions do not fit each other"),
        ({"num_key_value_heads": 3}, "does not divide"),
        ({"rope_theta": 10**400}, "rope_theta=1000"),
        ({"rope_theta": None}, "rope_theta=None"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 is neither"),
        ({"rope_scaling": {"factor": 2}}, "missing 3 required"),
        ({"rope_scaling": {**SCALING, "factor": float("nan")}}, "factor=nan cannot be computed with"),
        ({"rope_scaling": {**SCALING, "low_freq_factor": "1"}}, "low_freq_factor='1' cannot be computed with"),
        ({"width": 3}, "width"),
    ],
)
def test_a_forged_model_is_refused_before_anything_is_built_of_it(changes: dict[str, Any], message: str) -> None:
    manifest = manifest_of(3)
    assert shape_of(manifest) == SHAPE
    with pytest.raises(CheckpointError, match=f"does not describe a model: .*{message}"):
        shape_of(replace(manifest, model=manifest.model | changes))


def test_a_version_that_is_no_number_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"format version 2\.0; this version of pretraining reads 2"):
        Manifest.parse({**manifest_of(3).document(), "format_version": 2.0}, "m.json")


def test_a_number_that_python_does_not_write_is_refused() -> None:
    values = {name: getattr(manifest_of(3), name) for name in Manifest.__dataclass_fields__}
    with pytest.raises(CheckpointError, match=r"step has another form, .*(huge|9999)"):
        Manifest.of_values({**values, "step": 10**5000 - 1}, "iter_state_dict.pt")


def test_a_checkpoint_of_another_model_is_refused_with_each_difference() -> None:
    check_same_model(manifest_of(3), SHAPE, Path("here"))
    other = replace(SHAPE, hidden_size=512, vocab_size=7)
    with pytest.raises(CheckpointError) as raised:
        check_same_model(manifest_of(3), other, Path("runs/a"))
    assert "hidden_size: 256 in the checkpoint, 512 in this run" in str(raised.value)
    assert "vocab_size: 32000 in the checkpoint, 7 in this run" in str(raised.value)
    assert "runs/a" in str(raised.value)
