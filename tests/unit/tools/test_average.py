"""`pretrain average`: the weighted mean of checkpoints, whatever their form, and what it says of their runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unit.checkpoint.checkpoint_files import (
    DATA,
    SHAPES,
    config_of,
    flip_byte,
    manifest_of,
    tensors_of,
    write_full_form,
    write_sharded,
)

from pretraining.checkpoint.manifest import EVALUATION_SETS_STATE, MANIFEST
from pretraining.checkpoint.reader import open_tensors, read_tensor
from pretraining.checkpoint.start_point import CheckpointRef, find_newest, find_start
from pretraining.cli import main
from pretraining.config.recipe_files import RUN_CONFIG_FILE, dump_config
from pretraining.config.training import CheckpointConfig
from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import CheckpointError
from pretraining.model.hf import ORIGIN_FILE, parameter_shapes
from pretraining.optim.schedules import DECAYS
from pretraining.tools.average import decay_weights
from pretraining.tools.command_settings import ExportConfig
from pretraining.tools.export import export
from pretraining.train.plan import recorded_evaluation

SHAPE = SHAPES["plain"]
FACTS = {"held_out_fraction": 0.1, "sep_token": 0, "bos_token": None}
SETS = {EVALUATION_SETS_STATE: {"sequences": 8, "weights": {"a": 1}}}


def write_checkpoint(run: Path, step: int, *, name: str = "", full: bool = False, **changes: Any) -> Path:
    folder = run / "checkpoints" / (name or f"step_{step}_ckp")
    config = dump_config(config_of(SHAPE, sep_token="0"))
    manifest = manifest_of(SHAPE, step, **{"data": {**DATA, **FACTS}, "state": SETS, "config": config, **changes})
    (write_full_form if full else write_sharded)(folder, tensors_of(SHAPE, seed=step), manifest)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2, 4 and 6, one of them in four .pt files, and what is not to be averaged."""
    root = tmp_path_factory.mktemp("average")
    for step in (2, 4, 6):
        write_checkpoint(root / "run", step, full=step == 4)
    write_checkpoint(root / "run", 5, name="step_5_ckp.preempt", kind="preempt")
    write_checkpoint(root / "run", 6, name="mine")
    write_checkpoint(root / "run", 8, name="set_aside_1/step_8_ckp")
    (root / "run" / "checkpoints" / "best").symlink_to("step_4_ckp")
    (root / "run" / RUN_CONFIG_FILE).write_text(dump_config(config_of(SHAPE)))
    (root / "run" / ORIGIN_FILE).write_text('{"license": "mit"}')
    return root


def run_average(*words: object) -> Path:
    """Run the command, and return the checkpoint that it wrote."""
    main(["average", *map(str, words)])
    (path,) = (Path(str(words[-1]).partition("=")[2]) / "checkpoints").iterdir()
    return path


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    stored = open_tensors(path, find_newest(path).manifest.files)
    return {name: read_tensor(stored, name) for name in stored.chunks}


def assert_average(path: Path, weights: Mapping[int, float]) -> None:
    found = weights_in(path)
    assert found.keys() == parameter_shapes(SHAPE).keys()
    sources = {step: tensors_of(SHAPE, seed=step) for step in weights}
    for name, tensor in found.items():
        by_hand = sum(weight * sources[step][name].double() for step, weight in weights.items())
        assert isinstance(by_hand, torch.Tensor)
        torch.testing.assert_close(tensor, by_hand.float(), rtol=2e-7, atol=0)  # rounded to float32 once


def test_the_newest_checkpoints_of_a_run_are_averaged_each_step_once(root: Path, tmp_path: Path) -> None:
    path = run_average(root / "run", "--last=3", f"--output_path={tmp_path / 'out'}")
    assert path.name == "step_6_ckp"
    assert_average(path, {2: 1 / 3, 4: 1 / 3, 6: 1 / 3})


