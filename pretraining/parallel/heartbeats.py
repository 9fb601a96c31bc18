"""How each process of a job is, told to all others through the key-value store that they met in.

The store is served by one process, or by torchrun. Where that one does not answer, an operation may block for good, so
`Heartbeats.of_others` asks in a thread and gives up on it.
"""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from pretraining.parallel.unofficial import store_of_job

PATIENCE_SECONDS = 5.0
"""How long an answer of the store is waited for."""


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life.

    Attributes:
        count: how many there were: one that does not grow is of a process that is not alive.
        progress: grows with everything that the main thread gets done.
        step: steps that the run has done.
        doing: as in `Pulse`.
        host: machine.
    """

    count: int
    progress: int
    step: int
    doing: str
    host: str


class Heartbeats:
    """This process's side of the exchange; a collective call to make.

    Args:
        rank: of this process.
        world_size: number of processes.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._host = socket.gethostname()
        self._count = 0
        self._telling, self._asking = (_connect() for _ in range(2))

    def tell(self, progress: int, step: int, doing: str) -> None:
        """Give a sign of life; may block where the store does not answer."""
        self._count += 1
        beat = Heartbeat(self._count, progress, step, doing, self._host)
        self._telling.set(str(self._rank), json.dumps(asdict(beat)))

    def of_others(self) -> dict[int, Heartbeat] | None:
        """The newest sign of life of every other process that gave one; None where the store does not answer."""
        answers: list[dict[int, Heartbeat]] = []
        asking = threading.Thread(target=lambda: answers.append(self._ask()), name="heartbeats", daemon=True)
        asking.start()
        asking.join(PATIENCE_SECONDS)
        return answers[0] if answers else None

    def _ask(self) -> dict[int, Heartbeat]:
        known = [rank for rank in range(self._world_size) if rank != self._rank]
        if not self._asking.check([str(rank) for rank in known]):  # one question for all, unless somebody is missing
            known = [rank for rank in known if self._asking.check([str(rank)])]
        found = self._asking.multi_get([str(rank) for rank in known])
        return {rank: Heartbeat(**json.loads(beat)) for rank, beat in zip(known, found, strict=True)}


def _connect() -> dist.Store:
    store = store_of_job("heartbeats")
    store.set_timeout(timedelta(seconds=PATIENCE_SECONDS))
    return store
