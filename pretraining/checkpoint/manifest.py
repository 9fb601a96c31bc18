"""What a checkpoint is: tensors under stable names, all else as one JSON document, the manifest, and what lies where.

    tensors     model.layers.0.mlp.up_proj.weight                     a parameter, under its Hugging Face name
                optimizer.exp_avg.model.layers.0.mlp.up_proj.weight   what the optimizer keeps for it
    manifest    step, tokens, losses, position in the data, states of parts of the run, model, world, config; size and
                checksum of every file

    <run>/checkpoints/step_1000_ckp/             committed: it has a manifest, or is damaged
    <run>/checkpoints/step_1040_ckp.preempt/     the same; goes once a newer one is committed
    <run>/checkpoints/best -> step_900_ckp       the lowest evaluation loss
    <run>/checkpoints/step_1100_ckp.1f9c.tmp/    being written, or left by an interrupted save
    <run>/checkpoints/<any other name>/          the user's own: a checkpoint if it has a manifest; never removed

Neither depends on the number of processes: tensors are global, and the job has one position in the data. Names of
folders are for people: what a checkpoint is stands in its manifest. Only what has the name that a save gave it is ever
removed.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pretraining.config.variants import LlamaShape, RopeScaling, model_settings, resolve_shape, shown, size_problems
from pretraining.errors import CheckpointError, ConfigError
from pretraining.files import entries_of, exists, is_file, is_folder, read_json

if TYPE_CHECKING:  # to read manifests needs no torch, which takes a second to import
    import torch
    from torch import nn

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

EVALUATION_STATE = "evaluation"
"""Of the evaluator, among a manifest's states."""
_PENDING_KEY = "owed"
"""In the evaluator's state: whether an evaluation of these weights is due and not done."""
GUARDS_STATE = "guards"
"""Of what ends a run that goes wrong, among a manifest's states."""

KINDS = ("interval", "final", "preempt", "best")

