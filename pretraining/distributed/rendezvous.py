"""How the processes of a job meet, and what they do while some are missing.

    store of rank 0 answers -> every rank has come (rank 0 counts) -> process group connects -> every rank is connected

Nothing here waits where signals are not heard: waits are short and repeated, and what waits inside PyTorch runs in a
thread. Who is missing is named every half minute. Where one process cannot connect, all end with the same error.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pretraining.errors import LaunchError, LostPeerError
from pretraining.launch.network import GLOO_INTERFACE, NCCL_INTERFACE, interface_to_others, offered_address
from pretraining.text import list_some

log = logging.getLogger(__name__)

T = TypeVar("T")

# Long enough for rank 0 to index a large dataset while the others wait for it. A watchdog that is on ends a job that
# hangs earlier, since it can say why (`watchdog.collective_timeout`).
COLLECTIVE_TIMEOUT = timedelta(minutes=30)

SECONDS_BETWEEN_LINES = 30.0
SECONDS_OF_A_PROBE = 1.0
SHORTEST_PAUSE, LONGEST_PAUSE = 0.01, 0.25
"""Between two looks at the store, in seconds: short while all are starting, longer where one is late."""
MOST_NAMED = 16

SECONDS_FOR_OTHERS = 5.0
"""How long a process that cannot connect waits for what the others say, and for them to read why it ends."""

# Keys of the store.
OFFER, OFFERS, CONNECTED, ALL_CONNECTED = "offer", "offers", "connected", "all connected"
FAILED, FAILURE_READ = "failed", "failure read"


def _nothing() -> None:
    """Asks for no early end."""


@dataclass
class Patience:
    """How long a process waits for the others, and what it does meanwhile.

    Attributes:
        timeout: from the start of the wait to the end of patience.
        end_early: called all the time; raises where the process has been told to end.
        speaks: whether this process says whom it waits for.
    """

    timeout: timedelta = COLLECTIVE_TIMEOUT
    end_early: Callable[[], object] = _nothing
    speaks: bool = True
    clock: Callable[[], float] = time.monotonic
    _began: float = field(init=False)
    _said: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self._said = self.clock()

    def pause(self) -> float:
        """Returns how long to sleep until the next look."""
        return min(LONGEST_PAUSE, max(SHORTEST_PAUSE, (self.clock() - self._began) / 20))

    def check(self, missing: Callable[[], str], speaks: bool = True) -> None:
        """Called in each turn of a wait; `missing` names those that have not come.

        Raises:
            LaunchError: the time is over.
        """
        self.end_early()
        now = self.clock()
        if now - self._began > self.timeout.total_seconds():
            names = missing()
            raise LaunchError(
                f"{names} {'have' if names.startswith('ranks') else 'has'} not come within "
                f"{self.timeout.total_seconds():.0f} s. See what their machines have printed, and whether MASTER_ADDR "
                "and MASTER_PORT are the same everywhere. --first_step_timeout says how long is waited."
            )
        if self.speaks and speaks and now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            log.warning("waiting for %s, for %.0f s so far", missing(), now - self._began)


@dataclass(frozen=True)
class Place:
    """A process among all, and (`local_`) among those of its node; where rank 0 answers."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    @property
    def meeting_point(self) -> str:
        """Where rank 0 answers, in words."""
        return f"{self.master_addr}:{self.master_port}"

    @property
    def has_other_nodes(self) -> bool:
        """Whether some processes are on other machines."""
        return self.local_world_size < self.world_size


def meet(place: Place, connect: Callable[[dist.Store], object], patience: Patience) -> None:
    """Awaits all processes of the job, then has each `connect` by a store for this start; a collective call.

    Raises:
        LaunchError: some have not come, or one could not connect, which all then raise.
        LostPeerError: the process that serves the store has ended.
    """
    # Rank 0 knows who is missing. The others know whether it is rank 0: one of a node says so, on its own node rank 1.
    patience.speaks = place.local_rank == 0 or place.rank == 1
    store = open_store(place, patience)
    try:
        address = address_towards(place.master_addr) if place.has_other_nodes else ""
        store, addresses = rendezvous(store, place.rank, place.world_size, patience, address)
        if place.has_other_nodes:
            choose_interface(place.master_addr, addresses)
        connect_all(store, place, connect, patience)
    except dist.DistError as error:
        patience.end_early()  # where all are told to end, rank 0 may be the first to do so
        raise LostPeerError(
            f"rank 0, or its torchrun, has ended before all processes have met at {place.meeting_point}; what it "
            "printed last says why."
        ) from error


