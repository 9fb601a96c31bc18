"""`pretrain prepare` in a job, over the processes of a machine, and after a kill."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from unit.tools.prepare.prepare_files import (
    contents,
    json_lines,
    made_elsewhere,
    packed,
    prepare_config,
    prepare_killed,
)

from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import DataError
from pretraining.launch.layout import ProcessLayout
from pretraining.tools.command_settings import PrepareConfig
from pretraining.tools.prepare import encode, units
from pretraining.tools.prepare import prepare as run
from pretraining.tools.prepare.encode import Report
from pretraining.tools.prepare.prepare import prepare
from pretraining.tools.prepare.records import PrepareCounts, PrepareSummary

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
    for rank, number in enumerate((11, 6, 4)):
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


# The processes of a machine


@pytest.fixture
def pooled(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> PrepareConfig:
    """Two threads, and a process per thread."""
    train_tokenizer(TEXTS, 300).save(Path(config.input_path[0]).parent)
    for encoder in ("fastokens", "tokenizers"):
        monkeypatch.setitem(encode.THREADS_PER_PROCESS, encoder, 1)
    root = str(Path(config.input_path[0]).parent)
    return replace(config, vocab_size=None, tokenizer_path=root, num_workers=2)


def report_to(report: Report, patch: pytest.MonkeyPatch) -> None:
    """Call a function whenever `prepare` counts what was done."""
    encode_units: Callable[..., None] = run.encode_units
    patch.setattr(run, "encode_units", lambda *args: encode_units(*args[:-1], report))


def test_an_error_in_a_process_is_the_error_of_the_call(pooled: PrepareConfig) -> None:
    good = Path(pooled.input_path[0]).read_bytes()
    Path(pooled.input_path[0]).write_bytes(good + b"nonsense\n")
    with pytest.raises(DataError) as error:
        prepare(pooled)
    assert re.search("in.jsonl from byte .*--bad_records=skip", str(error.value)) and error.value.row is not None
    assert not multiprocessing.active_children()


def test_a_killed_worker_fails_the_call(pooled: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    def kill_one(counts: PrepareCounts) -> None:
        if not killed:
            killed.append(multiprocessing.active_children()[0].pid or 0)
            os.kill(killed[0], signal.SIGKILL)

    report_to(kill_one, monkeypatch)
    with pytest.raises(DataError) as error:
        prepare(pooled)
    assert error.value.settings == ("num_workers",)
    assert not multiprocessing.active_children()


def test_an_interrupt_stops_all_processes_and_the_next_call_resumes(
    pooled: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(counts: PrepareCounts) -> None:
        if counts.documents:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        report_to(interrupt, patch)
        with pytest.raises(KeyboardInterrupt):
            prepare(pooled)
    assert not multiprocessing.active_children()
    assert len(prepare(pooled).files) == 8
    monkeypatch.setattr(encode, "ProcessPoolExecutor", pytest.fail)  # which threads do not need
    assert contents(pooled.output_path) == made_elsewhere(pooled, num_workers=1)


# After a kill the same call continues: nothing is lost, nothing is doubled, nothing is encoded again

KILLED = [f"Document {n} of a call that is killed. " * (n % 5) for n in range(60)]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrepareConfig:
    """An input of several units, of which some give several files, and one none."""
    monkeypatch.setattr(units, "UNIT_BYTES", 1500)
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 100)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # the power stays on
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(json_lines(KILLED))
    (tmp_path / "in/b.jsonl.gz").write_bytes(packed("b.gz", json_lines(KILLED)))
    (tmp_path / "in/c.txt").write_text(" " * 2000)
    (tmp_path / "in/c.jsonl").write_bytes(json_lines([""] * 120))
    return prepare_config(tmp_path, "in", tokens_per_file=300, num_workers=1)


def whole_files(config: PrepareConfig) -> dict[str, int]:
    """Inodes of the token files that done files name."""
    work = Path(config.output_path) / ".in.preparing"
    records = [json.loads(path.read_text()) for path in work.glob("unit_*.json")]
    names = [file["name"] for record in records for file in record["files"]]
    return {name: (work / "files" / name).stat().st_ino for name in names if (work / "files").exists()}


@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["before", "after", "writing"])
def test_a_preparation_killed_at_any_moment_is_resumed(small: PrepareConfig, moment: str) -> None:
    wanted = made_elsewhere(small)
    assert len(wanted) > 9
    kept_at_best = 0
    for number in count(1):
        there = replace(small, output_path=f"{small.output_path}_{number}")
        if not prepare_killed(there, moment, number):
            break
        kept = whole_files(there)
        prepare(there)
        assert contents(there.output_path) == wanted
        now = {name: (Path(there.output_path) / "in" / name).stat().st_ino for name in kept}
        assert now == kept, "whole files are not made again"
        kept_at_best = max(kept_at_best, len(kept))
    assert number > 8 and kept_at_best > 5


def test_a_full_disk_is_one_error_and_keeps_complete_units(
    small: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = made_elsewhere(small)
    write_record, written = run.WorkFolder.write_record, 0

    def full(*args: object) -> None:
        nonlocal written
        written += 1
        if written > 3:
            raise OSError(28, "No space left on device")
        write_record(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run.WorkFolder, "write_record", full)
    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        prepare(small)
    monkeypatch.setattr(run.WorkFolder, "write_record", write_record)
    assert len(whole_files(small)) == 3
    prepare(small)
    assert contents(small.output_path) == wanted


DAMAGES = ["files/part_000000_000000.arrow", "unit_000000.json", "plan.json", "tokenizer.json"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_units_damaged_on_disk_are_redone_and_files_of_other_calls_are_ignored(
    small: PrepareConfig, damage: str
) -> None:
    wanted, work = made_elsewhere(small), Path(small.output_path) / ".in.preparing"
    assert prepare_killed(small, "after", 14)
    for name in (damage, "files/part_000099_000000.arrow", "files/.part_000000_000000.arrow.x.1.tmp"):
        (work / name).write_text("[")
    prepare(small)
    assert contents(small.output_path) == wanted


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