_SAVE_NAME = (
    r"(step_(?P<step>\d+)_ckp|tokens\(\d\.\d\de\d+\)(_tloss\(-?\d+\.\d{3}\))?(_vloss\(-?\d+\.\d{3}\))?_ckpt)"
    r"(\.preempt)?(\.step_(?P<also>\d+))?"
)
"""What `checkpoint_name` and `distinct_name` give."""
_COMMITTED = re.compile(_SAVE_NAME)
_UNFINISHED = re.compile(rf"{_SAVE_NAME}(\.[0-9a-f]{{4}})?\.tmp")
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
        kept = self.state.get(EVALUATION_STATE)
        if isinstance(kept, dict) and isinstance(kept.get("decided_by"), list):
            return tuple(map(str, kept["decided_by"]))
        return tuple(sorted(self.data["phases"][-1]["weights"])) if self.data else ()

    @property
    def skipped_in_a_row(self) -> int:
        """Updates just before it that were left out: a run that diverges goes back to before the first of them."""
        kept = self.state.get(GUARDS_STATE)
        count = kept.get("skipped_in_a_row") if isinstance(kept, dict) else None
        return count if type(count) is int else 0

    @property
    def is_of_finished_run(self) -> bool:
        """Whether nothing is left to do: the last step is done, and so is its evaluation."""
        kept = self.state.get(EVALUATION_STATE)
        return self.kind == "final" and not (isinstance(kept, dict) and kept.get(_PENDING_KEY))

    @staticmethod
    def parse(document: Any, path: str) -> Manifest:
        """Reads the manifest in a JSON document; a CheckpointError if it is none, of another version or damaged."""
        if not isinstance(document, dict) or "format_version" not in document:
            raise CheckpointError("not the manifest of a checkpoint: it has no format_version", path=path)
        _check_version(document["format_version"], path)
        names = Manifest.__dataclass_fields__.keys()
        missing = sorted((names | {"checksum"}) - document.keys())
        if missing:
            raise CheckpointError(f"damaged: it lacks {', '.join(missing)}", path=path)
        values = {name: document[name] for name in names}
        if document["checksum"] != _checksum(values):
            raise CheckpointError("damaged: its content does not have the checksum that stands in it", path=path)
        return Manifest.of_values(values, path)

    @staticmethod
    def of_values(values: Mapping[str, Any], path: str) -> Manifest:
        """Makes a manifest of the value of every field; a CheckpointError that names each that no run writes."""
        _check_version(values["format_version"], path)
        if foreign := sorted(_problems(values)):
            raise CheckpointError(f"damaged: {'; '.join(foreign)}", path=path)
        files = {name: FileEntry(**entry) for name, entry in values["files"].items()}
        return Manifest(**{**values, "files": files})

    def document(self) -> dict[str, Any]:
        """What goes into the file: JSON's own types, and last a checksum of all the rest."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self), allow_nan=False))
        return {**values, "checksum": _checksum(values)}


def _torch_version() -> str:
    import torch  # here: whoever makes a manifest has tensors

    return str(torch.__version__)


def _check_version(version: Any, path: str) -> None:
    if type(version) is not int or version != FORMAT_VERSION:
        raise CheckpointError(
            f"format version {shown(version)}; this version of pretraining reads {FORMAT_VERSION}. Use the version "
            "that wrote it",
            path=path,
        )


LARGEST_COUNT = 2**62
"""Of steps, tokens and bytes: more than any run has."""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_COUNT


def _is_number(value: Any) -> bool:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) <= LARGEST_COUNT)


def _is_object(value: Any) -> bool:
    """Return whether a value is a JSON object of finite numbers, texts, lists and objects."""
    try:
        return type(value) is dict and json.loads(json.dumps(value, allow_nan=False)) == value
    except (ValueError, TypeError, RecursionError):
        return False


# By the annotation of a field: what its value may be, as a test and in words.
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_count, f"a whole number from 0 to {LARGEST_COUNT}"),
    "float": (lambda value: _is_number(value) and value >= 0, "a finite number from 0"),
    "float | None": (lambda value: value is None or _is_number(value), "a finite number or null"),
    "str": (lambda value: type(value) is str, "a text"),
    "dict[str, Any]": (_is_object, "an object of plain, finite values"),
    "Mapping[str, FileEntry]": (_is_object, "a list of files"),
}


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what no run writes; never the whole of a long value."""
    for name, declared in Manifest.__dataclass_fields__.items():
        fits, wanted = _FORMS[str(declared.type)]
        if not fits(values[name]):
            yield f"{name} has another form, {shown(values[name])}, not {wanted}"
            return
    if values["kind"] not in KINDS:
        yield f"kind is {shown(values['kind'])}, not one of {', '.join(KINDS)}"
    for name, entry in values["files"].items():
        is_entry = isinstance(entry, dict) and entry.keys() == {"bytes", "crc32"}
        if not (is_entry and _is_count(entry["bytes"]) and type(entry["crc32"]) is str):
            yield f"files has {shown(entry)} for {name}, not a size and a checksum"
    if values["data"] and not _is_data_state(values["data"]):
        yield f"data is {shown(values['data'])}, not a position in the data"
    elif values["data"]:
        batch = values["global_batch_size"]
        of_data = values["data"]["phases"][-1].get("global_batch_size", batch)
        if batch != of_data or batch < 1:
            yield f"global_batch_size is {batch}, and that of the data {shown(of_data)}"


def _is_data_state(data: dict[str, Any]) -> bool:
    """Return whether the parts of the data's state are there that are read here; `data.resume` looks at the rest."""
    try:
        phases, datasets, counts = data["phases"], data["datasets"], data["counts"]
        weights = [phase["weights"] for phase in phases]
        numbers = [data["next_sample"], *counts.values(), *(phase["first_step"] for phase in phases)]
        numbers += [each for of_phase in weights for each in of_phase.values()]
        numbers += [each.get("tokens", 0) for each in datasets.values()]
        return all(map(_is_count, numbers)) and bool(datasets.keys() >= weights[-1].keys() <= counts.keys())
    except (KeyError, TypeError, AttributeError, IndexError):
        return False


def _checksum(values: dict[str, Any]) -> str:
    return crc32_text(zlib.crc32(json.dumps(values, sort_keys=True).encode()))


def crc32_text(value: int) -> str:
    """A CRC-32 as manifests write it: eight hexadecimal digits."""
    return f"{value:08x}"


