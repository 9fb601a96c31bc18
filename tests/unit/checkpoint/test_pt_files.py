"""The four files are what torch.save would have written, and are read without executing anything."""

from __future__ import annotations

import pickle
import resource
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.checkpoint.checkpoint_files import SHAPES, manifest_of, tensors_of, write_full_form

from pretraining.checkpoint import pt_files
from pretraining.checkpoint.headers import load_file, read_header
from pretraining.checkpoint.manifest import (
    FULL_FILES,
    ITERATION_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    FileEntry,
)
from pretraining.checkpoint.pt_files import FullSave, manifest_of_files, write_file
from pretraining.checkpoint.reader import TensorFiles, file_entry
from pretraining.config.recipes import settings_in
from pretraining.errors import CheckpointError, DamagedError
from pretraining.model.llama import Llama

every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@every_shape
def test_the_files_load_safely_and_into_a_model(shape, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tensors = write_full_form(tmp_path / "c", tensors_of(shape), manifest_of(shape))
    model, optimizer, schedule, iteration = (
        torch.load(tmp_path / "c" / name, weights_only=True) for name in FULL_FILES
    )
    llama = Llama(shape)
    llama.load_state_dict(model)  # strict: every name is there, a tied head as well
    assert all(torch.equal(tensors[name], value) for name, value in llama.named_parameters())
    assert optimizer["state"].keys() == dict(llama.named_parameters()).keys()
    for name, kept in optimizer["state"].items():
        assert all(torch.equal(value, tensors[f"optimizer.{key}.{name}"]) for key, value in kept.items())
        assert kept.keys() == {"step", "exp_avg", "exp_avg_sq"}
    named = [name for group in optimizer["param_groups"] for name in group["params"]]
    assert sorted(named) == sorted(optimizer["state"])
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.1, 0.0]
    assert schedule == {
        "step": 3,
        "learning_rate": 3e-4,
        "min_lr_ratio": 0.1,
        "warmup_steps": None,
        "num_steps": "1000",
    }
    begin = {"epoch": 0, "segment": 1, "segment_start": 2, "segment_end": 3, "best_loss": 2.25}
    assert begin.items() <= iteration.items()
    assert (iteration["step"], iteration["tokens_seen"], iteration["data"]) == (3, 300, manifest_of(shape).data)


def test_epochs_are_passes_over_the_dataset_that_was_passed_over_least() -> None:
    manifest = manifest_of(SHAPES["plain"])
    config = settings_in(manifest.config, "c")
    manifest.data["counts"] |= {"a": 7, "b": 40}
    try:
        assert pt_files._iteration_state(manifest, config)["epoch"] == 2  # of 64 tokens
    finally:
        manifest.data["counts"] |= {"a": 1, "b": 2}
    made_up = replace(manifest, data={})
    assert pt_files._iteration_state(made_up, config)["epoch"] == 0


