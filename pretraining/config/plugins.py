"""Registries of the plugins that users choose by name: optimizers, schedules, trackers, token formats.

    --optimizer=adamw                 built in: a row of a table here, with the path of its code
    --optimizer=my_package.lion:Lion  user-defined class or function, without registration

docs/extending.md gives the interface of each. Plugins are imported only when they are built; nothing here needs torch.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretraining.errors import ConfigError, PretrainError

PLUGIN_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""A user-defined plugin: package.module:Name."""


SHARDED_TENSORS = str(Path("torch", "distributed", "tensor"))
"""Folder of PyTorch's code that refuses operations on sharded tensors."""


@dataclass(frozen=True)
class Entry:
    """A built-in plugin.

    Attributes:
        path: class or function, as `package.module:Name`.
        options: settings of its section that it reads; for optimizers besides learning_rate and weight_decay.
    """

    path: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScheduleEntry(Entry):
    """A built-in schedule. The settings that it reads tell its parts: warm-up, phase at the peak, end of the decay.

    Attributes:
        decay_shape: shape of the decay; None = no decay, or the setting of this name.
    """

    decay_shape: str | None = None


@dataclass(frozen=True)
class OptimizerEntry(Entry):
    """A built-in optimizer.

    A class is built from parameter groups and settings under torch's names; a function gets the parameters and the
    resolved settings (no None).

    Attributes:
        defaults: values of settings that are None.
        moments: tensors kept per parameter, of its shape; "momentum_buffer" only if momentum is not 0.
        matrix_moments: the same for the blocks' matrices, if different.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    moments: tuple[str, ...] = ()
    matrix_moments: tuple[str, ...] | None = None


def _rates(learning_rate: float, weight_decay: float, **more: float) -> Mapping[str, float]:
    return {"learning_rate": learning_rate, "weight_decay": weight_decay, **more}


_ADAPTIVE, _MOMENTUM = "pretraining.optim.adaptive", "pretraining.optim.momentum"
_OF_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
_OF_MUON = ("momentum", "nesterov", "muon_ns_steps", "muon_adam_learning_rate", "muon_adam_weight_decay", *_OF_ADAM)
_ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
_BUFFER = ("momentum_buffer",)
OPTIMIZERS = {
    "adamw": OptimizerEntry(f"{_ADAPTIVE}:FusedAdamW", _OF_ADAM, _rates(3e-4, 0.1), _ADAM_MOMENTS),
    "adam": OptimizerEntry(f"{_ADAPTIVE}:FusedAdam", _OF_ADAM, _rates(3e-4, 0.0), _ADAM_MOMENTS),
    "sgd": OptimizerEntry(f"{_MOMENTUM}:SGD", (), _rates(0.1, 0.0), ()),
    "sgdm": OptimizerEntry(
        f"{_MOMENTUM}:SGD", ("momentum", "nesterov"), _rates(0.1, 0.0, momentum=0.9, nesterov=False), _BUFFER
    ),
    "normalized_sgdm": OptimizerEntry(
        f"{_MOMENTUM}:NormalizedSGDM", ("momentum",), _rates(0.1, 0.0, momentum=0.9), _BUFFER
    ),
    "nadam": OptimizerEntry(f"{_ADAPTIVE}:NAdamW", _OF_ADAM, _rates(3e-4, 0.1), _ADAM_MOMENTS),
    "rmsprop": OptimizerEntry(
        f"{_ADAPTIVE}:RMSprop",
        ("rms_alpha", "momentum", "adam_epsilon"),
        _rates(3e-4, 0.0, rms_alpha=0.99, momentum=0.0),
        ("square_avg", *_BUFFER),
    ),
    "muon": OptimizerEntry(
        "pretraining.optim.muon:muon",
        _OF_MUON,
        _rates(1e-3, 0.1, momentum=0.95, nesterov=True, muon_ns_steps=5),
        _ADAM_MOMENTS,
        matrix_moments=_BUFFER,
    ),
}
_WARMUP_AND_DECAY = "pretraining.optim.schedules:warmup_and_decay"
_OF_STABLE_PHASE = ("warmup_steps", "min_lr_ratio", "stable_steps", "decay_steps")
SCHEDULES = {
    "cosine": ScheduleEntry(_WARMUP_AND_DECAY, ("warmup_steps", "min_lr_ratio"), "cosine"),
    "linear": ScheduleEntry(_WARMUP_AND_DECAY, ("warmup_steps", "min_lr_ratio"), "linear"),
    "constant": ScheduleEntry(_WARMUP_AND_DECAY, ("warmup_steps",)),
    "polynomial": ScheduleEntry(_WARMUP_AND_DECAY, ("warmup_steps", "min_lr_ratio", "decay_power"), "polynomial"),
    "piecewise_linear": ScheduleEntry("pretraining.optim.schedules:piecewise_linear", ("schedule_points",)),
    "trapezoid": ScheduleEntry(_WARMUP_AND_DECAY, _OF_STABLE_PHASE, "linear"),
    "wsd": ScheduleEntry(_WARMUP_AND_DECAY, (*_OF_STABLE_PHASE, "decay_shape")),
}
USER_DEFINED = SCHEDULES["wsd"]
"""Parts of a user-defined schedule: all of them."""
TOKEN_FORMATS = {
    "arrow": "pretraining.data.storage.arrow:ArrowFormat",
    "arrow_stream": "pretraining.data.storage.arrow:ArrowStreamFormat",
    "npy": "pretraining.data.storage.flat_files:NpyFormat",
    "npy_raw": "pretraining.data.storage.flat_files:RawNpyFormat",
    "bin": "pretraining.data.storage.flat_files:BinFormat",
    "megatron": "pretraining.data.storage.megatron:MegatronFormat",
}
"""Token formats. A row with the suffix of an earlier row has a method `accepts`, which looks into a file."""
TOKEN_SUFFIXES = (".arrow", ".npy", ".bin")
_OF_SERVICES = ("tracker_project_name", "tracker_run_name", "tracker_run_id")
TRACKERS = {
    "tensorboard": Entry("pretraining.observability.tensorboard:TensorBoard"),
    "wandb": Entry("pretraining.observability.wandb_tracker:Wandb", _OF_SERVICES),
    "mlflow": Entry("pretraining.observability.mlflow_tracker:MLflow", _OF_SERVICES),
}


def load_plugin(flag: str, path: str) -> Any:
    """Import `package.module:Name`, also from the working directory; `flag` is the setting that gives the path.

    Raises:
        ConfigError: the module cannot be imported, or lacks the name.
    """
    module_name, _, name = path.partition(":")
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))
    try:
        with plugin_errors(flag, path):
            plugin: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"--{flag}={path}: {module_name} cannot be imported ({error})") from error
    for part in name.split("."):
        if not hasattr(plugin, part):
            raise ConfigError(f"--{flag}={path}: {module_name} has no {name}")
        plugin = getattr(plugin, part)
    return plugin


@contextmanager
def plugin_errors(flag: str, name: str) -> Iterator[None]:
    """Turn an exception of user-defined code into an error that names file and line.

    A PretrainError, ImportError or OSError passes unchanged: callers handle it.

    Raises:
        ConfigError: the code in the `with` block raised another exception.
    """
    try:
        yield
    except (PretrainError, ImportError, OSError):
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"--{flag}={name} fails: {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        ) from error


@contextmanager
def sharding_errors(optimizer: str) -> Iterator[None]:
    """Turn PyTorch's refusal of an operation on sharded tensors into an error that names the optimizer.

    Raises:
        ConfigError: the optimizer cannot update sharded parameters.
    """
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if SHARDED_TENSORS not in traceback.extract_tb(error.__traceback__)[-1].filename:
            raise
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{optimizer} cannot update sharded parameters: {reason}\nGive --sharding_strategy=ddp, another optimizer "
            "or, if the class has such an option, --optimizer_options=foreach=false"
        ) from error


def parse_options(flag: str, texts: tuple[str, ...]) -> Mapping[str, Any]:
    """Read `key=value` texts: true, false, none, and Python's literals, as in `betas=(0.9,0.99)`; all else stays text.

    Raises:
        ConfigError: a text is not `key=value`, or a key is repeated.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key.isidentifier():
            raise ConfigError(f"--{flag}={','.join(texts)}: write key=value, comma list, as in momentum=0.9,fast=true")
        if key in options:
            raise ConfigError(f"--{flag}={','.join(texts)}: {key} is given twice")
        options[key] = _value_of(value)
    return options


def join_brackets(items: Sequence[str]) -> list[str]:
    """Return the items of a comma list, with those that a comma inside of brackets has cut joined again."""
    joined: list[str] = []
    for item in items:
        before = joined[-1] if joined else ""
        if sum(map(before.count, "([")) > sum(map(before.count, ")]")):
            joined[-1] = f"{before},{item}"
        else:
            joined.append(item)
    return joined


def _value_of(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
