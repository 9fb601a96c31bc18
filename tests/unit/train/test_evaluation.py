"""Whole runs in this process that are evaluated: on several sets, by which the best is chosen, and where that ends."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from training_runs import TINY, VOCABULARY, write_dataset, write_two_datasets

from pretraining.checkpoint.manifest import read_manifest
from pretraining.cli import main
from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import Preempted

SETS = ("first", "second", "books")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two datasets to train on, and a folder of another one."""
    write_dataset(tmp_path / "books", documents=50, seed=2)
    return write_two_datasets(tmp_path / "data")


def flags(data: Path, *more: str) -> list[str]:
    given = ["num_steps=4", f"data_path={data}", "sep_token=0", "logical_shards=8", "eval_interval=2", "eval_batches=2"]
    given += ["held_out_fraction=0.2", f"eval_datasets={data.parent}/books", "global_batch_size=4", *more]
    names = {flag.partition("=")[0] for flag in given}
    return [*(flag for flag in TINY if flag.partition("=")[0] not in names), *given]


def start(run: Path, data: Path, *more: str) -> None:
    main(["train", *flags(data, f"ckpt_save_path={run}", *more)])


def evaluations(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "evaluation_loss" in line]


def refusal(run: Path, data: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What a start that is refused says."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        start(run, data, *more)
    assert ended.value.code == 1
    return capsys.readouterr().err


def status(run: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run / "run_status.json").read_text())
    return document