def kinds_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64]), st.lists(st.integers(1, 9), max_size=3)
        )
    )
)
def test_a_file_written_tensor_by_tensor_is_a_sound_archive(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("t") / MODEL_FILE
    tensors = {f"t{number}": torch.randn(shape).to(dtype) for number, (dtype, shape) in enumerate(kinds)}
    write_file(path, kinds_of(tensors), lambda pending: {**pending, "plain": [1, "two"]}, iter(tensors.values()))
    assert zipfile.ZipFile(path).testzip() is None
    for mapped in (True, False):
        content = torch.load(path, weights_only=True, mmap=mapped)
        assert content["plain"] == [1, "two"] and content.keys() == {*tensors, "plain"}
        assert all(torch.equal(content[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(CheckpointError):
        read_header(path)
    assert write_file(path, kinds_of(tensors), dict, iter(tensors.values())) == file_entry(path)
    ours = TensorFiles(path.parent, {path.name: None})
    assert all(torch.equal(ours.read(name), tensor) for name, tensor in tensors.items())


def test_a_part_of_larger_memory_is_written_alone(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    write_file(tmp_path / "a.pt", {"a": (torch.float32, (2, 3))}, dict, iter([whole[1:3]]))
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["a"], whole[1:3])
    assert (tmp_path / "a.pt").stat().st_size < 3000


def test_errors_of_the_disk_and_of_what_gives_the_tensors_stay_what_they_are(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(1000), "b": torch.randn(1000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
        with pytest.raises(OSError, match="File too large"):
            write_file(tmp_path / "a.pt", kinds_of(tensors), dict, iter(tensors.values()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "a.pt", {"a": (torch.float32, (2**50,))}, dict, iter([]))

    def lost_peer() -> Iterator[torch.Tensor]:
        yield tensors["a"]
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        write_file(tmp_path / "a.pt", kinds_of(tensors), dict, lost_peer())


class Payload:
    """Would make a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return (Path.touch, (self.path,))


def test_a_hostile_pickle_is_refused_and_not_executed(tmp_path: Path) -> None:
    torch.save({"model.norm.weight": Payload(tmp_path / "executed")}, tmp_path / "new.pt")
    with (tmp_path / "old.pt").open("wb") as file:
        pickle.dump({"a": Payload(tmp_path / "executed")}, file)
    for name in ("new.pt", "old.pt"):
        with pytest.raises(DamagedError) as refused:
            load_file(tmp_path / name)
        assert refused.value.path == tmp_path / name
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_a_compressed_entry_is_refused_before_it_is_inflated(compression: int, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "stored.pt")
    stored = zipfile.ZipFile(tmp_path / "stored.pt")
    with zipfile.ZipFile(tmp_path / MODEL_FILE, "w") as archive:
        for entry in stored.infolist():
            kind = compression if entry.filename.endswith("data.pkl") else zipfile.ZIP_STORED
            archive.writestr(entry.filename, stored.read(entry), kind)
    with pytest.raises(DamagedError, match="compressed"):
        read_header(tmp_path / MODEL_FILE)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (MODEL_FILE, None),
        (MODEL_FILE, b"PK\3\4 and no more"),
        (MODEL_FILE, [1]),
        (MODEL_FILE, {"model.norm.weight": 1}),
        (MODEL_FILE, {"a": torch.randn(4, 3).T}),
        (OPTIMIZER_FILE, {"state": [1]}),
    ],
    ids=["gone", "cut", "no dictionary", "no tensor", "not in a row", "no state"],
)
def test_a_file_of_another_form_is_refused_by_its_path(tmp_path: Path, name: str, content: object) -> None:
    torch.save({}, tmp_path / MODEL_FILE)
    torch.save({"state": {}}, tmp_path / OPTIMIZER_FILE)
    (tmp_path / name).unlink()
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    with pytest.raises(DamagedError) as refused:
        opened(tmp_path)
    assert refused.value.path == tmp_path / name


def opened(folder: Path, entries: Mapping[str, FileEntry] | None = None) -> TensorFiles:
    """The tensors of the four files, which are compared if their entries are known."""
    return TensorFiles(folder, entries or dict.fromkeys((MODEL_FILE, OPTIMIZER_FILE)))


def test_the_files_alone_say_where_the_run_was(tmp_path: Path) -> None:
    manifest = manifest_of(SHAPES["scaled"])
    write_full_form(tmp_path / "c", tensors_of(SHAPES["scaled"]), manifest)
    assert manifest_of_files(tmp_path / "c") == manifest
    torch.save({"step": 3}, tmp_path / "c" / ITERATION_FILE)
    with pytest.raises(CheckpointError) as refused:
        manifest_of_files(tmp_path / "c")
    assert refused.value.path == tmp_path / "c" / ITERATION_FILE


@pytest.mark.usefixtures("single_process")
def test_where_writing_fails_every_tensor_is_gathered_all_the_same(tmp_path: Path) -> None:
    """Other ranks are in these collectives; one that is left out would hang them."""
    shape = SHAPES["plain"]
    gathered = []

    class Watched(dict):  # type: ignore[type-arg]
        def __getitem__(self, name: str) -> torch.Tensor:
            gathered.append(name)
            value: torch.Tensor = super().__getitem__(name)
            return value

    tensors = Watched(tensors_of(shape))
    with pytest.raises(FileNotFoundError):
        FullSave(tensors, manifest_of(shape)).write(tmp_path / "nowhere")
    assert len(gathered) == len(tensors)
    gathered.clear()
    FullSave(tensors, manifest_of(shape)).write(tmp_path)
    assert opened(tmp_path).shapes().keys() == tensors.keys() and len(gathered) == len(tensors)
