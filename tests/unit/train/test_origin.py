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
from unit.train.whole_runs import refusal, start

from pretraining.cli import main
from pretraining.errors import CheckpointError

MODEL = [flag for flag in TINY if flag.partition("=")[0] in ("batch_size", "report_interval", "learning_rate")]
SHORT = ("num_steps=1", "seq_length=16")
TOKENS = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 5}
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.1}


def model_folder(folder: Path, generation: dict[str, Any] | None = None, **config: Any) -> Path:
    """Write a Hugging Face folder as people publish them."""
    single(folder, shape=replace(SHAPES["plain"], vocab_size=64))
    document = json.loads((folder / "config.json").read_text())
    own = {"initializer_range": 0.01, "use_cache": False, "pretraining_tp": 1, "max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps({**document, **TOKENS, **own, **config}))
    given = (
        {**TOKENS, **SAMPLING, "max_length": 32, "transformers_version": "4.40.0"} if generation is None else generation
    )
    (folder / "generation_config.json").write_text(json.dumps(given))
    return folder


def exported(run: Path | str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Export, and return config.json and generation_config.json."""
    shutil.rmtree(folder, ignore_errors=True)
    main(["export", str(run), f"--output_path={folder}"])
    config, generation = (json.loads((folder / name).read_text()) for name in ("config.json", "generation_config.json"))
    return config, generation


def test_an_import_and_a_start_from_the_folder_record_the_same_and_exports_keep_it(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    main(["import", str(folder), f"--ckpt_save_path={tmp_path / 'imported'}"])
    start(tmp_path / "run", f"ckpt_load_path={folder}", *SHORT, model=MODEL)
    records = [(tmp_path / name / "imported.json").read_bytes() for name in ("imported", "run")]
    assert records[0] == records[1]
    for name in ("imported", "run"):
        config, generation = exported(tmp_path / name, tmp_path / "out")
        kept = {"initializer_range": 0.01, "use_cache": False, "pretraining_tp": 1, **TOKENS}
        assert {each: config[each] for each in kept} == kept
        assert generation == {**TOKENS, **SAMPLING, "max_length": 32}


def test_transformers_reads_the_kept_values_from_an_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    start(tmp_path / "run", f"ckpt_load_path={model_folder(tmp_path / 'm')}", *SHORT, model=MODEL)
    exported(tmp_path / "run", tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    read = model.generation_config.to_dict()
    assert {name: read[name] for name in (*TOKENS, *SAMPLING)} == {**TOKENS, **SAMPLING}
    assert (model.config.initializer_range, model.config.pad_token_id) == (0.01, 5)


def test_a_resume_never_writes_the_record_and_a_run_without_one_exports_as_before(tmp_path: Path) -> None:
    folder, run = model_folder(tmp_path / "m"), tmp_path / "run"
    start(run, f"ckpt_load_path={folder}", *SHORT, model=MODEL)
    (run / "imported.json").unlink()
    start(run, f"ckpt_load_path={folder}", "num_steps=2", "seq_length=16", model=MODEL)
    assert not (run / "imported.json").exists()
    config, generation = exported(run, tmp_path / "out")
    assert (config["bos_token_id"], config["eos_token_id"], config["initializer_range"]) == (None, None, 0.02)
    assert set(generation) == set(TOKENS)
    # A record of an earlier version has tokens, license and name alone.
    (run / "imported.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, "license": None}))
    config, generation = exported(run, tmp_path / "out")
    assert (config["eos_token_id"], generation["eos_token_id"], set(generation)) == (2, 2, set(TOKENS))


def test_a_new_run_in_the_folder_of_one_that_saved_nothing_records_its_own_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for load, is_recorded in ((f"ckpt_load_path={model_folder(tmp_path / 'm')}", True), ("init_from=scratch", False)):
        start(run, load, *SHORT, *([] if is_recorded else TINY), model=MODEL)
        assert (run / "imported.json").exists() is is_recorded
        shutil.rmtree(run / "checkpoints")


@pytest.mark.parametrize("flags", [[], ["weights_only=true"]])
def test_the_record_goes_along_into_other_runs_and_full_exports(flags: list[str], tmp_path: Path) -> None:
    first, whole, second = tmp_path / "first", tmp_path / "whole", tmp_path / "second"
    start(first, f"ckpt_load_path={model_folder(tmp_path / 'm')}", *SHORT, model=MODEL)
    main(["export", str(first), f"--output_path={whole}", "--format=full"])
    for source in (first, first / "checkpoints/step_1_ckp", whole):
        start(second, f"ckpt_load_path={source}", "num_steps=2", "seq_length=16", *flags, model=MODEL)
        assert exported(second, tmp_path / "out")[1] == {**TOKENS, **SAMPLING, "max_length": 32}
        shutil.rmtree(second)
    aside = first / "checkpoints/set_aside_20261122-101500-417306"
    aside.mkdir()
    (first / "checkpoints/step_1_ckp").rename(aside / "step_1_ckp")
    assert exported(aside / "step_1_ckp", tmp_path / "out")[0]["eos_token_id"] == [2, 3]


def test_the_record_outlives_the_disks_of_a_run_with_a_mirror(tmp_path: Path) -> None:
    run, mirror = tmp_path / "run", f"file://{tmp_path}/store/mine"
    flags = [f"ckpt_load_path={model_folder(tmp_path / 'm')}", "seq_length=16", f"ckpt_mirror_path={mirror}"]
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


def test_a_link_out_of_the_folder_is_no_generation_config(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (tmp_path / "private.json").write_text('{"token": "secret"}')
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to(tmp_path / "private.json")
    error = refusal(tmp_path / "run", f"ckpt_load_path={folder}", *SHORT, model=MODEL)
    assert "leads out of its folder" in str(error) and not (tmp_path / "run/imported.json").exists()


@pytest.mark.parametrize("content", ["{", "[1]", '{"config": 3}'])
def test_a_damaged_record_is_an_error_of_the_export(content: str, tmp_path: Path) -> None:
    start(tmp_path / "run", f"ckpt_load_path={model_folder(tmp_path / 'm')}", *SHORT, model=MODEL)
    (tmp_path / "run/imported.json").write_text(content)
    with pytest.raises(SystemExit) as ending:
        exported(tmp_path / "run", tmp_path / "out")
    assert isinstance(ending.value.__context__, CheckpointError) and "Delete it" in str(ending.value.__context__)
