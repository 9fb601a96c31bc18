"""Content of a checkpoint: tensors under stable names, and a JSON manifest with everything else.

    tensors     model.layers.0.mlp.up_proj.weight                     parameter, under its Hugging Face name
                optimizer.exp_avg.model.layers.0.mlp.up_proj.weight   optimizer state of the parameter
    manifest    step, tokens, losses, position in the data, states of components, model, world, config; size and
                checksum of every file

Neither depends on the number of processes: tensors are global, and all processes share one position in the data.
`run_folder` describes the files and folders.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from pretraining.checkpoint.branches import Branches, parse_branches
from pretraining.config.variants import (
    WITHOUT_WEIGHTS,
    LlamaShape,
    RopeScaling,
    model_settings,
    resolve_shape,
    shown,
    size_problems,
)
from pretraining.errors import CheckpointError, ConfigError
from pretraining.files import with_checksum
from pretraining.optim.horizon import ANNEALING_FROM
from pretraining.progress import PENDING_EVALUATION, PENDING_TASKS

FORMAT_VERSION = 2

# Names on disk and of tensors: changing one makes a new format.
OPTIMIZER_PREFIX = "optimizer."
MANIFEST = "manifest.json"
SHARD_SUFFIX = ".safetensors"
MODEL_FILE = "model_state_dict.pt"
OPTIMIZER_FILE = "optim_state_dict.pt"
SCHEDULE_FILE = "lr_state_dict.pt"
ITERATION_FILE = "iter_state_dict.pt"
FULL_FILES = (MODEL_FILE, OPTIMIZER_FILE, SCHEDULE_FILE, ITERATION_FILE)

EVALUATION_STATE = "evaluation"
"""Key of the evaluator in a manifest's states."""
EVALUATION_SETS_STATE = "evaluation_sets"
"""Key of the record of the evaluation sets in a manifest's states."""
LOSS_STATE = "loss"
"""Key of the newest and the best evaluation loss (`Best`) in a manifest's states."""
REPORTED_LOSS_STATE = "reported_loss"
"""Key of the best reported loss of training (`Best`) in a manifest's states."""
METRIC_STATE = "metric"
"""Key of the metric that decides which checkpoint is best (`Best`) in a manifest's states; absent if the loss does."""
GUARDS_STATE = "guards"
"""Key of the guards in a manifest's states."""
SCHEDULE_STATE = "schedule"
"""Key of the learning rate in a manifest's states."""
TRACKERS_STATE = "trackers"
"""Key of the ids of trackers' runs in a manifest's states."""
RUN_STATE = "run"
"""Key of the record of the run in a manifest's states."""
RUN_ID = "id"
"""Key in this record: id of the run, as in run_status.json."""
BRANCHES = "branches"
"""Key in this record: `Manifest.branches`."""
AVERAGE = "average"
"""Key of what weights are an average of (`tools/average.py`): checkpoints, and facts about their runs."""
REQUEST = "resume_from_checkpoint"
"""Key in this record: `Manifest.request`."""


class Stateful(Protocol):
    """Component whose state influences later steps, and so belongs in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able; empty if there is none."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""


@dataclass(frozen=True)
class FileEntry:
    """Size of a checkpoint's file, and CRC-32 of its content in the form of `crc32_text`."""

    bytes: int
    crc32: str


Files = Mapping[str, FileEntry | None]
"""Names of the files with tensors in a folder, with size and checksum if known."""


