"""Which process the others wait for.

Collectives make the steps of all processes equally long, so step times name nobody. What differs is how a process
spends them: the slow one works all the time, the others wait for it. So a thread in each process looks at the main
thread many times a second, notes whether it works or waits, and a report compares what share of the time each worked.

Own work is everything that is no waiting for other processes or the device: computing on a CPU, Python, waiting for
data or a file system. A GPU that computes slowly is not seen: its process waits for it as all others do.
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
FEWEST_LOOKS = 100
"""Before them, shares are too coarse to blame anyone: a share of a half is known to 5%."""
MOST_NAMED = 4


class StragglerWatch:
    """Samples what the main thread does, from a thread of its own; with a factor of None it does nothing.

    Only the activities "training" and "data" count.
    """

    def __init__(self, factor: float | None, activity: Activity) -> None:
        self._factor = factor if dist.get_world_size() > 1 else None
        self._activity = activity
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="straggler watch", daemon=True)
        self._watched = 0
        self._working = self._waiting = self._for_data = 0

    def start(self) -> None:
        """Begin to look at the calling thread."""
        self._watched = threading.get_ident()
        if self._factor is not None:
            self._thread.start()

    def stop(self) -> None:
        """Stop looking, and wait for the thread."""
        self._stopped.set()
        if self._factor is not None:
            self._thread.join()

    def report(self, step_seconds: float) -> list[str]:
        """Return a line for each process that the others wait for; a collective call.

        `step_seconds` is the mean since the last report.
        """
        if self._factor is None:
            return []
        own = torch.tensor([self._working, self._waiting, self._for_data])
        everyone = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        counts = [each.tolist() for each in everyone]
        looks_of_fewest = min(working + waiting for working, waiting, _ in counts)
        if looks_of_fewest < FEWEST_LOOKS:
            return []
        self._working = self._waiting = self._for_data = 0
        shares = [working / (working + waiting) for working, waiting, _ in counts]
        slow = find_stragglers(shares, looks_of_fewest, self._factor)
        hosts = gather_from_every_rank(socket.gethostname) if slow else []
        lines = []
        for rank, others in slow.items():
            share, for_data = shares[rank], counts[rank][2] / counts[rank][0]
            detail = f", {for_data:.0%} of it waiting for data" if for_data >= 0.01 else ""
            lines.append(
                f"straggler: rank {rank} on {hosts[rank]}: {share * step_seconds:.3f} s of own work a step{detail}, "
                f"{share / others:.1f} times as much as the others, who wait for it ({others * step_seconds:.3f} s)"
            )
        return lines

    def _look_on(self) -> None:
        while not self._stopped.wait(PERIOD_SECONDS):
            self._look()

    def _look(self) -> None:
        # A function of its own releases the frame when it returns. A frame that is kept keeps the main thread's locals
        # alive, tensors too, and freeing a tensor here while the interpreter ends aborts the process.
        frame = sys._current_frames().get(self._watched)
        doing = self._activity.doing
        if frame is None or doing not in ("training", "data"):
            return
        if is_waiting(frame):
            self._waiting += 1
        else:
            self._working += 1
            self._for_data += doing == "data"


def find_stragglers(shares: list[float], looks: int, factor: float) -> dict[int, float]:
    """Return the ranks whose share of own work stands out, the largest first, with the median share of the others.

    A share stands out if it is `factor` times that median, costs the others at least a tenth of their time, and chance
    does not explain it: four standard errors of a difference of two proportions from `looks` samples each.
    """
    found = {}
    for rank in sorted(range(len(shares)), key=lambda rank: -shares[rank])[:MOST_NAMED]:
        share = shares[rank]
        others = max(statistics.median(shares[:rank] + shares[rank + 1 :]), 1.0 / looks)
        middle = (share + others) / 2
        chance = 4.0 * math.sqrt(2.0 * middle * (1.0 - middle) / looks)
        if share >= factor * others and share - others >= max(0.1, chance):
            found[rank] = others
    return found
