"""Norms by block in whole runs of this process: what they are, that they change nothing, and a spike in one block."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import losses_of, metrics_of, reports_of
from unit.train import whole_runs
from unit.train.whole_runs import checkpoint, equal, error_of, tensors_of

from pretraining.errors import ConfigError
from pretraining.model.llama import DecoderBlock
from pretraining.observability.block_norms import BlockNorms, _block_of

pytestmark = pytest.mark.thorough

PARTS = ("grad", "weight", "update", "ratio", "output")
BLOCKS = ["embed", "layers.0", "layers.1", "layers.2", "norm", "head"]


def start(run: Path, *flags: str) -> list[dict[str, Any]]:
    """Train, and return the lines with norms."""
    whole_runs.start(run, "norms_interval=2", *flags)
    return metrics_of(run, "norms/grad/embed")


def norms_of(line: dict[str, Any], part: str) -> dict[str, float]:
    prefix = f"norms/{part}/"
    return {name.removeprefix(prefix): value for name, value in line.items() if name.startswith(prefix)}


def by_block(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, tensor in tensors.items():
        block = _block_of(name)
        sums[block] = sums.get(block, 0.0) + float(tensor.double().square().sum())
    return {block: math.sqrt(total) for block, total in sums.items()}


def test_norms_are_those_of_two_checkpoints_and_change_nothing(tmp_path: Path) -> None:
    lines = start(tmp_path / "run", "checkpoint_interval=1", "z_loss_weight=1e-3")
    whole_runs.start(tmp_path / "alone", "z_loss_weight=1e-3")
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "alone")
    assert equal(checkpoint(tmp_path / "run", 4), checkpoint(tmp_path / "alone", 4))
    assert [line["step"] for line in lines] == [2, 4]
    for line in lines:
        after, before = (
            {name: each for name, each in tensors_of(checkpoint(tmp_path / "run", step)).items() if "." in name}
            for step in (line["step"], line["step"] - 1)
        )
        after, before = ({n: t for n, t in each.items() if n in _parameters(each)} for each in (after, before))
        assert norms_of(line, "weight") == pytest.approx(by_block(after), rel=1e-5)
        update = by_block({name: after[name].double() - before[name].double() for name in after})
        assert norms_of(line, "update") == pytest.approx(update, rel=1e-4)
        ratio = {block: update[block] / norm for block, norm in by_block(after).items()}
        assert norms_of(line, "ratio") == pytest.approx(ratio, rel=1e-4)
        assert math.hypot(*norms_of(line, "grad").values()) == pytest.approx(line["grad_norm"], rel=1e-5)
        assert math.hypot(*norms_of(line, "weight").values()) == pytest.approx(line["param_norm"], rel=1e-5)
        assert list(norms_of(line, "grad")) == BLOCKS and list(norms_of(line, "output")) == BLOCKS[:-1]
        assert norms_of(line, "output")["norm"] == pytest.approx(1.0, rel=0.05)  # the last norm's weights are near 1
    assert "norms/grad/embed" not in reports_of(tmp_path / "run")[0]


def _parameters(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in tensors if name.startswith(("model.", "lm_head."))]


@pytest.mark.parametrize(
    "more",
    [
        ["fsdp_activation_checkpointing=true", "batch_size=1", "global_batch_size=2"],
        ["fsdp_activation_checkpointing=true"],
    ],
)
def test_recomputation_and_the_cut_into_micro_batches_do_not_count_twice(more: list[str], tmp_path: Path) -> None:
    lines, others = (
        start(tmp_path / "run", "grad_clip_thresh=0.1"),
        start(tmp_path / "other", "grad_clip_thresh=0.1", *more),
    )
    for line, other in zip(lines, others, strict=True):
        names = [name for name in line if name.startswith("norms/")]
        assert {name: other[name] for name in names} == pytest.approx({name: line[name] for name in names}, rel=1e-4)


def test_a_tied_head_counts_once_and_a_skipped_update_is_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = BlockNorms.take_gradients

    def spoil(norms: BlockNorms, scale: Any) -> None:
        next(iter(norms._parameters.values())).grad.fill_(math.nan)  # type: ignore[union-attr]
        take(norms, scale)

    monkeypatch.setattr(BlockNorms, "take_gradients", spoil)
    line = start(tmp_path / "run", "tie_word_embeddings=true", "num_steps=2")[0]
    assert list(norms_of(line, "weight")) == BLOCKS[:-1]
    assert set(norms_of(line, "update").values()) == {0.0} and norms_of(line, "grad")["embed"] is None


def test_a_spike_in_one_block_is_found_in_its_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = DecoderBlock.forward, []

    def spike(block: DecoderBlock, x_BSD: torch.Tensor, *others: Any) -> torch.Tensor:
        found = forward(block, x_BSD, *others)
        calls.append(block)
        is_second = (len(calls) - 1) % 3 == 1
        return found * 50 if is_second and len(calls) > 9 else found  # from step 4 on

    monkeypatch.setattr(DecoderBlock, "forward", spike)
    before, after = start(tmp_path / "run")
    growth = {block: after[f"norms/output/{block}"] / before[f"norms/output/{block}"] for block in BLOCKS[:-1]}
    assert growth["layers.0"] < 2 < 20 < growth["layers.1"]


@pytest.mark.parametrize("reports", ["report_interval=3", "report_interval=1ktok", "report_interval=0"])
def test_norms_without_a_report_at_their_steps_are_refused(reports: str, tmp_path: Path) -> None:
    error = error_of(lambda: start(tmp_path / "run", reports))
    assert isinstance(error, ConfigError) and "give a multiple of a --report_interval in steps" in str(error)