def test_named_checkpoints_have_weights_and_their_order_changes_no_bit(root: Path, tmp_path: Path) -> None:
    names = [root / "run" / "checkpoints" / f"step_{step}_ckp" for step in (2, 4, 6)]
    first = run_average(*names, "--weights=3,0,1", f"--output_path={tmp_path / 'first'}")
    other = run_average(names[2], names[1], names[0], "--weights=1,0,3", f"--output_path={tmp_path / 'other'}")
    assert_average(first, {2: 0.75, 4: 0.0, 6: 0.25})
    assert (first / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_hugging_face_folders_and_copies_in_a_store_are_averaged_like_checkpoints(root: Path, tmp_path: Path) -> None:
    for step in (2, 6):
        checkpoint = root / "run" / "checkpoints" / f"step_{step}_ckp"
        export(ExportConfig(ckpt_load_path=str(checkpoint), output_path=str(tmp_path / f"hf{step}"), dtype="float32"))
    path = run_average(tmp_path / "hf2", tmp_path / "hf6", f"--output_path={tmp_path / 'out'}")
    assert_average(path, {2: 0.5, 6: 0.5})
    path = run_average(f"file://{root / 'run'}", "--steps=3-7", f"--output_path={tmp_path / 'stored'}")
    assert_average(path, {4: 0.5, 6: 0.5})


@given(
    steps=st.lists(st.integers(0, 60), min_size=2, max_size=6, unique=True).map(sorted),
    shape=st.sampled_from([*DECAYS]),
)
def test_weights_of_a_decay_give_what_it_would_have_made_of_each_update(steps: list[int], shape: str) -> None:
    updates = torch.randn(60, dtype=torch.float64, generator=torch.Generator().manual_seed(steps[0]))
    for begin, end in pairwise(steps):
        updates[begin:end] = updates[begin:end].mean()  # only their sum is in the checkpoints
    constant = torch.cat((torch.zeros(1, dtype=torch.float64), updates.cumsum(0)))
    length = steps[-1] - steps[0]
    decayed = sum(updates[at] * DECAYS[shape]((at - steps[0]) / length, 1.0) for at in range(steps[0], steps[-1]))
    weights = decay_weights(steps, shape)
    merged = sum(weight * constant[step] for weight, step in zip(weights, steps, strict=True))
    assert sum(weights) == pytest.approx(1) and float(merged) == pytest.approx(float(constant[steps[0]] + decayed))


def test_an_average_names_its_sources_and_facts(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    path = run_average(root / "run", "--steps=2-4", "--decay_shape=linear", f"--output_path={output}")
    found = find_newest(output)
    assert (found.weights_only, found.manifest.step, found.manifest.data) == (True, 4, {})
    assert found.manifest.average["of"] == [
        {"checkpoint": "step_2_ckp", "step": 2, "weight": 0.25},
        {"checkpoint": "step_4_ckp", "step": 4, "weight": 0.75},
    ]
    assert found.manifest.facts_of_data == FACTS
    assert recorded_evaluation(found.manifest).sequences == 8
    assert found.config.checkpoint.ckpt_save_path == str(output) and found.config.data.sep == 0
    capsys.readouterr()
    main(["list", str(output)])
    assert "complete, merged" in capsys.readouterr().out
    main(["verify", str(output)])
    export(ExportConfig(ckpt_load_path=str(output), output_path=str(tmp_path / "exported")))
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "0.25 x step 2 + 0.75 x step 4" in card and "license: mit" in card
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["eos_token_id"] == 0
    start = find_start(CheckpointConfig(ckpt_save_path=str(tmp_path / "new"), ckpt_load_path=str(output)))
    assert isinstance(start, CheckpointRef) and start.step == 0
    with pytest.raises(CheckpointError, match=re.escape(f"new run from it, with --ckpt_load_path={output}")):
        find_start(CheckpointConfig(ckpt_save_path=str(output)))
    assert (path / MANIFEST).exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["R"], "--last or --steps, or name several"),
        (["C2", "C4", "--last=2"], "choose checkpoints of one run"),
        (["R", "--last=2", "--steps=2-4"], "leave one of them out"),
        (["R", "--last=2", "--weights=1,1"], "belong to checkpoints that are named"),
        (["C2", "C4", "--weights=1,1", "--decay_shape=linear"], "the shape gives the weights"),
        (["C2", "--last=2"], "is one checkpoint"),
        (["R", "--last=4"], r"too few checkpoints (steps 2, 4, 6): --last=4 needs 4"),
        (["R", "--steps=5-6"], "--steps=5-6 needs 2"),
        (["R", "--steps=x"], "--steps=x: write first and last"),
        (["C2", "C4", "--weights=1"], "--weights has 1 number for 2 checkpoints"),
        (["C2", "C4", "--weights=0,0"], "not all 0"),
        (["C4", "C2", "--decay_shape=linear"], "by ascending steps"),
        (["C2", "other"], "different data"),
        (["C2", "tied"], "holds another model (tie_word_embeddings: True"),
        (["C2", "damaged"], "is damaged: its checksum is"),
        (["C2", "tied"], "False in ROOT/run/checkpoints/step_2_ckp). Name checkpoints of one model"),
        (["C2", "C4", "--weights=1e308,1e308"], "not all 0, and of a finite sum"),
        (["C2", "nowhere"], "error: --paths=OTHERS/nowhere: there is no such folder"),
    ],
)
def test_what_cannot_be_averaged_is_refused(
    root: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "of_others"
    data: dict[str, Any] = {**DATA, **FACTS, "held_out_fraction": 0.2}
    made: dict[str, dict[str, Any]] = {"other": {"data": data}, "tied": {}, "damaged": {}, "nowhere": {}}
    names = {"R": root / "run", **{f"C{step}": root / "run" / "checkpoints" / f"step_{step}_ckp" for step in (2, 4)}}
    for name in made.keys() & set(words):
        names[name] = run / "checkpoints" / name
        if name == "tied":
            write_sharded(names[name], tensors_of(SHAPES["tied"]), manifest_of(SHAPES["tied"], state=SETS))
        elif name != "nowhere":
            flaw = write_checkpoint(run, 4, name=name, **made[name])
            if name == "damaged":
                flip_byte(next(flaw.glob("*.safetensors")))
    with pytest.raises(SystemExit) as stopped:
        run_average(*(names.get(word, word) for word in words), f"--output_path={tmp_path / 'out'}")
    message = message.replace("ROOT", str(root)).replace("OTHERS", f"{run}/checkpoints")
    assert stopped.value.code == 1 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_with_other_evaluation_sets_and_weights_are_averaged_and_the_newest_record_stays(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", 2, state={})
    write_checkpoint(tmp_path / "run", 4)
    weighed = {EVALUATION_SETS_STATE: {"sequences": 16, "weights": {"a": 3, "b": 1}}}
    write_checkpoint(tmp_path / "run", 6, state=weighed)
    path = run_average(tmp_path / "run", "--last=3", f"--output_path={tmp_path / 'out'}")
    assert_average(path, {2: 1 / 3, 4: 1 / 3, 6: 1 / 3})
    record = recorded_evaluation(find_newest(path).manifest)
    assert (record.sequences, record.weights) == (16, {"a": 3, "b": 1})


def test_checkpoints_of_two_tokenizers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for step, (name, text) in enumerate((("one", "the cat sat "), ("other", "a dog ran "), ("again", "the cat sat "))):
        (tmp_path / name).mkdir()
        train_tokenizer([text * 9] * 9, 264).save(tmp_path / name)
        config = dump_config(config_of(SHAPE, sep_token="0", tokenizer_path=str(tmp_path / name)))
        paths.append(write_checkpoint(tmp_path / f"run_{name}", step, config=config))
    run_average(paths[0], paths[2], f"--output_path={tmp_path / 'alike'}")
    with pytest.raises(SystemExit):
        run_average(*paths[:2], f"--output_path={tmp_path / 'out'}")
    error = capsys.readouterr().err
    assert f"{paths[1]}: and {paths[0]} have different tokenizers: " in error and "of one tokenizer" in error
    assert not (tmp_path / "out").exists()
