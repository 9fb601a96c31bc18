"""A run that diverges for good goes back without the batches, and what it trained on can still be shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from faulty_runs import ALL, Ended, batches_of, train, train_each
from tiers import first_quick
from training_runs import events_of, reports_of, write_two_datasets

from pretraining.cli import main
from pretraining.config.recipe_files import load_config
from pretraining.data.resume import restored_mixture

GLOBAL_BATCH = 4
LEFT_OUT = range(7 * GLOBAL_BATCH, 10 * GLOBAL_BATCH)  # those of steps 8, 9 and 10
GUARDS = ["max_skipped_steps=3", "spike_threshold=6", "spike_window=8", "max_rollbacks=2"]
EXPLODES = (ALL, "learning_rate_explodes", 7)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs and of data to learn from."""
    place = tmp_path_factory.mktemp("rollback")
    write_two_datasets(place / "data")
    (place / "notes").mkdir()
    return place


def flags_of(run: Path, interval: int, *more: str) -> list[str]:
    data = [f"data_path={run.parent / 'data'}", "sep_token=0", "logical_shards=8"]
    return [*data, *GUARDS, f"checkpoint_interval={interval}", f"ckpt_save_path={run}", *more]


@pytest.fixture(scope="module")
def ended(place: Path) -> list[list[Ended]]:
    """A run that is mended by going back, and one that is not."""
    return train_each(
        [
            (flags_of(place / "mended", 3, "num_steps=15"), [EXPLODES, (ALL, "note_batches", str(place / "notes"))]),
            (flags_of(place / "lost", 2, "num_steps=30"), [(1, "spoil_objective", 3, 30, "times NaN")]),
        ]
    )


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())
    return document


def skipped_in(run: Path) -> dict[str, list[list[int]]]:
    """The numbers within their datasets of the samples that are left out, as a run without a rollback has them."""
    mixture = restored_mixture(manifest_of(run / "checkpoints" / "step_3_ckp")["data"])
    numbers = mixture.numbers([(LEFT_OUT.start, LEFT_OUT.stop)])
    return {name: [list(each) for each in ranges] for name, ranges in sorted(numbers.items())}


