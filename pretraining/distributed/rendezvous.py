"""The rendezvous: how the processes of a job find each other.

    store of rank 0 answers -> every rank arrives (rank 0 counts) -> process group connects -> every rank is connected

Blocking calls of PyTorch run in a thread while the main thread polls, so that signals are handled. Missing processes
are logged every half minute. If one process cannot connect, all raise the same error.
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
from pretraining.launch.network import GLOO_INTERFACE, NCCL_INTERFACE, address_towards, interface_with
from pretraining.text import list_some

log = logging.getLogger(__name__)

T = TypeVar("T")

# Long enough for rank 0 to index a large dataset while the others wait. The watchdog, if enabled, stops a hanging job
# earlier and with a report (`watchdog.collective_timeout`).
COLLECTIVE_TIMEOUT = timedelta(minutes=30)

LOG_INTERVAL_SECONDS = 30.0
PROBE_SECONDS = 1.0
SHORTEST_PAUSE, LONGEST_PAUSE = 0.01, 0.25
"""Seconds between polls: short at the start, longer for late processes."""
MOST_NAMED = 16

FAILURE_GRACE_SECONDS = 5.0
"""Time that the process with the store keeps running after a failure, so that others can read the error."""


@dataclass
class Deadline:
    """A time limit for waiting on other processes.

    Attributes:
        timeout: time limit, counted from now.
        check_signals: called at each poll; raises if a signal stops the process.
        rank: this process's rank if it logs missing processes, else None.
    """

    timeout: timedelta = COLLECTIVE_TIMEOUT
    check_signals: Callable[[], object] = lambda: None
    rank: int | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._start = self._logged = self.clock()

    def poll(self, missing: str = "") -> None:
        """Check signals and the time limit, log `missing` every half minute, and sleep briefly.

        Raises:
            LaunchError: the time limit is exceeded.
        """
        self.check_signals()
        now = self.clock()
        waited = now - self._start
        if waited > self.timeout.total_seconds():
            error = LaunchError(
                f"waited {self.timeout.total_seconds():.0f} s (--first_step_timeout) for {missing or 'other ranks'}.\n"
                "Check the output on their machines, and that MASTER_ADDR and MASTER_PORT are the same everywhere."
            )
            error.rank = self.rank
            raise error
        if missing and self.rank is not None and now - self._logged >= LOG_INTERVAL_SECONDS:
            self._logged = now
            log.warning("waiting for %s, for %.0f s so far", missing, waited)
        time.sleep(min(LONGEST_PAUSE, max(SHORTEST_PAUSE, waited / 20)))


class Rendezvous:
    """The rendezvous of one process, as a sequence of collective calls.

    Raises:
        LaunchError: (all calls) a process is missing after the time limit.
    """

    def __init__(self, layout: ProcessLayout, deadline: Deadline) -> None:
        self._layout, self._deadline = layout, deadline
        # Rank 0 logs missing ranks. If rank 0 itself is missing, one process per node logs it, and rank 1.
        deadline.rank = layout.rank if layout.local_rank == 0 or layout.rank == 1 else None

    def run(self, connect: Callable[[dist.Store], object]) -> None:
        """Wait for all processes of the job, then `connect` each through a store of this start.

        Raises:
            LaunchError: a process cannot connect; all raise the same error.
            LostPeerError: the process that serves the store exited.
        """
        master, has_other_nodes = self._layout.master_addr, self._layout.local_world_size < self._layout.world_size
        try:
            store = self.join_start(self.open_store(), address_towards([master]) if has_other_nodes else "")
            if has_other_nodes:
                addresses = store.multi_get([f"arrived/{rank}" for rank in range(self._layout.world_size)])
                choose_interface([master, *(address.decode() for address in addresses if address)])
            self.connect_all(store, connect)
        except dist.DistError as error:
            self._deadline.check_signals()  # a signal may have stopped rank 0 first
            raise LostPeerError(
                "rank 0, or its torchrun, exited before all processes were connected; see its last output for why."
            ) from error

    def open_store(self) -> dist.Store:
        """Return the key-value store of the rendezvous: rank 0's, or torchrun's if it offers one.

        Raises:
            LaunchError: another program answers, or the port is taken.
        """
        layout, deadline = self._layout, self._deadline
        where = f"rank 0 at {layout.master_addr}:{layout.master_port}"
        is_server = layout.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True, "timeout": COLLECTIVE_TIMEOUT}
        while not is_server:  # TCPStore itself would retry only once per second, without a reason to log
            try:
                socket.create_connection((layout.master_addr, layout.master_port), PROBE_SECONDS).close()
                break
            except OSError as error:
                deadline.poll(f"{where} ({error.strerror or error})")
        try:
            return run_in_thread(
                lambda: dist.TCPStore(layout.master_addr, layout.master_port, layout.world_size, is_server, **options),
                lambda: deadline.poll(f"{where}, where another program may be listening"),
            )
        except (dist.DistError, ValueError) as error:
            refused = LaunchError(
                f"cannot join the {layout.world_size} processes of {where}: {_first_line(error)}.\n"
                "Check that MASTER_ADDR is reachable from every node and that MASTER_PORT is free."
            )
            refused.rank = layout.rank  # the others may wait for this one
            raise refused from error

    def join_start(self, store: dist.Store, address: str = "") -> dist.Store:
        """Return the part of a store that belongs to this start, after every rank has written its address there.

        torchrun keeps one store for all its restarts. A restarted process would read the addresses of dead processes,
        and wait for them until a timeout (pytorch issue 135712; the restart count does not help, since each machine
        counts separately). So rank 0 creates a name for this start, and sends it to every rank that asks:

            rank r    ask/<r> = a random word      rank 0    answer/<that word> = the name of this start

        Nobody reads the answer to the word of a dead process.
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
            LaunchError: a process could not connect; all raise the same error.
        """
        layout, own = self._layout, cast(Any, store)
        watch: dist.Store = own.clone()  # a blocking call blocks its whole connection

        def fail(text: str) -> NoReturn:
            first = watch.compare_set("failed", "", text).decode()
            if layout.rank == 0 and layout.world_size > 1:
                time.sleep(FAILURE_GRACE_SECONDS)
            raise LaunchError(first)

        def check_failure(missing: Iterable[int]) -> None:
            if watch.check(["failed"]):
                fail("")

        def poll() -> None:
            check_failure([])
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
        self._await_all(watch, "connected", "", check_failure)

    def _await_all(self, store: dist.Store, key: str, value: str, on_poll: Callable[[Iterable[int]], object]) -> None:
        """Write a value under a key, and wait until all ranks have; rank 0 counts them.

        `on_poll` is called at each poll; rank 0 passes the missing ranks.
        """
        store.set(f"{key}/{self._layout.rank}", value)
        if self._layout.rank == 0:
            missing = list(range(self._layout.world_size))
            while missing := [rank for rank in missing if not store.check([f"{key}/{rank}"])]:
                on_poll(missing)
                self._deadline.poll(f"ranks {list_ranks(missing)}")
            store.set(f"{key}/all", "")
        while not store.check([f"{key}/all"]):
            on_poll([])
            self._deadline.poll()


def choose_interface(hosts: Iterable[str]) -> None:
    """Make gloo use the interface that leads to the first host on another machine, unless the user chose one.

    On rank 0's machine MASTER_ADDR may lead to this machine only, so the other processes' addresses follow it.
    """
    address = "" if os.environ.get(GLOO_INTERFACE) else address_towards(hosts)
    name = interface_with(address) if address else None
    if name is not None:
        os.environ[GLOO_INTERFACE] = name
        log.info("gloo reaches other machines through %s (%s); %s names another", address, name, GLOO_INTERFACE)


def run_in_thread(call: Callable[[], T], poll: Callable[[], object]) -> T:
    """Run a blocking call of PyTorch in a thread, and `poll` until the call returns."""
    outcome = in_background(call, "rendezvous")
    while not outcome.done():
        poll()
    return outcome.result()


def in_background(call: Callable[[], T], name: str) -> Future[T]:
    """Run a call in a daemon thread, so that the process can exit while the call blocks."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def list_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: all if they are few, else the first ones and the number of the rest."""
    return f"[{list_some(ranks, MOST_NAMED)}]"