@dataclass(frozen=True)
class Manifest:
    """JSON document of a checkpoint; it is written last, so it marks a complete checkpoint.

    The defaults describe weights before the first training step.

    Attributes:
        seconds: training time over all invocations.
        kind: reason of the save: "interval"; "final": the run is done; "preempt": in case the run is stopped,
            superseded by the next one; "best": lowest evaluation loss so far, superseded by the next best.
        loss, evaluation_loss: newest value, if any and finite; possibly of an earlier step.
        data: position in the data, the loader's state; empty if the checkpoint holds only weights.
        state: states of other components, by name.
        world: number of processes, strategy and threads per process of the writer; any other layout can read it.
        config: the run's settings, as YAML.
    """

    format_version: int = FORMAT_VERSION
    step: int = 0
    tokens_seen: int = 0
    seconds: float = 0.0
    kind: str = "interval"
    loss: float | None = None
    evaluation_loss: float | None = None
    best_evaluation_loss: float | None = None
    data: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    global_batch_size: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    world: dict[str, Any] = field(default_factory=dict)
    torch_version: str = field(default_factory=lambda: _torch_version())
    files: Files = field(default_factory=dict)
    config: str = ""

    @property
    def recorded_files(self) -> dict[str, FileEntry]:
        """Files with known sizes and checksums: all files of a checkpoint that a run saved."""
        return {name: entry for name, entry in self.files.items() if entry is not None}

    @property
    def decided_by(self) -> tuple[str, str]:
        """Name and definition of what `cost_of_step` depends on; costs of different definitions are not compared."""
        decides = self._state_of(METRIC_STATE) or self._state_of(LOSS_STATE)
        return str(decides.get("name")), str(decides.get("definition"))

    @property
    def average(self) -> dict[str, Any]:
        """Checkpoints that the weights are an average of, and facts about their runs; empty if they are no average."""
        return self._state_of(AVERAGE)

    @property
    def facts_of_data(self) -> dict[str, Any]:
        """State of the loader or, of an average, what all its runs agree on; empty if no run trained the weights."""
        return self.data or dict(self.average.get("data", {}))

    @property
    def skipped_in_a_row(self) -> int:
        """Skipped updates just before the checkpoint; a divergence goes back to before the first of them."""
        count: int = self._state_of(GUARDS_STATE).get("skipped_in_a_row", 0)
        return count

    @property
    def annealing_from(self) -> int:
        """Step at which the annealing stage of the run began; 0 before it."""
        step: int = self._state_of(SCHEDULE_STATE).get(ANNEALING_FROM, 0)
        return step

    @property
    def run_id(self) -> str:
        """Id of the run; empty in weights that no run has trained."""
        return str(self._state_of(RUN_STATE).get(RUN_ID, ""))

    @property
    def branches(self) -> Branches:
        """Branches of the run up to the checkpoint; none in weights that no run has trained."""
        return parse_branches(self._state_of(RUN_STATE).get(BRANCHES, ()))

    @property
    def request(self) -> str | None:
        """The `resume_from_checkpoint` of the start that saved the checkpoint, or that has returned to it."""
        request = self._state_of(RUN_STATE).get(REQUEST)
        return None if request is None else str(request)

    @property
    def evaluation_of_step(self) -> float | None:
        """Evaluation loss of these weights, if any and finite."""
        return self._value_of_step(LOSS_STATE)

    @property
    def best_loss(self) -> tuple[str, float | None]:
        """Name and value of the lowest loss of the evaluations or, without any, of the reports."""
        if self.best_evaluation_loss is not None:
            return "evaluation_loss", self.best_evaluation_loss
        reported = (self._state_of(REPORTED_LOSS_STATE).get("best"), self.loss)
        return "loss", min((loss for loss in reported if loss is not None), default=None)

    @property
    def metric_of_step(self) -> float | None:
        """Value of these weights of the metric that decides which checkpoint is best; None if the loss decides."""
        return self._value_of_step(METRIC_STATE)

    @property
    def cost_of_step(self) -> float | None:
        """Number of these weights that is lowest in the best checkpoint: the evaluation loss, or of the metric."""
        metric = self._state_of(METRIC_STATE)
        value = self.metric_of_step if metric else self.evaluation_of_step
        return -value if value is not None and metric.get("larger_is_better") else value

    def _value_of_step(self, name: str) -> float | None:
        state = self._state_of(name)
        value: float | None = state.get("value")
        return value if state.get("step") == self.step else None

    @property
    def is_of_finished_run(self) -> bool:
        """Whether the run is done: its last step, and the evaluation of that step."""
        return self.kind == "final" and not self.pending

    @property
    def pending(self) -> tuple[str, ...]:
        """Keys of the evaluations of these weights that are due and not done, on sets and on tasks."""
        state = self._state_of(EVALUATION_STATE)
        return tuple(key for key in (PENDING_EVALUATION, PENDING_TASKS) if state.get(key))

    def check_states(self) -> None:
        """Raise a TypeError or ValueError if a state has another type than its readers expect."""
        for name, state in self.state.items():
            if not isinstance(state, dict):
                raise TypeError(f"the state of {name} is {shown(state)}")
        tracked = (self._state_of(name).get(key) for name in _BESTS for key in TRACKED)
        for number in (*tracked, self.skipped_in_a_row, self.annealing_from):
            if number is not None and (type(number) is bool or not isinstance(number, int | float)):
                raise TypeError(f"a state has {shown(number)} in place of a number")
        parse_branches(self._state_of(RUN_STATE).get(BRANCHES, ()))

    def _state_of(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = self.state.get(name, {})
        return state

    @staticmethod
    def parse(document: Any, path: str) -> Manifest:
        """Return the manifest of a JSON document; raise a CheckpointError if it is damaged or of another version."""
        manifest = Manifest.from_values(document, path)
        if document != manifest.document():
            raise CheckpointError("damaged: its content does not match the checksum in it", path=path)
        return manifest

    @staticmethod
    def from_values(values: Any, path: str) -> Manifest:
        """Return a manifest of field values; raise a CheckpointError if one is missing or of another type."""
        version = values.get("format_version") if isinstance(values, dict) else None
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"has format version {shown(version)}, not {FORMAT_VERSION}: read it with the version that wrote it",
                path=path,
            )
        try:
            plain = json.loads(json.dumps({name: values[name] for name in FIELDS}, allow_nan=False))
            files = {name: FileEntry(**entry) for name, entry in plain["files"].items()}
            manifest = Manifest(**{**plain, "files": files})
            _check_types(manifest)
            for entry in files.values():
                _check_types(entry)
            _check_data_state(manifest.data)
            manifest.check_states()
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
            raise CheckpointError(f"damaged: {type(error).__name__}: {error}", path=path) from None
        return manifest

    def document(self) -> dict[str, Any]:
        """Return the manifest as JSON types, with a checksum of all fields as the last one."""
        return with_checksum(json.loads(json.dumps(asdict(self), allow_nan=False)))


