"""What a checkpoint holds: tensors under stable names, and everything else as one JSON document, the manifest.

    tensors     model.layers.0.mlp.up_proj.weight                 a parameter, under its Hugging Face name
                optimizer.exp_avg.model.layers.0.mlp.up_proj.weight   what the optimizer keeps for it
    manifest    step, tokens, losses, position in the data, model dimensions, world, config

Both are independent of the number of processes: tensors are global (a rank writes its shards of them), and there is one
data position for the whole job.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from pretraining.config.variants import LlamaShape
from pretraining.errors import CheckpointError

FORMAT_VERSION = 1
OPTIMIZER_PREFIX = "optimizer."


@dataclass(frozen=True)
class Manifest:
    """The JSON document of a checkpoint; written last, it says that the checkpoint is complete.

    Attributes:
        format_version: of this document and of the tensors' names.
        step: updates done.
        tokens_seen: tokens of those updates.
        seconds: time trained, over all invocations, as intervals in time count it.
        loss: the newest reported one, if any and finite.
        evaluation_loss: the same.
        data: position in the data, as the loader gives it.
        global_batch_size: sequences a step.
        model: dimensions of the model.
        world: number of processes and strategy that wrote it; another one can read it.
        torch_version: that wrote it.
        files: size in bytes of every tensor file.
        config: the run's settings, as YAML.
        state: what collaborators of the loop remember, by name.
    """

    format_version: int
    step: int
    tokens_seen: int
    seconds: float
    loss: float | None
    evaluation_loss: float | None
    data: dict[str, Any]
    global_batch_size: int
    model: dict[str, Any]
    world: dict[str, Any]
    torch_version: str
    files: dict[str, int]
    config: str
    state: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def parse(document: Any, path: str) -> Manifest:
        """The manifest in a JSON document.

        Raises:
            CheckpointError: it is not one, or of a version that this code cannot read.
        """
        if not isinstance(document, dict) or "format_version" not in document:
            raise CheckpointError(f"{path} is not the manifest of a checkpoint: it has no format_version.")
        version = document["format_version"]
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format version {version}; this version of pretraining reads {FORMAT_VERSION}. "
                "Use the version that wrote it."
            )
        missing = sorted(Manifest.__dataclass_fields__.keys() - document.keys())
        if missing:
            raise CheckpointError(
                f"{path} lacks {', '.join(missing)}: it is damaged. Remove its folder to use an older one."
            )
        return Manifest(**{name: document[name] for name in Manifest.__dataclass_fields__})

    def document(self) -> dict[str, Any]:
        """What goes into the file."""
        return asdict(self)


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


def file_of_tensor(names: list[str]) -> dict[str, int]:
    """Number of the file, from 1, that each tensor goes into: one for each block, and the first for all the rest.

    A file is put together in memory before it is written, so this also bounds the memory that a save takes.
    """
    block = re.compile(r"\blayers\.(\d+)\.")
    matches = {name: block.search(name) for name in names}
    return {name: 2 + int(match.group(1)) if match else 1 for name, match in matches.items()}


def check_same_model(manifest: Manifest, shape: LlamaShape, path: str) -> None:
    """Refuse a checkpoint of a model with other dimensions.

    Raises:
        CheckpointError: names each difference.
    """
    ours = asdict(shape)
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
