"""The ways to write checkpoints that are compared hold the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pretraining.config.command_line import load_train_config
from scripts.benchmark.measure.checkpoints import CONTENDERS, DEFAULTS, RAW


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(64, 32, generator=generator) for name in ("model.a", "model.b", "optimizer.a")}


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("name", sorted(CONTENDERS.keys() - {RAW}))
def test_every_contender_loads_what_it_saved(name: str, tmp_path: Path) -> None:
    config, saved = load_train_config(DEFAULTS), tensors()
    CONTENDERS[name].save(tmp_path / "run", saved, config)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    CONTENDERS[name].load(tmp_path / "run", loaded, config)
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())
