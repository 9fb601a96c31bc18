from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from pretraining.distributed.processes import rendezvous
from pretraining.errors import LaunchError

LONG = timedelta(seconds=60)


def start(store: dist.Store, ranks: int) -> list[str]:
    """The processes of a start meet; each finds in its store what rank 0 puts there."""

    def come(rank: int) -> str:
        own = rendezvous(store, rank, ranks, LONG)
        if rank == 0:
            own.set("who", "first" if store.add("starts", 1) == 1 else "later")
        return str(own.get("who").decode())

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(come, range(ranks)))


def test_every_start_has_a_place_of_its_own_in_one_store() -> None:
    store = dist.HashStore()
    assert start(store, 3) == ["first"] * 3
    assert start(store, 3) == ["later"] * 3
    assert start(store, 2) == ["later"] * 2  # a machine less


def test_what_the_dead_have_asked_is_not_taken_for_the_living() -> None:
    store = dist.HashStore()
    store.set("ask/1", "of a process that was killed")
    with pytest.raises(LaunchError, match=r"ranks \[1\] have not come within 0 s"):
        rendezvous(store, 0, 2, timedelta(0))
    assert start(store, 2) == ["first"] * 2
