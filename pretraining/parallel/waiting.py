"""Where the host waits for other processes or for the device, and how a thread that looks on can tell.

A look at the main thread finds it working or waiting. It waits where the innermost Python function is one of
`torch.distributed` that calls into a collective, or one of the functions here: whoever waits in this project's own code
does it through them.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


def wait_for(work: Any) -> None:
    """Wait for a collective that is under way."""
    work.wait()


def wait_for_device(event: torch.cuda.Event) -> None:
    """Wait until the device has come to an event."""
    event.synchronize()


_COLLECTIVES = dist.distributed_c10d.__file__
_OWN = {function.__code__ for function in (wait_for, wait_for_device)}


def is_waiting(frame: FrameType) -> bool:
    """Whether a thread whose innermost frame this is waits for other processes or for the device."""
    return frame.f_code in _OWN or frame.f_code.co_filename == _COLLECTIVES
