"""Samples that cannot be read, where a run is to go on without them: slots keep their places and lose their labels.

Single faults are lived with. Where nothing can be read any more, as when a file system is gone, that ends the run all
the same: it would go on for days and learn nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pretraining.errors import DataError

LINES_SHOWN = 20
"""Samples that are named one by one; of a dataset of another tokenizer every one would be."""
MOST_IN_A_ROW = 256
"""Samples of a process with no readable one between them that end the run."""


class Quarantine:
    """Notes samples that cannot be read; may be used by several threads.

    Args:
        note: shows a line to the user.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._lock = threading.Lock()
        self._count = self._in_a_row = 0

    def add(self, problem: str) -> None:
        """Note a sample.

        Args:
            problem: what is wrong with which sample.

        Raises:
            DataError: there were too many in a row.
        """
        with self._lock:
            self._count += 1
            self._in_a_row += 1
            count, in_a_row = self._count, self._in_a_row
        if in_a_row >= MOST_IN_A_ROW:
            raise DataError(f"{in_a_row} samples in a row cannot be read, which is no case for quarantine: {problem}")
        if count <= LINES_SHOWN:
            self._note(f"quarantined, its labels are left out: {problem}")
        elif count.bit_count() == 1:  # 32, 64, 128 ...: a run of months is told, and does not drown in it
            self._note(f"quarantined: {count:,} samples so far. `pretrain verify` names every fault of the files")

    def end_row(self) -> None:
        """Note that samples could be read."""
        with self._lock:
            self._in_a_row = 0