def inspect(capsys: pytest.CaptureFixture[str], run: Path, step: int) -> list[dict[str, Any]]:
    """The samples of a step, as `pretrain inspect` shows them."""
    capsys.readouterr()
    main(["inspect", f"ckpt_load_path={run}", f"step={step}", "json=true", "tokens=true"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_run_rolls_back_and_finishes_without_the_batches(place: Path, ended: list[list[Ended]]) -> None:
    assert [each.status for each in ended[0]] == [0, 0]
    reports = reports_of(place / "mended")
    assert [report["step"] for report in reports] == list(range(1, 16))
    assert not any(report["skipped_updates"] for report in reports)
    assert max(report["loss"] for report in reports) < 6
    skipped = skipped_in(place / "mended")
    saved = {step: manifest_of(place / "mended" / "checkpoints" / f"step_{step}_ckp") for step in (3, 6, 9, 12, 15)}
    # Step 6 is saved again, so that no start forgets what is left out; step 3 is from before.
    assert [manifest["data"]["skipped"] for manifest in saved.values()] == [{}, *[skipped] * 4]


def test_the_event_log_has_the_skipped_samples_and_the_target_of_the_rollback(
    place: Path, ended: list[list[Ended]]
) -> None:
    events = events_of(place / "mended")
    kinds = [event["event"] for event in events if event["event"] not in ("checkpoint", "phase")]
    assert kinds == ["start", "skip", "skip", "skip", "restore", "rollback", "end"]
    skips = [(event["step"], event["in_a_row"]) for event in events if event["event"] == "skip"]
    assert skips == [(8, 1), (9, 2), (10, 3)]
    back = next(event for event in events if event["event"] == "rollback")
    assert (back["step"], back["first_step"], back["samples"]) == (10, 8, [LEFT_OUT.start, LEFT_OUT.stop - 1])
    assert back["checkpoints_dropped"] == [str(place / "mended" / "checkpoints" / "step_9_ckp")]
    restored = next(event for event in events if event["event"] == "restore")
    assert restored["step"] == 6 and restored["checkpoint"].endswith("step_6_ckp")
    saved = [event["step"] for event in events if event["event"] == "checkpoint"]
    assert saved == [3, 6, 9, 6, 9, 12, 15]  # that of the time before the rollback stays


def test_a_rollback_is_no_start_and_changes_no_settings(place: Path, ended: list[list[Ended]]) -> None:
    (record,) = json.loads((place / "lost" / "logs" / "environment.json").read_text())
    assert (record["processes"], len(record["ranks"]), record["step"]) == (2, 2, 0)
    assert load_config(place / "mended" / "config.yaml").data.skip_samples == ()  # the same command finds its folder


def test_inspect_shows_the_samples_of_every_step_after_a_rollback(
    place: Path, ended: list[list[Ended]], capsys: pytest.CaptureFixture[str]
) -> None:
    trained = batches_of(place / "notes")  # of what came last
    assert sorted(trained) == list(range(1, 16))

    def shown(run: Path, step: int) -> list[int]:
        return [crc32(np.array(slot["ids"]).tobytes()) for slot in inspect(capsys, run, step)]

    assert {step: shown(place / "mended", step) for step in trained} == trained
    used = [row for rows in trained.values() for row in rows]
    before = place / "mended" / "checkpoints" / "step_3_ckp"  # which knows of no skipped sample
    diverged = {row for step in (8, 9, 10) for row in shown(before, step)}
    assert len({*used}) == len(used) and len(diverged) == 12 and not {*used} & diverged


@pytest.mark.parametrize("killed", first_quick("before the next save", "before checkpoints were set aside"))
def test_a_kill_after_a_rollback_forgets_no_skipped_samples(
    killed: str, place: Path, ended: list[list[Ended]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = place / killed
    train(flags_of(run, 3, "num_steps=15"), EXPLODES, (ALL, "in_step", 8, "SIGKILL", 2), status=-9)
    if killed == "before checkpoints were set aside":  # the next start diverges again
        (given_up,) = (run / "checkpoints").glob("set_aside_*/step_9_ckp")
        given_up.rename(run / "checkpoints" / "step_9_ckp")
    train(flags_of(run, 3, "num_steps=12"), processes=1)
    for step in (6, 9, 12):
        saved = manifest_of(run / "checkpoints" / f"step_{step}_ckp")
        assert saved["data"]["skipped"] == skipped_in(place / "mended")
    assert inspect(capsys, run, 8) == inspect(capsys, place / "mended", 8)


def test_a_run_that_rollbacks_do_not_help_stops(place: Path, ended: list[list[Ended]]) -> None:
    assert [each.status for each in ended[1]] == [1, 1]
    assert "error: step 5" in ended[1][0].stderr and "--max_rollbacks" in ended[1][0].stderr
    kept = {path.name for path in (place / "lost" / "checkpoints").glob("step_*")}
    assert kept == {"step_2_ckp", "step_4_ckp"}


def test_a_rollback_to_the_border_of_two_phases_uses_no_skipped_sample_and_others_once(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """6 steps of weights 1:1 with 4 sequences, a resume with 3:1 and 8; steps 7 and 8 diverge."""
    run = place / "border"
    before = ["datasets=first,second", "seq_length=16", "weights=1,1", "global_batch_size=4", "num_steps=6"]
    after = [*before[:2], "weights=3,1", "global_batch_size=8", "num_steps=8", "max_skipped_steps=2", "max_rollbacks=1"]
    lost = (ALL, "spoil_objective", 7, 8, "times NaN", 1)
    train_each([(flags_of(run, 2, *before), []), (flags_of(run, 2, *after, "spike_threshold=none"), [lost])])
    data = manifest_of(run / "checkpoints" / "step_8_ckp")["data"]
    assert data["skipped"] == {"first": [[12, 24]], "second": [[12, 16]]} and data["next_sample"] == 40
    # The new phase begins where it began before the rollback: 12 of each, then 3:1 for skipped and used samples.
    assert data["phases"][1]["first_sample"] == 24
    assert data["phases"][1]["base_counts"] == {"first": [[16, 12]], "second": [[16, 12]]}
    assert data["counts"] == {"first": [[16, 12 + 24]], "second": [[16, 12 + 8]]}
    slots = [slot for step in range(1, 9) for slot in inspect(capsys, run, step)]
    assert sorted(slot["sample_id"] for slot in slots) == [*range(40)]
    assert len({json.dumps(slot["spans"]) for slot in slots}) == 40
