"""Processes of one job that find each other in a folder which all of them see, and share out work.

    rank 0                                          the others
    clears the folder, waits for all                write rank_<r> with a name of their own
    writes joined: whom it has seen                 wait until their own name is in it
    publishes something                             receive it
    a process that fails writes failed_<r>; all touch rank_<r> now and then; one that waits looks at both
    waits until the others have left                remove rank_<r>
    removes the folder

What an earlier job left in the folder is never taken for this one's: a process goes on only after rank 0 has named it,
and by then rank 0 has cleared the folder. No network is used: it works wherever the output can be written. Only the own
clock is trusted.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pretraining.errors import DataError, PretrainError
from pretraining.files import exists, is_folder, write_atomic

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
NOTE_SECONDS = 30.0
JOIN_SECONDS = 600.0
HEARTBEAT_SECONDS = 10.0
SILENT_SECONDS = 300.0


class Team:
    """This process among the `size` of its job; a context, in which they have found each other. One needs no folder."""

    def __init__(self, folder: Path, rank: int, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rank = rank
        self.size = size
        self._folder = folder
        self._clock = clock
        self._checked = self._listened = clock()
        self._is_together = False  # before that, failures may be an earlier job's
        self._heard: dict[int, tuple[int, float]] = {}
        self._ended = threading.Event()

    def __enter__(self) -> Team:
        if self.size > 1:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self.rank == 0:
                self._gather()
            else:
                self._join()
            self._is_together = True
            threading.Thread(target=self._keep_heartbeat, daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.size == 1:
            return
        try:
            if error is not None:
                self._fail(error)
            elif self.rank > 0:
                self._member(self.rank).unlink(missing_ok=True)
            else:
                self.wait(lambda: not self._present(), lambda: f"ranks {_listed(self._present())} to end")
                shutil.rmtree(self._folder, ignore_errors=True)
        finally:
            self._ended.set()

    def publish(self, name: str, content: Any) -> None:
        """Rank 0: hands something that JSON can say to the others, who `receive` it."""
        if self.size > 1:
            write_atomic(self._folder / f"{name}.json", json.dumps(content))

    def receive(self, name: str) -> Any:
        """Others: wait for what rank 0 publishes."""
        path = self._folder / f"{name}.json"
        self.wait(partial(exists, path), lambda: f"rank 0: {name}")
        return json.loads(path.read_text(encoding="utf-8"))

    def wait(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Waits until something is ready, and says now and then for what.

        Raises:
            DataError: another process has failed; or the others have not come in time.
        """
        began = noted = self._clock()
        while not ready():
            self.check()
            now = self._clock()
            if not self._is_together and now - began > JOIN_SECONDS:
                raise DataError(
                    f"rank {self.rank} waited {JOIN_SECONDS:.0f} s for {what()}, in vain. Start all {self.size} "
                    "processes together; --output_path must name a folder that all machines see"
                )
            if now - noted > NOTE_SECONDS:
                noted = now
                log.warning("waits for %s (in %s)", what(), self._folder)
            time.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raises a DataError if another process has failed; looks every `POLL_SECONDS`, so it may be called often."""
        if self._is_together and self._clock() - self._checked >= POLL_SECONDS:
            self._checked = self._clock()
            self._look_after_others()

    def _gather(self) -> None:
        """Rank 0: clears the folder, and names all that come after that."""
        for leftover in self._folder.iterdir():
            leftover.unlink(missing_ok=True)
        write_atomic(self._member(0), "")

        def missing() -> list[int]:
            return sorted({*range(1, self.size)}.difference(self._present()))

        self.wait(lambda: not missing(), lambda: f"ranks {_listed(missing())} to begin")
        self.publish("joined", {rank: self._member(rank).read_text() for rank in range(1, self.size)})

    def _join(self) -> None:
        """Others: writes a name of its own, again if rank 0 has cleared it away, until rank 0 has seen it."""
        name = f"{platform.node()} {os.getpid()} {time.time_ns()}"
        joined = self._folder / "joined.json"

        def is_named() -> bool:
            with suppress(FileNotFoundError):  # cleared away under our hands
                if exists(joined) and json.loads(joined.read_text()).get(str(self.rank)) == name:
                    return True
                if not exists(self._member(self.rank)):
                    write_atomic(self._member(self.rank), name)
            return False

        self.wait(is_named, lambda: "rank 0 to begin")

    def _fail(self, error: BaseException) -> None:
        """Tells the others, unless one of them told us."""
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, PretrainError):
            if error.is_everywhere:
                return
            error.rank, text = self.rank or None, str(error)
        if is_folder(self._folder):
            write_atomic(self._folder / f"failed_{self.rank}", text)

    def _keep_heartbeat(self) -> None:
        """Gives signs of life, on a thread."""
        while not self._ended.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._member(self.rank))

    def _look_after_others(self) -> None:
        """Fails with a process that has failed, or gives no sign of life any more."""
        for path in sorted(self._folder.glob("failed_*[0-9]")):
            who = path.name.replace("failed_", "rank ")
            raise _failed(f"{who} has failed: {path.read_text(encoding='utf-8')}")
        now = self._clock()
        if now - self._listened < HEARTBEAT_SECONDS:
            return
        self._listened = now
        for rank in (0, *self._present()):
            with suppress(FileNotFoundError):
                heartbeat = self._member(rank).stat().st_mtime_ns
                if rank not in self._heard or self._heard[rank][0] != heartbeat:
                    self._heard[rank] = heartbeat, now
                elif rank != self.rank and now - self._heard[rank][1] > SILENT_SECONDS:
                    raise _failed(
                        f"rank {rank} has given no sign of life for {SILENT_SECONDS:.0f} s: was it killed? The same "
                        "command goes on from what is complete"
                    )

    def _present(self) -> list[int]:
        """Ranks besides 0 that have come and not left."""
        ranks = (int(path.name.removeprefix("rank_")) for path in self._folder.glob("rank_*[0-9]"))
        return sorted(rank for rank in ranks if rank > 0)

    def _member(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}"


def _failed(text: str) -> DataError:
    """An error that every process has, so that one of them says it."""
    error = DataError(text)
    error.is_everywhere = True
    return error


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
