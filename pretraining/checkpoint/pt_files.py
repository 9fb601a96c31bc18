"""The unsharded form of a checkpoint: four files of torch.save, tensors and plain values only.

    model_state_dict.pt    name -> weight, names as in Hugging Face; `load_state_dict` of a Llama takes it
    optim_state_dict.pt    "state": name -> {step, exp_avg, exp_avg_sq}, "param_groups": names and settings
    lr_state_dict.pt       settings of the learning rate and the step; it is a function of these
    iter_state_dict.pt     epoch, segment, its start and end, best loss; step, tokens, losses, position in the data

They stand in a checkpoint's folder in place of the shards, with the same manifest.json, which a restore believes. All
four load with `torch.load(…, weights_only=True)`, and nothing here ever loads them otherwise.

Rank 0 writes them and holds one tensor at a time, whatever the size of the model (`torch_files`). Reading maps the
files into memory and copies each rank's part out of them.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.serialization import skip_data

from pretraining.checkpoint.layout import Box
from pretraining.checkpoint.sources import check_content, inside
from pretraining.checkpoint.state import OPTIMIZER_PREFIX, FileEntry, Manifest, shape_of
from pretraining.checkpoint.tensor_files import checksum_file
from pretraining.config.recipes import settings_in
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape
from pretraining.errors import CheckpointError
from pretraining.model.llama import Llama
from pretraining.optim.optimizer import parameter_groups

MODEL_FILE = "model_state_dict.pt"
OPTIMIZER_FILE = "optim_state_dict.pt"
SCHEDULE_FILE = "lr_state_dict.pt"
ITERATION_FILE = "iter_state_dict.pt"
FULL_FILES = (MODEL_FILE, OPTIMIZER_FILE, SCHEDULE_FILE, ITERATION_FILE)


def save_full(folder: Path, tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> dict[str, FileEntry]:
    """Write the four files; a collective call, in which rank 0 writes.

    Args:
        folder: that they go into.
        tensors: as `state.tensor_state` gives them, sharded or not.
        manifest: of the checkpoint; its files do not matter.

    Returns:
        On rank 0, sizes and checksums of the files.

    Raises:
        OSError: on rank 0, a file cannot be written.
    """
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    values = (tensors[name].detach() for name in in_order(kinds))
    whole = (value.full_tensor() if isinstance(value, DTensor) else value for value in values)
    try:
        if dist.get_rank() == 0:
            write_full(folder, kinds, whole, manifest)
    finally:
        for _ in whole:  # every rank takes part in gathering every tensor, also where writing failed
            pass
    return {name: checksum_file(folder / name) for name in FULL_FILES} if dist.get_rank() == 0 else {}


def write_full(folder: Path, kinds: Kinds, values: Iterable[torch.Tensor], manifest: Manifest) -> None:
    """Write the four files from one process.

    Args:
        folder: that they go into.
        kinds: of all tensors.
        values: of all tensors, `in_order`; one is in memory at a time.
        manifest: of the checkpoint; its files do not matter.

    Raises:
        OSError: a file cannot be written.
    """
    shape, config = shape_of(manifest), settings_in(manifest.config, "config of the checkpoint")
    stream = iter(values)
    of_model, of_optimizer = _split(kinds)
    write_file(folder / MODEL_FILE, of_model, lambda blanks: _model_state(blanks, shape), stream)
    write_file(folder / OPTIMIZER_FILE, of_optimizer, lambda blanks: _optimizer_state(blanks, shape, config), stream)
    write_file(folder / SCHEDULE_FILE, {}, lambda _: _schedule_state(manifest, config), stream)
    write_file(folder / ITERATION_FILE, {}, lambda _: _iteration_state(manifest, config), stream)


def in_order(kinds: Kinds) -> list[str]:
    """The order in which tensors are written: of the model, then of the optimizer."""
    of_model, of_optimizer = _split(kinds)
    return [*of_model, *of_optimizer]


def is_full(files: Iterable[str]) -> bool:
    """Whether a checkpoint with these files has this form."""
    return MODEL_FILE in files


class FullFiles:
    """The tensors of the four files, mapped into memory: a `TensorSource`.

    Args:
        folder: of the files.
        files: where they are known, sizes and checksums, which are compared first.

    Raises:
        CheckpointError: a file is missing or damaged, or holds anything but tensors and plain values.
    """

    def __init__(self, folder: Path, files: Mapping[str, FileEntry | None]) -> None:
        model, optimizer = (load_file(folder / name, files.get(name)) for name in (MODEL_FILE, OPTIMIZER_FILE))
        state = optimizer.get("state")
        if not isinstance(state, dict) or not all(isinstance(kept, dict) for kept in state.values()):
            raise CheckpointError(f"{folder / OPTIMIZER_FILE} has no state of an optimizer by parameter names")
        self._tensors: dict[str, torch.Tensor] = {
            **model,
            **{f"{OPTIMIZER_PREFIX}{key}.{name}": value for name, kept in state.items() for key, value in kept.items()},
        }
        strange = [name for name, value in self._tensors.items() if type(value) is not torch.Tensor]
        if strange:
            raise CheckpointError(f"{folder}: {strange[0]} is no tensor")
        # A tied head is the embedding under a second name.
        head, embedding = (self._tensors.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
        if head is not None and embedding is not None and head.data_ptr() == embedding.data_ptr():
            del self._tensors["lm_head.weight"]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor's elements."""
        return self._tensors[name].dtype

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A part of a tensor, by default all of it; the file's own memory, not to be changed."""
        tensor = self._tensors[name]
        return tensor if box is None else inside(tensor, Box((0,) * tensor.dim(), tuple(tensor.shape)), box)


