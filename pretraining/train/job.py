"""The job of a start: what goes along from the rendezvous of its processes to the end of the run.

layout, requests, threads -> `join_job` -> Processes -> Job
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

from pretraining.checkpoint.lease import Lease
from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.config.fields import settings_of, values_of
from pretraining.config.rules import ineffective_settings
from pretraining.config.training import TrainConfig
from pretraining.config.values import format_value
from pretraining.distributed.processes import (
    Processes,
    gather_from_every_rank,
    join_processes,
    on_every_rank,
    on_rank_zero,
)
from pretraining.distributed.rendezvous import Deadline, list_ranks
from pretraining.distributed.torch_private import keep_store_of_job
from pretraining.distributed.watchdog import Watchdog, collective_timeout
from pretraining.errors import ConfigError
from pretraining.evaluation.evaluators import UserEvaluator
from pretraining.launch.cpu_threads import CpuThreads
from pretraining.launch.layout import ProcessLayout
from pretraining.observability.metrics import MetricsHook
from pretraining.text import list_some
from pretraining.train.preemption import StopRequests
from pretraining.train.run_status import RunStatusWriter

log = logging.getLogger(__name__)

_MAX_NAMED = 8


@dataclass(frozen=True)
class Job:
    """Companion of a whole start: processes, requests, status, lease.

    Attributes:
        processes: this process among those of the job.
        requests: signals and deadline of this rank.
        status: writer of the run's status and events; by default one that writes nothing.
        lease: right to write into the run's folder, checked before each commit; None = the run saves nothing.
        threads: CPU threads chosen for this process; None = keep the current number.
        hook: user-defined metrics.
        evaluators: user-defined evaluators, by their names in the settings; the settings name the others' classes.
        launcher: name of what started the processes.
    """

    processes: Processes
    requests: StopRequests = field(default_factory=StopRequests)
    status: RunStatusWriter = field(default_factory=lambda: RunStatusWriter(0, is_writer=False))
    lease: Lease | None = None
    threads: CpuThreads | None = None
    hook: MetricsHook | None = None
    evaluators: Mapping[str, UserEvaluator] = field(default_factory=dict)
    launcher: str = ""

    def begin(self, config: TrainConfig, start: CheckpointRef | None) -> None:
        """Count the start of a run that saves, unless a request stops it; a collective call.

        Raises:
            Preempted: a stop is requested; if it is a signal, the start is not counted.
            CheckpointError: as in `RunStatusWriter.begin`.
        """
        on_every_rank(self.requests.raise_if_signalled)
        if self.lease is not None:
            on_rank_zero(lambda: self.status.begin(config.checkpoint.folder, start))
        on_every_rank(self.requests.raise_if_pending)


@contextmanager
def join_job(
    config: TrainConfig, layout: ProcessLayout, requests: StopRequests, is_embedded: bool
) -> Iterator[Processes]:
    """Join the processes of a job for a `with` block, with a watchdog; a collective call."""
    for line in ineffective_settings(config):
        log.info(line)
    waiting = config.guard.first_step_timeout.amount or collective_timeout(config.guard).total_seconds()
    with (
        join_processes(
            layout,
            timeout=collective_timeout(config.guard),
            deadline=Deadline(timedelta(seconds=waiting), requests.raise_if_signalled),
            parallel=config.parallel,
        ) as processes,
        nullcontext() if is_embedded and layout.world_size == 1 else Watchdog(config.guard, processes),
    ):
        if is_embedded and layout.world_size > 1:
            keep_store_of_job()
        _check_same_settings(config)
        yield processes


def _check_same_settings(config: TrainConfig) -> None:
    """Refuse settings that differ between ranks, unless they are `per_node`: ranks would hang; a collective call."""
    settings = settings_of(TrainConfig)
    texts = {
        name: format_value(value) if value is None or not settings[name].per_node else "given"
        for name, value in values_of(config).items()
    }
    everyone = gather_from_every_rank(lambda: texts)
    different = []
    for name in sorted(set().union(*everyone)):
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, given in enumerate(everyone):
            ranks[given.get(name, "unknown")].append(rank)
        if len(ranks) > 1:
            values = (f"{text or 'empty'} on ranks {list_ranks(on)}" for text, on in ranks.items())
            different.append(f"{name} is {' and '.join(values)}")
    if different:
        raise ConfigError(
            f"the processes of this job have different settings: {list_some(different, _MAX_NAMED, '; ')}.\n"
            "Give all nodes the same recipe and flags; the recipe on a node's own disk may be outdated"
        )
