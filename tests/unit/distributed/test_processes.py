from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from pretraining.config.training import ParallelConfig
from pretraining.distributed import processes
from pretraining.distributed.host_sync import HostSync, HostValues
from pretraining.distributed.processes import join_processes, on_every_rank, on_rank_zero
from pretraining.distributed.rendezvous import Rendezvous
from pretraining.errors import DataError, LaunchError, LostPeerError
from pretraining.launch.layout import ProcessLayout, resolve_layout

ALONE = resolve_layout({})


@pytest.mark.parametrize("world_size", [1, 2])
def test_collectives_do_not_fail_before_their_timeout(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    """Neither PyTorch's collectives nor NCCL's monitor stop the job first."""
    init = Mock(side_effect=DataError("stop here"))
    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "")
    monkeypatch.delenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    monkeypatch.setattr(processes, "_device_of", lambda *place: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(Rendezvous, "run", lambda self, connect: connect(dist.HashStore()))
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(os, "environ", {**os.environ})
    layout = ProcessLayout(0, world_size, 0, 1, "environment", "127.0.0.1", 1)
    with pytest.raises(DataError), join_processes(layout, timeout=timedelta(hours=2)):
        pass
    assert init.call_args.kwargs["timeout"] == timedelta(hours=2)
    assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "7200"


def test_a_group_that_cannot_be_made_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such")
    with pytest.raises(LaunchError), join_processes(ALONE):
        pass
    assert not dist.is_initialized()


def test_the_exit_of_another_process_is_one_line_and_is_not_waited_for() -> None:
    with pytest.raises(LostPeerError) as raised, join_processes(ALONE):
        raise RuntimeError("[tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
    assert raised.value.rank == 0
    dist.destroy_process_group()  # kept on purpose: destroying the group may wait for dead processes
    with pytest.raises(RuntimeError, match="shape mismatch"), join_processes(ALONE):
        raise RuntimeError("shape mismatch")
    dist.destroy_process_group()


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("everywhere", [on_rank_zero, on_every_rank])
def test_results_and_errors_come_back_as_they_are(everywhere: Callable[[Callable[[], object]], object]) -> None:
    assert everywhere(lambda: [1, 2]) == [1, 2]
    with pytest.raises(DataError) as error:
        everywhere(Mock(side_effect=DataError("gone", path="a", row=3)))
    assert (error.value.path, error.value.row) == (Path("a"), 3)
    with pytest.raises(ZeroDivisionError):
        everywhere(lambda: 1 / 0)


@pytest.mark.parametrize(
    ("gpus", "place", "asked", "device"),
    [
        (4, (3, 4), {}, "cuda:3"),
        (1, (3, 4), {}, "cuda:0"),  # a launcher makes one GPU visible per task
        (4, (0, 8), {"device": "cpu"}, "cpu"),
        (4, (0, 1), {"device": "cpu", "backend": "gloo"}, "cpu"),
        (0, (0, 1), {}, "cpu"),
        (4, (0, 8), {}, "--nproc"),
        (4, (0, 1), {"backend": "gloo"}, "--backend"),
        (0, (0, 1), {"device": "cuda"}, "--device"),
        (0, (0, 1), {"backend": "nccl"}, "--backend"),
    ],
)
def test_a_process_has_a_device_of_its_own_or_is_refused(
    gpus: int, place: tuple[int, int], asked: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    parallel = ParallelConfig(**asked)
    if not device.startswith("--"):
        assert processes._device_of(*place, parallel) == torch.device(device)
    else:
        with pytest.raises(LaunchError) as error:
            processes._device_of(*place, parallel)
        assert device.removeprefix("--") in error.value.settings


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("ranks", [1, 2])
def test_shared_values_are_one_step_old_and_reductions_are_awaited(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []

    def all_reduce(offered: torch.Tensor, op: object, async_op: bool) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: waited.append(-int(offered[1])))

    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with HostSync() as agreement:
        agreed = [agreement.exchange(seconds, stop) for seconds, stop in ((1.5, 0), (2.5, 15), (3.5, 0))]
        assert waited == [0, 15] * (ranks > 1)
    assert agreed == [HostValues(0.0, 0), HostValues(1.5, 0), HostValues(2.5, 15)]
    assert waited == [0, 15, 0] * (ranks > 1)
