from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch

from pretraining.distributed.processes import Activity
from pretraining.observability import stragglers
from pretraining.observability.stragglers import StragglerWatch, find_stragglers


@pytest.mark.parametrize(
    ("shares", "samples", "named"),
    [
        ([0.4, 0.9, 0.4, 0.4], 1000, {1: 0.4}),
        ([0.9, 0.3], 1000, {0: 0.3}),
        ([0.9, 0.95, 0.92, 0.9], 1000, {}),  # no rank waits
        ([0.4, 0.9, 0.4, 0.8, 0.4], 1000, {1: 0.4, 3: 0.4}),  # the slowest first
        ([0.01, 0.08, 0.01], 1000, {}),  # eight times, but the others hardly wait
        ([0.30, 0.48], 1000, {1: 0.30}),
        ([0.30, 0.48], 100, {}),  # within chance
        ([0.0, 0.9], 100, {1: 0.01}),
    ],
)
def test_a_process_with_more_work_is_named(shares: list[float], samples: int, named: dict[int, float]) -> None:
    found = find_stragglers(shares, samples, factor=1.5)
    assert found == pytest.approx(named) and list(found) == list(named)


def watch(factor: float | None, monkeypatch: pytest.MonkeyPatch, others: list[list[int]]) -> StragglerWatch:
    """A straggler watch beside other processes with these samples (working, waiting, for data)."""

    def all_gather(everyone: list[torch.Tensor], own: torch.Tensor) -> None:
        for tensor, values in zip(everyone, [own.tolist(), *others], strict=True):
            tensor.copy_(torch.tensor(values))

    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1 + len(others))
    monkeypatch.setattr("torch.distributed.all_gather", all_gather)
    hosts = [f"node{rank}" for rank in range(1 + len(others))]
    monkeypatch.setattr(stragglers, "gather_from_every_rank", lambda function: hosts)
    monkeypatch.setattr(stragglers, "is_waiting", lambda frame: False)
    return StragglerWatch(factor, Activity(doing="training"))


def test_a_report_names_rank_machine_factor_and_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = watch(1.5, monkeypatch, [[100, 100, 0], [180, 20, 90]])
    looked._working, looked._waiting = 100, 100
    assert looked.report(step_seconds=2.0) == [
        "straggler: rank 2 on node2: 1.800 s of own work per step, 50% of it waiting for data, 1.8 times as much as "
        "the other ranks (1.000 s), which wait"
    ]
    assert looked.report(2.0) == []  # a report counts the samples since the last one


@pytest.mark.parametrize(("factor", "processes"), [(None, 2), (1.5, 1)])
def test_no_sampling_without_need(factor: float | None, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = watch(factor, monkeypatch, [[1, 1, 1]] * (processes - 1))
    looked.start()
    assert not looked._thread.is_alive() and looked.report(1.0) == []
    looked.stop()


def test_a_look_keeps_nothing_alive_of_what_it_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing a tensor in the sampling thread while Python exits would abort the process."""
    looked = watch(1.5, monkeypatch, [[0, 0, 0]])
    begun, go_on = threading.Event(), threading.Event()
    tensors: list[weakref.ref[torch.Tensor]] = []

    def train() -> None:
        tensor = torch.zeros(1)
        tensors.append(weakref.ref(tensor))
        begun.set()
        go_on.wait()

    training = threading.Thread(target=train)
    training.start()
    begun.wait()
    samples = iter((False, True))

    class OneLook:
        """Allow one sample; before the next one, the sampled frame has ended."""

        def wait(self, seconds: float) -> bool:
            is_over = next(samples)
            if is_over:
                go_on.set()
                training.join()
                assert tensors[0]() is None
            return is_over

    one_look: Any = OneLook()
    looked._stopped, looked._main_thread = one_look, training.ident or 0
    looked._sample_until_stopped()
    assert looked._working == 1
