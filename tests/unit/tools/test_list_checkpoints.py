"""`pretrain list`: every checkpoint of a run with its state."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from unit.checkpoint.checkpoint_files import SHAPES, manifest_of, tensors_of, write_full_form, write_sharded

from pretraining.checkpoint.manifest import MANIFEST
from pretraining.errors import CheckpointError
from pretraining.tools.commands import ListConfig
from pretraining.tools.list_checkpoints import list_checkpoints, rows_of

SHAPE = SHAPES["plain"]


def make_run(run: Path) -> Path:
    checkpoints = run / "checkpoints"
    tensors = tensors_of(SHAPE)
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}
    write_sharded(checkpoints / "step_0_ckp", weights, manifest_of(SHAPE, 0, data={}, loss=None, evaluation_loss=None))
    write_sharded(checkpoints / "step_2_ckp", tensors, manifest_of(SHAPE, 2))
    write_full_form(checkpoints / "step_10_ckp", tensors, manifest_of(SHAPE, 10, evaluation_loss=None))
    write_sharded(checkpoints / "step_11_ckp.preempt", tensors, manifest_of(SHAPE, 11, kind="preempt"))
    write_sharded(checkpoints / "step_12_ckp", tensors, manifest_of(SHAPE, 12))
    next((checkpoints / "step_12_ckp").glob("*.safetensors")).unlink()
    (checkpoints / "step_13_ckp.a1b2.tmp").mkdir()
    (checkpoints / "step_13_ckp.a1b2.tmp" / "part").write_bytes(b"1234")
    (checkpoints / "best").symlink_to("step_2_ckp")
    return run


Shown = Callable[..., list[str]]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """Return a function that lists a run and returns the printed lines."""

    def show(run: Path, **settings: bool) -> list[str]:
        list_checkpoints(ListConfig(str(run), **settings))
        return capsys.readouterr().out.splitlines()

    return show


def test_a_line_a_checkpoint_in_the_order_of_steps_and_as_json_an_object_each(tmp_path: Path, shown: Shown) -> None:
    run = make_run(tmp_path)
    lines = shown(run)
    states = ["complete, import", "complete, best", "complete", "complete, preempt", "damaged", "incomplete"]
    assert all(f"  {state}  " in line for state, line in zip(states, lines[1:7], strict=True))
    again = shown(tmp_path / "checkpoints")[1:7]
    assert [line.split()[-1] for line in again] == [line.split()[-1] for line in lines[1:7]]
    rows = [json.loads(line) for line in shown(run, json=True)]
    assert [row["step"] for row in rows] == [0, 2, 10, 11, None, None]
    assert [row["state"] for row in rows] == ["complete"] * 4 + ["damaged", "incomplete"]
    assert rows[1] | {"age_seconds": 0, "bytes": 0} == {
        **{"name": "step_2_ckp", "state": "complete", "kind": "interval", "best": True, "step": 2, "tokens_seen": 200},
        **{"loss": 2.5, "evaluation_loss": 2.75, "bytes": 0, "age_seconds": 0, "fault": None},
    }
    assert rows[-1]["bytes"] == 4 and rows[4]["fault"]
    for path in (run / "checkpoints" / "step_2_ckp").iterdir():
        os.utime(path, (1e9, 1e9))
    os.utime(run / "checkpoints" / "step_2_ckp", (1e9, 1e9))
    assert [row.age_seconds > 3e7 for row in rows_of(run)[:3]] == [False, True, False]


def test_four_files_without_a_manifest_are_complete_and_shards_without_one_are_damaged(
    tmp_path: Path, shown: Shown
) -> None:
    run = make_run(tmp_path)
    for name in ("step_10_ckp", "step_2_ckp"):
        (run / "checkpoints" / name / MANIFEST).unlink()
    rows = {row["name"]: row for row in map(json.loads, shown(run, json=True))}
    assert (rows["step_10_ckp"]["state"], rows["step_10_ckp"]["step"]) == ("complete", 10)
    assert rows["step_2_ckp"]["state"] == "damaged" and "its manifest.json is missing" in rows["step_2_ckp"]["fault"]


def test_a_run_without_checkpoints_has_none_and_no_run_is_an_error(tmp_path: Path, shown: Shown) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert len(shown(tmp_path)) == 2 and shown(tmp_path)[1].startswith("0 checkpoints")
    with pytest.raises(CheckpointError) as refusal:
        shown(tmp_path / "nowhere")
    assert refusal.value.path == tmp_path / "nowhere" and refusal.value.settings == ("run_path",)
