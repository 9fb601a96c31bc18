"""Measures what processes can exchange: the collectives of training by size, and single pairs of ranks.

In a collective all ranks take the same time, whoever is slow. So pairs exchange messages, too, as many at once as there
are pairs of different ranks: what is slow there has a name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from pretraining.tools.doctor.judgement import Link, rounds_of_pairs
from pretraining.tools.doctor.timing import meet, seconds_of, wait_for

SMALLEST_BYTES = 1024


@dataclass(frozen=True)
class CollectiveTime:
    """A collective over all ranks.

    Attributes:
        name: all-reduce, all-gather or reduce-scatter.
        size: bytes of the whole tensor.
        seconds: of a call, on the slowest rank.
        bus_gib_per_second: what the slowest link must have carried each way, whatever the number of ranks: the rule
            of nccl-tests, size / seconds x 2 (n-1) / n for an all-reduce and x (n-1) / n for the others.
    """

    name: str
    size: int
    seconds: float
    bus_gib_per_second: float


def message_sizes(largest: int) -> list[int]:
    """Bytes: the smallest, which shows the latency, and each 32 times as large up to the largest."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * 32 < largest:
        sizes.append(sizes[-1] * 32)
    return [*sizes, largest]


def measure_collectives(device: torch.device, largest_bytes: int) -> list[CollectiveTime]:
    """All-reduce, all-gather and reduce-scatter by size; a collective call, with the same result on all ranks."""
    with warnings.catch_warnings():
        # PyTorch 2.13 calls two of them by other names, which 2.11 does not have.
        warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)
        return _measure_collectives(device, largest_bytes)


def _measure_collectives(device: torch.device, largest_bytes: int) -> list[CollectiveTime]:
    ranks, times = dist.get_world_size(), []
    for size in message_sizes(largest_bytes):
        piece = torch.zeros(max(1, size // 4 // ranks), dtype=torch.float32, device=device)
        whole = piece.repeat(ranks)
        kinds: list[tuple[str, Callable[[], object], int]] = [
            ("all-reduce", lambda whole=whole: dist.all_reduce(whole), 2),  # type: ignore[misc]
            ("all-gather", lambda whole=whole, piece=piece: dist.all_gather_into_tensor(whole, piece), 1),  # type: ignore[misc]
            ("reduce-scatter", lambda whole=whole, piece=piece: dist.reduce_scatter_tensor(piece, whole), 1),  # type: ignore[misc]
        ]
        for name, call, passes in kinds:
            meet()
            own = torch.tensor([seconds_of(call, device, together=True)], dtype=torch.float64)
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
            seconds = own.item()
            bus = whole.nbytes * passes * (ranks - 1) / ranks / seconds / 2**30
            times.append(CollectiveTime(name, whole.nbytes, seconds, bus))
    return times


def measure_links(device: torch.device, size: int, hosts: list[str]) -> dict[Link, float]:
    """GiB/s each way between pairs of ranks, all pairs of a round at once; a collective call, the same on all ranks.

    Args:
        device: of this rank.
        size: bytes of a message.
        hosts: machine of each rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    own: dict[tuple[int, int], float] = {}
    for pairs in rounds_of_pairs(hosts):
        meet()
        mine = next((pair for pair in pairs if rank in pair), None)
        if mine is None:
            seconds_of(lambda: None, device, together=True)  # the others ask all ranks how many calls to make
            continue
        other = mine[1] if rank == mine[0] else mine[0]
        exchange = partial(_exchange, sent, received, other)
        own[mine] = size / 2**30 / seconds_of(exchange, device, together=True)
    wait_for(device)
    everyone: list[dict[tuple[int, int], float]] = [{}] * world_size
    dist.all_gather_object(everyone, own)
    links = {}
    for one, other in sorted({pair for each in everyone for pair in each}):
        rate = min(everyone[one][one, other], everyone[other][one, other])
        links[Link(one, other, hosts[one] == hosts[other])] = rate
    return links


def _exchange(sent: torch.Tensor, received: torch.Tensor, other: int) -> None:
    operations = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
