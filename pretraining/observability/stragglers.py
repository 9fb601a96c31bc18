"""The straggler watch, which finds processes that the others wait for.

Collectives make the steps of all processes equally long, so step times reveal nothing. But a slow process works all the
time, while the others wait. So a thread in each process samples many times per second whether the main thread works or
waits, and reports compare the shares of work.

Work is everything except waiting for other processes or the device: CPU computation, Python, waiting for data or a file
system. A slow GPU is not found, because its process waits too.
"""

from __future__ import annotations

import math
import socket
import statistics
import sys
import threading

import torch
import torch.distributed as dist

from pretraining.distributed.host_sync import is_waiting
from pretraining.distributed.processes import Activity, gather_from_every_rank

PERIOD_SECONDS = 0.05
MIN_SAMPLES = 100
"""Samples before a report; they determine a share of a half to 5%."""
MAX_NAMED = 4


class StragglerWatch:
    """A thread that samples the main thread during the activities "training" and "data"; off if `factor` is None."""

    def __init__(self, factor: float | None, activity: Activity) -> None:
        self._factor = factor if dist.get_world_size() > 1 else None
        self._activity = activity
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="straggler watch", daemon=True)
        self._main_thread = 0
        self._working = self._waiting = self._for_data = 0

    def start(self) -> None:
        """Start to sample the calling thread."""
        self._main_thread = threading.get_ident()
        if self._factor is not None:
            self._thread.start()

    def stop(self) -> None:
        """Stop sampling, and wait for the thread."""
        self._stopped.set()
        if self._factor is not None:
            self._thread.join()

    def report(self, step_seconds: float) -> list[str]:
        """Return one line per straggler; a collective call.

        Args:
            step_seconds: mean since the last report.
        """
        if self._factor is None:
            return []
        own = torch.tensor([self._working, self._waiting, self._for_data])
        everyone = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        counts = [each.tolist() for each in everyone]
        samples = min(working + waiting for working, waiting, _ in counts)
        if samples < MIN_SAMPLES:
            return []
        self._working = self._waiting = self._for_data = 0
        shares = [working / (working + waiting) for working, waiting, _ in counts]
        slow = find_stragglers(shares, samples, self._factor)
        hosts = gather_from_every_rank(socket.gethostname) if slow else []
        lines = []
        for rank, others in slow.items():
            share, for_data = shares[rank], counts[rank][2] / counts[rank][0]
            detail = f", {for_data:.0%} of it waiting for data" if for_data >= 0.01 else ""
            lines.append(
                f"straggler: rank {rank} on {hosts[rank]}: {share * step_seconds:.3f} s of own work per step{detail}, "
                f"{share / others:.1f} times as much as the other ranks ({others * step_seconds:.3f} s), which wait"
            )
        return lines

    def _sample_until_stopped(self) -> None:
        while not self._stopped.wait(PERIOD_SECONDS):
            self._sample()

    def _sample(self) -> None:
        # A separate function, so that the frame is released. A kept frame keeps the main thread's tensors alive, and
        # freeing a tensor here while Python exits aborts the process.
        frame = sys._current_frames().get(self._main_thread)
        doing = self._activity.doing
        if frame is None or doing not in ("training", "data"):
            return
        if is_waiting(frame):
            self._waiting += 1
        else:
            self._working += 1
            self._for_data += doing == "data"


def find_stragglers(shares: list[float], samples: int, factor: float) -> dict[int, float]:
    """Return stragglers, the largest share of work first, each with the median share of the other ranks.

    A straggler's share is at least `factor` times this median, and at least a tenth of the time above it. The
    difference must exceed four standard errors of two proportions from `samples` samples each.
    """
    found = {}
    for rank in sorted(range(len(shares)), key=lambda rank: -shares[rank])[:MAX_NAMED]:
        share = shares[rank]
        others = max(statistics.median(shares[:rank] + shares[rank + 1 :]), 1.0 / samples)
        middle = (share + others) / 2
        chance = 4.0 * math.sqrt(2.0 * middle * (1.0 - middle) / samples)
        if share >= factor * others and share - others >= max(0.1, chance):
            found[rank] = others
    return found
