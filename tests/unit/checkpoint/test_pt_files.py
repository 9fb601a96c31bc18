"""The four files are those of torch.save, and are read without executing anything."""

from __future__ import annotations

import errno
import pickle
import resource
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.checkpoint.checkpoint_files import DATA, SHAPES, file_entry, manifest_of, tensors_of, write_full_form

from pretraining.checkpoint import pt_files
from pretraining.checkpoint.headers import StoredTensors, load_file, read_header, read_headers
from pretraining.checkpoint.manifest import FULL_FILES, ITERATION_FILE, MODEL_FILE, OPTIMIZER_FILE, SCHEDULE_FILE
from pretraining.checkpoint.pt_files import FullSave, manifest_of_files, write_file
from pretraining.checkpoint.reader import read_tensor
from pretraining.config.recipe_files import settings_in
from pretraining.config.variants import LlamaShape
from pretraining.durations import TokenSchedule
from pretraining.errors import CheckpointError, DamagedError
from pretraining.model.llama import Llama
from pretraining.optim.optimizer import parameter_groups
from pretraining.optim.schedules import build_learning_rate

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_files_load_safely_and_into_a_model_and_its_optimizer(shape: LlamaShape, tmp_path: Path) -> None:
    tensors = tensors_of(shape)
    shuffled = {name: tensors[name] for name in sorted(tensors, reverse=True)}
    data = {
        **DATA,
        "counts": {"a": [[64, 7]], "b": [[64, 40]]},
    }  # 4 passes over 100 tokens with 64 per sample, and 2 over 1,000
    manifest = manifest_of(shape, data=data)
    write_full_form(tmp_path / "c", shuffled, manifest)
    model, state, schedule, iteration = (torch.load(tmp_path / "c" / name, weights_only=True) for name in FULL_FILES)
    llama = Llama(shape)
    llama.load_state_dict(model)  # strict: every name must be there, also a tied head
    parameters = dict(llama.named_parameters())
    assert all(torch.equal(tensors[name], value) for name, value in parameters.items())
    optimizer = torch.optim.AdamW(parameter_groups(parameters, 0.1))
    optimizer.load_state_dict(state)
    for name, parameter in parameters.items():
        assert state["state"][name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, tensors[f"optimizer.{key}.{name}"])
    assert state["state"].keys() == parameters.keys()
    named = [name for group in state["param_groups"] for name in group["params"]]
    assert sorted(named) == sorted(parameters)
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.0]
    config = settings_in(manifest.config, "c")
    rate = build_learning_rate(config.schedule, config.run.num_steps, TokenSchedule.steady(256), None).at(3, 3e-4)
    assert schedule == {
        **{"step": 3, "learning_rate": 3e-4, "min_lr_ratio": 0.1, "warmup_steps": None, "num_steps": "1000"},
        **{"last_epoch": 3, "base_lrs": [3e-4, 3e-4], "_last_lr": [rate] * 2},
    }
    begin = {"epoch": 2, "segment": 1, "segment_start": 8, "segment_end": 12, "best_loss": 2.25}
    assert iteration["best_loss_name"] == "evaluation_loss"
    assert begin.items() <= iteration.items()
    assert (iteration["step"], iteration["tokens_seen"], iteration["data"]) == (3, 300, data)


@pytest.mark.parametrize("change", [{"run": {"num_steps": "2ep"}}, {"schedule": {"schedule": "nowhere:Schedule"}}])
def test_the_last_learning_rate_is_left_out_if_a_manifest_cannot_tell_it(change: Any, tmp_path: Path) -> None:
    settings = yaml.safe_load(manifest_of(SHAPES["plain"]).config)
    for section, values in change.items():
        settings[section] |= values
    manifest = manifest_of(SHAPES["plain"], config=yaml.dump(settings), data={})
    write_full_form(tmp_path / "c", tensors_of(SHAPES["plain"]), manifest)
    schedule, iteration = (
        torch.load(tmp_path / "c" / name, weights_only=True) for name in (SCHEDULE_FILE, ITERATION_FILE)
    )
    assert schedule["base_lrs"] == [3e-4, 3e-4] and "_last_lr" not in schedule and iteration["epoch"] == 0


