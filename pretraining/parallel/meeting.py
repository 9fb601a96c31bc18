"""A place to meet that no earlier start of the same job has used.

torchrun keeps one key-value store for all its restarts. Processes that are started anew would find in it the addresses
that the dead have left, and wait for them until a timeout (pytorch issue 135712; the count of restarts is no way out,
as each machine has its own). So rank 0 makes up a name for this start and tells it to whoever asks now:

    rank r    ask/<r>  = a word of its own                 rank 0    answer/<that word> = the name of this start
              taken/<name>/<r>                                       done, when all have taken it

A word that a dead process has left gets an answer, too, which nobody reads.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from pretraining.errors import LaunchError

SECONDS_BETWEEN_LOOKS = 0.05


def meet(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of a store that is this start's alone; a collective call.

    Args:
        store: of all starts of the job.
        rank: of this process.
        world_size: processes of this start.
        timeout: how long to wait for the others.

    Raises:
        LaunchError: some have not come.
    """
    name = _tell_name(store, world_size, timeout) if rank == 0 else _ask_name(store, rank)
    return dist.PrefixStore(f"start/{name}", store)


def _tell_name(
    store: dist.Store, world_size: int, timeout: timedelta, clock: Callable[[], float] = time.monotonic
) -> str:
    name, answered = uuid.uuid4().hex, dict[int, bytes]()
    missing = set(range(1, world_size))
    deadline = clock() + timeout.total_seconds()
    while missing:
        for rank in sorted(missing):
            if store.check([f"taken/{name}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"ask/{rank}"]) and answered.get(rank) != (word := store.get(f"ask/{rank}")):
                store.set(f"answer/{word.decode()}", name)
                answered[rank] = word
        if missing and clock() > deadline:
            raise LaunchError(
                f"ranks {sorted(missing)} have not come within {timeout.total_seconds():.0f} s. "
                "See what their machines have printed."
            )
        time.sleep(SECONDS_BETWEEN_LOOKS if missing else 0)
    return name


def _ask_name(store: dist.Store, rank: int) -> str:
    word = uuid.uuid4().hex
    store.set(f"ask/{rank}", word)
    name: str = store.get(f"answer/{word}").decode()  # waits until it is there
    store.set(f"taken/{name}/{rank}", "")
    return name
