from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pretraining.config.training import ParallelConfig
from pretraining.distributed import processes
from pretraining.distributed.host_sync import HostSync, HostValues
from pretraining.distributed.processes import join_processes, on_every_rank, on_rank_zero
from pretraining.errors import DataError, LaunchError, LostPeerError


def test_one_process_joins_itself_without_an_address_and_leaves() -> None:
    with join_processes(0, 1, 0, 1, {}) as joined:
        assert joined.is_main and joined.world_size == dist.get_world_size() == 1
    assert not dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_gives_up_before_the_time_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    """Neither PyTorch's collectives nor NCCL's own monitor."""
    given: dict[str, object] = {}

    def note(backend: str, **arguments: object) -> None:
        given.update(arguments)
        raise LaunchError("noted")

    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "")
    monkeypatch.delenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    monkeypatch.setattr(processes, "_device_of", lambda *place: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(processes, "meet", lambda place, connect, patience: connect(dist.HashStore()))
    monkeypatch.setattr(dist, "init_process_group", note)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    monkeypatch.setattr(os, "environ", {**os.environ})
    with (
        pytest.raises(LaunchError, match="noted"),
        join_processes(0, world_size, 0, 1, where, timeout=timedelta(hours=2)),
    ):
        pass
    assert given["timeout"] == timedelta(hours=2)
    assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "7200"


def test_an_interface_that_is_not_there_is_named_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "interfaces_here", lambda: ["lo", "ib0", "eth0"])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    said = "GLOO_SOCKET_IFNAME=eth7 names no interface of .*, which has eth0, ib0, lo: name one of them, or unset it"
    with pytest.raises(LaunchError, match=said), join_processes(0, 1, 0, 1, {}):
        pass
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7,lo")
    processes._refuse_missing_interface()


def test_the_end_of_another_process_is_said_in_a_line_and_not_waited_for() -> None:
    with (
        pytest.raises(LostPeerError, match="another process of the job has ended") as raised,
        join_processes(0, 1, 0, 1, {}),
    ):
        raise RuntimeError("[tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
    assert raised.value.rank == 0
    dist.destroy_process_group()  # left behind on purpose: taking leave may wait for the dead
    with pytest.raises(RuntimeError, match="shape mismatch"), join_processes(0, 1, 0, 1, {}):
        raise RuntimeError("shape mismatch")
    dist.destroy_process_group()


@pytest.mark.usefixtures("single_process")
def test_results_and_errors_come_back() -> None:
    assert on_rank_zero(lambda: [1, 2]) == [1, 2]
    assert on_every_rank(lambda: "here") == "here"

    def fails() -> None:
        raise DataError("no such file")

    with pytest.raises(DataError, match="no such file"):
        on_rank_zero(fails)
    with pytest.raises(DataError, match="no such file"):
        on_every_rank(fails)


@pytest.mark.usefixtures("single_process")
def test_a_bug_keeps_its_own_type() -> None:
    with pytest.raises(ZeroDivisionError):
        on_rank_zero(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        on_every_rank(lambda: 1 / 0)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 4)
    assert processes._device_of(local_rank=3, local_world_size=4) == torch.device("cuda", 3)
    with pytest.raises(LaunchError, match=r"8 processes were started on .* 4 GPUs. Start at most 4"):
        processes._device_of(local_rank=0, local_world_size=8)


def test_a_launcher_may_show_each_task_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)
    assert processes._device_of(local_rank=3, local_world_size=4) == torch.device("cuda", 0)


def test_a_cpu_trains_beside_gpus_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 4)
    assert processes._device_of(0, 8, ParallelConfig(device="cpu")) == torch.device("cpu")
    with pytest.raises(LaunchError, match="--backend=gloo is for CPUs, and this machine has GPUs"):
        processes._device_of(0, 1, ParallelConfig(backend="gloo"))
    assert processes._device_of(0, 1, ParallelConfig(device="cpu", backend="gloo")) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("asked", [ParallelConfig(device="cuda"), ParallelConfig(backend="nccl")])
def test_a_gpu_that_is_not_there_is_named_by_its_flag(asked: ParallelConfig) -> None:
    flag = "--device=cuda" if asked.device == "cuda" else "--backend=nccl"
    with pytest.raises(LaunchError, match=f"{flag} needs a GPU, and PyTorch sees none on"):
        processes._device_of(0, 1, asked)


@pytest.mark.usefixtures("single_process")
def test_two_ranks_on_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid = "GPU-1"

    def everyone_says(outcomes: list[object], mine: object) -> None:
        outcomes[:] = [mine, mine]

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    monkeypatch.setattr(dist, "all_gather_object", everyone_says)
    with pytest.raises(LaunchError, match=r"ranks \[0, 1\] share one GPU"):
        processes._refuse_shared_devices(torch.device("cuda", 0))


@pytest.mark.usefixtures("single_process")
def test_what_is_agreed_is_a_step_behind() -> None:
    with HostSync() as agreement:
        agreed = [agreement.exchange(seconds, stop) for seconds, stop in ((1.5, 0), (2.5, 15), (3.5, 0))]
    assert agreed == [HostValues(0.0, 0), HostValues(1.5, 0), HostValues(2.5, 15)]
