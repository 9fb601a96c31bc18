"""What a checkpoint is: tensors under stable names, all else as one JSON document, the manifest, and what lies where.

    tensors     model.layers.0.mlp.up_proj.weight                     a parameter, under its Hugging Face name
                optimizer.exp_avg.model.layers.0.mlp.up_proj.weight   what the optimizer keeps for it
    manifest    step, tokens, losses, position in the data, states of parts of the run, model, world, config; size and
                checksum of every file

    <run>/checkpoints/step_1000_ckp/             committed: it has a manifest
    <run>/checkpoints/step_1040_ckp.preempt/     the same; goes once a newer one is committed
    <run>/checkpoints/best -> step_900_ckp       the lowest evaluation loss
    <run>/checkpoints/step_1100_ckp.1f9c.tmp/    being written, or left by an interrupted save

Neither depends on the number of processes: tensors are global, and the job has one position in the data. Names of
folders are for people: what a checkpoint is stands in its manifest.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from pretraining.config.variants import LlamaShape, RopeScaling
from pretraining.errors import CheckpointError

FORMAT_VERSION = 2

# Names on disk and in tensors: a change of any of them is a new format.
OPTIMIZER_PREFIX = "optimizer."
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
BEST = "best"
PREEMPT_SUFFIX = ".preempt"
UNFINISHED_SUFFIX = ".tmp"
SHARD_SUFFIX = ".safetensors"
MODEL_FILE = "model_state_dict.pt"
OPTIMIZER_FILE = "optim_state_dict.pt"
SCHEDULE_FILE = "lr_state_dict.pt"
ITERATION_FILE = "iter_state_dict.pt"
FULL_FILES = (MODEL_FILE, OPTIMIZER_FILE, SCHEDULE_FILE, ITERATION_FILE)

_STEP_NAME = re.compile(r"step_(\d+)_ckp(\.preempt)?")
_ANY_NAME = re.compile(r"(step_\d+_ckp|tokens\(.*_ckpt).*")
_NOT_COMPUTED_WITH = ("max_position_embeddings",)
"""Dimensions in which two models with the same weights may differ."""


class Stateful(Protocol):
    """A part of the run whose memory influences the next step, and so goes into checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """What to keep, values that JSON has; empty where there is nothing."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what was kept."""


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
        world: number of processes and strategy that wrote it; others can read it.
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
    torch_version: str = torch.__version__
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    config: str = ""

    @staticmethod
    def parse(document: Any, path: str) -> Manifest:
        """Reads the manifest in a JSON document; a CheckpointError if it is none, of another version or damaged."""
        if not isinstance(document, dict) or "format_version" not in document:
            raise CheckpointError(f"{path} is not the manifest of a checkpoint: it has no format_version")
        version = document["format_version"]
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format version {version}; this version of pretraining reads {FORMAT_VERSION}. "
                "Use the version that wrote it"
            )
        names = Manifest.__dataclass_fields__.keys()
        missing = sorted((names | {"checksum"}) - document.keys())
        if missing:
            raise CheckpointError(f"{path} is damaged: it lacks {', '.join(missing)}")
        values = {name: document[name] for name in names}
        if document["checksum"] != _checksum(values):
            raise CheckpointError(f"{path} is damaged: its content does not have the checksum that stands in it")
        foreign = sorted(name for name, form in _FORMS.items() if not isinstance(values[name], form))
        entries = values["files"].values() if "files" not in foreign else ()
        if foreign or not all(isinstance(entry, dict) and entry.keys() == {"bytes", "crc32"} for entry in entries):
            raise CheckpointError(f"{path} is damaged: {', '.join(foreign) or 'files'} has another form")
        files = {name: FileEntry(int(entry["bytes"]), str(entry["crc32"])) for name, entry in values["files"].items()}
        return Manifest(**{**values, "files": files})

    def document(self) -> dict[str, Any]:
        """What goes into the file: JSON's own types, and last a checksum of all the rest."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self), allow_nan=False))
        return {**values, "checksum": _checksum(values)}


_FORMS: dict[str, Any] = {
    **dict.fromkeys(("step", "tokens_seen", "global_batch_size"), int),
    **dict.fromkeys(("data", "state", "model", "world", "files"), dict),
    **dict.fromkeys(("kind", "config", "torch_version"), str),
    "seconds": int | float,
}


def _checksum(values: dict[str, Any]) -> str:
    return crc32_text(zlib.crc32(json.dumps(values, sort_keys=True).encode()))


def crc32_text(value: int) -> str:
    """A CRC-32 as manifests write it: eight hexadecimal digits."""
    return f"{value:08x}"


def read_document(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint, without a look at its files; raises as `Manifest.parse`."""
    path = folder / MANIFEST
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return Manifest.parse(document, str(path))


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint and compares names and sizes of its files; their content is not read.

    Raises:
        CheckpointError: the manifest is unreadable, or a file is missing, surplus or has another size.
    """
    manifest = read_document(folder)
    sizes = (size_fault(folder / name, entry) for name, entry in manifest.files.items())
    fault = next(chain(misnamed_files(folder, manifest), filter(None, sizes)), None)
    if fault is not None:
        raise CheckpointError(fault)
    return manifest


def size_fault(path: Path, written: FileEntry) -> str | None:
    """Says that a file is missing or has another size, if so."""
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    return None if size == written.bytes else f"{path} has {size:,} bytes in place of {written.bytes:,}"


def misnamed_files(folder: Path, manifest: Manifest, suffixes: Sequence[str] = (SHARD_SUFFIX,)) -> Iterator[str]:
    """Says which files the manifest does not name, and which it names that may lie anywhere."""
    here = {path.name for suffix in suffixes for path in folder.glob(f"*{suffix}")}
    for name in sorted(here - manifest.files.keys()):
        yield f"{folder / name} is no part of the checkpoint: its manifest does not name it"
    for name in manifest.files:
        if Path(name).name != name or not (name.endswith(SHARD_SUFFIX) or name in FULL_FILES):
            yield f"{folder / MANIFEST} names {name!r}, which is no tensor file of this folder"


# What lies in a run's folder


def committed_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, the highest step last; what is incomplete does not count."""
    found = [path for path in _folders(run) if (path / MANIFEST).is_file() and path.suffix != UNFINISHED_SUFFIX]
    # Of one step's two, a preemption checkpoint was saved first.
    return sorted(found, key=lambda path: (step_of(path), path.suffix != PREEMPT_SUFFIX, path.name))


