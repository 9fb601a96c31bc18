"""`pretrain verify RUN`: a sound checkpoint has no faults, and every fault is named with its place."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.checkpoint.checkpoint_files import (
    SHAPES,
    config_of,
    file_entry,
    flip_byte,
    manifest_of,
    tensors_of,
    write_full_form,
    write_manifest,
    write_sharded,
)
from unit.train.whole_runs import error_of

from pretraining.checkpoint.chunks import Chunk
from pretraining.checkpoint.completeness import coverage_fault
from pretraining.checkpoint.manifest import (
    ITERATION_FILE,
    LOSS_STATE,
    MANIFEST,
    MODEL_FILE,
    OPTIMIZER_FILE,
    SCHEDULE_FILE,
)
from pretraining.checkpoint.restore import load
from pretraining.checkpoint.run_folder import read_document
from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.checkpoint.writer import WriteItem, write_chunks
from pretraining.cli import main
from pretraining.config.recipe_files import dump_config
from pretraining.errors import CheckpointError, DamagedError
from pretraining.model.hf import parameter_shapes
from pretraining.tools.command_settings import ListConfig, VerifyConfig
from pretraining.tools.list_checkpoints import list_checkpoints, rows_of
from pretraining.tools.verify import faults_of, verify

SHAPE = SHAPES["plain"]
UP = "model.layers.1.mlp.up_proj.weight"
FIRST = "shard-00001-model-00001-of-00002.safetensors"
SECOND = "shard-00002-model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound checkpoint, to be spoilt."""
    write_sharded(tmp_path / "c", tensors_of(SHAPE), manifest_of(SHAPE))
    return tmp_path / "c"


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (lambda folder: (folder / FIRST).unlink(), [FIRST]),
        (lambda folder: flip_byte(folder / SECOND), [SECOND]),
        (lambda folder: [path.write_bytes(b"") for path in (folder / FIRST, folder / SECOND)], [FIRST, SECOND]),
        (lambda folder: (folder / f"._{FIRST}").touch(), []),  # of a Mac's disk: no manifest names it
        (lambda folder: (folder / MANIFEST).write_text("{"), [MANIFEST]),
        (lambda folder: (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace("3", "4")), [MANIFEST]),
    ],
)
def test_damaged_files_are_named(folder: Path, damage: Callable[[Path], object], names: list[str]) -> None:
    damage(folder)
    faults = faults_of(folder)
    assert [str(folder / name) in fault for fault, name in zip(faults, names, strict=True)] == [True] * len(names)


def refused(folder: Path) -> str:
    """What a load of all weights of a checkpoint is refused with; empty where it is not."""
    weights = {name: torch.zeros(size) for name, size in parameter_shapes(SHAPE).items()}
    try:
        load(CheckpointRef(folder, read_document(folder)), weights)
    except DamagedError as error:
        return str(error)
    return ""


Change = Callable[[list[WriteItem]], list[WriteItem]]


def rewritten(folder: Path, change: Change) -> list[str]:
    """Return the faults of a checkpoint whose checksums fit, but not its content; a load names the same faults."""
    folder.mkdir()
    tensors = tensors_of(SHAPE).items()
    pieces = change([WriteItem(name, Chunk.whole(tensor.shape), tensor) for name, tensor in tensors])
    by_name: dict[str, list[WriteItem]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    files = {}
    for number in range(max(map(len, by_name.values()))):  # a file holds a name once
        name = f"part-{number}.safetensors"
        own = [found[number] for found in by_name.values() if len(found) > number]
        files[name] = write_chunks(folder / name, own)
    write_manifest(folder, manifest_of(SHAPE), files)
    faults = faults_of(folder)
    assert refused(folder) == "; ".join(faults)
    return faults


def cut(*ranges: tuple[int, int]) -> Change:

    def change(pieces: list[WriteItem]) -> list[WriteItem]:
        (whole,) = [piece for piece in pieces if piece.name == UP]
        parts = [WriteItem(UP, Chunk((a, 0), (b - a, 16)), whole.values[a:b].contiguous()) for a, b in ranges]
        return [*(piece for piece in pieces if piece is not whole), *parts]

    return change


def put(tensor: torch.Tensor, name: str = UP) -> Change:
    item = WriteItem(name, Chunk.whole(tensor.shape), tensor)
    return lambda pieces: [*(piece for piece in pieces if piece.name != name), item]


def without(end: str) -> Change:
    return lambda pieces: [piece for piece in pieces if not piece.name.endswith(end)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut((0, 20), (20, 32)), None),
        (cut((0, 20), (24, 32)), "of shape [32, 16], 20 to 23 of dim 0 are missing or duplicated"),
        (cut((0, 20), (16, 32)), "16 to 19 of dim 0 are missing or duplicated"),
        (cut((0, 20), (0, 20), (20, 32)), "2 chunks hold the same elements"),
        (cut((0, 20)), "dim 0 ends at 20, not at 32"),
        (put(torch.zeros(32, 16).half()), f"{UP} is of type torch.float16, not"),
        (put(torch.zeros(40, 16)), "dim 0 ends at 40, not at 32"),
        (put(torch.zeros(32)), f"{UP} does not have the 2 dims of its shape [32, 16]"),
        (put(torch.zeros(32, 16).long(), f"optimizer.exp_avg.{UP}"), "is of type torch.int64, not"),
        (put(torch.zeros(()), f"optimizer.exp_avg.{UP}"), "does not have the 2 dims"),
        (put(torch.zeros(32), f"optimizer.row_means.{UP}"), None),
        (put(torch.zeros(1), "model.foreign"), "model.foreign is no tensor of the model (in"),
        (lambda pieces: [piece for piece in pieces if piece.name != UP], f"lacks {UP}"),
        (without(f".{UP}"), f"lacks the optimizer state of {UP}"),
    ],
)
def test_missing_and_duplicate_pieces_are_named(tmp_path: Path, change: Change, message: str | None) -> None:
    faults = rewritten(tmp_path / "c", change)
    assert len(faults) == (0 if message is None else 1), faults
    assert message is None or message in faults[0]


