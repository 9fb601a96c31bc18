"""The project's checkpoints and those of DCP hold the same; damage is noticed by the project's."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from pretraining.config.command_line import load_train_config
from scripts.benchmark import job
from scripts.benchmark.compare.against_dcp import CONTENDERS, flip
from scripts.benchmark.measure.checkpoints import DEFAULTS


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(64, 32, generator=generator) for name in ("model.a", "model.b", "optimizer.a")}


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_loads_what_it_saved(name: str, tmp_path: Path) -> None:
    config, saved = load_train_config(DEFAULTS), tensors()
    CONTENDERS[name].save(tmp_path / "run", saved, config)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    CONTENDERS[name].load(tmp_path / "run", loaded, config)
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())


def test_memory_is_what_work_takes_at_most() -> None:
    taken = job.memory_for(lambda: mmap.mmap(-1, 2**25).write(bytes(2**25)))
    assert taken is not None and 2**24 <= taken < 2**27  # the system counts in lots of pages


def test_where_the_system_tells_no_memory_the_work_is_done_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    monkeypatch.setattr(job, "CLEAR_REFS", tmp_path / "no" / "such")
    assert job.memory_for(lambda: done.append(1)) is None
    monkeypatch.setattr(job, "CLEAR_REFS", tmp_path / "refs")
    monkeypatch.setattr(job, "STATUS", tmp_path / "status")
    job.STATUS.write_text("VmRSS: 1 kB\n")
    assert job.memory_for(lambda: done.append(2)) is None
    assert done == [1, 2]


def test_a_flipped_bit_is_flipped_back(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    before = file.read_bytes()
    flip(file, 3)
    assert [a ^ b for a, b in zip(before, file.read_bytes(), strict=True)].count(1) == 1
    flip(file, 3)
    assert file.read_bytes() == before
