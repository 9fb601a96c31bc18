from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from pretraining.checkpoint import store
from pretraining.checkpoint.manager import CheckpointManager, find_checkpoint
from pretraining.checkpoint.state import Manifest
from pretraining.config.durations import Duration, Progress
from pretraining.config.intervals import Interval
from pretraining.config.training import CheckpointConfig, ModelConfig
from pretraining.config.variants import resolve_shape
from pretraining.errors import CheckpointError
from pretraining.observability.throughput import Stopwatch
from pretraining.train.state import TrainState

SHAPE = resolve_shape(ModelConfig(model_variant="tiny"))

pytestmark = pytest.mark.usefixtures("single_process")


def manifest_of(step: int, files: dict[str, int]) -> Manifest:
    return Manifest(1, step, step * 10, 0.0, None, None, {}, 1, asdict(SHAPE), {}, torch.__version__, files, "")


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "model.layers.0.a.weight": torch.full((3, 2), value),
        "lm_head.weight": torch.full((4,), value),
        "optimizer.step.lm_head.weight": torch.tensor(value),
    }


def save(run: Path, step: int) -> Path:
    folder = store.checkpoint_path(run, step)
    store.save_checkpoint(folder, tensors(float(step)), lambda files: manifest_of(step, files))
    return folder


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    folder = save(tmp_path, 7)
    restored = tensors(0.0)
    store.load_tensors(folder, restored)
    assert all(torch.equal(restored[name], value) for name, value in tensors(7.0).items())
    manifest = store.read_manifest(folder)
    assert manifest.step == 7
    assert set(manifest.files) == {path.name for path in folder.iterdir()} - {store.MANIFEST}
    assert all(name.endswith(".safetensors") for name in manifest.files)


def test_checkpoints_are_in_order_of_their_steps_not_of_their_times(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        save(tmp_path, step)
    os.utime(store.checkpoint_path(tmp_path, 9))
    assert [store.step_of(path) for path in store.committed_checkpoints(tmp_path)] == [9, 10, 100]


def test_a_save_that_was_interrupted_does_not_count_and_is_replaced_by_the_next(tmp_path: Path) -> None:
    save(tmp_path, 5)
    half = store.checkpoint_path(tmp_path, 6).with_name("step_6_ckp.tmp")
    half.mkdir()
    (half / "shard-00001-model-00001-of-00002.safetensors").write_bytes(b"half")
    without_manifest = store.checkpoint_path(tmp_path, 8)
    without_manifest.mkdir()
    assert [store.step_of(path) for path in store.committed_checkpoints(tmp_path)] == [5]
    assert store.incomplete_checkpoints(tmp_path) == [half, without_manifest]
    another = store.checkpoint_path(tmp_path, 4).with_name("step_4_ckp.tmp")
    another.mkdir()
    save(tmp_path, 6)
    assert not half.exists() and not another.exists()
    restored = tensors(0.0)
    store.load_tensors(store.checkpoint_path(tmp_path, 6), restored)
    assert torch.equal(restored["lm_head.weight"], torch.full((4,), 6.0))


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    (folder / "left.over").write_text("old")
    save(tmp_path, 5)
    assert not (folder / "left.over").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder, shard: shard.unlink(), "is missing"),
        (lambda folder, shard: shard.write_bytes(shard.read_bytes()[:-1]), "bytes in place of"),
        (lambda folder, shard: (folder / store.MANIFEST).write_text("{"), "cannot be read"),
        (lambda folder, shard: shard.with_name("extra.safetensors").touch(), "extra.safetensors is no part"),
    ],
)
def test_damage_that_sizes_show_is_named(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    folder = save(tmp_path, 5)
    damage(folder, next(folder.glob("*.safetensors")))
    with pytest.raises(CheckpointError, match=message):
        store.read_manifest(folder)


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    (tmp_path / "secret").write_text("x")
    document = json.loads((folder / store.MANIFEST).read_text())
    document["files"]["../../secret"] = 1
    (folder / store.MANIFEST).write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="is missing"):
        store.read_manifest(folder)


