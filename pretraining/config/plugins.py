"""What users exchange by name: optimizers, schedules, trackers, token formats and scores. No torch.

    --optimizer=adamw                 a name of a table here: where its code is, and what it reads
    --optimizer=my_package.lion:Lion  a class or function of the user's own, without registration

docs/extending.md says what each has to offer. What a name stands for is imported when it is built.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretraining.errors import ConfigError, PretrainError

OWN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""A user's own: package.module:Name."""


@dataclass(frozen=True)
class Entry:
    """What ships with the project under a name.

    Attributes:
        path: as `package.module:Name`, of its class or function.
        options: the settings of its section that it reads; of optimizers besides learning_rate and weight_decay.
    """

    path: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimizerEntry(Entry):
    """An optimizer: a class, made over parameter groups with settings by the names of torch; or a function.

    A function is given the parameters and the settings, in which nothing is none.

    Attributes:
        defaults: what settings stand for where they are none.
        moments: what it keeps of a parameter's shape for each parameter; "momentum_buffer" with momentum only.
        matrix_moments: the same for the matrices of blocks, if that is something else.
        update_bytes: of temporary tensors in an update, per parameter of the larger group of parameters.
        matrix_update_bytes: per parameter of the blocks' matrices instead, (whole, sharded).
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    moments: tuple[str, ...] = ()
    matrix_moments: tuple[str, ...] | None = None
    update_bytes: int = 0
    matrix_update_bytes: tuple[int, int] | None = None


_OF_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
_ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENTUM = ("momentum_buffer",)
OPTIMIZERS = {
    "adamw": OptimizerEntry(
        "pretraining.optim.adaptive:FusedAdamW", _OF_ADAM, {"learning_rate": 3e-4, "weight_decay": 0.1}, _ADAM_MOMENTS
    ),
    "adam": OptimizerEntry(
        "pretraining.optim.adaptive:FusedAdam", _OF_ADAM, {"learning_rate": 3e-4, "weight_decay": 0.0}, _ADAM_MOMENTS
    ),
    "sgd": OptimizerEntry("pretraining.optim.momentum:SGD", (), {"learning_rate": 0.1, "weight_decay": 0.0}, ()),
    "sgdm": OptimizerEntry(
        "pretraining.optim.momentum:SGD",
        ("momentum", "nesterov"),
        {"learning_rate": 0.1, "weight_decay": 0.0, "momentum": 0.9, "nesterov": False},
        _MOMENTUM,
    ),
    "normalized_sgdm": OptimizerEntry(
        "pretraining.optim.momentum:NormalizedSGDM",
        ("momentum",),
        {"learning_rate": 0.1, "weight_decay": 0.0, "momentum": 0.9},
        _MOMENTUM,
        update_bytes=4,
    ),
    "nadam": OptimizerEntry(
        "pretraining.optim.adaptive:NAdamW",
        _OF_ADAM,
        {"learning_rate": 3e-4, "weight_decay": 0.1},
        _ADAM_MOMENTS,
        update_bytes=8,
    ),
    "rmsprop": OptimizerEntry(
        "pretraining.optim.adaptive:RMSprop",
        ("rms_alpha", "momentum", "adam_epsilon"),
        {"learning_rate": 3e-4, "weight_decay": 0.0, "rms_alpha": 0.99, "momentum": 0.0},
        ("square_avg", *_MOMENTUM),
        update_bytes=4,
    ),
    "muon": OptimizerEntry(
        "pretraining.optim.muon:muon",
        ("momentum", "nesterov", "muon_ns_steps", "muon_adam_learning_rate", "muon_adam_weight_decay", *_OF_ADAM),
        {"learning_rate": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "muon_ns_steps": 5},
        _ADAM_MOMENTS,
        matrix_moments=_MOMENTUM,
        matrix_update_bytes=(5, 10),  # as simulated; sharded ones go to their owners and back
    ),
}
_WARMUP_AND_DECAY = "pretraining.optim.schedules:warmup_and_decay"
_OF_STABLE_PHASE = ("warmup_steps", "min_lr_ratio", "stable_steps", "decay_steps")
SCHEDULES = {
    "cosine": Entry(_WARMUP_AND_DECAY, ("warmup_steps", "min_lr_ratio")),
    "linear": Entry(_WARMUP_AND_DECAY, ("warmup_steps", "min_lr_ratio")),
    "constant": Entry(_WARMUP_AND_DECAY, ("warmup_steps",)),
    "polynomial": Entry(_WARMUP_AND_DECAY, ("warmup_steps", "min_lr_ratio", "decay_power")),
    "piecewise_linear": Entry("pretraining.optim.schedules:piecewise_linear", ("schedule_points",)),
    "trapezoid": Entry(_WARMUP_AND_DECAY, _OF_STABLE_PHASE),
    "wsd": Entry(_WARMUP_AND_DECAY, (*_OF_STABLE_PHASE, "decay_shape")),
}
TOKEN_FORMATS = {
    "arrow": "pretraining.data.storage.arrow:ArrowFormat",
    "npy": "pretraining.data.storage.flat_files:NpyFormat",
    "bin": "pretraining.data.storage.flat_files:BinFormat",
}
TOKEN_SUFFIXES = tuple(f".{name}" for name in TOKEN_FORMATS)
SCORES = {
    "loss": "pretraining.evaluation.scores:Loss",
    "perplexity": "pretraining.evaluation.scores:Perplexity",
    "token_accuracy": "pretraining.evaluation.scores:TokenAccuracy",
    "bits_per_byte": "pretraining.evaluation.scores:BitsPerByte",
}
_OF_SERVICES = ("tracker_project_name", "tracker_run_name", "tracker_run_id")
TRACKERS = {
    "tensorboard": Entry("pretraining.observability.tensorboard:TensorBoard"),
    "wandb": Entry("pretraining.observability.wandb_tracker:Wandb", _OF_SERVICES),
    "mlflow": Entry("pretraining.observability.mlflow_tracker:MLflow", _OF_SERVICES),
    "jsonl": Entry("pretraining.observability.trackers:JsonLines"),
}


def load_plugin(flag: str, path: str) -> Any:
    """Import what `package.module:Name` names, also from the working directory; `flag` is the setting that names it.

    Raises:
        ConfigError: there is no such module, or nothing of that name in it.
    """
    module_name, _, name = path.partition(":")
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))
    try:
        with plugin_errors(flag, path):
            found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"--{flag}={path}: {module_name} cannot be imported ({error})") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"--{flag}={path}: {module_name} has no {name}")
        found = getattr(found, part)
    return found


@contextmanager
def plugin_errors(flag: str, name: str) -> Iterator[None]:
    """Turn what a user's own code raises into one error that says where.

    Errors for users, of imports and of the file system pass: their callers say more.

    Raises:
        ConfigError: the code inside of the `with` block fails.
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


def parse_options(flag: str, texts: tuple[str, ...]) -> Mapping[str, Any]:
    """Read `key=value` texts: whole numbers, numbers, true, false and none become values, the rest stays text.

    Raises:
        ConfigError: a text is not `key=value`, or a key comes twice.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key.isidentifier():
            raise ConfigError(f"--{flag}={','.join(texts)}: write key=value, comma list, as in momentum=0.9,fast=true")
        if key in options:
            raise ConfigError(f"--{flag}={','.join(texts)}: {key} comes twice")
        options[key] = _value_of(value)
    return options


def _value_of(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
