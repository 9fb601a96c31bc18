"""How often a run reads each dataset: logged by its start, a dry run and a plan, for the whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_runs import TINY, write_dataset
from unit.train.whole_runs import start

from pretraining.cli import main
from pretraining.text import describe_passes, describe_repeats

LONG = ("num_steps=80", "run_steps=1", "seq_length=32", "batch_size=2", "logical_shards=4")
TOKENS = 80 * 2 * 32


def reads(messages: list[str]) -> dict[str, tuple[str, int, float]]:
    """Return share, tokens and passes by dataset from the lines of a start."""
    rows = [words for line in messages if "tokens" in (words := line.split()) and words[-1] == "passes"]
    return {row[-6]: (row[-5], int(row[-4].replace(",", "")), float(row[-2].replace(",", ""))) for row in rows}


def test_a_small_dataset_that_is_read_often_is_logged_with_a_warning_by_start_and_dry_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pretraining")
    for name, documents in (("large", 400), ("small", 3)):
        write_dataset(tmp_path / "data" / name, documents)
    data = f"data_path={tmp_path / 'data'}"
    for flags in ([], ["dry_run=true", f"ckpt_save_path={tmp_path / 'other'}"]):
        caplog.clear()
        start(tmp_path / "run", data, *LONG, "datasets=large,small", "weights=1,1", *flags)
        found = reads(caplog.messages)
        assert list(found) == ["small", "large"]
        assert found["small"][:2] == ("50.0%", TOKENS // 2) and found["small"][2] > 10 > 1 > found["large"][2]
        (warning,) = [line for line in caplog.messages if "after 4 passes" in line]
        assert f"small ({found['small'][2]} passes)" in warning and "large" not in warning


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    main(["plan", *TINY[:6], "num_steps=80", "seq_length=32", "batch_size=2", "--gpu=h100", "--gpus=1", *flags])
    return capsys.readouterr().out.splitlines()


def test_a_plan_knows_what_prepare_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lines in (("large", 400), ("small", 2)):
        text = tmp_path / f"{name}.jsonl"
        text.write_text("".join(json.dumps({"text": f"a text with words, number {n}"}) + "\n" for n in range(lines)))
        main(["prepare", f"--input_path={text}", f"--output_path={tmp_path / 'data'}", "--vocab_size=300"])
    data = f"data_path={tmp_path / 'data'}"
    capsys.readouterr()
    found = reads(plan(capsys, data, "datasets=large,small", "weights=1,1"))
    assert found["small"][:2] == ("50.0%", TOKENS // 2) and found["small"][2] == pytest.approx(
        200 * found["large"][2], 0.2
    )
    by_tokens = plan(capsys, data, "held_out_fraction=0.5")
    assert len(reads(by_tokens)) == 2 and any("after 4 passes" in line for line in by_tokens) is False
    assert not reads(plan(capsys, data, "num_steps=2ep")) and not reads(plan(capsys, "data_path=/nowhere"))


def test_many_datasets_are_a_few_lines() -> None:
    passes = {f"d{number}": float(number) for number in range(20)}
    lines = describe_passes(dict.fromkeys(passes, 1000), passes)
    assert len(lines) == 9 and lines[0].split()[0] == "d19" and lines[-1] == "and 12 more, at most 11.0 passes each"
    repeats = describe_repeats(passes)
    assert "d19 (19.0 passes), d18 (18.0 passes)" in repeats and "and 11 more" in repeats
    assert describe_repeats({"a": 4.0}) == ""
