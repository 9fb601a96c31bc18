"""The loss scale follows torch.amp.GradScaler."""

from __future__ import annotations

import json

import pytest
import torch

from pretraining.distributed.loss_scaler import FIRST_SCALE, GROWTH_INTERVAL, LARGEST_SCALE, LossScaler

CPU = torch.device("cpu")


def update(scaler: LossScaler, overflowed: bool) -> bool:
    return bool(scaler.update(torch.tensor(overflowed)))


def test_the_scale_follows_torch() -> None:
    scaler = LossScaler(CPU)
    scale, steps = torch.tensor(FIRST_SCALE), torch.tensor(0, dtype=torch.int32)
    defaults = torch.amp.GradScaler("cpu").state_dict()
    assert float(scaler.scale) == defaults["scale"] and defaults["growth_interval"] == GROWTH_INTERVAL
    overflows = {0, 1, 2, 1000, 3500, 3501, 7600}
    for step in range(9000):
        overflowed = step in overflows
        update(scaler, overflowed)
        torch._amp_update_scale_(
            scale,
            steps,
            torch.tensor(float(overflowed)),
            defaults["growth_factor"],
            defaults["backoff_factor"],
            GROWTH_INTERVAL,
        )
        assert float(scaler.scale) == float(scale), step


def test_an_overflow_differs_from_a_gradient_that_is_not_finite_without_scale() -> None:
    scaler = LossScaler(CPU)
    assert [update(scaler, True) for _ in range(18)] == [True] * 16 + [False] * 2
    assert float(scaler.scale) == 1
    assert not update(scaler, False)
    scaler.load_state_dict({"scale": LARGEST_SCALE, "steps": GROWTH_INTERVAL - 1})
    update(scaler, False)
    assert float(scaler.scale) == LARGEST_SCALE  # float32 can square it


@pytest.mark.parametrize("steps", [1, GROWTH_INTERVAL - 1])
def test_a_scale_is_restored_from_a_checkpoint(steps: int) -> None:
    scaler, other = LossScaler(CPU), LossScaler(CPU)
    for overflowed in (True, *[False] * steps):
        update(scaler, overflowed)
    other.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    for _ in range(3):
        update(scaler, False)
        update(other, False)
        assert float(other.scale) == float(scaler.scale)
