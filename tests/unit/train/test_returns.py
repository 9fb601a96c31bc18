"""Returns to older checkpoints: what a start says, what it records, and what another machine makes of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from training_runs import checkpoints_of, events_of, losses_of
from unit.train.whole_runs import checkpoint, diverging_after, equal, manifest_of, refusal, saved, start, started_at

from pretraining.checkpoint.manifest import Manifest
from pretraining.cli import main
from pretraining.data import resume
from pretraining.files import with_checksum
from pretraining.train import run as run_module

EVALUATED = ("held_out_fraction=0.1", "eval_interval=4", "eval_batches=1", "checkpoint_interval=2")


def numbers(run: Path, step: int) -> list[tuple[int, int]]:
    """Return number and first step of the branches up to a checkpoint."""
    return [(number, first) for number, first, _ in manifest_of(run, step)["state"]["run"]["branches"]]


def listed(run: Path | str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """Return the rows of `pretrain list` by name."""
    capsys.readouterr()
    main(["list", str(run), "--json"])
    return {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}


def newest(run: Path, event: str) -> dict[str, Any]:
    return [each for each in events_of(run) if each["event"] == event][-1]


def test_a_return_and_a_rollback_begin_a_branch_and_a_resume_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("checkpoint_interval=2", "num_steps=8")
    start(tmp_path, *flags, "run_steps=4")
    start(tmp_path, *flags, "run_steps=2")
    assert numbers(tmp_path, 2) == numbers(tmp_path, 6) == [(1, 0)]
    start(tmp_path, *flags, "resume_from_checkpoint=4", "run_steps=2")
    start(tmp_path, *flags, "run_steps=1")
    assert numbers(tmp_path, 4) == [(1, 0)] and numbers(tmp_path, 7) == [(1, 0), (2, 5)]
    diverging_after(7, monkeypatch)
    start(tmp_path, *flags, "max_skipped_steps=2", "max_rollbacks=1", "num_steps=10")
    assert numbers(tmp_path, 7) == numbers(tmp_path, 10) == [(1, 0), (2, 5), (3, 7)]


def test_a_return_that_is_undone_by_hand_holds_and_later_saves_are_a_branch_of_their_own(tmp_path: Path) -> None:
    flags = ("checkpoint_interval=2", "num_steps=8")
    start(tmp_path, *flags)
    start(tmp_path, *flags, "resume_from_checkpoint=4", "run_steps=1")
    for path in (tmp_path / "checkpoints").glob("set_aside_*/*"):
        path.rename(tmp_path / "checkpoints" / path.name)
    start(tmp_path, *flags, "num_steps=10")
    assert started_at(tmp_path) == 8 and numbers(tmp_path, 10) == [(1, 0), (3, 9)]


def test_a_run_of_an_earlier_version_begins_its_branches_at_its_next_save(tmp_path: Path) -> None:
    start(tmp_path, "checkpoint_interval=2")
    for step in (2, 4):
        document = manifest_of(tmp_path, step)
        del document["checksum"], document["state"]["run"]
        (checkpoint(tmp_path, step) / "manifest.json").write_text(json.dumps(with_checksum(document)))
    start(tmp_path, "num_steps=6")
    assert numbers(tmp_path, 6) == [(1, 5)]
    assert Manifest.parse(manifest_of(tmp_path, 2), "").branches == ()


def exchange_disks(root: Path) -> None:
    """Put the folder `old` in the place of `run`, as on another machine, and name that one `first`."""
    (root / "run").rename(root / "first")
    (root / "old").rename(root / "run")


def test_row_63_an_old_disk_does_not_bring_back_what_the_stores_retention_has_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (f"ckpt_mirror_path=file://{tmp_path}/store", "num_steps=12", "keep_last=1", "preempt_interval=100")
    for _ in range(3):
        start(tmp_path / "run", *flags, "run_steps=2")
    shutil.copytree(tmp_path / "run", tmp_path / "old", symlinks=True)
    shutil.copytree(checkpoint(tmp_path / "run", 6), tmp_path / "old" / "checkpoints" / "step_9_ckp")  # never copied
    document = manifest_of(tmp_path / "old", 9) | {"step": 9}
    del document["checksum"]
    (checkpoint(tmp_path / "old", 9) / "manifest.json").write_text(json.dumps(with_checksum(document)))
    start(tmp_path / "run", *flags, "run_steps=1")  # step 7
    start(tmp_path / "run", *flags, "resume_from_checkpoint=7", "run_steps=1")  # step 8, without a record of step 9
    assert not list((tmp_path / "store").rglob("set_aside.json"))
    exchange_disks(tmp_path)
    start(tmp_path / "run", *flags, "run_steps=2", "learning_rate=2e-3")
    assert started_at(tmp_path / "run") == 8
    assert [path.parent.name[:10] for path in tmp_path.rglob("step_9_ckp")] == ["set_aside_"]


def test_a_copy_that_another_machine_makes_during_a_start_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flags = (f"ckpt_mirror_path=file://{tmp_path}/store", "num_steps=8")
    start(tmp_path / "run", *flags, "run_steps=2")
    shutil.copytree(tmp_path / "run", tmp_path / "old", symlinks=True)
    start(tmp_path / "run", *flags, "run_steps=2")
    newer, away = checkpoint(tmp_path / "store", 4), tmp_path / "away"
    newer.rename(away)
    list_copies = run_module.list_copies

    def list_and_commit(*args: Any) -> Any:
        found = list_copies(*args)
        if away.exists():
            away.rename(newer)
        return found

    monkeypatch.setattr(run_module, "list_copies", list_and_commit)
    exchange_disks(tmp_path)
    start(tmp_path / "run", *flags, "run_steps=2")
    assert "step_4_ckp" in caplog.text and checkpoints_of(tmp_path / "run") >= {"step_4_ckp", "step_6_ckp"}
    assert equal(checkpoint(tmp_path / "run", 4), checkpoint(tmp_path / "first", 4))
    assert not list((tmp_path / "store").rglob("set_aside.json"))


def test_a_rollback_to_initial_weights_keeps_the_order_of_an_old_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("max_skipped_steps=2", "max_rollbacks=1", "checkpoint_interval=1", "num_steps=4")
    monkeypatch.setattr(resume, "ORDER_VERSION", 1)  # the version that began the run
    diverging_after(0, monkeypatch, then=lambda: monkeypatch.setattr(resume, "ORDER_VERSION", 2))
    start(tmp_path, *flags)
    assert [manifest_of(tmp_path, step)["data"]["order_version"] for step in (0, 4)] == [1, 1]
    assert manifest_of(tmp_path, 0)["data"]["skipped"] == [[0, 4]]


def test_an_event_tells_of_a_return_of_changed_settings_and_of_skipped_samples(tmp_path: Path) -> None:
    start(tmp_path, "checkpoint_interval=2")
    assert not {"return", "settings", "skip_samples"} & {each["event"] for each in events_of(tmp_path)}
    start(tmp_path, "checkpoint_interval=2", "resume_from_checkpoint=2", "learning_rate=2e-3", "skip_samples=6-7")
    back = newest(tmp_path, "return")
    assert back["step"] == 2 and [Path(each).name for each in back["set_aside"]] == ["step_4_ckp"]
    assert newest(tmp_path, "settings")["changes"]["learning_rate"] == ["0.001", "0.002"]
    assert newest(tmp_path, "skip_samples")["samples"] == [[6, 7]]
    start(tmp_path, "num_steps=6", "learning_rate=2e-3", "skip_samples=6-7")
    assert len([each for each in events_of(tmp_path) if each["event"] in ("return", "skip_samples")]) == 2
    start(tmp_path / "new", "skip_samples=3,5-6")
    assert newest(tmp_path / "new", "skip_samples") | {"samples": [[3, 3], [5, 6]], "step": 0} == newest(
        tmp_path / "new", "skip_samples"
    )


def test_a_return_that_is_done_is_said_with_the_way_to_do_it_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ("checkpoint_interval=2", "num_steps=6", "resume_from_checkpoint=2")
    start(tmp_path, *flags[:2])
    for rate in ("1e-4", "2e-4", "3e-4"):
        start(tmp_path, *flags, f"learning_rate={rate}")
        first = losses_of(tmp_path)[-4:]
        caplog.clear()
        start(tmp_path, *flags, f"learning_rate={rate}")
        assert started_at(tmp_path) == 6
        [line] = [each for each in caplog.messages if "To go back again" in each]
        named = re.search(r"first move newer checkpoints to a new folder (\S+)<name>", line)
        assert named is not None
        new = Path(f"{named[1]}{rate}")
        new.mkdir()
        for step in (4, 6):
            checkpoint(tmp_path, step).rename(new / f"step_{step}_ckp")
        assert saved(tmp_path)[-1] == "step_2_ckp"
    start(tmp_path, *flags, "learning_rate=3e-4")
    assert started_at(tmp_path) == 2 and losses_of(tmp_path)[-4:] == first


def test_list_shows_what_is_set_aside_and_naming_it_says_how_to_take_it_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, store = tmp_path / "run", f"file://{tmp_path}/store"
    flags = (f"ckpt_mirror_path={store}", "num_steps=4")
    for _ in range(2):
        start(run, *flags, "run_steps=2")
    four = shutil.copytree(checkpoint(run, 4), tmp_path / "four")
    start(run, *flags, "resume_from_checkpoint=2", "run_steps=1")
    [aside] = [name for name, row in listed(run, capsys).items() if row["state"] == "set aside"]
    assert re.fullmatch(r"set_aside_[^/]*/step_4_ckp", aside)
    assert listed(run, capsys)[aside]["step"] == 4 and listed(run, capsys)[aside]["bytes"] > 1000
    assert [row["state"] for row in listed(store, capsys).values()] == ["complete", "complete", "set aside"]
    main(["list", str(run)])
    assert re.search(r"^3 checkpoints, .* of which 1 set aside, ", capsys.readouterr().out, re.MULTILINE)
    path = run / "checkpoints" / aside
    for request in (str(path), "step_4_ckp", "4"):
        error = str(refusal(run, *flags, f"resume_from_checkpoint={request}"))
        assert f"move {path} to {run}/checkpoints" in error and "rename its set_aside.json in the mirror" in error
    path.rename(checkpoint(run, 4))
    [record] = (tmp_path / "store").rglob("set_aside.json")
    record.rename(record.with_name("manifest.json"))
    start(run, *flags, "num_steps=5")
    assert started_at(run) == 4 and equal(checkpoint(run, 4), four)


def test_a_step_that_was_saved_again_is_taken_back_under_another_name(tmp_path: Path) -> None:
    run, flags = tmp_path / "run", ("checkpoint_interval=2", f"ckpt_mirror_path=file://{tmp_path}/store")
    start(run, *flags)
    first = shutil.copytree(checkpoint(run, 4), tmp_path / "first")
    start(run, *flags, "resume_from_checkpoint=2", "learning_rate=1e-2")
    again = shutil.copytree(checkpoint(run, 4), tmp_path / "again")
    [path] = (run / "checkpoints").glob("set_aside_*/step_4_ckp")
    assert "If there is one of its name, give another name" in str(
        refusal(run, *flags, f"resume_from_checkpoint={path}")
    )
    path.rename(run / "checkpoints" / "step_4_ckp.back")
    start(run, *flags, "num_steps=6", "resume_from_checkpoint=step_4_ckp.back")
    assert started_at(run) == 4 and equal(checkpoint(run, 4).with_suffix(".back"), first)
    assert numbers(run, 6) == [(1, 0), (3, 5)]
    for place in (run, tmp_path / "store"):  # nothing is lost on the way
        assert equal(checkpoint(place, 4), again) and equal(checkpoint(place, 4).with_suffix(".back"), first)


def test_a_checkpoint_shows_the_evaluation_of_its_own_step_or_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path, *EVALUATED, "num_steps=10", "learning_rate=1e-2", "run_steps=4")
    start(tmp_path, *EVALUATED, "num_steps=10", "learning_rate=3")
    rows = listed(tmp_path, capsys)
    evaluated = {name for name, row in rows.items() if row["evaluation_loss"] is not None}
    assert evaluated == {"step_4_ckp", "step_8_ckp", "step_10_ckp"}  # the end is evaluated, too
    assert manifest_of(tmp_path, 6)["evaluation_loss"] == manifest_of(tmp_path, 4)["evaluation_loss"]  # the newest one
    best = tmp_path / "checkpoints" / "best"
    assert best.readlink() == Path("step_4_ckp")
    shutil.rmtree(best.resolve())
    caplog.clear()
    start(tmp_path, *EVALUATED, "num_steps=10", "learning_rate=3")
    assert str(best.readlink()) in ("step_8_ckp", "step_10_ckp") and f"is gone from {tmp_path}" in caplog.text


def test_a_best_checkpoint_is_evaluated_also_if_saves_and_evaluations_differ(tmp_path: Path) -> None:
    start(tmp_path, *EVALUATED[:3], "checkpoint_interval=3", "num_steps=9")
    best = (tmp_path / "checkpoints" / "best").readlink()
    assert best in (Path("step_4_ckp"), Path("step_8_ckp"), Path("step_9_ckp"))
