"""`pretrain prepare` in a job, a share per process; tests/distributed/test_launchers.py starts real ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.tools.prepare.killed_prepare import prepare_killed
from unit.tools.prepare.prepare_files import contents, json_lines, made_elsewhere, prepare_config

from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import DataError
from pretraining.launch.layout import ProcessLayout
from pretraining.tools.commands import PrepareConfig
from pretraining.tools.prepare import prepare as run
from pretraining.tools.prepare import units
from pretraining.tools.prepare.prepare import prepare
from pretraining.tools.prepare.records import PrepareSummary

TEXTS = [f"Document {n} for several machines. " * 9 for n in range(60)]


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 2500)
    monkeypatch.setattr(run, "PLAN_SECONDS", 0)


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
    """An input of eight units."""
    (tmp_path / "in.jsonl").write_bytes(json_lines(TEXTS))
    return prepare_config(tmp_path, vocab_size=280)


def layout(rank: int, size: int) -> ProcessLayout:
    return ProcessLayout(rank, size, rank, size, "torchrun", "", 0)


def ranks(config: PrepareConfig, size: int, *order: int) -> list[PrepareSummary | None]:
    """Runs processes of a job, one after the other."""
    return [prepare(config, layout(rank, size)) for rank in order]


def test_any_number_of_processes_writes_the_same_bytes_and_the_last_one_finishes(
    config: PrepareConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = made_elsewhere(config)
    capsys.readouterr()
    first, *others, last = ranks(config, 9, 0, 8, *range(1, 8))  # rank 8 has no unit
    assert first is None and set(others) == {None}
    assert last is not None and contents(config.output_path) == wanted
    assert capsys.readouterr().out.count("Train on it with") == 1
    assert None not in ranks(config, 2, 1, 0)  # which is finished
    assert capsys.readouterr().out.count("Train on it with") == 1 and contents(config.output_path) == wanted


def test_a_killed_job_resumes_with_another_number_of_processes(config: PrepareConfig) -> None:
    wanted = made_elsewhere(config)
    for rank, number in enumerate((8, 4, 3)):
        assert prepare_killed(config, "before", number, layout(rank, 3))
    assert 2 < len(list(Path(config.output_path).glob(".in.preparing/unit_*"))) < 8
    assert ranks(config, 2, 0, 1)[0] is None
    assert contents(config.output_path) == wanted


def test_a_failed_process_leaves_the_dataset_unfinished_until_a_resume(config: PrepareConfig) -> None:
    good = Path(config.input_path[0]).read_bytes()
    lines = good.splitlines(keepends=True)
    lines[10] = lines[10].replace(b"{", b"!")  # in the second unit, which rank 1 takes
    Path(config.input_path[0]).write_bytes(b"".join(lines))
    Path(config.output_path).mkdir()
    train_tokenizer(TEXTS, 280).save(Path(config.output_path))  # rank 0 would find the line in training one
    assert ranks(config, 3, 0, 2) == [None, None]
    with pytest.raises(DataError) as error:
        ranks(config, 3, 1)
    assert error.value.rank == 1 and error.value.row is not None
    assert not Path(config.output_path, "in").exists()
    Path(config.input_path[0]).write_bytes(good)
    assert ranks(config, 1, 0) != [None]


def test_without_the_plan_of_rank_0_a_process_does_not_wait_for_ever(config: PrepareConfig) -> None:
    with pytest.raises(DataError) as error:
        ranks(config, 2, 1)
    assert error.value.rank == 1 and error.value.settings == ("output_path",)
    assert ranks(config, 2, 0) == [None]
    with pytest.raises(DataError):
        ranks(replace(config, tokens_per_file=7), 2, 1)
    assert ranks(config, 2, 1) != [None]


def test_rank_0_chooses_the_encoder(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    choose = run.choose_encoder

    def watched(tokenizer: Any, encoder: Any) -> Any:
        asked.append(encoder)
        return choose(tokenizer, encoder)

    monkeypatch.setattr(run, "choose_encoder", watched)
    ranks(config, 3, 0, 1)
    plan = json.loads(Path(config.output_path, ".in.preparing", "plan.json").read_text())
    assert asked == ["auto", plan["encoding"]["encoder"]] and plan["encoding"]["encoder"] != "auto"


def test_of_two_that_find_all_done_at_once_one_finishes(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = made_elsewhere(config)
    make_manifest, summaries = run.manifest, []

    def overtaken(*args: Any) -> str:
        monkeypatch.setattr(run, "manifest", make_manifest)
        summaries.extend(ranks(config, 1, 0))
        return make_manifest(*args)

    monkeypatch.setattr(run, "manifest", overtaken)
    assert ranks(config, 1, 0) == [None]
    assert summaries != [None] and contents(config.output_path) == wanted