def open_store(place: Place, patience: Patience) -> dist.Store:
    """Returns the store in which the processes find each other: rank 0's, or torchrun's where it offers one.

    Raises:
        LaunchError: nothing answers, or something else; or the port is taken.
    """
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_server = place.rank == 0 and not is_torchruns
    if not is_server:
        with _speaking_for_itself(place.rank):
            _await_answer(place, patience)

    def look() -> None:
        patience.check(lambda: f"the key-value store of {place.meeting_point}")

    def open_one() -> dist.Store:
        return dist.TCPStore(
            *(place.master_addr, place.master_port, place.world_size),
            is_master=is_server,
            timeout=COLLECTIVE_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
        )

    with _speaking_for_itself(place.rank):
        try:
            return attend(open_one, patience, look)
        except (dist.DistError, ValueError) as error:
            raise LaunchError(
                f"could not join the {place.world_size} processes at {place.meeting_point}: {_first_line(error)}. "
                "Check that MASTER_ADDR is reachable from every node and that MASTER_PORT is free."
            ) from error


def _await_answer(place: Place, patience: Patience) -> None:
    """Waits until something listens where rank 0 is to answer; a store would wait for it without hearing signals."""
    while True:
        try:
            socket.create_connection((place.master_addr, place.master_port), SECONDS_OF_A_PROBE).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        patience.check(lambda reason=reason: f"rank 0 at {place.meeting_point} ({reason})")  # type: ignore[misc]
        time.sleep(patience.pause())


def rendezvous(
    store: dist.Store, rank: int, world_size: int, patience: Patience, address: str = ""
) -> tuple[dist.Store, list[str]]:
    """Finds the processes of this start among what earlier starts have left in a store; a collective call.

    torchrun keeps one key-value store for all its restarts. A restarted process would find in it the addresses of dead
    ones, and wait for them until a timeout (pytorch issue 135712; the number of restarts does not help, since each
    machine counts its own). So rank 0 makes up a name for this start and tells it to every rank that asks now:

        rank r    ask/<r>  = a word of its own                 rank 0    answer/<that word> = the name of this start
                  taken/<name>/<r> = its address                         start/<name>/addresses, when all have taken it

    Nobody reads the answer to a word that a dead process has left. Returns the part of the store for this start alone,
    and the addresses, where they were given.

    Raises:
        LaunchError: some ranks have not come.
    """
    if rank == 0:
        name, addresses = _tell_name(store, world_size, patience)
        own = dist.PrefixStore(f"start/{name}", store)
        own.set("addresses", json.dumps(sorted({address, *addresses} - {""})))
    else:
        word = uuid.uuid4().hex
        store.set(f"ask/{rank}", word)
        with _speaking_for_itself(rank):
            name = _await_key(store, f"answer/{word}", patience, lambda: patience.check(lambda: "rank 0"))
        store.set(f"taken/{name}/{rank}", address)
        own = dist.PrefixStore(f"start/{name}", store)
    found = _await_key(own, "addresses", patience, lambda: patience.check(lambda: "another rank", speaks=False))
    return own, list(json.loads(found))


def _tell_name(store: dist.Store, world_size: int, patience: Patience) -> tuple[str, set[str]]:
    """Rank 0's part: returns the name and the addresses of the others."""
    name, answered = uuid.uuid4().hex, dict[int, bytes]()
    missing, addresses = set(range(1, world_size)), set[str]()
    while missing:
        for rank in sorted(missing):
            if store.check([f"taken/{name}/{rank}"]):
                missing.remove(rank)
                addresses.add(store.get(f"taken/{name}/{rank}").decode())
            elif store.check([f"ask/{rank}"]) and answered.get(rank) != (word := store.get(f"ask/{rank}")):
                store.set(f"answer/{word.decode()}", name)
                answered[rank] = word
        if missing:
            patience.check(lambda: f"ranks {list_ranks(sorted(missing))}")
            time.sleep(patience.pause())
    return name, addresses


def address_towards(host: str) -> str:
    """Returns this machine's address as the host sees it; empty where the host is this machine, or unknown."""
    found = interface_to_others([host])
    return "" if found is None else found.address


