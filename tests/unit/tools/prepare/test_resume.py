"""After a kill the same call continues: nothing is lost, nothing is doubled, nothing is encoded again."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from unit.tools.prepare.killed_prepare import prepare_killed
from unit.tools.prepare.prepare_files import contents, json_lines, made_elsewhere, packed, prepare_config

from pretraining.errors import DataError
from pretraining.tools.commands import PrepareConfig
from pretraining.tools.prepare import encode, units, vocabulary
from pretraining.tools.prepare import prepare as run
from pretraining.tools.prepare.prepare import prepare

TEXTS = [f"Document {n} of a call that is killed. " * (n % 5) for n in range(60)]


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 1500)
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 100)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # the power stays on


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
    """An input of several units, of which some give several files, and one none."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(json_lines(TEXTS))
    (tmp_path / "in/b.jsonl.gz").write_bytes(packed("b.gz", json_lines(TEXTS)))
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
def test_a_preparation_killed_at_any_moment_is_resumed(config: PrepareConfig, moment: str) -> None:
    wanted = made_elsewhere(config)
    assert len(wanted) > 9
    kept_at_best = 0
    for number in count(1):
        there = replace(config, output_path=f"{config.output_path}_{number}")
        if not prepare_killed(there, moment, number):
            break
        kept = whole_files(there)
        prepare(there)
        assert contents(there.output_path) == wanted
        now = {name: (Path(there.output_path) / "in" / name).stat().st_ino for name in kept}
        assert now == kept, "whole files are not made again"
        kept_at_best = max(kept_at_best, len(kept))
    assert number > 8 and kept_at_best > 5


def test_a_preparation_killed_repeatedly_finishes_with_one_tokenizer_training(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = made_elsewhere(config)
    kills = 0
    for moment in ("after", "before", "writing") * 9:
        if not prepare_killed(config, moment, 5):
            break
        kills += 1
    assert kills > 3
    monkeypatch.setattr(vocabulary, "train_tokenizer", pytest.fail)
    prepare(config)
    assert contents(config.output_path) == wanted


def test_a_full_disk_is_one_error_and_keeps_complete_units(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = made_elsewhere(config)
    write_record, written = run.WorkFolder.write_record, 0

    def full(*args: object) -> None:
        nonlocal written
        written += 1
        if written > 3:
            raise OSError(28, "No space left on device")
        write_record(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run.WorkFolder, "write_record", full)
    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        prepare(config)
    monkeypatch.setattr(run.WorkFolder, "write_record", write_record)
    assert len(whole_files(config)) == 3
    prepare(config)
    assert contents(config.output_path) == wanted


DAMAGES = ["files/part_000000_000000.arrow", "unit_000000.json", "plan.json", "tokenizer.json"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_units_damaged_on_disk_are_redone_and_files_of_other_calls_are_ignored(
    config: PrepareConfig, damage: str
) -> None:
    wanted, work = made_elsewhere(config), Path(config.output_path) / ".in.preparing"
    assert prepare_killed(config, "after", 14)
    for name in (damage, "files/part_000099_000000.arrow", "files/.part_000000_000000.arrow.x.1.tmp"):
        (work / name).write_text("[")
    prepare(config)
    assert contents(config.output_path) == wanted