def read_document(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint, without a look at its files; raises as `Manifest.parse`."""
    path = folder / MANIFEST
    try:
        return Manifest.parse(read_json(path), str(path))
    except FileNotFoundError:
        raise CheckpointError(f"damaged: it has lost its {MANIFEST}", path=folder) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}", path=path) from None


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
    if not is_file(path):
        return f"{path} is no file" if exists(path) else f"{path} is missing"
    size = path.stat().st_size
    return None if size == written.bytes else f"{path} has {size:,} bytes in place of {written.bytes:,}"


def misnamed_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Says which files the manifest does not name, and which it names that may lie anywhere."""
    here = {path.name for path in folder.glob(f"*{SHARD_SUFFIX}")}
    for name in sorted(here - manifest.files.keys()):
        yield f"{folder / name} is no part of the checkpoint: its manifest does not name it"
    for name in manifest.files:
        if Path(name).name != name or not (name.endswith(SHARD_SUFFIX) or name in FULL_FILES):
            yield f"{folder / MANIFEST} names {name!r}, which is no tensor file of this folder"


# What lies in a run's folder


def committed_checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, the highest step last; what a save has not committed does not count.

    One that lost its manifest is among them: its name says that it was committed.
    """
    found = [path for path in _folders(run) if is_committed(path)]
    # Of one step's two, a preemption checkpoint was saved first; a user's copy comes before what it is of.
    return sorted(
        found, key=lambda path: (step_of(path), path.suffix != PREEMPT_SUFFIX, has_save_name(path), path.name)
    )


def is_committed(path: Path) -> bool:
    """Whether a folder is a checkpoint that was committed, be it damaged: it has a manifest, or the name of one."""
    return path.suffix != UNFINISHED_SUFFIX and (is_file(path / MANIFEST) or has_save_name(path))


def has_save_name(path: Path) -> bool:
    """Whether a folder has a name that only saves give."""
    return _COMMITTED.fullmatch(path.name) is not None


def unfinished_saves(run: Path) -> list[Path]:
    """Folders of saves that are under way, or never ended, in order; the next save removes them."""
    return sorted(path for path in _folders(run) if _UNFINISHED.fullmatch(path.name) and not path.is_symlink())


def run_of(path: Path) -> Path:
    """A run's folder, where it or its checkpoints/ was named."""
    return path.parent if path.name == CHECKPOINTS else path


def _folders(run: Path) -> list[Path]:
    folder = run / CHECKPOINTS
    return [path for path in entries_of(folder) if path.name != BEST and is_folder(path)] if is_folder(folder) else []


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


def distinct_name(name: str, step: int) -> str:
    """The name for a step where another step's checkpoint has taken the usual one: by rounding they may be the same."""
    return f"{name}.step_{step}"


def is_as_saved(path: Path, manifest: Manifest) -> bool:
    """Whether a checkpoint has the name that its save gave it; otherwise a user has copied or renamed it."""
    names = {checkpoint_name(style, manifest) for style in ("step", "tokens")}
    return path.name in names | {distinct_name(name, manifest.step) for name in names}


def step_of(path: Path) -> int:
    """The step of a checkpoint: that of its manifest; where none can be read, of its name; -1 where neither says."""
    try:
        status = (path / MANIFEST).stat()
        return _step_in(path, status.st_mtime_ns, status.st_size, status.st_ino)
    except (OSError, CheckpointError):
        match = _COMMITTED.fullmatch(path.name)
        return int((match["step"] or match["also"] or -1) if match else -1)


@lru_cache(maxsize=4096)
def _step_in(path: Path, modified_ns: int, size: int, inode: int) -> int:
    # Cached: a run that keeps everything would otherwise read a thousand manifests at each save.
    return read_document(path).step


# Tensors and dimensions


def tensor_state(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, not copied: loading into them restores the run.

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
    """The dimensions of a checkpoint's model; a CheckpointError if this version knows others."""
    try:
        scaling = manifest.model["rope_scaling"]
        shape = LlamaShape(**{**manifest.model, "rope_scaling": None if scaling is None else RopeScaling(**scaling)})
        problem = next(size_problems(shape), None)
        if problem is None and resolve_shape(model_settings(shape)) == shape:
            return shape
        error: Exception = ValueError(problem or "its dimensions do not fit each other")
    except (KeyError, TypeError, ConfigError) as raised:
        error = raised
    raise CheckpointError(f"the manifest of step {manifest.step} does not describe a model: {error}")


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
            f"a checkpoint of another model ({'; '.join(differences)}). Give the flags of that model, or another "
            "--ckpt_save_path / --ckpt_load_path.",
            path=path,
        )
