"""What watches over a run, and how far it lets one go: the section `guard`."""

from __future__ import annotations

from dataclasses import dataclass

from pretraining.config.fields import INTERVAL, setting
from pretraining.progress import Duration


@dataclass(frozen=True)
class GuardConfig:
    """When an update is left out, and when a run that goes wrong is ended or turned back."""

    max_skipped_steps: int = setting(
        20,
        "so many updates left out in a row (loss or gradient not finite, or a spike) end the run, or turn it back "
        "where max_rollbacks allows; 0 = never",
        minimum=0,
    )
    spike_threshold: float | None = setting(
        None,
        "leave an update out where its loss lies more than so many standard deviations above the mean of the last "
        "ones; 6 is common; none = only where loss or gradient is not finite",
        minimum=1,
    )
    spike_window: int = setting(
        128, "losses that spike_threshold looks back on; with less than half of them, none is a spike", minimum=4
    )
    max_rollbacks: int = setting(
        0,
        "after max_skipped_steps, go back to the newest checkpoint before them and leave their samples out, at most "
        "so many times without progress in between; 0 = end the run",
        minimum=0,
    )
    replica_check_interval: Duration = setting(
        Duration(0, "steps"),
        "how often to compare the weights of replicas (ddp, hsdp), and end the run, naming the rank, where they "
        "differ; 0 = never",
        units=INTERVAL,
    )
    straggler_factor: float | None = setting(
        1.5,
        "reports name a process whose own work takes so many times as long as that of the others; none = do not look",
        minimum=1.05,
    )
    hang_timeout: Duration = setting(
        Duration(600, "seconds"),
        "end the job, with exit code 124, the stacks of all processes and the names of those at fault, where nothing "
        "makes progress for so long; 0s = never",
        units=("seconds",),
    )
    first_step_timeout: Duration = setting(
        Duration(1800, "seconds"),
        "the same until the first step is done, which opens data, restores and compiles; 0s = never",
        units=("seconds",),
    )