FIELDS = tuple(each.name for each in fields(Manifest))
_BESTS = (LOSS_STATE, REPORTED_LOSS_STATE, METRIC_STATE)
TRACKED = ("value", "step", "best", "in_a_row")
"""Numbers in the state of a `Best`."""


def _torch_version() -> str:
    import torch  # here, since only processes with tensors make manifests

    return str(torch.__version__)


LARGEST_COUNT = 2**62
"""Largest number of steps, tokens or bytes; no run has more."""
_TYPES: dict[str, Any] = {"int": int, "float": int | float, "float | None": int | float | None, "str": str}
"""Types that a field may have, by its annotation; all other fields are dictionaries."""


def _check_types(read: Manifest | FileEntry) -> None:
    """Raise a TypeError if a field does not have its declared type, or a count is out of range."""
    for each in fields(read):
        value = getattr(read, each.name)
        is_fitting = isinstance(value, _TYPES.get(str(each.type), dict))
        if not is_fitting or type(value) is bool or (type(value) is int and not 0 <= value <= LARGEST_COUNT):
            raise TypeError(f"{each.name} is {shown(value)}")


def _check_data_state(data: dict[str, Any]) -> None:
    """Raise an error if a field that is read here or at an export is missing or no count; the state may be empty.

    `data.resume` checks all fields, when a run resumes.
    """
    if not data:
        return
    weights, counts, datasets = data["phases"][-1]["weights"], data["counts"], data["datasets"]
    if not datasets.keys() >= weights.keys() <= counts.keys():
        raise ValueError("data has weights of unknown datasets")
    numbers = [data.get("next_sample", 0), *(number for pairs in counts.values() for pair in pairs for number in pair)]
    numbers += [fingerprint.get("tokens", 0) for fingerprint in datasets.values()]
    for phase in data["phases"]:
        numbers += [phase[name] for name in ("first_step", "first_sample", "global_batch_size", "seq_length")]
        numbers += phase["weights"].values()
    wrong = [number for number in numbers if type(number) is not int or not 0 <= number <= LARGEST_COUNT]
    if wrong:
        raise TypeError(f"data has {shown(wrong[0])} in place of a count")


# Dimensions


def shape_of(manifest: Manifest) -> LlamaShape:
    """Return the dimensions of a checkpoint's model; raise a CheckpointError if this version cannot build them."""
    try:
        scaling = manifest.model["rope_scaling"]
        shape = LlamaShape(**{**manifest.model, "rope_scaling": None if scaling is None else RopeScaling(**scaling)})
        if problem := next(size_problems(shape), None):
            raise ValueError(problem)
        if resolve_shape(model_settings(shape)) != shape:
            raise ValueError("its dimensions contradict each other")
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"the manifest of step {manifest.step} does not describe a model: {error}") from None
    return shape


def check_same_model(
    manifest: Manifest,
    shape: LlamaShape,
    path: Path,
    may_differ: Collection[str] = frozenset(),
    other: str = "this run",
    remedy: str = "Give its flags, or another --ckpt_save_path or --ckpt_load_path",
) -> None:
    """Raise a CheckpointError that names each difference if a checkpoint's model has other dimensions.

    Args:
        may_differ: dimensions that are not compared.
        other: what has the dimensions `shape`.
    """
    ignored = {*WITHOUT_WEIGHTS, *may_differ}
    ours = {name: value for name, value in vars(shape).items() if name not in ignored}
    theirs = vars(shape_of(manifest))
    differences = [
        f"{name}: {theirs[name]} in the checkpoint, {value} in {other}"
        for name, value in ours.items()
        if theirs[name] != value
    ]
    if differences:
        raise CheckpointError(f"holds another model ({'; '.join(differences)}). {remedy}", path=path)
