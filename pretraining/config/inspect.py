"""The settings of `pretrain inspect`: those of training, which decide what a step trains on, and what of it to show."""

from __future__ import annotations

from dataclasses import dataclass

from pretraining.config.ranges import parse_range
from pretraining.config.setting import setting
from pretraining.config.training import TrainConfig
from pretraining.errors import ConfigError


@dataclass(frozen=True)
class InspectSettings:
    """What to show of the run that the other settings describe. ckpt_load_path takes those of a checkpoint."""

    step: int | None = setting(
        None, "the step to show, numbered from 1 as in reports: the batch of that update", minimum=1, maximum=10**12
    )
    steps: str | None = setting(None, "A-B: a summary of steps A to B, a line a dataset, in place of single samples")
    sample_id: int | None = setting(
        None, "show only the sample with this global index; its step is found", minimum=0, maximum=10**15
    )
    rank: int | None = setting(None, "show only what this process trains on; needs world_size", minimum=0)
    world_size: int | None = setting(
        None,
        "GPUs that share the global batch; none = 1. What is in the batch depends on it only where neither "
        "global_batch_size nor a checkpoint says how large that is",
        minimum=1,
    )
    tokens: bool = setting(False, "show the token ids too, and with tokenizer_path their text")
    json: bool = setting(False, "one JSON object a sample (with steps: a dataset), nothing shortened")

    @property
    def step_range(self) -> tuple[int, int]:
        """First and last of `steps`.

        Raises:
            ValueError: it is no range of steps.
        """
        return parse_range(self.steps or "", smallest=1)


@dataclass(frozen=True)
class InspectConfig(TrainConfig):
    """A run, and what to show of it."""

    inspect: InspectSettings = InspectSettings()


def check_inspect_config(config: InspectConfig) -> None:
    """Refuse settings that contradict each other.

    Raises:
        ConfigError: with every problem found.
    """
    asked, problems = config.inspect, []
    if asked.steps is None:
        if asked.step is None and asked.sample_id is None:
            problems.append("nothing to show: give --step=N, --sample_id=N, or --steps=A-B for a summary")
    else:
        single = {"step": asked.step, "sample_id": asked.sample_id, "rank": asked.rank, "tokens": asked.tokens or None}
        given = [f"--{name}" for name, value in single.items() if value is not None]
        if given:
            problems.append(f"--steps={asked.steps} is a summary of whole steps: leave out {', '.join(given)}")
        if not _is_range(asked):
            problems.append(f"--steps={asked.steps}: write the first and the last step, as in --steps=1-1000")
    if asked.rank is not None and asked.world_size is None:
        problems.append(f"--rank={asked.rank} is one of how many? Give --world_size=<number of GPUs> too")
    elif asked.rank is not None and asked.world_size is not None and asked.rank >= asked.world_size:
        problems.append(
            f"--rank={asked.rank} is not there: --world_size={asked.world_size} has ranks 0 to {asked.world_size - 1}"
        )
    if problems:
        raise ConfigError(problems)


def _is_range(asked: InspectSettings) -> bool:
    try:
        _, last = asked.step_range
    except ValueError:
        return False
    return last <= 10**12