def choose_interface(master_addr: str, addresses: Sequence[str]) -> None:
    """Has gloo use the interface that leads to the other machines, unless the user has chosen one.

    On the machine of rank 0 its own name may lead nowhere else; the `addresses` of the others do.
    """
    if os.environ.get(GLOO_INTERFACE):
        return
    found = interface_to_others([master_addr, *addresses])
    if found is not None:
        os.environ[GLOO_INTERFACE] = found.name
        log.info("gloo talks to other machines from %s; %s chooses another interface", found, GLOO_INTERFACE)


def connect_all(store: dist.Store, place: Place, connect: Callable[[dist.Store], object], patience: Patience) -> None:
    """Connects this process, and returns once all are connected.

    Raises:
        LaunchError: this one or another could not connect; the same error on all.
    """
    watch = _clone(store)  # a call that waits holds up its connection

    def missing() -> str:
        connected = [watch.check([f"{CONNECTED}/{rank}"]) for rank in range(place.world_size)]
        return f"ranks {list_ranks([rank for rank, is_there in enumerate(connected) if not is_there])} to connect"

    def look() -> None:
        if watch.check([FAILED]):
            raise _failure(watch, place, "")
        patience.check(missing, speaks=place.rank == 0)

    if place.local_rank == 0 and place.has_other_nodes:
        offer = f"rank {place.rank} on {socket.gethostname()} offers {offered_address(os.environ)}"
        watch.set(f"{OFFER}/{place.rank}", offer)
        watch.add(OFFERS, 1)
    try:
        attend(lambda: connect(store), patience, look)
    except (RuntimeError, ValueError) as error:
        raise _failure(watch, place, _description(watch, place, error)) from error
    watch.set(f"{CONNECTED}/{place.rank}", "")
    if watch.add(CONNECTED, 1) == place.world_size:
        watch.set(ALL_CONNECTED, "")
    _await_key(watch, ALL_CONNECTED, patience, look)


def _failure(watch: dist.Store, place: Place, text: str) -> LaunchError:
    """Returns the error that all processes raise: the first that any of them has told, else this one."""
    told = watch.compare_set(FAILED, "", text).decode()
    watch.add(FAILURE_READ, 1)
    if place.rank == 0:  # the store ends with the process that serves it, which may be this one
        _await_count(watch, FAILURE_READ, place.world_size)
    return LaunchError(told)


def _await_count(store: dist.Store, key: str, count: int) -> None:
    """Waits for a few seconds until a count is reached."""
    until = time.monotonic() + SECONDS_FOR_OTHERS
    while store.add(key, 0) < count and time.monotonic() < until:
        time.sleep(SHORTEST_PAUSE)


def _description(watch: dist.Store, place: Place, error: BaseException) -> str:
    if place.has_other_nodes:
        _await_count(watch, OFFERS, place.world_size // place.local_world_size)
    keys = [f"{OFFER}/{rank}" for rank in range(place.world_size)]
    offers = [watch.get(key).decode() for key in keys if watch.check([key])][:MOST_NAMED]
    return (
        f"all {place.world_size} processes have come to {place.meeting_point}, but rank {place.rank} on "
        f"{socket.gethostname()} cannot connect to the others: {_first_line(error)}."
        + "".join(f"\n  {offer}" for offer in offers)
        + (f"\nSet {GLOO_INTERFACE} (and {NCCL_INTERFACE}) to an interface that all nodes reach." if offers else "")
    )


@contextmanager
def _speaking_for_itself(rank: int) -> Iterator[None]:
    """For waits for rank 0, which others may not wait for: an error is this process's own."""
    try:
        yield
    except LaunchError as error:
        error.rank = rank
        raise


def attend(call: Callable[[], T], patience: Patience, look: Callable[[], object]) -> T:
    """Runs a call that waits inside PyTorch in a thread, so that signals are heard; `look` is called meanwhile."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    while not wait([outcome], timeout=patience.pause()).done:
        look()
    return outcome.result()


def _await_key(store: dist.Store, key: str, patience: Patience, look: Callable[[], object]) -> str:
    """Returns the value of a key once it is there; `look` is called meanwhile."""
    while not store.check([key]):
        look()
        time.sleep(patience.pause())
    return str(store.get(key).decode())


def _clone(store: Any) -> dist.Store:
    """Returns a new connection to a store."""
    clone: dist.Store = store.clone()
    return clone


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def list_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as a message names them: all of a few, of many the first and how many more there are."""
    return f"[{list_some(ranks, MOST_NAMED)}]"