def test_a_tensor_that_the_checkpoint_lacks_is_an_error(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    with pytest.raises(CheckpointError, match=r"cannot be loaded.*extra\.weight"):
        store.load_tensors(folder, {**tensors(0.0), "extra.weight": torch.zeros(1)})


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    shard = next(folder.glob("*.safetensors"))
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        store.load_tensors(folder, tensors(0.0))


def test_where_nothing_can_be_written_the_error_says_so(tmp_path: Path) -> None:
    (tmp_path / store.CHECKPOINTS).write_text("a file in the way")
    with pytest.raises(CheckpointError, match=r"cannot be written.*Older checkpoints are untouched"):
        save(tmp_path, 5)


def test_a_write_that_fails_leaves_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 5)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.dcp.HuggingFaceStorageWriter, "write_data", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, 6)
    monkeypatch.undo()
    monkeypatch.setattr(store.json, "dump", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, 6)
    assert [store.step_of(path) for path in store.committed_checkpoints(tmp_path)] == [5]


def test_the_save_path_wins_over_the_load_path(tmp_path: Path) -> None:
    other = save(tmp_path / "other", 50)
    config = CheckpointConfig(ckpt_save_path=str(tmp_path / "own"), ckpt_load_path=str(tmp_path / "other"))
    found = find_checkpoint(config)
    assert found is not None and found.path == other
    own = save(tmp_path / "own", 3)
    found = find_checkpoint(config)
    assert found is not None and found.path == own


def test_a_load_path_may_be_a_run_its_folder_of_checkpoints_or_one_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "other"
    first, second = save(run, 1), save(run, 2)
    for source, expected in [(run, second), (run / store.CHECKPOINTS, second), (first, first)]:
        found = find_checkpoint(CheckpointConfig(ckpt_save_path=str(tmp_path / "own"), ckpt_load_path=str(source)))
        assert found is not None and found.path == expected


def test_without_a_checkpoint_a_run_starts_anew_unless_one_was_named(tmp_path: Path) -> None:
    own = str(tmp_path / "own")
    assert find_checkpoint(CheckpointConfig(ckpt_save_path=own)) is None
    with pytest.raises(CheckpointError, match=r"--ckpt_load_path=.*nowhere holds no complete checkpoint"):
        find_checkpoint(CheckpointConfig(ckpt_save_path=own, ckpt_load_path=str(tmp_path / "nowhere")))


def manager_of(run: Path, notes: list[str]) -> CheckpointManager:
    return CheckpointManager(
        run=run,
        interval=Interval(Duration(2, "steps"), None),
        tensors=lambda: tensors(1.0),
        manifest_for=lambda progress, loss, files: manifest_of(progress.steps, files),
        activity=Stopwatch().activity,
        note=notes.append,
    )


def run_steps(manager: CheckpointManager, count: int) -> None:
    state = TrainState(total_steps=100, stop_step=count, tokens_per_step=10, progress=Progress(0, 0))
    while not state.stopping:
        state.advance(0.0)
        manager.maybe_save(state, None)


def steps_in(run: Path) -> list[int]:
    return [store.step_of(path) for path in store.committed_checkpoints(run)]


def test_saves_come_on_the_interval_and_at_the_end_once(tmp_path: Path) -> None:
    notes: list[str] = []
    with manager_of(tmp_path, notes) as manager:
        run_steps(manager, 5)
    assert steps_in(tmp_path) == [2, 4, 5]
    assert len(notes) == 3 and "step_5_ckp" in notes[-1]
    with manager_of(tmp_path / "even", notes) as manager:
        run_steps(manager, 4)
    assert steps_in(tmp_path / "even") == [2, 4] and len(notes) == 5


def test_after_an_error_nothing_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), manager_of(tmp_path, []) as manager:
        run_steps(manager, 3)
        raise ZeroDivisionError
    assert steps_in(tmp_path) == [2]
