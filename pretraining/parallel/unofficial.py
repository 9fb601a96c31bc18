"""What PyTorch has under private names only, in one place."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def store_of_job(prefix: str) -> dist.Store:
    """A connection of its own to the key-value store that the processes met in; keys begin with `prefix`.

    Its own, because an operation that blocks holds up all others of a connection.
    """
    store: Any = distributed_c10d._get_default_store()
    return dist.PrefixStore(prefix, store.clone())


def set_timeout_of_group(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set after which a process that waits in a collective of the group gives up."""
    distributed_c10d._set_pg_timeout(timeout, group)