def evaluated(run: Path, data: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    """What `--eval_only` prints as JSON, behind a table with a line a set."""
    capsys.readouterr()
    start(run, data, "eval_only=true", *more)
    *_, last = lines = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(last)
    begin = next(number for number, line in enumerate(lines) if line.startswith("set "))
    assert [line.split()[0] for line in lines[begin + 1 : -1]] == [*found["sets"], "mean"]
    return found


def test_each_set_has_loss_perplexity_and_accuracy_and_the_mean_is_over_their_tokens(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    start(run, data)
    assert "evaluation on first, second, books; the mean over their tokens says which" in capsys.readouterr().out
    for line in evaluations(run):
        for name in ("", *(f"/{each}" for each in SETS)):
            assert 0 < line[f"evaluation_loss{name}"] < 5 and 0 <= line[f"evaluation_token_accuracy{name}"] <= 1
            assert line[f"evaluation_perplexity{name}"] == pytest.approx(math.exp(line[f"evaluation_loss{name}"]))
        assert not any("bits" in name for name in line)
    last = evaluations(run)[-1]
    found = evaluated(run, data, capsys)
    tokens = {name: found["sets"][name]["tokens"] for name in SETS}
    assert tokens["first"] + tokens["second"] == tokens["books"] == 2 * 4 * 32
    mean = sum(tokens[name] * last[f"evaluation_loss/{name}"] for name in SETS) / sum(tokens.values())
    assert last["evaluation_loss"] == pytest.approx(mean, rel=1e-6)
    assert read_manifest(run / "checkpoints" / "step_4_ckp").evaluation_loss == last["evaluation_loss"]


def test_evaluating_alone_finds_what_the_run_found_and_writes_nothing(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    start(run, data)
    last = evaluations(run)[-1]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    main(["export", str(run), f"output_path={tmp_path}/exported", "dtype=float32"])
    places = (run, run / "checkpoints/best", run / "checkpoints/step_4_ckp", tmp_path / "exported")
    for place in places:
        found = evaluated(tmp_path / "unused", data, capsys, f"ckpt_load_path={place}")
        assert found["evaluation_loss"] == pytest.approx(last["evaluation_loss"], rel=1e-6), place
        for name in SETS:
            assert found["sets"][name]["loss"] == pytest.approx(last[f"evaluation_loss/{name}"], rel=1e-6)
            assert found["sets"][name]["token_accuracy"] == last[f"evaluation_token_accuracy/{name}"]
    assert evaluated(run, data, capsys)["step"] == 4
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert not (tmp_path / "unused").exists()


def test_an_export_is_evaluated_without_training_data(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "run", data)
    main(["export", f"{tmp_path}/run", f"output_path={tmp_path}/exported", "dtype=float32"])
    capsys.readouterr()
    alone = [f"eval_datasets={tmp_path}/books,{data}/first", f"ckpt_load_path={tmp_path}/exported"]
    settings = ["eval_only=true", "seq_length=32", "sep_token=0", "logical_shards=8", "mixed_precision=false"]
    main(["train", *alone, *settings])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["sets"].keys() == {"books", "first"} and found["step"] == 0


def test_with_a_tokenizer_there_are_bits_a_byte(data: Path, tmp_path: Path) -> None:
    train_tokenizer(["a tokenizer of some words, and words of a tokenizer " * 9], 300).save(tmp_path)
    run = tmp_path / "run"
    more = (f"tokenizer_path={tmp_path}", "vocab_size=300", "sample_tokens=0", "num_steps=2")
    start(run, data, *more)
    (line,) = evaluations(run)
    # Ids below 257 are the end of text and single bytes, so there are fewer bytes than tokens.
    for name in ("", *(f"/{each}" for each in SETS)):
        assert line[f"evaluation_bits_per_byte{name}"] > line[f"evaluation_loss{name}"] / math.log(2)


def test_a_tokenizer_larger_than_the_model_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_tokenizer(["a tokenizer"], 300).save(tmp_path)
    said = refusal(tmp_path / "run", data, capsys, f"tokenizer_path={tmp_path}", "sample_tokens=0")
    assert f"more than the model's {VOCABULARY}" in said


def test_the_best_checkpoint_is_that_of_the_set_that_decides(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    start(run, data, "best_by=books")
    manifest = read_manifest(run / "checkpoints" / "step_4_ckp")
    assert manifest.evaluation_loss == evaluations(run)[-1]["evaluation_loss/books"]
    assert manifest.decided_by == ("books",) and manifest.best_evaluation_loss is not None
    # Another set decides from here on: what was best before does not count.
    start(run, data, "best_by=first", "num_steps=6", "eval_interval=6", "learning_rate=1e-30")
    said = capsys.readouterr().out
    assert "the loss of books decided which checkpoint is best; from here on it is that of first" in said
    last = read_manifest(run / "checkpoints" / "step_6_ckp")
    assert last.evaluation_loss == last.best_evaluation_loss == evaluations(run)[-1]["evaluation_loss/first"]
    assert (run / "checkpoints" / "best").resolve().name == "step_6_ckp"


@pytest.mark.thorough
def test_a_run_stops_early_and_says_so_and_goes_on_when_it_is_told_to(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, still = tmp_path / "run", ("early_stopping_evaluations=2", "num_steps=20", "learning_rate=0")
    start(run, data, *still, "run_steps=4")  # nothing is learned: the first is the best
    assert status(run)["status"] == "finished" and "as many as --run_steps" in status(run)["reason"]
    start(run, data, *still)
    reason = "no loss below"
    assert f"Stopped early at step 6 of 20: {reason}" in capsys.readouterr().out
    assert status(run)["status"] == "finished" and f"stopped early at step 6 of 20: {reason}" in status(run)["reason"]
    assert read_manifest(run / "checkpoints" / "step_6_ckp").kind == "final"
    start(run, data, *still)
    assert "nothing was trained. It stopped early: no loss below" in capsys.readouterr().out
    assert status(run)["step"] == 6
    start(run, data, *still[1:], "early_stopping_evaluations=0", "run_steps=2")
    assert status(run)["step"] == 8


def test_the_end_of_a_run_that_stops_early_is_reported(data: Path, tmp_path: Path) -> None:
    start(tmp_path, data, "early_stopping_evaluations=2", "num_steps=20", "learning_rate=0", "report_interval=4")
    lines = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [4, 6]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["best_by=boks"],
            r"--best_by=boks is no evaluation set; there are first, second, books; did you mean books\?",
        ),
        (["best_by=second", "weights=1000,1", "datasets=first,second"], "no sequence is of it. Give more --eval_batch"),
        (["eval_datasets=none/there"], "none/there: --eval_datasets names it"),
        (["seq_length=4096", "held_out_fraction=0", "datasets=first", "eval_batches=1"], "one sample takes"),
        (["eval_only=true", "ckpt_save_path=nothing/here"], "nothing/here holds no complete checkpoint"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert re.search(message, refusal(tmp_path / "run", data, capsys, *more))


def test_a_name_on_the_hub_is_evaluated(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        return str(tmp_path / "nothing")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    said = refusal(tmp_path / "run", data, capsys, "eval_only=true", "ckpt_load_path=someone/model")
    assert asked == ["someone/model"] and str(tmp_path / "nothing") in said


def test_documents_that_the_run_was_trained_on_are_not_evaluated_as_held_out(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "run", data, "num_steps=1")
    said = refusal(tmp_path / "run", data, capsys, "eval_only=true", "held_out_fraction=0.5")
    assert "--held_out_fraction=0.5: the run has held out 0.2" in said and "Give --held_out_fraction=0.2" in said


def test_evaluating_alone_passes_over_a_damaged_checkpoint(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    start(run, data, "checkpoint_interval=2")
    (shard,) = (run / "checkpoints/step_4_ckp").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    assert evaluated(run, data, capsys)["step"] == 2


def test_a_set_that_gets_no_sequence_is_named_and_has_no_numbers(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "run", data, "weights=1000,1", "datasets=first,second", "num_steps=2")
    assert "evaluation set second gets no sequence of --eval_batches=2" in capsys.readouterr().out
    (line,) = evaluations(tmp_path / "run")
    assert line["evaluation_loss/second"] is None and line["evaluation_loss"] > 0


def test_a_time_limit_ends_an_evaluation_alone_and_nothing_is_printed(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "run", data, "num_steps=1")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        start(tmp_path / "run", data, "eval_only=true", "time_limit=0.001s")
    printed = capsys.readouterr()
    assert ended.value.code == Preempted.exit_code and "evaluation_loss" not in printed.out
    assert "Preempted in an evaluation (the time limit is near): nothing was written." in printed.err
