"""How the processes of a job find each other, and what they do while some are missing.

    store of rank 0 answers -> every rank arrives (rank 0 counts) -> process group connects -> every rank is connected

What waits inside PyTorch runs in a thread while the main thread polls, so that signals are heard. Who is missing is
named every half minute. If one process cannot connect, all end with the same error.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch.distributed as dist

from pretraining.errors import LaunchError, LostPeerError
from pretraining.launch.layout import ProcessLayout
from pretraining.launch.network import GLOO_INTERFACE, NCCL_INTERFACE, interface_to_others
from pretraining.text import list_some

log = logging.getLogger(__name__)

T = TypeVar("T")

# Long enough for rank 0 to index a large dataset while the others wait for it. A watchdog that is on ends a job that
# hangs earlier, since it can say why (`watchdog.collective_timeout`).
COLLECTIVE_TIMEOUT = timedelta(minutes=30)

SECONDS_BETWEEN_LINES = 30.0
SECONDS_OF_A_PROBE = 1.0
SHORTEST_PAUSE, LONGEST_PAUSE = 0.01, 0.25
"""Between two polls, in seconds: short while all are starting, longer when one is late."""
MOST_NAMED = 16

SECONDS_FOR_OTHERS = 5.0
"""How long the process that serves the store stays after a failure, for the others to read it."""


@dataclass
class Deadline:
    """Until when a process waits for others, and what it does meanwhile.

    Attributes:
        timeout: from now on.
        check_signals: called at each poll; raises when the process has been told to stop.
        rank: of this process, if it is one that says whom it waits for.
    """

    timeout: timedelta = COLLECTIVE_TIMEOUT
    check_signals: Callable[[], object] = lambda: None
    rank: int | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began = self._logged = self.clock()

    def poll(self, missing: str = "") -> None:
        """Check signals and the time, log who is `missing` every half minute, and sleep for a moment.

        Raises:
            LaunchError: the time is over.
        """
        self.check_signals()
        now = self.clock()
        waited = now - self._began
        if waited > self.timeout.total_seconds():
            error = LaunchError(
                f"waited {self.timeout.total_seconds():.0f} s (--first_step_timeout) for {missing or 'other ranks'}.\n"
                "See what their machines print, and whether MASTER_ADDR and MASTER_PORT are the same everywhere."
            )
            error.rank = self.rank
            raise error
        if missing and self.rank is not None and now - self._logged >= SECONDS_BETWEEN_LINES:
            self._logged = now
            log.warning("waiting for %s, for %.0f s so far", missing, waited)
        time.sleep(min(LONGEST_PAUSE, max(SHORTEST_PAUSE, waited / 20)))


class Rendezvous:
    """The rendezvous of one process, as a sequence of collective calls.

    Raises:
        LaunchError: (all calls) some ranks do not come.
    """

    def __init__(self, layout: ProcessLayout, deadline: Deadline) -> None:
        self._layout, self._deadline = layout, deadline
        # Rank 0 knows who is missing. The others know whether it is rank 0: one of a node says so, beside it rank 1.
        deadline.rank = layout.rank if layout.local_rank == 0 or layout.rank == 1 else None

    def run(self, connect: Callable[[dist.Store], object]) -> None:
        """Wait for all processes of the job, then have each `connect` by a store of this start.

        Raises:
            LaunchError: a process cannot connect, which all then raise.
            LostPeerError: the process that serves the store has ended.
        """
        master, has_other_nodes = self._layout.master_addr, self._layout.local_world_size < self._layout.world_size
        towards_rank_0 = interface_to_others([master]) if has_other_nodes else None
        try:
            store = self.join_start(self.open_store(), "" if towards_rank_0 is None else towards_rank_0.address)
            if has_other_nodes:
                addresses = store.multi_get([f"arrived/{rank}" for rank in range(self._layout.world_size)])
                choose_interface([master, *(address.decode() for address in addresses if address)])
            self.connect_all(store, connect)
        except dist.DistError as error:
            self._deadline.check_signals()  # if all are told to stop, rank 0 may be the first to do so
            raise LostPeerError(
                "rank 0, or its torchrun, has ended before all processes were connected; what it printed last says why."
            ) from error

    def open_store(self) -> dist.Store:
        """Return the store in which the processes find each other: rank 0's, or torchrun's if it offers one.

        Raises:
            LaunchError: something else answers; or the port is taken.
        """
        layout, deadline = self._layout, self._deadline
        where = f"rank 0 at {layout.master_addr}:{layout.master_port}"
        is_server = layout.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True, "timeout": COLLECTIVE_TIMEOUT}
        while not is_server:  # a store looks for its server once a second only, and does not say why it waits
            try:
                socket.create_connection((layout.master_addr, layout.master_port), SECONDS_OF_A_PROBE).close()
                break
            except OSError as error:
                deadline.poll(f"{where} ({error.strerror or error})")
        try:
            return run_in_thread(
                lambda: dist.TCPStore(layout.master_addr, layout.master_port, layout.world_size, is_server, **options),
                lambda: deadline.poll(f"{where}, where something answers that may be no store"),
            )
        except (dist.DistError, ValueError) as error:
            refused = LaunchError(
                f"cannot join the {layout.world_size} processes of {where}: {_first_line(error)}.\n"
                "Check that MASTER_ADDR is reachable from every node and that MASTER_PORT is free."
            )
            refused.rank = layout.rank  # the others may wait for this one
            raise refused from error

    def join_start(self, store: dist.Store, address: str = "") -> dist.Store:
        """Return the part of a store that belongs to this start alone, once every rank has left its address there.

        torchrun keeps one key-value store for all its restarts. A restarted process would find in it the addresses of
        dead ones, and wait for them until a timeout (pytorch issue 135712; the number of restarts does not help, since
        each machine counts its own). So rank 0 makes up a name for this start and gives it to every rank that asks now:

            rank r    ask/<r> = a word of its own      rank 0    answer/<that word> = the name of this start

        Nobody reads the answer to a word that a dead process has left.
        """
        word = uuid.uuid4().hex
        if self._layout.rank == 0:
            store.set(f"answer/{word}", word)
        store.set(f"ask/{self._layout.rank}", word)
        while not store.check([f"answer/{word}"]):
            self._deadline.poll("rank 0")
        name = store.get(f"answer/{word}").decode()

        def answer_requests(missing: Iterable[int]) -> None:
            for rank in missing:
                if store.check([f"ask/{rank}"]):
                    store.set(f"answer/{store.get(f'ask/{rank}').decode()}", name)

        own = dist.PrefixStore(f"start/{name}", store)
        self._await_all(own, "arrived", address, answer_requests)
        return own

    def connect_all(self, store: dist.Store, connect: Callable[[dist.Store], object]) -> None:
        """Connect this process, and return once all are connected.

        Raises:
            LaunchError: this one or another could not connect; the same error on all.
        """
        layout, own = self._layout, cast(Any, store)
        watch: dist.Store = own.clone()  # a call that waits holds up its connection

        def fail(text: str) -> NoReturn:
            first = watch.compare_set("failed", "", text).decode()
            if layout.rank == 0 and layout.world_size > 1:
                time.sleep(SECONDS_FOR_OTHERS)
            raise LaunchError(first)

        def look(missing: Iterable[int]) -> None:
            if watch.check(["failed"]):
                fail("")

        def poll() -> None:
            look([])
            self._deadline.poll("the processes to connect to each other" if layout.rank == 0 else "")

        try:
            run_in_thread(lambda: connect(store), poll)
        except (RuntimeError, ValueError) as error:
            fail(
                f"rank {layout.rank} of {layout.world_size}, on {socket.gethostname()}, cannot connect to the others: "
                f"{_first_line(error)}.\n"
                f"Set {GLOO_INTERFACE} (there {os.environ.get(GLOO_INTERFACE) or 'not set'}) and {NCCL_INTERFACE} to "
                "an interface that all nodes reach."
            )
        self._await_all(watch, "connected", "", look)

    def _await_all(self, store: dist.Store, key: str, value: str, look: Callable[[Iterable[int]], object]) -> None:
        """Leave a value under a key, and wait until all ranks have; rank 0 counts them.

        `look` is called meanwhile, with the ranks that rank 0 misses.
        """
        store.set(f"{key}/{self._layout.rank}", value)
        if self._layout.rank == 0:
            missing = list(range(self._layout.world_size))
            while missing := [rank for rank in missing if not store.check([f"{key}/{rank}"])]:
                look(missing)
                self._deadline.poll(f"ranks {list_ranks(missing)}")
            store.set(f"{key}/all", "")
        while not store.check([f"{key}/all"]):
            look([])
            self._deadline.poll()


def choose_interface(hosts: Iterable[str]) -> None:
    """Have gloo use the interface that leads to the first host on another machine, unless the user has chosen one.

    On the machine of rank 0 its own name may lead nowhere else; the addresses of the others do.
    """
    found = None if os.environ.get(GLOO_INTERFACE) else interface_to_others(hosts)
    if found is not None:
        os.environ[GLOO_INTERFACE] = found.name
        log.info("gloo talks to other machines from %s; %s chooses another interface", found, GLOO_INTERFACE)


def run_in_thread(call: Callable[[], T], poll: Callable[[], object]) -> T:
    """Return what a call returns that waits inside PyTorch, which runs in a thread; `poll` is called meanwhile."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    while not outcome.done():
        poll()
    return outcome.result()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def list_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as a message names them: all of a few, of many the first and how many more there are."""
    return f"[{list_some(ranks, MOST_NAMED)}]"