@pytest.mark.parametrize(("state", "best"), [({}, 2.5), ({"reported_loss": {"best": 1.5}}, 1.5)])
def test_the_best_loss_without_evaluations_is_the_lowest_report(tmp_path: Path, state: Any, best: float) -> None:
    shape = SHAPES["plain"]
    manifest = manifest_of(shape, evaluation_loss=None, best_evaluation_loss=None, state=state)
    write_full_form(tmp_path / "c", tensors_of(shape), manifest)
    iteration = torch.load(tmp_path / "c" / ITERATION_FILE, weights_only=True)
    assert (iteration["best_loss_name"], iteration["best_loss"]) == ("loss", best)


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64]), st.lists(st.integers(1, 9), max_size=3)
        )
    )
)
def test_a_file_is_a_sound_archive_whose_tensors_are_found(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("t") / MODEL_FILE
    tensors = {f"t{number}": torch.randn(shape).to(dtype) for number, (dtype, shape) in enumerate(kinds)}
    assert write_file(path, tensors) == file_entry(path)
    assert zipfile.ZipFile(path).testzip() is None
    ours = read_headers(path.parent, [path.name])
    assert all(torch.equal(read_tensor(ours, name), tensor) for name, tensor in tensors.items())


def test_an_error_of_the_disk_is_raised_unchanged(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
        with pytest.raises(OSError) as failed:
            write_file(tmp_path / "a.pt", {"a": torch.randn(1000), "b": torch.randn(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failed.value.errno == errno.EFBIG


class Payload:
    """Object that creates a file when it is unpickled."""

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
    with pytest.raises(DamagedError) as refused:
        read_header(tmp_path / MODEL_FILE)
    assert "compressed" in str(refused.value)


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


def opened(folder: Path) -> StoredTensors:
    """Return the tensors of the four files."""
    return read_headers(folder, (MODEL_FILE, OPTIMIZER_FILE))


def test_the_files_alone_say_where_the_run_was(tmp_path: Path) -> None:
    manifest = manifest_of(SHAPES["scaled"])
    write_full_form(tmp_path / "c", tensors_of(SHAPES["scaled"]), manifest)
    files = dict.fromkeys((MODEL_FILE, OPTIMIZER_FILE))
    assert manifest_of_files(tmp_path / "c") == replace(manifest, files=files)
    torch.save({"step": 3}, tmp_path / "c" / ITERATION_FILE)
    with pytest.raises(CheckpointError) as refused:
        manifest_of_files(tmp_path / "c")
    assert refused.value.path == tmp_path / "c" / ITERATION_FILE


@pytest.mark.usefixtures("single_process")
def test_a_part_of_larger_memory_is_written_alone(tmp_path: Path) -> None:
    shape = SHAPES["plain"]
    tensors = tensors_of(shape)
    name = "model.norm.weight"
    part = torch.zeros(2**20)[: len(tensors[name])].copy_(tensors[name])
    turned = tensors[UP].T.contiguous().T
    FullSave({**tensors, name: part, UP: turned}, manifest_of(shape)).write(tmp_path)
    found = opened(tmp_path)
    assert all(torch.equal(read_tensor(found, each), tensors[each]) for each in (name, UP))
    assert (tmp_path / MODEL_FILE).stat().st_size < 2**20 and found.chunks.keys() == tensors.keys()


@pytest.mark.usefixtures("single_process")
def test_without_memory_every_tensor_is_gathered_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks are in these collectives; a skipped collective would hang them."""
    gathered: list[torch.Tensor] = []

    def no_memory(value: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no memory")

    def is_sharded(value: torch.Tensor) -> bool:
        gathered.append(value)
        return False

    monkeypatch.setattr(pt_files, "_copy_to_host", no_memory)
    monkeypatch.setattr(pt_files, "is_sharded", is_sharded)
    tensors = tensors_of(SHAPES["plain"])
    with pytest.raises(RuntimeError):
        FullSave(tensors, manifest_of(SHAPES["plain"])).write(tmp_path)
    assert len(gathered) == len(tensors) and not list(tmp_path.iterdir())
