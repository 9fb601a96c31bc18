"""What a checkpoint is: tensors under stable names, and all else as one JSON document, the manifest.

    tensors     model.layers.0.mlp.up_proj.weight                     a parameter, under its Hugging Face name
                optimizer.exp_avg.model.layers.0.mlp.up_proj.weight   what the optimizer keeps for it
    manifest    step, tokens, losses, position in the data, states of parts of the run, model, world, config; size and
                checksum of every file

Neither depends on the number of processes: tensors are global, and the job has one position in the data. `run_folder`
says what lies where.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pretraining.config.variants import LlamaShape, RopeScaling, model_settings, resolve_shape, shown, size_problems
from pretraining.errors import CheckpointError, ConfigError
from pretraining.files import exists, is_file, read_json, with_checksum
from pretraining.model.hf import CONFIG_FILE

if TYPE_CHECKING:  # to read manifests needs no torch, which takes a second to import
    import torch
    from torch import nn

FORMAT_VERSION = 2

# Names on disk and in tensors: a change of any of them is a new format.
OPTIMIZER_PREFIX = "optimizer."
MANIFEST = "manifest.json"
SHARD_SUFFIX = ".safetensors"
MODEL_FILE = "model_state_dict.pt"
OPTIMIZER_FILE = "optim_state_dict.pt"
SCHEDULE_FILE = "lr_state_dict.pt"
ITERATION_FILE = "iter_state_dict.pt"
FULL_FILES = (MODEL_FILE, OPTIMIZER_FILE, SCHEDULE_FILE, ITERATION_FILE)

EVALUATION_STATE = "evaluation"
"""Of the evaluator, among a manifest's states."""
_PENDING_KEY = "owed"
"""In the evaluator's state: whether an evaluation of these weights is due and not done."""
GUARDS_STATE = "guards"
"""Of what ends a run that goes wrong, among a manifest's states."""

_NOT_COMPUTED_WITH = ("max_position_embeddings",)
"""Dimensions in which two models with the same weights may differ."""


class Stateful(Protocol):
    """A part of the run whose memory influences the next step, and so goes into checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Return what to keep, values that JSON has; empty where there is nothing."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was kept."""


@dataclass(frozen=True)
class FileEntry:
    """What a file of a checkpoint has to be: its size, and the CRC-32 of its content as `crc32_text` writes it."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """The JSON document of a checkpoint; written last, it says that the checkpoint is complete.

    The defaults are those of weights that no training step has touched.

    Attributes:
        seconds: time trained, over all invocations.
        kind: why it was saved: "interval"; "final", the run is done; "preempt", in case the run is stopped, superseded
            by the next one; "best", its evaluation loss was the lowest, superseded by the next best.
        loss, evaluation_loss: the newest, if any and finite.
        best_evaluation_loss: the lowest of the run so far, if any.
        data: position in the data, as the loader gives it; empty where a checkpoint holds weights alone.
        state: what parts of the run remember, by name.
        world: number of processes, strategy, and threads of a process that wrote it; others can read it.
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
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    config: str = ""

    @property
    def decided_by(self) -> tuple[str, ...]:
        """The evaluation sets whose loss is `evaluation_loss`, sorted.

        They are kept where they are not the held-out documents of all datasets.
        """
        kept = self._kept(EVALUATION_STATE).get("decided_by")
        if isinstance(kept, list):
            return tuple(map(str, kept))
        return tuple(sorted(self.data["phases"][-1]["weights"])) if self.data else ()

    @property
    def skipped_in_a_row(self) -> int:
        """Updates just before it that were left out: a run that diverges goes back to before the first of them."""
        count = self._kept(GUARDS_STATE).get("skipped_in_a_row")
        return count if type(count) is int else 0

    @property
    def is_of_finished_run(self) -> bool:
        """Whether nothing is left to do: the last step is done, and so is its evaluation."""
        return self.kind == "final" and not self._kept(EVALUATION_STATE).get(_PENDING_KEY)

    def _kept(self, name: str) -> dict[str, Any]:
        kept = self.state.get(name)
        return kept if isinstance(kept, dict) else {}

    @staticmethod
    def parse(document: Any, path: str) -> Manifest:
        """Return the manifest in a JSON document; a CheckpointError if it is none, of another version or damaged."""
        manifest = Manifest.of_values(document, path)
        if document != manifest.document():
            raise CheckpointError("damaged: its content does not have the checksum that stands in it", path=path)
        return manifest

    @staticmethod
    def of_values(values: Any, path: str) -> Manifest:
        """Return a manifest of the value of every field; a CheckpointError if a value is missing or of another type."""
        version = values.get("format_version") if isinstance(values, dict) else None
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"format version {shown(version)}; this version of pretraining reads {FORMAT_VERSION}. Use the version "
                "that wrote it",
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
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
            raise CheckpointError(f"damaged: {type(error).__name__}: {error}", path=path) from None
        return manifest

    def document(self) -> dict[str, Any]:
        """Return what goes into the file: JSON's own types, and last a checksum of all the rest."""
        return with_checksum(json.loads(json.dumps(asdict(self), allow_nan=False)))


FIELDS = tuple(each.name for each in fields(Manifest))


def _torch_version() -> str:
    import torch  # here: whoever makes a manifest has tensors

    return str(torch.__version__)


