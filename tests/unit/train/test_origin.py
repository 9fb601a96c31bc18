"""What exports keep of the model that a run began with: tokens, sampling values, entries that no setting stands for."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training_runs import TINY
from unit.checkpoint.checkpoint_files import SHAPES
from unit.checkpoint.test_hf_import import single
from unit.train.whole_runs import error_of, start

from pretraining.cli import main
from pretraining.errors import CheckpointError

MODEL = [flag for flag in TINY if flag.partition("=")[0] in ("batch_size", "report_interval", "learning_rate")]
SHORT = ("num_steps=1", "seq_length=16")
TOKENS = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 5}
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.1}
KEPT = {**TOKENS, **SAMPLING, "max_length": 32}


def model_folder(folder: Path, generation: dict[str, Any] | None = None, **config: Any) -> Path:
    """Write a Hugging Face folder as people publish them."""
    single(folder, shape=replace(SHAPES["plain"], vocab_size=64))
    document = json.loads((folder / "config.json").read_text())
    own = {"initializer_range": 0.01, "use_cache": False, "pretraining_tp": 1, "max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps({**document, **TOKENS, **own, **config}))
    given = {**KEPT, "transformers_version": "4.40.0"} if generation is None else generation
    (folder / "generation_config.json").write_text(json.dumps(given))
    return folder


def exported(run: Path | str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Export, and return config.json and generation_config.json."""
    shutil.rmtree(folder, ignore_errors=True)
    main(["export", str(run), f"--output_path={folder}"])
    config, generation = (json.loads((folder / name).read_text()) for name in ("config.json", "generation_config.json"))
    return config, generation


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and a run that began with it; tests must not change them."""
    folder = tmp_path_factory.mktemp("begun")
    start(folder / "run", f"ckpt_load_path={model_folder(folder / 'm')}", *SHORT, model=MODEL)
    return folder


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    return shutil.copytree(begun / "run", tmp_path / "run", symlinks=True)


def test_an_import_and_a_start_from_the_folder_record_the_same_and_exports_keep_it(begun: Path, tmp_path: Path) -> None:
    main(["import", str(begun / "m"), f"--ckpt_save_path={tmp_path / 'imported'}"])
    runs = (tmp_path / "imported", begun / "run")
    assert len({(run / "imported.json").read_bytes() for run in runs}) == 1
    for run in runs:
        config, generation = exported(run, tmp_path / "out")
        kept = {"initializer_range": 0.01, "use_cache": False, "pretraining_tp": 1, **TOKENS}
        assert {each: config[each] for each in kept} == kept and generation == KEPT
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    read = model.generation_config.to_dict()
    assert {name: read[name] for name in (*TOKENS, *SAMPLING)} == {**TOKENS, **SAMPLING}
    assert (model.config.initializer_range, model.config.pad_token_id) == (0.01, 5)


def test_a_resume_never_writes_the_record_and_a_run_without_one_exports_as_before(
    begun: Path, run: Path, tmp_path: Path
) -> None:
    (run / "imported.json").unlink()
    start(run, f"ckpt_load_path={begun / 'm'}", "num_steps=2", "seq_length=16", model=MODEL)
    assert not (run / "imported.json").exists()
    config, generation = exported(run, tmp_path / "out")
    assert (config["bos_token_id"], config["eos_token_id"], config["initializer_range"]) == (None, None, 0.02)
    assert set(generation) == set(TOKENS)
    # A record may lack entries.
    (run / "imported.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, "license": None}))
    config, generation = exported(run, tmp_path / "out")
    assert (config["eos_token_id"], generation["eos_token_id"], set(generation)) == (2, 2, set(TOKENS))
    for content in ("{", "[1]", '{"config": 3}'):
        (run / "imported.json").write_text(content)
        error = error_of(lambda: exported(run, tmp_path / "out"))
        assert isinstance(error, CheckpointError) and "Delete it" in str(error)


def test_a_new_run_in_the_folder_of_one_that_saved_nothing_records_its_own_model(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    start(run, "init_from=scratch", *SHORT, *TINY, model=MODEL)
    assert not (run / "imported.json").exists()


@pytest.mark.parametrize("flags", [[], ["weights_only=true"]])
def test_the_record_goes_along_into_other_runs_and_full_exports(flags: list[str], run: Path, tmp_path: Path) -> None:
    whole, second = tmp_path / "whole", tmp_path / "second"
    main(["export", str(run), f"--output_path={whole}", "--format=full"])
    for source in (run, run / "checkpoints/step_1_ckp", whole):
        start(second, f"ckpt_load_path={source}", "num_steps=2", "seq_length=16", *flags, model=MODEL)
        assert exported(second, tmp_path / "out")[1] == KEPT
        shutil.rmtree(second)
    aside = run / "checkpoints/set_aside_20261122-101500-417306"
    aside.mkdir()
    (run / "checkpoints/step_1_ckp").rename(aside / "step_1_ckp")
    assert exported(aside / "step_1_ckp", tmp_path / "out")[0]["eos_token_id"] == [2, 3]


def test_the_record_outlives_the_disks_of_a_run_with_a_mirror(begun: Path, tmp_path: Path) -> None:
    run, mirror = tmp_path / "run", f"file://{tmp_path}/store/mine"
    flags = [f"ckpt_load_path={begun / 'm'}", "seq_length=16", f"ckpt_mirror_path={mirror}"]
    start(run, "num_steps=1", *flags, model=MODEL)
    shutil.rmtree(run)
    start(run, "num_steps=2", *flags, model=MODEL)
    start(tmp_path / "other", "num_steps=3", "seq_length=16", f"ckpt_load_path={mirror}", model=MODEL)
    for source in (run, tmp_path / "other", mirror, f"{mirror}/checkpoints/step_2_ckp"):
        assert exported(source, tmp_path / "out")[1]["temperature"] == 0.6


def test_ends_of_text_of_a_chat_model_stay_beside_the_run_s_and_a_line_names_one_that_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pretraining")
    folder = model_folder(tmp_path / "m", {"eos_token_id": [3, 2]}, eos_token_id=2)
    for token, ends in ((2, [3, 2]), (3, [3, 2]), (9, [9, 3, 2])):
        start(tmp_path / f"run{token}", f"ckpt_load_path={folder}", *SHORT, f"sep_token={token}", model=MODEL)
        config, generation = exported(tmp_path / f"run{token}", tmp_path / "out")
        assert (config["eos_token_id"], generation["eos_token_id"]) == (token, ends)
        assert (f"eos_token_id is {token}, that of the run, in place of 2 of" in caplog.text) is (token != 2)
    (folder / "generation_config.json").unlink()  # then config.json alone says how its texts end
    start(tmp_path / "run", f"ckpt_load_path={folder}", *SHORT, "sep_token=9", model=MODEL)
    assert exported(tmp_path / "run", tmp_path / "out")[1]["eos_token_id"] == [9, 2]


def test_code_and_invalid_tokens_are_not_kept_and_damage_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wild = {"auto_map": {"AutoModel": "code.Model"}, "_name_or_path": "/home/me"}
    folder = model_folder(tmp_path / "m", {"pad_token_id": [1]}, **wild, bos_token_id="a")
    start(tmp_path / "run", f"ckpt_load_path={folder}", *SHORT, model=MODEL)
    config, _ = exported(tmp_path / "run", tmp_path / "out")
    assert not config.keys() & wild.keys() and config["bos_token_id"] is None
    (folder / "generation_config.json").write_text("[1")
    start(tmp_path / "damaged", f"ckpt_load_path={folder}", *SHORT, model=MODEL)
    assert "generation_config.json: it is empty or no JSON object" in caplog.text
