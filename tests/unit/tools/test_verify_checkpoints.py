"""`pretrain verify`: a sound checkpoint has no faults, and every fault is named with its place."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unit.checkpoint.checkpoint_files import (
    SHAPES,
    config_of,
    flip_byte,
    manifest_of,
    tensors_of,
    write_full_form,
    write_manifest,
    write_sharded,
)

from pretraining.checkpoint.completeness import coverage_fault
from pretraining.checkpoint.manifest import (
    ITERATION_FILE,
    MANIFEST,
    MODEL_FILE,
    OPTIMIZER_FILE,
    SCHEDULE_FILE,
    read_document,
)
from pretraining.checkpoint.reader import file_entry
from pretraining.checkpoint.start_point import CheckpointRef, find_checkpoint, load
from pretraining.checkpoint.writer import Chunk, WriteItem, write_chunks
from pretraining.config.commands import VerifyConfig
from pretraining.config.recipes import dump_config
from pretraining.config.rules import check_config
from pretraining.config.training import CheckpointConfig
from pretraining.errors import CheckpointError, ConfigError, DamagedError
from pretraining.model.hf import parameter_shapes
from pretraining.tools.verify_checkpoints import faults_of, verify_checkpoints

SHAPE = SHAPES["plain"]
UP = "model.layers.1.mlp.up_proj.weight"
FIRST = "shard-00001-model-00001-of-00002.safetensors"
SECOND = "shard-00002-model-00002-of-00002.safetensors"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("processes", [1, 3, 7])
def test_a_sound_checkpoint_has_no_faults(tmp_path: Path, shape, processes: int) -> None:  # type: ignore[no-untyped-def]
    write_sharded(tmp_path / "c", tensors_of(shape), manifest_of(shape), processes)
    assert faults_of(tmp_path / "c", threads=4) == []


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_sound_full_checkpoint_has_no_faults(tmp_path: Path, shape) -> None:  # type: ignore[no-untyped-def]
    write_full_form(tmp_path / "c", tensors_of(shape), manifest_of(shape))
    assert faults_of(tmp_path / "c") == []


def rewrite_manifest(folder: Path, **changes: object) -> None:
    document = json.loads((folder / MANIFEST).read_text()) | changes
    (folder / MANIFEST).write_text(json.dumps(document))


def damage_both(folder: Path) -> None:
    flip_byte(folder / FIRST)
    (folder / SECOND).write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (lambda folder: (folder / FIRST).unlink(), [f"{FIRST} is missing"]),
        (lambda folder: flip_byte(folder / SECOND), [f"{SECOND} is damaged: its checksum is"]),
        (
            damage_both,
            [f"{FIRST} is damaged", f"{SECOND} has 0 bytes in place of"],
        ),
        (lambda folder: (folder / "more.safetensors").touch(), ["more.safetensors is no part of the checkpoint"]),
        (lambda folder: (folder / MANIFEST).write_text("{"), ["manifest.json: cannot be read"]),
        (lambda folder: rewrite_manifest(folder, step=4), ["manifest.json: damaged"]),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, damage: Callable[[Path], object], messages: list[str]) -> None:
    folder = tmp_path / "c"
    write_sharded(folder, tensors_of(SHAPE), manifest_of(SHAPE))
    damage(folder)
    faults = faults_of(folder)
    assert len(faults) == len(messages)
    assert all(str(folder) in fault and message in fault for fault, message in zip(faults, messages, strict=True))


def test_a_manifest_that_names_files_elsewhere_or_no_model_is_a_fault(tmp_path: Path) -> None:
    manifest = manifest_of(SHAPE)
    write_sharded(tmp_path / "c", tensors_of(SHAPE), manifest)
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(b"1")
    write_manifest(tmp_path / "c", manifest, {"../outside.safetensors": file_entry(outside)})
    assert any(
        "names '../outside.safetensors', which is no tensor file of this folder" in fault
        for fault in faults_of(tmp_path / "c")
    )
    write_manifest(tmp_path / "c", replace(manifest, model={"rope_scaling": None, "width": 3}), {})
    assert "does not describe a model" in faults_of(tmp_path / "c")[0]


def refused(folder: Path) -> str:
    """What a load of all weights of a checkpoint is refused with; empty where it is not."""
    weights = {name: torch.zeros(size) for name, size in parameter_shapes(SHAPE).items()}
    try:
        load(CheckpointRef(folder, read_document(folder)), weights)
    except DamagedError as error:
        return str(error)
    return ""


def rewritten(folder: Path, change: Callable[[list[WriteItem]], list[WriteItem]]) -> list[str]:
    """The faults of a checkpoint whose checksums fit, but not its content; a load says the same ones."""
    folder.mkdir()
    pieces = [
        WriteItem(name, Chunk((0,) * tensor.dim(), tuple(tensor.shape)), tensor)
        for name, tensor in tensors_of(SHAPE).items()
    ]
    changed = change(pieces)
    by_name: dict[str, list[WriteItem]] = {}
    for piece in changed:
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


def cut(pieces: list[WriteItem], name: str, ranges: list[tuple[int, int]]) -> list[WriteItem]:
    """One tensor in pieces of rows."""
    (whole,) = [piece for piece in pieces if piece.name == name]
    parts = [
        WriteItem(name, Chunk((begin, 0), (end - begin, whole.chunk.sizes[1])), whole.values[begin:end].contiguous())
        for begin, end in ranges
    ]
    return [piece for piece in pieces if piece.name != name] + parts


def put(pieces: list[WriteItem], name: str, tensor: torch.Tensor) -> list[WriteItem]:
    kept = [piece for piece in pieces if piece.name != name]
    return [*kept, WriteItem(name, Chunk.whole(tensor.shape), tensor)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pieces: cut(pieces, UP, [(0, 20), (20, 32)]), None),
        (lambda pieces: cut(pieces, UP, [(0, 20), (24, 32)]), "of shape [32, 16], 20 to 23 of dim 0 are missing"),
        (lambda pieces: cut(pieces, UP, [(0, 20), (16, 32)]), "16 to 19 of dim 0 are there more than once"),
        (lambda pieces: cut(pieces, UP, [(0, 20), (0, 20), (20, 32)]), "they are there 2 times"),
        (lambda pieces: cut(pieces, UP, [(0, 20)]), "20 to 31 of dim 0 are missing"),
        (lambda pieces: cut(pieces, UP, [(0, 16), (8, 16), (24, 32)]), "8 to 15 of dim 0 are there more than once"),
        (lambda pieces: put(pieces, UP, torch.zeros(32, 16).half()), f"{UP} is of type torch.float16, not"),
        (lambda pieces: put(pieces, UP, torch.zeros(32, 16).int()), f"{UP} is of type torch.int32, not"),
        (
            lambda pieces: put(pieces, f"optimizer.exp_avg.{UP}", torch.zeros(32, 16).long()),
            "is of type torch.int64, not of floating-point numbers",
        ),
        (lambda pieces: put(pieces, f"optimizer.step.{UP}", torch.zeros(1)), "has the shape [1], not []"),
        (lambda pieces: put(pieces, f"optimizer.exp_avg.{UP}", torch.zeros(())), "has the shape [], not [32, 16]"),
        (lambda pieces: put(pieces, f"optimizer.row_means.{UP}", torch.zeros(32)), None),
        (lambda pieces: put(pieces, UP, torch.zeros(40, 16)), "32 to 39 of dim 0 are beyond its shape"),
        (lambda pieces: put(pieces, UP, torch.zeros(32)), f"{UP} has the shape [32], not [32, 16]"),
        (lambda pieces: put(pieces, f"optimizer.exp_avg.{UP}", torch.zeros(9, 16)), "9 to 31 of dim 0 are missing"),
        (lambda pieces: put(pieces, "model.foreign", torch.zeros(1)), "model.foreign is no tensor of the model (in"),
        (lambda pieces: [piece for piece in pieces if piece.name != UP], f"lacks {UP}"),
        (
            lambda pieces: [piece for piece in pieces if not piece.name.endswith(f".{UP}")],
            f"lacks the optimizer's state of {UP}",
        ),
        (
            lambda pieces: [
                replace(piece, values=piece.values.half()) if piece.chunk.offsets[:1] == (20,) else piece
                for piece in cut(pieces, UP, [(0, 20), (20, 32)])
            ],
            "are of different types, torch.float16, torch.float32 (in part-0.safetensors, part-1.safetensors)",
        ),
    ],
)  # fmt: skip
def test_pieces_that_do_not_make_each_tensor_once_are_named(
    tmp_path: Path, change: Callable[[list[WriteItem]], list[WriteItem]], message: str | None
) -> None:
    faults = rewritten(tmp_path / "c", change)
    assert len(faults) == (0 if message is None else 1), faults
    assert message is None or message in faults[0]


def test_a_file_with_holes_is_a_fault_though_its_checksum_fits(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    write_sharded(folder, tensors_of(SHAPE), manifest_of(SHAPE))
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes() + b"\0" * 8)
    write_manifest(folder, manifest_of(SHAPE), {path.name: file_entry(path) for path in folder.glob("*.safetensors")})
    (fault,) = faults_of(folder)
    assert f"{FIRST} is no sound safetensors file" in fault and f"{FIRST}: its header makes no sense" in refused(folder)
    (folder / FIRST).write_bytes(b"\x10" + b"\0" * 7 + b"{not json      }")
    write_manifest(folder, manifest_of(SHAPE), {path.name: file_entry(path) for path in folder.glob("*.safetensors")})
    assert f"{FIRST} is no sound safetensors file" in faults_of(folder)[0]


def test_an_optimizer_of_a_users_own_may_keep_nothing(tmp_path: Path) -> None:
    config = config_of(SHAPE)
    config = replace(config, optimizer=replace(config.optimizer, optimizer="torch.optim:SGD"))
    weights = {name: tensor for name, tensor in tensors_of(SHAPE).items() if not name.startswith("optimizer.")}
    write_sharded(tmp_path / "c", weights, manifest_of(SHAPE, config=dump_config(config)))
    assert faults_of(tmp_path / "c") == [] and refused(tmp_path / "c") == ""
    write_sharded(tmp_path / "d", weights, manifest_of(SHAPE))
    assert len(faults_of(tmp_path / "d")) == len(weights) and "and 18 more: `pretrain verify" in refused(tmp_path / "d")


def test_full_files_with_other_content_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    write_full_form(folder, tensors_of(SHAPE), manifest_of(SHAPE))

    def faults() -> list[str]:
        write_manifest(folder, manifest_of(SHAPE), {path.name: file_entry(path) for path in folder.glob("*.pt")})
        return faults_of(folder)

    model = torch.load(folder / MODEL_FILE, weights_only=True)
    torch.save({**model, UP: torch.zeros(3, 16)}, folder / MODEL_FILE)
    assert "3 to 31 of dim 0 are missing (in model_state_dict.pt)" in faults()[0]
    assert refused(folder) == faults()[0]
    torch.save({**model, UP: model[UP].int()}, folder / MODEL_FILE)
    assert f"{UP} is of type torch.int32" in faults()[0] and refused(folder) == faults()[0]
    torch.save({**model, UP: model[UP].double()}, folder / MODEL_FILE)
    assert faults() == [] and refused(folder) == ""
    torch.save({**model, UP: [1.0, 2.0]}, folder / MODEL_FILE)
    assert f"{UP} is no tensor" in faults()[0] and f"{UP} is no tensor" in refused(folder)
    torch.save({**model, UP: model[UP].to_sparse()}, folder / MODEL_FILE)
    # torch 2.15 does not load sparse tensors from files that nobody vouches for.
    said = "damaged, or holds more" if torch.__version__ >= "2.15" else f"{UP} is no tensor whose elements lie in a row"
    assert said in faults()[0]
    torch.save(model, folder / MODEL_FILE)
    torch.save([1], folder / SCHEDULE_FILE)
    assert "lr_state_dict.pt: holds no dictionary" in faults()[0]


def test_four_files_without_a_manifest_are_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints" / "step_3_ckp"
    write_full_form(folder, tensors_of(SHAPE), manifest_of(SHAPE))
    (folder / MANIFEST).unlink()
    copied = shutil.copytree(folder, tmp_path / "copied")
    for source in (tmp_path, folder, copied):
        verify_checkpoints(VerifyConfig(ckpt_path=str(source)))
        assert "step 3, 2 files" in capsys.readouterr().out
    model = torch.load(copied / MODEL_FILE, weights_only=True)
    torch.save({**model, UP: torch.zeros(3, 16)}, copied / MODEL_FILE)
    assert "3 to 31 of dim 0 are missing (in model_state_dict.pt)" in faults_of(copied)[0]
    (copied / OPTIMIZER_FILE).unlink()
    assert "optim_state_dict.pt: cannot be read: No such file" in faults_of(copied)[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": "three"}, "step has another form, 'three'"),
        ({"step": torch.tensor(3)}, "step has another form, tensor(3)"),
        ({"data": [1, 2]}, "data has another form, [1, 2]"),
        ({"loss": [2.5]}, "loss has another form"),
        ({"state": {"guards": torch.zeros(2)}}, "state has another form"),
        ({"model": {1: 2}}, "model has another form"),
        ({"kind": torch.zeros(2)}, "kind has another form"),
        ({"format_version": "2"}, "format version '2'; this version"),
        ({"format_version": 3}, "format version 3; this version"),
    ],
)
def test_an_iteration_state_with_other_types_is_one_fault(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = tmp_path / "c"
    write_full_form(folder, tensors_of(SHAPE), manifest_of(SHAPE))
    (folder / MANIFEST).unlink()
    content = torch.load(folder / ITERATION_FILE, weights_only=True)
    torch.save(content | changes, folder / ITERATION_FILE)
    (fault,) = faults_of(folder)
    assert message in fault and str(folder / ITERATION_FILE) in fault
    config = CheckpointConfig(ckpt_save_path=str(tmp_path / "new"), ckpt_load_path=str(folder))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        find_checkpoint(config)


def test_a_checkpoint_that_lost_its_manifest_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (1, 2):
        write_sharded(checkpoints / f"step_{step}_ckp", tensors_of(SHAPE), manifest_of(SHAPE, step))
    (checkpoints / "step_2_ckp" / MANIFEST).unlink()
    (checkpoints / "notes").mkdir()
    for source, said in ((tmp_path, "1 of 2 checkpoints is damaged"), (checkpoints / "step_2_ckp", "1 of 1")):
        with pytest.raises(CheckpointError, match=said):
            verify_checkpoints(VerifyConfig(ckpt_path=str(source)))
        assert "step_2_ckp: damaged: it has lost its manifest.json" in capsys.readouterr().out


def test_a_run_is_checked_wholly_and_what_is_incomplete_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        write_sharded(checkpoints / f"step_{step}_ckp", tensors_of(SHAPE), manifest_of(SHAPE, step))
    (checkpoints / "step_4_ckp.tmp").mkdir()
    for source in (tmp_path, checkpoints):
        verify_checkpoints(VerifyConfig(ckpt_path=str(source)))
        out, progress = capsys.readouterr()
        said = out.splitlines()
        assert [line.split(":")[0].rpartition("/")[2] for line in said[:3]] == [
            f"step_{step}_ckp" for step in (1, 2, 3)
        ]
        assert all("no faults" in line for line in said[:3]) and "step_4_ckp.tmp is incomplete" in said[3]
        assert len(progress.splitlines()) == 3
    flip_byte(checkpoints / "step_2_ckp" / FIRST)
    with pytest.raises(CheckpointError, match="1 of 3 checkpoints is damaged; the faults are listed above"):
        verify_checkpoints(VerifyConfig(ckpt_path=str(tmp_path)))
    said = capsys.readouterr().out.splitlines()
    assert [("no faults" in line, "is damaged" in line) for line in said[:3]] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    verify_checkpoints(VerifyConfig(ckpt_path=str(checkpoints / "step_3_ckp")))
    with pytest.raises(CheckpointError, match=r"is neither a checkpoint .* nor a run"):
        verify_checkpoints(VerifyConfig(ckpt_path=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing to check: give a checkpoint or run"),
        ({"ckpt_path": "a", "data_path": "b"}, "--ckpt_path=a and --data_path=b are two things to check"),
        ({"ckpt_path": "a", "vocab_size": 3}, "--vocab_size is about token files"),
        ({"ckpt_path": "a", "datasets": ("x",)}, "--datasets is about token files"),
    ],
)
def test_there_is_one_thing_to_check(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(VerifyConfig(**given))


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[Chunk], tuple[int, ...]]:
    """A tensor cut along each dim in turn."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))

    def cut_from(dim: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Chunk]:
        if dim == len(shape):
            return [Chunk(offsets, sizes)]
        places = sorted(draw(st.sets(st.integers(1, shape[dim] - 1)))) if shape[dim] > 1 else []
        ends = zip([0, *places], [*places, shape[dim]], strict=True)
        return [box for begin, end in ends for box in cut_from(dim + 1, (*offsets, begin), (*sizes, end - begin))]

    return cut_from(0, (), ()), shape


@given(grids(), st.data())
def test_any_grid_covers_its_tensor_and_one_box_less_or_more_does_not(
    grid: tuple[list[Chunk], tuple[int, ...]], data: st.DataObject
) -> None:
    boxes, shape = grid
    assert coverage_fault(boxes, shape) is None
    box = data.draw(st.sampled_from(boxes))
    assert coverage_fault([*boxes, box], shape) is not None
    others = [other for other in boxes if other is not box]
    assert not others or coverage_fault(others, shape) is not None