LARGEST_COUNT = 2**62
"""Of steps, tokens and bytes: more than any run has."""
_TYPES: dict[str, Any] = {"int": int, "float": int | float, "float | None": int | float | None, "str": str}
"""What a field may be, by its annotation; all others are dictionaries."""


def _check_types(read: Manifest | FileEntry) -> None:
    """Raise a TypeError if a field has another type than it declares, or a count is none of a run."""
    for each in fields(read):
        value = getattr(read, each.name)
        is_fitting = isinstance(value, _TYPES.get(str(each.type), dict))
        if not is_fitting or type(value) is bool or (type(value) is int and not 0 <= value <= LARGEST_COUNT):
            raise TypeError(f"{each.name} is {shown(value)}")


def _check_data_state(data: dict[str, Any]) -> None:
    """Raise an error unless the parts of the data's state that are read here are there; `data.resume` checks the rest.

    It is empty in a checkpoint of weights alone.
    """
    if data:
        weights = data["phases"][-1]["weights"]
        if not data["datasets"].keys() >= weights.keys() <= data["counts"].keys():
            raise ValueError("data has weights of unknown datasets")


def crc32_text(value: int) -> str:
    """Return a CRC-32 as manifests write it: eight hexadecimal digits."""
    return f"{value:08x}"


def read_document(folder: Path) -> Manifest:
    """Read what a checkpoint is, without a look at the files that it names.

    Its manifest says so; without one its four .pt files or, where the folder is Hugging Face's, the model in it.

    Raises:
        CheckpointError: it is damaged, or of no form that is read here.
    """
    path = folder / MANIFEST
    if not is_file(path):
        if is_file(folder / ITERATION_FILE):
            from pretraining.checkpoint.pt_files import manifest_of_files

            return manifest_of_files(folder)
        if is_file(folder / CONFIG_FILE):
            from pretraining.checkpoint.hf_import import manifest_of_folder

            return manifest_of_folder(folder)
        raise CheckpointError(f"damaged: it has lost its {MANIFEST}", path=folder)
    try:
        return Manifest.parse(read_json(path), str(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}", path=path) from None


def read_manifest(folder: Path) -> Manifest:
    """Read what a checkpoint is, and compare names and sizes of its files; their content is not read.

    Raises:
        CheckpointError: as `read_document`; or a file is missing, surplus or has another size.
    """
    manifest = read_document(folder)
    sizes = (size_fault(folder / name, entry) for name, entry in manifest.files.items())
    fault = next(chain(misnamed_files(folder, manifest), filter(None, sizes)), None)
    if fault is not None:
        raise CheckpointError(fault)
    return manifest


def size_fault(path: Path, written: FileEntry) -> str | None:
    """Return what is wrong with the presence or the size of a file, if anything."""
    if not is_file(path):
        return f"{path} is no file" if exists(path) else f"{path} is missing"
    size = path.stat().st_size
    return None if size == written.bytes else f"{path} has {size:,} bytes in place of {written.bytes:,}"


def misnamed_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield the files that the manifest does not name, and those it names that may lie anywhere."""
    here = {path.name for path in folder.glob(f"*{SHARD_SUFFIX}")} if manifest.files else set()
    for name in sorted(here - manifest.files.keys()):
        yield f"{folder / name} is no part of the checkpoint: its manifest does not name it"
    for name in manifest.files:
        if Path(name).name != name or not (name.endswith(SHARD_SUFFIX) or name in FULL_FILES):
            yield f"{folder / MANIFEST} names {name!r}, which is no tensor file of this folder"


# Tensors and dimensions


def tensor_state(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, not copied: loading into them restores the run.

    Args:
        optimizer: over the same parameters, its state already made; None for the parameters alone.
    """
    import torch  # here: whoever has an optimizer has imported it

    tensors: dict[str, torch.Tensor] = {name: parameter.detach() for name, parameter in parameters.items()}
    if optimizer is not None:
        for name, parameter in parameters.items():
            for key, value in optimizer.state[parameter].items():
                assert isinstance(value, torch.Tensor), f"optimizer state {key} of {name} is no tensor"
                tensors[f"{OPTIMIZER_PREFIX}{key}.{name}"] = value
    return tensors


def shape_of(manifest: Manifest) -> LlamaShape:
    """Return the dimensions of a checkpoint's model; a CheckpointError if this version knows others."""
    try:
        scaling = manifest.model["rope_scaling"]
        shape = LlamaShape(**{**manifest.model, "rope_scaling": None if scaling is None else RopeScaling(**scaling)})
        if problem := next(size_problems(shape), None):
            raise ValueError(problem)
        if resolve_shape(model_settings(shape)) != shape:
            raise ValueError("its dimensions do not fit each other")
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"the manifest of step {manifest.step} does not describe a model: {error}") from None
    return shape


def check_same_model(manifest: Manifest, shape: LlamaShape, path: Path) -> None:
    """Raise a CheckpointError that names each difference if a checkpoint is of a model with other dimensions."""
    ours = {name: value for name, value in asdict(shape).items() if name not in _NOT_COMPUTED_WITH}
    differences = [
        f"{name}: {manifest.model.get(name)} in the checkpoint, {value} in this run"
        for name, value in ours.items()
        if manifest.model.get(name) != value
    ]
    if differences:
        raise CheckpointError(
            f"a checkpoint of another model ({'; '.join(differences)}). Give the flags of that model, or another "
            "--ckpt_save_path / --ckpt_load_path.",
            path=path,
        )
