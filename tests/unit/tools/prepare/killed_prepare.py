"""`prepare` in a process that is killed, without any chance to tidy up, at a chosen moment."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretraining.launch.layout import ProcessLayout
from pretraining.tools.commands import PrepareConfig
from pretraining.tools.prepare.prepare import prepare
from pretraining.tools.prepare.token_files import TokenWriter


def prepare_killed(config: PrepareConfig, moment: str, number: int, layout: ProcessLayout | None = None) -> bool:
    """Start `prepare` in a process of its own, forked from this one, and kill it.

    Args:
        config: of the call.
        moment: `before` or `after` a file gets its name, or `writing`.
        number: which time, from 1, counted over all files.
        layout: of the call.

    Returns:
        whether it was killed; False where it had ended before.
    """
    process = multiprocessing.get_context("fork").Process(target=_run, args=(config, moment, number, layout))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def _run(config: PrepareConfig, moment: str, number: int, layout: ProcessLayout | None) -> None:
    seen = 0

    def killing(original: Callable[..., Any], when: str) -> Callable[..., Any]:
        def patched(*args: Any) -> Any:
            nonlocal seen
            seen += when == moment or (moment == "after" and when == "before")
            if seen == number and moment in ("before", "writing"):
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args)
            if seen == number and moment == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return patched

    for name in ("replace", "rename"):
        setattr(Path, name, killing(getattr(Path, name), "before"))
    TokenWriter._flush = killing(TokenWriter._flush, "writing")  # type: ignore[method-assign]
    prepare(config, layout)