def manifest_of_files(folder: Path) -> Manifest:
    """The manifest that the four files carry, for a folder in which they stand alone; without sizes and checksums.

    Raises:
        CheckpointError: the files carry none.
    """
    content = load_file(folder / ITERATION_FILE)
    names = Manifest.__dataclass_fields__.keys() - {"files"}
    missing = sorted(names - content.keys())
    if missing:
        raise CheckpointError(f"{folder / ITERATION_FILE} lacks {', '.join(missing)}: it is of another program")
    return Manifest(**{name: content[name] for name in names}, files={})


def _split(kinds: Kinds) -> tuple[Kinds, Kinds]:
    of_model = {name: kind for name, kind in kinds.items() if not name.startswith(OPTIMIZER_PREFIX)}
    return of_model, {name: kind for name, kind in kinds.items() if name not in of_model}


def _model_state(tensors: Mapping[str, torch.Tensor], shape: LlamaShape) -> dict[str, torch.Tensor]:
    # Under both its names, as `state_dict()` of a tied model gives it; it is in the file once.
    tied = {"lm_head.weight": tensors["model.embed_tokens.weight"]} if shape.tie_word_embeddings else {}
    return {**tensors, **tied}


def _optimizer_state(tensors: Mapping[str, torch.Tensor], shape: LlamaShape, config: TrainConfig) -> dict[str, Any]:
    state: dict[str, dict[str, torch.Tensor]] = {}
    for full_name, tensor in tensors.items():
        key, _, name = full_name.removeprefix(OPTIMIZER_PREFIX).partition(".")
        state.setdefault(name, {})[key] = tensor
    with torch.device("meta"):
        model = Llama(shape)
    names = {parameter: name for name, parameter in model.named_parameters()}
    settings = config.optimizer
    common = {
        "lr": settings.learning_rate,
        "betas": (settings.adam_beta1, settings.adam_beta2),
        "eps": settings.adam_epsilon,
    }
    groups = [
        {**group, **common, "params": [names[parameter] for parameter in group["params"]]}
        for group in parameter_groups(model, settings.weight_decay)
    ]
    return {"state": state, "param_groups": groups}


def _schedule_state(manifest: Manifest, config: TrainConfig) -> dict[str, Any]:
    warmup = config.schedule.warmup_steps
    return {
        "step": manifest.step,
        "learning_rate": config.optimizer.learning_rate,
        "min_lr_ratio": config.schedule.min_lr_ratio,
        "warmup_steps": None if warmup is None else str(warmup),
        "num_steps": str(config.run.num_steps),
    }


def _iteration_state(manifest: Manifest, config: TrainConfig) -> dict[str, Any]:
    phases = manifest.data.get("phases", [{"first_step": 0}])
    content = manifest.document()
    return {
        "epoch": _passes(manifest.data, config.data.seq_length),
        "segment": len(phases) - 1,
        "segment_start": phases[-1]["first_step"],
        "segment_end": manifest.step,
        "best_loss": manifest.best_evaluation_loss,
        **{name: content[name] for name in Manifest.__dataclass_fields__ if name != "files"},
    }


