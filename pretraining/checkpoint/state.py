"""What a checkpoint holds: tensors under stable names, and everything else as one JSON document, the manifest.

    tensors     model.layers.0.mlp.up_proj.weight                 a parameter, under its Hugging Face name
                optimizer.exp_avg.model.layers.0.mlp.up_proj.weight   what the optimizer keeps for it
    manifest    step, tokens, losses, position in the data, state of the collaborators, model, world, config; size and
                checksum of every file

Both are independent of the number of processes: tensors are global (a rank writes its pieces of them), and there is one
data position for the whole job.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import nn

from pretraining.config.variants import LlamaShape, RopeScaling
from pretraining.errors import CheckpointError

FORMAT_VERSION = 2
OPTIMIZER_PREFIX = "optimizer."
NOT_COMPUTED_WITH = ("max_position_embeddings",)
"""Dimensions that the same weights may have another of."""


class Stateful(Protocol):
    """A collaborator of the loop whose memory influences the next step, and so goes into checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """What to keep; values that JSON has."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was kept."""


@dataclass(frozen=True)
class FileEntry:
    """What a file of a checkpoint has to be.

    Attributes:
        bytes: its size.
        crc32: of its content, 8 hexadecimal digits.
    """

    bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """The JSON document of a checkpoint; written last, it says that the checkpoint is complete.

    Attributes:
        format_version: of this document and of the tensors' names.
        step: updates done.
        tokens_seen: tokens of those updates.
        seconds: time trained, over all invocations, as intervals in time count it.
        kind: why it was saved: "interval"; "final", the run is done; "preempt", in case the run is stopped, superseded
            by the next one; "best", its evaluation loss was the lowest, superseded by the next best.
        loss: the newest reported one, if any and finite.
        evaluation_loss: the same.
        best_evaluation_loss: the lowest one of the run so far, if any.
        data: position in the data, as the loader gives it.
        state: what collaborators of the loop remember, by name.
        global_batch_size: sequences a step.
        model: dimensions of the model.
        world: number of processes and strategy that wrote it; another one can read it.
        torch_version: that wrote it.
        files: every tensor file.
        config: the run's settings, as YAML.
    """

    format_version: int
    step: int
    tokens_seen: int
    seconds: float
    kind: str
    loss: float | None
    evaluation_loss: float | None
    best_evaluation_loss: float | None
    data: dict[str, Any]
    state: dict[str, Any]
    global_batch_size: int
    model: dict[str, Any]
    world: dict[str, Any]
    torch_version: str
    files: Mapping[str, FileEntry]
    config: str

    @staticmethod
    def parse(document: Any, path: str) -> Manifest:
        """The manifest in a JSON document.

        Raises:
            CheckpointError: it is not one, or of a version that this code cannot read, or it was damaged.
        """
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
    """A number that any changed value changes; JSON's numbers and texts read back equal, so it can be made again."""
    return crc32_text(zlib.crc32(json.dumps(values, sort_keys=True).encode()))


def crc32_text(value: int) -> str:
    """A CRC-32 as manifests write it."""
    return f"{value:08x}"


def tensor_state(
    parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, the very ones that train: loading into them restores the run.

    Args:
        parameters: by name, as sharded.
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
    """The dimensions of a checkpoint's model.

    Raises:
        CheckpointError: the manifest names others than this version knows.
    """
    try:
        scaling = manifest.model["rope_scaling"]
        return LlamaShape(**{**manifest.model, "rope_scaling": None if scaling is None else RopeScaling(**scaling)})
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the manifest of step {manifest.step} does not describe a model: {error}") from None


def check_same_model(manifest: Manifest, shape: LlamaShape, path: str) -> None:
    """Refuse a checkpoint of a model with other dimensions.

    Raises:
        CheckpointError: names each difference.
    """
    ours = {name: value for name, value in asdict(shape).items() if name not in NOT_COMPUTED_WITH}
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
