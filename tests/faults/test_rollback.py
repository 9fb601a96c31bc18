"""A run that diverges for good goes back without the batches, and what it trained on can still be shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from guarded_runs import start_without_launcher, train_with_faults
from tiers import first_quick
from training_runs import TINY, events_of, reports_of, write_two_datasets

from pretraining.cli import main
from pretraining.config.recipes import load_config

GLOBAL_BATCH = 4
LEFT_OUT = range(7 * GLOBAL_BATCH, 10 * GLOBAL_BATCH)  # those of steps 8, 9 and 10


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rollback")


@pytest.fixture(scope="module")
def endings(place: Path) -> list[dict[str, Any]]:
    """A run that is mended by going back, and one that is not."""
    data = write_two_datasets(place / "data")
    guards = ["max_skipped_steps=3", "spike_threshold=6", "spike_window=8", "max_rollbacks=2"]
    mended = ["num_steps=15", "checkpoint_interval=3", *guards, f"ckpt_save_path={place / 'mended'}"]
    lost = ["num_steps=30", "checkpoint_interval=2", *guards, f"ckpt_save_path={place / 'lost'}"]
    return train_with_faults(2, data, [("learning_rate_explodes", mended), ("loss_stays_nan", lost)])


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())
    return document


def test_a_run_rolls_back_and_finishes_without_the_batches(place: Path, endings: list[dict[str, Any]]) -> None:
    assert [ending for ending in endings if ending["fault"] == "learning_rate_explodes" and "error" in ending] == []
    reports = reports_of(place / "mended")
    assert [report["step"] for report in reports] == list(range(1, 16))
    assert not any(report["skipped_updates"] for report in reports)
    assert max(report["loss"] for report in reports) < 6
    skipped = [[LEFT_OUT.start, LEFT_OUT.stop]]
    saved = {step: manifest_of(place / "mended" / "checkpoints" / f"step_{step}_ckp") for step in (3, 6, 9, 12, 15)}
    # Step 6 is saved again, so that no start forgets what is left out; step 3 is from before.
    assert [manifest["data"]["skipped"] for manifest in saved.values()] == [[], *[skipped] * 4]


def test_the_event_log_has_the_skipped_samples_and_the_target_of_the_rollback(
    place: Path, endings: list[dict[str, Any]]
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


def test_a_rollback_is_no_start_with_a_record_of_its_environment(place: Path, endings: list[dict[str, Any]]) -> None:
    (record,) = json.loads((place / "lost" / "logs" / "environment.json").read_text())
    assert (record["processes"], len(record["ranks"]), record["step"]) == (2, 2, 0)


def test_the_settings_stay_those_of_the_start_so_that_the_same_command_finds_its_folder(
    place: Path, endings: list[dict[str, Any]]
) -> None:
    assert load_config(place / "mended" / "config.yaml").data.skip_samples == ()


def test_inspect_shows_the_samples_of_every_step_after_a_rollback(
    place: Path, endings: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    trained: dict[int, list[list[int]]] = {}
    for rank in (0, 1):
        lines = [json.loads(line) for line in (place / "mended" / f"trained_{rank}.jsonl").read_text().splitlines()]
        for step, tokens in {line["step"]: line["tokens"] for line in lines}.items():  # what came last is what counts
            trained.setdefault(step, []).extend(tokens)
    assert sorted(trained) == list(range(1, 16))
    for step, tokens in trained.items():
        main(["inspect", f"ckpt_load_path={place / 'mended'}", f"step={step}", "json=true", "tokens=true"])
        slots = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [slot["ids"][:-1] for slot in slots] == tokens
        assert not any(slot["sample_id"] in LEFT_OUT for slot in slots)


@pytest.mark.parametrize("killed", first_quick("before the next save", "before checkpoints were set aside"))
def test_a_kill_after_a_rollback_forgets_no_skipped_samples(
    killed: str, place: Path, endings: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = place / killed.replace(" ", "_")
    guards = ["max_skipped_steps=3", "spike_threshold=6", "spike_window=8", "max_rollbacks=2"]
    flags = ["checkpoint_interval=3", *guards, f"ckpt_save_path={run}"]
    ranks = start_without_launcher(2, place / "data", "killed_after_a_rollback", ["num_steps=15", *flags])
    for process in ranks:
        process.communicate(timeout=300)
    assert [process.returncode for process in ranks] == [-9, -9]
    if killed == "before checkpoints were set aside":  # the next start diverges again
        (given_up,) = (run / "checkpoints").glob("set_aside_*/step_9_ckp")
        given_up.rename(run / "checkpoints" / "step_9_ckp")
    again = [*TINY, f"data_path={place / 'data'}", "sep_token=0", "logical_shards=8", "batch_size=2", *flags]
    main(["train", *again, "num_steps=12"])
    for step in (6, 9, 12):
        saved = manifest_of(run / "checkpoints" / f"step_{step}_ckp")
        assert saved["data"]["skipped"] == [[LEFT_OUT.start, LEFT_OUT.stop]]
    capsys.readouterr()
    main(["inspect", f"ckpt_load_path={run}", "step=8", "json=true"])
    slots = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(slot["sample_id"] for slot in slots) == list(range(LEFT_OUT.stop, LEFT_OUT.stop + GLOBAL_BATCH))


def test_a_run_that_rollbacks_do_not_help_stops(place: Path, endings: list[dict[str, Any]]) -> None:
    errors = {ending["error"] for ending in endings if ending["fault"] == "loss_stays_nan"}
    (error,) = errors
    assert "step 5" in error and "--max_rollbacks" in error
    kept = {path.name for path in (place / "lost" / "checkpoints").glob("step_*")}
    assert kept == {"step_2_ckp", "step_4_ckp"}


def test_a_rollback_to_the_border_of_two_phases_uses_no_skipped_sample_and_others_once(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """6 steps of weights 1:1 with 4 sequences, a resume with 3:1 and 8; steps 7 and 8 diverge."""
    run = place / "border"
    common = ["datasets=first,second", "checkpoint_interval=2", f"ckpt_save_path={run}", "seq_length=16"]
    before = [*common, "weights=1,1", "global_batch_size=4", "num_steps=6"]
    after = [*common, "weights=3,1", "global_batch_size=8", "num_steps=8", "max_skipped_steps=2", "max_rollbacks=1"]
    train_with_faults(2, place / "data", [("no_fault", before), ("loss_is_nan_at_first", after)])
    data = manifest_of(run / "checkpoints" / "step_8_ckp")["data"]
    assert data["skipped"] == [[24, 40]] and data["next_sample"] == 56
    # The new phase begins where it began before the rollback: 12 of each, then 3:1 for skipped and used samples.
    assert data["phases"][1]["first_sample"] == 24 and data["phases"][1]["base_counts"] == {"first": 12, "second": 12}
    assert data["counts"] == {"first": 12 + 24, "second": 12 + 8}
    capsys.readouterr()
    samples = []
    for step in range(1, 9):
        main(["inspect", f"ckpt_load_path={run}", f"step={step}", "json=true"])
        samples += [json.loads(line)["sample_id"] for line in capsys.readouterr().out.splitlines()]
    assert sorted(samples) == [*range(24), *range(40, 56)]