def test_chunks_that_are_cut_along_two_dims_cover_a_tensor_once() -> None:
    grid = [Chunk((row, column), (2, 3)) for row in (0, 2) for column in (0, 3)]
    assert coverage_fault(grid, (4, 6)) is None
    assert all(coverage_fault(wrong, (4, 6)) for wrong in (grid[1:], grid[:-1], [*grid, grid[1]]))


def test_an_invalid_safetensors_file_is_a_fault_despite_its_checksum(folder: Path) -> None:
    sound = (folder / FIRST).read_bytes()
    for content in (sound + b"\0" * 8, b"\x10" + b"\0" * 7 + b"{not json      }"):
        (folder / FIRST).write_bytes(content)
        files = {path.name: file_entry(path) for path in folder.glob("*.safetensors")}
        write_manifest(folder, manifest_of(SHAPE), files)
        (fault,) = faults_of(folder)
        assert fault.startswith(str(folder / FIRST)) and FIRST in refused(folder)


def test_a_user_defined_optimizer_may_keep_nothing(tmp_path: Path) -> None:
    config = config_of(SHAPE)
    config = replace(config, optimizer=replace(config.optimizer, optimizer="torch.optim:SGD"))
    weights = {name: tensor for name, tensor in tensors_of(SHAPE).items() if not name.startswith("optimizer.")}
    write_sharded(tmp_path / "c", weights, manifest_of(SHAPE, config=dump_config(config)))
    assert faults_of(tmp_path / "c") == [] and refused(tmp_path / "c") == ""
    write_sharded(tmp_path / "d", weights, manifest_of(SHAPE))
    assert len(faults_of(tmp_path / "d")) == len(weights) and "and 18 more" in refused(tmp_path / "d")


def test_full_files_with_other_content_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    write_full_form(folder, tensors_of(SHAPE), manifest_of(SHAPE))
    model = torch.load(folder / MODEL_FILE, weights_only=True)

    def faults(value: Any) -> list[str]:
        torch.save({**model, UP: value}, folder / MODEL_FILE)
        write_manifest(folder, manifest_of(SHAPE), {path.name: file_entry(path) for path in folder.glob("*.pt")})
        return faults_of(folder)

    for value in (torch.zeros(3, 16), model[UP].int()):
        (fault,) = faults(value)
        assert UP in fault and refused(folder) == fault
    assert faults(model[UP].double()) == [] and refused(folder) == ""
    assert f"{UP} is no tensor" in faults([1.0, 2.0])[0] and f"{UP} is no tensor" in refused(folder)
    # torch 2.15 does not load sparse tensors from files that nobody vouches for.
    assert re.search(f"{UP} is no tensor|damaged, or holds more", faults(model[UP].to_sparse())[0])
    torch.save([1], folder / SCHEDULE_FILE)
    assert SCHEDULE_FILE in faults(model[UP])[0]


