"""What a run is made of before it has a state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.config.batch import BatchPlan
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape
from pretraining.data.dataset import OpenedDatasets
from pretraining.data.loader import Loader
from pretraining.distributed.processes import Processes
from pretraining.progress import TokenSchedule
from pretraining.train.data import open_loader


@dataclass(frozen=True)
class Parts:
    """Everything that is known before the model is built.

    Attributes:
        config: the settings.
        processes: this process among the others.
        shape: dimensions of the model.
        restorable: the checkpoint to start from; None for a new run.
        weights: what a new run takes its weights from; None for initial ones, or those of `restorable`.
        abandoned: what interrupted saves have left in the run's folder.
        data: the datasets; None for made-up data.
        plan: how a global batch is cut.
        token_schedule: tokens of the run's steps, those before the checkpoint too.
        total_steps: length of the run.
    """

    config: TrainConfig
    processes: Processes
    shape: LlamaShape
    restorable: CheckpointRef | None
    weights: CheckpointRef | None
    abandoned: list[Path]
    data: OpenedDatasets | None
    plan: BatchPlan
    token_schedule: TokenSchedule
    total_steps: int

    @property
    def training_tokens(self) -> int | None:
        """Tokens of one pass over the datasets; made-up data has no end."""
        return self.data.training_tokens if self.data is not None else None

    def held_out_loader(self) -> Loader:
        """This rank's loader for evaluations; a collective call."""
        return open_loader(self.data, self.config, self.plan, self.processes.rank, self.shape.vocab_size, "held_out")
