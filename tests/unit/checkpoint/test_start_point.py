from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from unit.checkpoint.checkpoint_files import SHAPES, flip_byte, manifest_of, tensors_of, write_sharded
from unit.checkpoint.examples import save, tensors

from pretraining.checkpoint.manifest import MANIFEST
from pretraining.checkpoint.reader import load_tensors
from pretraining.checkpoint.restore import load_model
from pretraining.checkpoint.run_folder import CHECKPOINTS
from pretraining.checkpoint.start_point import CheckpointRef, find_start
from pretraining.config.training import CheckpointConfig
from pretraining.errors import CheckpointError, DamagedError
from pretraining.files import with_checksum

pytestmark = pytest.mark.usefixtures("single_process")


def own(run: Path) -> CheckpointConfig:
    return CheckpointConfig(ckpt_save_path=str(run))


def load_newest(config: CheckpointConfig) -> CheckpointRef | None:
    """Return the checkpoint that a start resumes: the newest that can be loaded."""
    damaged: dict[str, str] = {}
    while (found := find_start(config, damaged)) is not None:
        try:
            load_tensors(found.path, found.manifest.files, tensors(0.0))
        except DamagedError as error:
            damaged[found.source] = str(error)
        else:
            return found
    return None


def shard_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def forge(folder: Path, name: str, size: int) -> None:
    """Make the manifest name another file, with a valid checksum of the manifest."""
    document = json.loads((folder / MANIFEST).read_text())
    del document["checksum"]
    document["files"][name] = {"bytes": size, "crc32": "00000000"}
    (folder / MANIFEST).write_text(json.dumps(with_checksum(document)))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing shard": lambda folder: shard_of(folder).unlink(),
    "truncated shard": lambda folder: os.truncate(shard_of(folder), 9),
    "flipped bit": lambda folder: flip_byte(shard_of(folder), bits=1),
    "stranger": lambda folder: (folder / "extra.safetensors").touch(),
    "lost manifest": lambda folder: (folder / MANIFEST).unlink(),
    "damaged manifest": lambda folder: (folder / MANIFEST).write_text("{"),
    "deep manifest": lambda folder: (folder / MANIFEST).write_text("[" * 10**5),
    "other manifest": lambda folder: (folder / MANIFEST).write_text("{}"),
    "escaping manifest": lambda folder: forge(folder, "../../x.safetensors", 1),
    "pickle in the manifest": lambda folder: forge(folder, "x.pt", 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    good, bad = save(tmp_path, 5), save(tmp_path, 6)
    DAMAGES[damage](bad)
    found = load_newest(own(tmp_path))
    assert found is not None and found.path == good and found.is_own
    (line,) = found.damaged
    assert str(bad) in line
    exact = CheckpointConfig(ckpt_save_path=str(tmp_path / "own"), ckpt_load_path=str(bad))
    with pytest.raises(CheckpointError) as named:
        load_newest(exact)
    assert str(bad) in str(named.value) and named.value.settings == ("ckpt_load_path",)
    DAMAGES[damage](good)
    with pytest.raises(CheckpointError) as none:
        load_newest(own(tmp_path))
    assert str(good) in str(none.value) and str(bad) in str(none.value)


def test_a_load_path_may_be_a_run_its_folder_of_checkpoints_or_one_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "other"
    first, second = save(run, 1), save(run, 2)
    best = run / CHECKPOINTS / "best"
    best.symlink_to(first.name)
    for source, expected in [(run, second), (run / CHECKPOINTS, second), (first, first), (best, best)]:
        found = find_start(CheckpointConfig(ckpt_save_path=str(tmp_path / "own"), ckpt_load_path=str(source)))
        assert found is not None and found.path == expected


def test_a_tied_model_is_loaded_with_one_tensor_for_both_ends(tmp_path: Path) -> None:
    written = write_sharded(tmp_path / "c", tensors_of(SHAPES["tied"]), manifest_of(SHAPES["tied"]))
    _, model = load_model(str(tmp_path / "c"), torch.device("cpu"), torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(value, written[name]) for name, value in model.named_parameters())
