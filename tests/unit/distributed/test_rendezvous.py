from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
from helpers import free_ports

from pretraining.distributed import rendezvous as rendezvous_module
from pretraining.distributed.rendezvous import Patience, Place, choose_interface, connect_all, meet, rendezvous
from pretraining.errors import LaunchError, LostPeerError, Preempted
from pretraining.launch.network import GLOO_INTERFACE, Interface

LONG, NONE = timedelta(seconds=60), timedelta(0)


def start(store: dist.Store, ranks: int) -> list[str]:
    """The processes of a start meet; each finds in its store what rank 0 puts there."""

    def come(rank: int) -> str:
        own, _ = rendezvous(store, rank, ranks, Patience(LONG))
        if rank == 0:
            own.set("who", "first" if store.add("starts", 1) == 1 else "later")
        return str(own.get("who").decode())

    return together(come, ranks)


def together(come: Callable[[int], str], ranks: int) -> list[str]:
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(come, range(ranks)))


def place(rank: int, world_size: int = 2, port: int = 1, nodes: int = 1) -> Place:
    return Place(rank, world_size, rank % (world_size // nodes), world_size // nodes, "127.0.0.1", port)


def test_every_start_has_a_place_of_its_own_in_one_store() -> None:
    store = dist.HashStore()
    assert start(store, 3) == ["first"] * 3
    assert start(store, 3) == ["later"] * 3
    assert start(store, 2) == ["later"] * 2  # a machine less


def test_what_the_dead_have_asked_is_not_taken_for_the_living() -> None:
    store = dist.HashStore()
    store.set("ask/1", "of a process that was killed")
    with pytest.raises(LaunchError, match=r"ranks \[1\] have not come within 0 s"):
        rendezvous(store, 0, 2, Patience(NONE))
    assert start(store, 2) == ["first"] * 2


def test_all_learn_the_addresses_of_all() -> None:
    store = dist.HashStore()

    def come(rank: int) -> str:
        return " ".join(rendezvous(store, rank, 3, Patience(LONG), ["", "10.0.0.2", "10.0.0.1"][rank])[1])

    assert together(come, 3) == ["10.0.0.1 10.0.0.2"] * 3


# Waiting


class Clock:
    """A clock that ticks a second when it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.mark.parametrize("have_come", [False, True], ids=["to come", "to connect"])
def test_who_is_missing_is_said_every_half_minute_and_in_the_end(
    have_come: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Patience, "pause", lambda self: 0.0)
    patience, store = Patience(timedelta(seconds=100), clock=Clock()), dist.HashStore()
    with never_ending() as wait_for_ever, pytest.raises(LaunchError, match=r"ranks \[1, 2\] .*100 s") as error:
        if have_come:
            store.set("connected/0", "")
            connect_all(store, place(0, 3), wait_for_ever, patience)
        else:
            rendezvous(store, 0, 3, patience)
    assert "first_step_timeout" in error.value.settings
    assert len(caplog.messages) == 3


def test_every_process_is_told_that_rank_0_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patience, "pause", lambda self: 0.0)
    (port,) = free_ports(1)
    for rank in (1, 2, 3):
        where = Place(rank, 4, rank % 2, 2, "127.0.0.1", port)
        with pytest.raises(LaunchError, match=rf"rank 0 at 127.0.0.1:{port} ") as raised:
            meet(where, lambda store: None, Patience(timedelta(seconds=40), clock=Clock()))
        assert raised.value.rank == rank


def never_connects(store: dist.Store) -> None:
    threading.Event().wait()


@pytest.mark.parametrize(
    "stage", ["nothing answers", "rank 0 is silent", "ranks are missing", "connections are not made", "others connect"]
)
def test_a_signal_is_heard_at_each_stage_of_a_wait_for_others(stage: str) -> None:
    heard = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: heard.set())

    def end_early() -> None:
        if heard.is_set():
            raise Preempted("told to end")
        signal.raise_signal(signal.SIGTERM)

    (port,) = free_ports(1)
    patience = Patience(LONG, end_early)
    try:
        with pytest.raises(Preempted):
            if stage == "nothing answers":
                meet(place(1, port=port), never_connects, patience)
            elif stage == "rank 0 is silent":
                store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
                meet(place(1, port=port), never_connects, patience)
                del store
            elif stage == "ranks are missing":
                meet(place(0, port=port), never_connects, patience)
            elif stage == "connections are not made":
                meet(place(0, world_size=1, port=port), never_connects, patience)
            else:  # this one is, and waits for the other
                store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
                connect_all(store, place(0, port=port), lambda store: None, patience)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_port_where_something_else_listens_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        here = place(1, port=other.getsockname()[1])
        with pytest.raises(LaunchError, match=r"the key-value store of 127.0.0.1:\d+ has not come within 1 s"):
            meet(here, lambda store: None, Patience(timedelta(seconds=1)))
        with pytest.raises(LaunchError, match=r"could not join the 2 processes .* MASTER_PORT is free") as raised:
            meet(place(0, port=here.master_port), lambda store: None, Patience(LONG))
    assert raised.value.rank == 0


def test_the_end_of_the_process_that_serves_the_store_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*arguments: object) -> None:
        raise dist.DistNetworkError("Connection was closed")

    monkeypatch.setattr(rendezvous_module, "open_store", lambda *arguments: dist.HashStore())
    monkeypatch.setattr(rendezvous_module, "rendezvous", lost)
    with pytest.raises(LostPeerError, match=r"rank 0, or its torchrun, has ended before all processes have met"):
        meet(place(1), lambda store: None, Patience(LONG))

    def told() -> None:
        raise Preempted("so is this one")

    with pytest.raises(Preempted):
        meet(place(1), lambda store: None, Patience(LONG, told))


# Connecting


@contextmanager
def never_ending() -> Iterator[Callable[[dist.Store], None]]:
    """Connects until the end of the test."""
    leave = threading.Event()
    yield lambda store: void(leave.wait())
    leave.set()


def void(value: object) -> None:
    """Returns nothing."""


def test_all_are_connected_before_any_goes_on() -> None:
    store, connected = dist.HashStore(), list[int]()

    def come(rank: int) -> str:
        connect_all(store, place(rank, 3), lambda _: connected.append(rank), Patience(LONG))
        return str(len(connected))

    assert together(come, 3) == ["3"] * 3


def test_where_one_cannot_connect_all_end_with_its_error_and_the_addresses() -> None:
    store = dist.HashStore()

    def refuse(store: dist.Store) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with Connection refused, remote=[127.0.1.1]:4711\nframes")

    with never_ending() as wait_for_ever:
        connects = [wait_for_ever, refuse, lambda store: None]

        def come(rank: int) -> str:
            with pytest.raises(LaunchError) as raised:
                connect_all(store, place(rank, 3, nodes=3), connects[rank], Patience(LONG))
            return str(raised.value)

        one, *others = together(come, 3)
    assert others == [one] * 2
    first, *offers, advice = one.splitlines()
    assert "rank 1 on " in first and first.endswith("remote=[127.0.1.1]:4711.")
    assert sorted(offer.split()[1] for offer in offers) == ["0", "1", "2"] and GLOO_INTERFACE in advice


@pytest.mark.parametrize(
    ("own", "chosen"), [(None, "eth1"), ("", "eth1"), ("ib0", "ib0")], ids=["unset", "empty", "the user's"]
)
def test_gloo_gets_the_interface_towards_the_others_unless_the_user_has_chosen(
    own: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {"node01": Interface("lo", "127.0.0.1"), "10.0.0.2": Interface("eth1", "10.0.0.1")}
    monkeypatch.setattr("pretraining.launch.network.interface_towards", ways.get)
    monkeypatch.setenv(GLOO_INTERFACE, "to be put back")
    monkeypatch.delenv(GLOO_INTERFACE) if own is None else monkeypatch.setenv(GLOO_INTERFACE, own)
    choose_interface("node01", [])
    assert os.environ.get(GLOO_INTERFACE) == own
    choose_interface("node01", ["10.0.0.2"])
    assert os.environ.get(GLOO_INTERFACE) == chosen
