"""Sources of settings in words of this project, with the translations that some of them come from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pretraining.config.assignments import Source
from pretraining.config.command_line import ResolvedConfig, resolve_config
from pretraining.config.training import DataConfig, TrainConfig
from pretraining.errors import DataError
from pretraining.files import exists
from pretraining.progress import DefaultDuration, Duration

if TYPE_CHECKING:
    from pretraining.tools.translate.translation import Translation

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Translated:
    """Settings that a user gave, in words of this project.

    Attributes:
        sources: recipes left to right, and the command line; later ones win.
        translations: of files and words of other systems among them. Every source wins over their defaults.
    """

    sources: Sequence[Source]
    translations: Sequence[Translation] = ()

    @property
    def all_sources(self) -> list[Source]:
        """The defaults of other systems, then the sources."""
        return [*(Source(each.name, each.defaults) for each in self.translations), *self.sources]

    def resolve(
        self, root: type[T], recorded: Source | None = None, *, continues_runs: bool = False
    ) -> ResolvedConfig[T]:
        """Call `resolve_config`, and log what became of each key of another system.

        Args:
            root, continues_runs: as in `resolve_config`.
            recorded: settings of a checkpoint; all others win over them.
        """
        before = [] if recorded is None else [recorded]
        resolved = resolve_config(root, [*before, *self.all_sources], continues_runs=continues_runs)
        for each in self.translations:
            if each.notes:
                lines = "\n".join(each.table())
                log.info("%s is read as settings of another system (%s):\n%s", each.name, each.kind, lines)
        config = resolved.config
        warmup = resolved.chosen.get("warmup_steps")
        if isinstance(config, TrainConfig) and any(warmup in each.defaults for each in self.translations):
            length = config.schedule.warmup_steps or Duration(0, "steps")
            schedule = replace(config.schedule, warmup_steps=DefaultDuration(length.amount, length.unit))
            return replace(resolved, config=replace(config, schedule=schedule))
        return resolved

    def check_prepared(self, data: DataConfig) -> None:
        """Raise a DataError with the command that prepares the data of another system's file, unless it is there."""
        for folder, command in [each.prepare for each in self.translations if each.prepare is not None]:
            if not data.use_dummy_dataset and data.data_path == folder and not exists(Path(folder)):
                text = f"there is no data yet in {folder}. Prepare it, then give this command again:\n  {command}"
                raise DataError(text)
