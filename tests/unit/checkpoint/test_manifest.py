from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.checkpoint.examples import SHAPE, manifest_of

from pretraining.checkpoint.manifest import FileEntry, Manifest, _checksum, check_same_model
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
        ({"config": None, "data": 3}, "config, data has another form|data, config has another form"),
    ],
)
def test_a_forged_manifest_of_another_form_is_refused(changes: dict[str, Any], message: str) -> None:
    values = {**manifest_of(3).document(), **changes}
    del values["checksum"]
    with pytest.raises(CheckpointError, match=message):
        Manifest.parse({**values, "checksum": _checksum(values)}, "m.json")


def test_a_checkpoint_of_another_model_is_refused_with_each_difference() -> None:
    check_same_model(manifest_of(3), SHAPE, Path("here"))
    other = replace(SHAPE, hidden_size=512, vocab_size=7)
    with pytest.raises(CheckpointError) as raised:
        check_same_model(manifest_of(3), other, Path("runs/a"))
    assert "hidden_size: 256 in the checkpoint, 512 in this run" in str(raised.value)
    assert "vocab_size: 32000 in the checkpoint, 7 in this run" in str(raised.value)
    assert "runs/a" in str(raised.value)
