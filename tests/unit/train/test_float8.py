"""Whole runs in float8: they learn as in bfloat16, and their checkpoints are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulated_float8 import emulate_float8, needs_torchao
from safetensors.torch import load_file
from torch._inductor import config
from training_runs import TINY, losses_of, write_dataset
from unit.train.whole_runs import refusal, tensors_of

from pretraining.cli import main

BFLOAT16 = [flag for flag in TINY if not flag.startswith("mixed_precision")] + ["mixed_precision=true"]
TOLERANCE = 5e-3
"""Relative difference of a step's loss; over three seeds the largest was 1e-3 in 40 steps."""


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    emulate_float8(monkeypatch)
    with config.patch(emulate_precision_casts=False):  # float8 changes it for the whole process
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder / "first")
    return folder


def start(run: Path, data: Path, *flags: str) -> list[float]:
    common = [*BFLOAT16, f"data_path={data}", "sep_token=0", "batch_size=8", "num_steps=40", "warmup_steps=4"]
    main(["train", *common, "learning_rate=5e-3", f"ckpt_save_path={run}", *flags])
    return losses_of(run)


@pytest.mark.thorough
@needs_torchao
@pytest.mark.usefixtures("emulated")
def test_float8_learns_as_bfloat16_does_and_saves_the_same_tensors(tmp_path: Path, data: Path) -> None:
    expected = start(tmp_path / "none", data)
    assert expected[-1] < 0.7 * expected[0]
    plain = tensors_of(tmp_path / "none")
    for scaling in ("tensorwise", "rowwise"):
        losses = start(tmp_path / scaling, data, f"float8={scaling}")
        assert losses != expected and losses == pytest.approx(expected, rel=TOLERANCE)
        saved = tensors_of(tmp_path / scaling)
        assert {name: (value.shape, value.dtype) for name, value in saved.items()} == {
            name: (value.shape, value.dtype) for name, value in plain.items()
        }


@needs_torchao
@pytest.mark.usefixtures("emulated")
def test_initial_weights_and_exports_are_those_without_float8(tmp_path: Path, data: Path) -> None:
    for name, flags in (("none", []), ("float8", ["float8=rowwise"])):
        start(tmp_path / name, data, "num_steps=1", "warmup_steps=0", "learning_rate=0", *flags)
        main(["export", str(tmp_path / name), f"output_path={tmp_path / name / 'hf'}"])
    none, float8 = (load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("none", "float8"))
    assert none.keys() == float8.keys() and none
    assert all(torch.equal(tensor, float8[name]) for name, tensor in none.items())


def test_float8_on_a_cpu_is_refused(tmp_path: Path) -> None:
    assert "float8" in refusal(tmp_path / "run", "float8=tensorwise", model=BFLOAT16).settings
    assert not (tmp_path / "run" / "checkpoints").exists()