def _passes(data: Mapping[str, Any], seq_length: int) -> int:
    """Whole passes over the dataset that has been passed over least, of those that are mixed in now; 0 without data."""
    weights = data["phases"][-1]["weights"] if data else {}
    tokens = {name: data["datasets"][name].get("tokens", 0) for name, weight in weights.items() if weight > 0}
    passes = [data["counts"][name] * seq_length // tokens[name] for name in tokens if tokens[name] > 0]
    return min(passes, default=0)


# TODO(merge): was pretraining.checkpoint.pt_files
# Files of torch.save, written one tensor at a time and read without executing anything.
#
# torch.save wants all tensors of a file in memory at once. Here it writes the file with room for their bytes, and one
# tensor after the other then goes to its place, with its checksum, as a zip file has one of each member. What is
# written
# is what torch.save would have written. Reading maps a file into memory.

Kinds = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of tensors by name."""


def write_file(
    path: Path, kinds: Kinds, arrange: Callable[[Mapping[str, torch.Tensor]], Any], values: Iterator[torch.Tensor]
) -> None:
    """Write a file, flushed to disk.

    Args:
        path: of the file.
        kinds: of the tensors in it; each has memory of its own.
        arrange: makes the file's content from the tensors by name, which it meets in the order of `kinds`.
        values: the tensors, in that order; one is held at a time.

    Raises:
        OSError: it cannot be written.
    """
    needed = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in kinds.values())
    if shutil.disk_usage(path.parent).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    with FakeTensorMode():
        blanks = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in kinds.items()}
    try:
        with skip_data(materialize_fake_tensors=True):
            torch.save(arrange(blanks), path)
    except RuntimeError as error:  # its writer's name for any error of the file system
        raise OSError(errno.EIO, str(error).splitlines()[0], str(path)) from None
    places = _places(path)
    assert len(places) == len(kinds), "a tensor has a storage of its own, in the order of their names"
    with path.open("r+b") as file:
        for (dtype, shape), place in zip(kinds.values(), places, strict=True):
            value = next(values).cpu().contiguous()
            assert value.dtype == dtype and tuple(value.shape) == shape
            _fill_place(file, place, value.view(-1).view(torch.uint8).numpy().data)
            del value
        file.flush()
        os.fsync(file.fileno())


def load_file(path: Path, entry: FileEntry | None = None) -> dict[str, Any]:
    """Read a file of torch.save, tensors mapped into memory, without executing anything.

    Args:
        path: of the file.
        entry: size and checksum, compared first.

    Raises:
        CheckpointError: it cannot be read, is damaged, or holds anything but tensors and plain values.
    """
    try:
        if entry is not None:
            check_content(path, entry)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # torch.load raises many kinds, and long texts about how to load it unsafely
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is damaged, or holds more than tensors and plain values: {reason}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no dictionary")
    return content


@dataclass(frozen=True)
class _Place:
    """Where a storage lies in a file of torch.save.

    Attributes:
        begin, size: of its bytes.
        entry: of the zip's directory, which holds a checksum of them.
    """

    begin: int
    size: int
    entry: int


def _fill_place(file: BinaryIO, place: _Place, content: memoryview) -> None:
    """Write the bytes of a storage, and their checksum to both places where a zip file has it."""
    assert len(content) == place.size
    checksum = struct.pack("<I", zlib.crc32(content))
    file.seek(place.begin)
    file.write(content)
    file.seek(place.begin + place.size)
    if file.read(4) == b"PK\x07\x08":
        file.seek(place.begin + place.size + 4)
        file.write(checksum)
    file.seek(place.entry + 16)
    file.write(checksum)


def _places(path: Path) -> list[_Place]:
    """Where the storages of a file are, in the order in which torch.save met them."""
    places: dict[int, _Place] = {}
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        entry = archive.start_dir
        for info in archive.infolist():  # in the order of the directory
            folder, _, number = info.filename.rpartition("/")
            if folder.endswith("/data"):
                file.seek(info.header_offset + 26)
                name_length, extra_length = struct.unpack("<HH", file.read(4))
                begin = info.header_offset + 30 + name_length + extra_length
                places[int(number)] = _Place(begin, info.file_size, entry)
            file.seek(entry + 28)
            entry += 46 + sum(struct.unpack("<HHH", file.read(6)))
    return [place for _, place in sorted(places.items())]
