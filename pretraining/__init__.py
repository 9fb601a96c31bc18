"""Pretraining of Llama-family language models with PyTorch's FSDP2.

The names below are public; everything else is private and may change. Names are imported on first use, so
`import pretraining` is fast and needs no torch. README.md has a reading path through the code.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

_CONFIGS = """TrainConfig ModelConfig DataConfig BatchConfig RunConfig ParallelConfig OptimizerConfig ScheduleConfig
CheckpointConfig EvaluationConfig ReportConfig GuardConfig LossConfig ProfilerConfig"""
_HOME_OF = {
    **dict.fromkeys(_CONFIGS.split(), "pretraining.config.training"),
    "Duration": "pretraining.progress",
    "PretrainError": "pretraining.errors",
    "Loader": "pretraining.data.loader",
    "Trainer": "pretraining.api",
    "load_model": "pretraining.api",
    "TrainResult": "pretraining.train.run",
}
__all__ = ["__version__", *_HOME_OF]

if TYPE_CHECKING:
    from pretraining.api import Trainer as Trainer
    from pretraining.api import load_model as load_model
    from pretraining.config.training import BatchConfig as BatchConfig
    from pretraining.config.training import CheckpointConfig as CheckpointConfig
    from pretraining.config.training import DataConfig as DataConfig
    from pretraining.config.training import EvaluationConfig as EvaluationConfig
    from pretraining.config.training import GuardConfig as GuardConfig
    from pretraining.config.training import LossConfig as LossConfig
    from pretraining.config.training import ModelConfig as ModelConfig
    from pretraining.config.training import OptimizerConfig as OptimizerConfig
    from pretraining.config.training import ParallelConfig as ParallelConfig
    from pretraining.config.training import ProfilerConfig as ProfilerConfig
    from pretraining.config.training import ReportConfig as ReportConfig
    from pretraining.config.training import RunConfig as RunConfig
    from pretraining.config.training import ScheduleConfig as ScheduleConfig
    from pretraining.config.training import TrainConfig as TrainConfig
    from pretraining.data.loader import Loader as Loader
    from pretraining.durations import Duration as Duration
    from pretraining.errors import PretrainError as PretrainError
    from pretraining.train.run import TrainResult as TrainResult


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
