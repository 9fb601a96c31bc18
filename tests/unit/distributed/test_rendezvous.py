from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import count

import pytest
import torch.distributed as dist
from helpers import free_ports

from pretraining.distributed import rendezvous as rendezvous_module
from pretraining.distributed.rendezvous import Deadline, Rendezvous, choose_interface
from pretraining.errors import LaunchError, LostPeerError, Preempted
from pretraining.launch.layout import ProcessLayout
from pretraining.launch.network import GLOO_INTERFACE

LONG = timedelta(seconds=60)


def rendezvous_of(
    rank: int, world_size: int = 2, deadline: Deadline | None = None, port: int = 1, nodes: int = 1
) -> Rendezvous:
    local = world_size // nodes
    layout = ProcessLayout(rank, world_size, rank % local, local, "environment", "127.0.0.1", port)
    return Rendezvous(layout, deadline or Deadline(LONG))


def together(come: Callable[[int], str], ranks: int) -> list[str]:
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(come, range(ranks)))


def start(store: dist.Store, ranks: int) -> list[str]:
    """Run a rendezvous; each process finds rank 0's value and all addresses in its store."""

    def come(rank: int) -> str:
        own = rendezvous_of(rank, ranks).join_start(store, f"10.0.0.{rank}")
        if rank == 0:
            own.set("who", "first" if store.add("starts", 1) == 1 else "later")
        assert [own.get(f"arrived/{each}").decode() for each in range(ranks)] == [f"10.0.0.{r}" for r in range(ranks)]
        return str(own.get("who").decode())

    return together(come, ranks)


def test_every_start_has_its_own_part_of_one_store() -> None:
    store = dist.HashStore()
    assert start(store, 3) == ["first"] * 3
    assert start(store, 3) == ["later"] * 3
    assert start(store, 2) == ["later"] * 2  # one machine fewer


def test_requests_of_dead_processes_are_ignored() -> None:
    store = dist.HashStore()
    store.set("ask/1", "of a process that was killed")
    with pytest.raises(LaunchError):
        rendezvous_of(0, deadline=Deadline(timedelta(0))).join_start(store)
    assert start(store, 2) == ["first"] * 2


# Waiting


def ticking() -> Callable[[], float]:
    """Return a clock that advances one second per reading."""
    return partial(next, count(1.0))


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHORTEST_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(rendezvous_module, name, 0.0)


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("have_come", [False, True], ids=["to come", "to be connected"])
def test_missing_ranks_are_in_the_log_and_in_the_error(have_come: bool, caplog: pytest.LogCaptureFixture) -> None:
    rendezvous = rendezvous_of(0, 3, Deadline(timedelta(seconds=100), clock=ticking()))
    with pytest.raises(LaunchError) as error:
        if have_come:
            rendezvous.connect_all(dist.HashStore(), lambda store: None)
        else:
            rendezvous.join_start(dist.HashStore())
    assert error.value.settings == ("first_step_timeout",) and error.value.rank == 0
    assert len(caplog.messages) == 3 and all("[1, 2]" in text for text in (*caplog.messages, str(error.value)))


@pytest.mark.usefixtures("no_pauses")
def test_every_node_and_rank_1_say_that_rank_0_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    (port,) = free_ports(1)
    for rank, speaker in ((1, 1), (2, 2), (3, None)):
        caplog.clear()
        deadline = Deadline(timedelta(seconds=40), clock=ticking())
        with pytest.raises(LaunchError) as raised:
            rendezvous_of(rank, 4, deadline, port, nodes=2).run(lambda store: None)
        assert raised.value.rank == speaker and len(caplog.messages) == (speaker is not None)


def never_connects(store: dist.Store) -> None:
    threading.Event().wait()


def stop() -> None:
    raise Preempted("SIGTERM")


@pytest.mark.parametrize(
    "stage", ["nothing answers", "rank 0 is silent", "ranks are missing", "connections are not made", "others connect"]
)
def test_signals_are_looked_for_at_each_stage_of_a_wait_for_others(stage: str) -> None:
    (port,) = free_ports(1)
    deadline = Deadline(LONG, stop)
    with pytest.raises(Preempted):
        if stage == "nothing answers":
            rendezvous_of(1, deadline=deadline, port=port).run(never_connects)
        elif stage == "rank 0 is silent":
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            rendezvous_of(1, deadline=deadline, port=port).run(never_connects)
            del store
        elif stage == "ranks are missing":
            rendezvous_of(0, deadline=deadline, port=port).run(never_connects)
        elif stage == "connections are not made":
            rendezvous_of(0, 1, deadline, port).run(never_connects)
        else:  # this one is, and waits for the other
            rendezvous_of(0, deadline=deadline).connect_all(dist.HashStore(), lambda store: None)


def test_a_port_of_another_program_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for rank, seconds in ((1, 1), (0, 60)):
            with pytest.raises(LaunchError) as raised:
                rendezvous_of(rank, deadline=Deadline(timedelta(seconds=seconds)), port=port).open_store()
            assert raised.value.rank == rank and str(port) in str(raised.value)


def test_the_exit_of_the_process_with_the_store_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*arguments: object) -> None:
        raise dist.DistNetworkError("Connection was closed")

    monkeypatch.setattr(Rendezvous, "open_store", lost)
    with pytest.raises(LostPeerError):
        rendezvous_of(1).run(never_connects)
    with pytest.raises(Preempted):
        rendezvous_of(1, deadline=Deadline(LONG, stop)).run(never_connects)


# Connecting


def test_all_are_connected_before_any_continues() -> None:
    store, connected = dist.HashStore(), list[int]()

    def come(rank: int) -> str:
        rendezvous_of(rank, 3).connect_all(store, lambda _: connected.append(rank))
        return str(len(connected))

    assert together(come, 3) == ["3"] * 3


def test_if_one_process_cannot_connect_all_raise_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "FAILURE_GRACE_SECONDS", 0.0)  # this store has no server
    store = dist.HashStore()

    def refuse(store: dist.Store) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with Connection refused, remote=[127.0.1.1]:4711\nframes")

    connects = [never_connects, refuse, lambda store: None]

    def come(rank: int) -> str:
        with pytest.raises(LaunchError) as raised:
            rendezvous_of(rank, 3, nodes=3).connect_all(store, connects[rank])
        assert raised.value.rank is None  # one message per node
        return str(raised.value)

    one, *others = together(come, 3)
    assert others == [one] * 2
    assert one.startswith("rank 1 ") and "[127.0.1.1]:4711" in one and GLOO_INTERFACE in one and "frames" not in one


@pytest.mark.parametrize(("own", "chosen"), [("", "eth1"), ("ib0", "ib0")])
def test_gloo_gets_the_interface_unless_the_user_chose_one(
    own: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_module, "address_towards", lambda hosts: "10.0.0.1" if "10.0.0.2" in hosts else "")
    monkeypatch.setattr(rendezvous_module, "interface_with", {"10.0.0.1": "eth1"}.get)
    monkeypatch.setenv(GLOO_INTERFACE, own)
    choose_interface(["node01"])
    assert os.environ.get(GLOO_INTERFACE) == own
    choose_interface(["node01", "10.0.0.2"])
    assert os.environ.get(GLOO_INTERFACE) == chosen
