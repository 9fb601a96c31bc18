from __future__ import annotations

import sys
import threading
from types import FrameType

import torch
import torch.distributed as dist

from pretraining.distributed.host_sync import is_waiting, wait_for


def innermost_frame_in(function: object) -> FrameType:
    """The frame of a thread that stands in a function's wait, from outside."""
    inside, leave = threading.Event(), threading.Event()

    class Work:
        def wait(self) -> None:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=function, args=(Work(),))  # type: ignore[arg-type]
    thread.start()
    inside.wait()
    assert thread.ident is not None
    frame: FrameType | None = sys._current_frames()[thread.ident]
    leave.set()
    thread.join()
    while frame is not None and frame.f_code is not wait_for.__code__:
        frame = frame.f_back
    assert frame is not None
    return frame


def test_whoever_waits_for_a_collective_of_its_own_is_seen_to() -> None:
    assert is_waiting(innermost_frame_in(wait_for))


def test_a_collective_is_waiting_and_computing_is_not(single_process: None) -> None:
    frames: list[FrameType] = []

    def trace(frame: FrameType, event: str, argument: object) -> None:
        frames.append(frame)

    sys.setprofile(trace)
    dist.all_reduce(torch.zeros(1))
    sys.setprofile(None)
    assert any(is_waiting(frame) and frame.f_code.co_name == "all_reduce" for frame in frames)
    assert not is_waiting(sys._getframe())