def incomplete_checkpoints(run: Path) -> list[Path]:
    """What interrupted saves have left in a run."""
    complete = set(committed_checkpoints(run))
    return sorted(path for path in _folders(run) if _ANY_NAME.fullmatch(path.name) and path not in complete)


def unfinished_saves(run: Path) -> list[Path]:
    """Folders of saves that are under way, or never ended."""
    return [path for path in _folders(run) if path.suffix == UNFINISHED_SUFFIX and not path.is_symlink()]


def run_of(path: Path) -> Path:
    """A run's folder, where it or its checkpoints/ was named."""
    return path.parent if path.name == CHECKPOINTS else path


def _folders(run: Path) -> list[Path]:
    folder = run / CHECKPOINTS
    return [path for path in folder.iterdir() if path.is_dir() and path.name != BEST] if folder.is_dir() else []


def checkpoint_path(run: Path, step: int) -> Path:
    """Where the checkpoint of a step is committed, as long as checkpoints are named by their steps."""
    return run / CHECKPOINTS / f"step_{step}_ckp"


def checkpoint_name(style: str, manifest: Manifest) -> str:
    """The name of a checkpoint's folder: style "step", or "tokens" for a name that tells the story."""
    suffix = PREEMPT_SUFFIX if manifest.kind == "preempt" else ""
    if style == "step":
        return f"step_{manifest.step}_ckp{suffix}"
    mantissa, _, exponent = f"{manifest.tokens_seen:.2e}".partition("e")
    losses = {"tloss": manifest.loss, "vloss": manifest.evaluation_loss}
    told = "".join(f"_{name}({loss:.3f})" for name, loss in losses.items() if loss is not None)
    return f"tokens({mantissa}e{int(exponent)}){told}_ckpt{suffix}"


def step_of(path: Path) -> int:
    """The step of a checkpoint; -1 where neither its name nor its manifest says."""
    match = _STEP_NAME.fullmatch(path.name)
    if match:
        return int(match.group(1))
    try:
        return read_document(path).step
    except CheckpointError:
        return -1


# Tensors and dimensions


def tensor_state(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, not copied: loading into them restores the run.

    Args:
        optimizer: over the same parameters, its state already made; None for the parameters alone.
    """
    tensors: dict[str, torch.Tensor] = {name: parameter.detach() for name, parameter in parameters.items()}
    if optimizer is not None:
        for name, parameter in parameters.items():
            for key, value in optimizer.state[parameter].items():
                assert isinstance(value, torch.Tensor), f"optimizer state {key} of {name} is no tensor"
                tensors[f"{OPTIMIZER_PREFIX}{key}.{name}"] = value
    return tensors


def shape_of(manifest: Manifest) -> LlamaShape:
    """The dimensions of a checkpoint's model; a CheckpointError if this version knows others."""
    try:
        scaling = manifest.model["rope_scaling"]
        return LlamaShape(**{**manifest.model, "rope_scaling": None if scaling is None else RopeScaling(**scaling)})
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the manifest of step {manifest.step} does not describe a model: {error}") from None


def check_same_model(manifest: Manifest, shape: LlamaShape, path: Path) -> None:
    """Raises a CheckpointError that names each difference if a checkpoint is of a model with other dimensions."""
    ours = {name: value for name, value in asdict(shape).items() if name not in _NOT_COMPUTED_WITH}
    differences = [
        f"{name}: {manifest.model.get(name)} in the checkpoint, {value} in this run"
        for name, value in ours.items()
        if manifest.model.get(name) != value
    ]
    if differences:
        raise CheckpointError(
            f"{path} is a checkpoint of another model ({'; '.join(differences)}). Give the flags of that model, "
            "or another --ckpt_save_path / --ckpt_load_path."
        )