def test_four_files_without_a_manifest_are_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints" / "step_3_ckp"
    write_full_form(folder, tensors_of(SHAPE), manifest_of(SHAPE))
    (folder / MANIFEST).unlink()
    copied = shutil.copytree(folder, tmp_path / "copied")
    for source in (tmp_path, folder, copied):
        verify(VerifyConfig(ckpt_path=str(source)))
        assert "step 3, 2 files" in capsys.readouterr().out
    model = torch.load(copied / MODEL_FILE, weights_only=True)
    torch.save({**model, UP: torch.zeros(3, 16)}, copied / MODEL_FILE)
    assert "dim 0 ends at 3, not at 32 (in model_state_dict.pt)" in faults_of(copied)[0]
    content = torch.load(copied / ITERATION_FILE, weights_only=True)
    for changes in ({"step": "three"}, {"data": [1, 2]}, {"state": {"guards": torch.zeros(2)}}, {"format_version": 3}):
        torch.save(content | changes, copied / ITERATION_FILE)
        (fault,) = faults_of(copied)
        assert str(copied / ITERATION_FILE) in fault
    torch.save(content, copied / ITERATION_FILE)
    (copied / OPTIMIZER_FILE).unlink()
    assert str(copied / OPTIMIZER_FILE) in faults_of(copied)[0]


def test_a_run_is_checked_wholly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lines(source: Path, *, damaged: int) -> list[str]:
        with pytest.raises(CheckpointError, match=f"damaged: {damaged} of") if damaged else nullcontext():
            verify(VerifyConfig(ckpt_path=str(source)))
        return capsys.readouterr().out.splitlines()

    checkpoints = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        write_sharded(checkpoints / f"step_{step}_ckp", tensors_of(SHAPE), manifest_of(SHAPE, step))
    for name in ("step_4_ckp.tmp", "notes"):
        (checkpoints / name).mkdir()
    for source in (tmp_path, checkpoints):
        said = lines(source, damaged=0)
        assert [f"step {step}" in line and "no faults" in line for step, line in enumerate(said, start=1)] == [True] * 3
    flip_byte(checkpoints / "step_2_ckp" / FIRST)
    (checkpoints / "step_3_ckp" / MANIFEST).unlink()
    first, second, third = lines(tmp_path, damaged=2)
    assert "no faults" in first and FIRST in second and "step_3_ckp: damaged: its manifest.json is missing" in third
    assert len(lines(checkpoints / "step_1_ckp", damaged=0)) == len(lines(checkpoints / "step_3_ckp", damaged=1)) == 1
    with pytest.raises(CheckpointError, match="neither a checkpoint"):
        verify(VerifyConfig(ckpt_path=str(tmp_path / "nowhere")))


@pytest.mark.parametrize("command", ["list", "export", "sample", "inspect"])
def test_a_folder_that_is_not_there_is_named_so(command: str, tmp_path: Path) -> None:
    words = {"export": [f"{tmp_path}/out"], "sample": ["--prompt=a"], "inspect": ["--step=1"]}.get(command, [])
    assert "there is no such" in str(error_of(lambda: main([command, f"{tmp_path}/nothing", *words])))


def test_a_git_lfs_pointer_in_a_checkpoint_is_named_as_one(folder: Path) -> None:
    (folder / FIRST).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "git lfs pull" in faults_of(folder)[0]


# pretrain list: every checkpoint of a run with its state


def make_run(run: Path) -> Path:
    checkpoints = run / "checkpoints"
    tensors = tensors_of(SHAPE)
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}
    imported = manifest_of(SHAPE, 0, data={}, loss=None, evaluation_loss=None, state={})
    write_sharded(checkpoints / "step_0_ckp", weights, imported)
    evaluated = {LOSS_STATE: {"value": 2.75, "step": 2}}
    write_sharded(checkpoints / "step_2_ckp", tensors, manifest_of(SHAPE, 2, state=evaluated))
    write_full_form(checkpoints / "step_10_ckp", tensors, manifest_of(SHAPE, 10, evaluation_loss=None))
    write_sharded(checkpoints / "step_11_ckp.preempt", tensors, manifest_of(SHAPE, 11, kind="preempt"))
    write_sharded(checkpoints / "step_12_ckp", tensors, manifest_of(SHAPE, 12))
    next((checkpoints / "step_12_ckp").glob("*.safetensors")).unlink()
    (checkpoints / "step_13_ckp.a1b2.tmp").mkdir()
    (checkpoints / "step_13_ckp.a1b2.tmp" / "part").write_bytes(b"1234")
    (checkpoints / "best").symlink_to("step_2_ckp")
    return run


def shown(run: Path, **settings: bool) -> list[str]:
    with redirect_stdout(StringIO()) as out:
        list_checkpoints(ListConfig(str(run), **settings))
    return out.getvalue().splitlines()


def test_a_line_a_checkpoint_in_the_order_of_steps_and_as_json_an_object_each(tmp_path: Path) -> None:
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


def test_a_run_without_checkpoints_has_none_and_no_run_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert shown(tmp_path)[1].startswith("0 checkpoints")
    with pytest.raises(CheckpointError) as refusal:
        shown(tmp_path / "nowhere")
    assert (refusal.value.path, refusal.value.settings) == (tmp_path / "nowhere", ("run_path",))
