"""Without a sep_token a new run takes that of its prepared data, and a resumed run keeps its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_runs import TINY, write_two_datasets

from pretraining.checkpoint.manifest import committed_checkpoints, read_manifest
from pretraining.cli import main
from pretraining.config.recipes import load_config


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two datasets; the first has a prepare.json."""
    write_two_datasets(tmp_path / "data")
    prepare(tmp_path / "data/first", 0)
    return tmp_path / "data"


def prepare(folder: Path, end_of_text: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "prepare.json").write_text(json.dumps({"tokenizer": {"end_of_text": end_of_text}}))


def flags(data: Path, run: Path, *more: str) -> list[str]:
    return [*TINY, f"data_path={data}", f"ckpt_save_path={run}", "num_steps=4", "logical_shards=8", *more]


def separator_of(run: Path) -> int | None:
    (*_, newest) = committed_checkpoints(run)
    separator = read_manifest(newest).data["sep_token"]
    assert separator == load_config(run / "config.yaml").data.sep_token
    assert separator is None or isinstance(separator, int)
    return separator


def test_a_new_run_takes_the_end_of_text_of_its_prepared_data_and_dry_run_and_inspect_show_the_same(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = flags(data, tmp_path / "run", "batch_size=2")
    main(["train", *asked, "dry_run=true"])
    shown = capsys.readouterr().out
    assert f"sep_token   0, the end_of_text of prepare.json in {data}/first" in shown
    assert any(line.split()[:2] == ["sep_token", "0"] for line in shown.splitlines())
    spans = []
    for given in ([], ["sep_token=0"]):
        main(["inspect", *asked, *given, "step=1", "json=true"])
        spans.append(capsys.readouterr().out)
    assert spans[0] == spans[1]
    main(["train", *asked, "run_steps=2"])
    assert "the end_of_text of prepare.json" in capsys.readouterr().out
    assert separator_of(tmp_path / "run") == 0
    (data / "first/prepare.json").unlink()  # the run has its own now
    main(["train", *asked])
    assert "end_of_text" not in capsys.readouterr().out
    assert separator_of(tmp_path / "run") == 0


def test_a_run_that_began_without_a_separator_goes_on_without(data: Path, tmp_path: Path) -> None:
    (data / "first/prepare.json").unlink()
    asked = flags(data, tmp_path / "run")
    main(["train", *asked, "run_steps=2"])
    prepare(data / "first", 0)
    main(["train", *asked])
    assert separator_of(tmp_path / "run") is None


def test_a_run_in_a_folder_with_a_timestamp_is_found_again(data: Path, tmp_path: Path) -> None:
    for _ in range(2):
        main(["train", *flags(data, tmp_path / "run.{timestamp}", "run_steps=2")])
    (run,) = tmp_path.glob("run.*")
    assert read_manifest(committed_checkpoints(run)[-1]).step == 4


def test_evaluation_folders_count_where_nothing_is_trained(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = tmp_path / "run", ["weights_only=true", f"ckpt_load_path={tmp_path / 'exported'}"]
    main(["train", *flags(data, run)])
    main(["export", f"ckpt_load_path={run}", f"output_path={tmp_path / 'exported'}"])
    capsys.readouterr()
    shape = [flag for flag in TINY if not flag.startswith(("learning", "tracker", "report", "progress"))]
    main(["train", *shape, *model[1:], "eval_only=true", f"eval_datasets={data / 'first'}", "logical_shards=8"])
    shown = capsys.readouterr()
    assert f"sep_token   0, the end_of_text of prepare.json in {data / 'first'}" in shown.out + shown.err


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (2, ["data/first: 0, ", "data/second: 2", "--sep_token"]),
        ("x", ["data/second/prepare.json", "--sep_token"]),
        (-1, ["data/second/prepare.json", "--sep_token"]),
    ],
)
def test_prepared_datasets_that_disagree_or_cannot_be_read_are_an_error_until_sep_token_is_given(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], written: object, said: list[str]
) -> None:
    prepare(data / "second", written)
    asked = flags(data, tmp_path / "run", "dry_run=true")
    with pytest.raises(SystemExit) as ending:
        main(["train", *asked])
    error = capsys.readouterr().err
    assert ending.value.code == 1 and all(part in error for part in said)
    main(["train", *asked, "sep_token=0"])
    main(["train", *asked, "datasets=first"])
