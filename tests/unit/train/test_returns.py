"""Returns to older checkpoints: what a start does once, records and shows, and what another machine makes of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from training_runs import TINY, checkpoints_of, events_of, losses_of
from unit.train.whole_runs import (
    checkpoint,
    damage,
    equal,
    manifest_of,
    numbers,
    refusal,
    resume,
    saved,
    start,
    started_at,
)

from pretraining.checkpoint import manager
from pretraining.cli import main
from pretraining.config.recipe_files import load_config
from pretraining.errors import CheckpointError
from pretraining.train import build
from pretraining.train import run as run_module

EACH = ("num_steps=6", "checkpoint_interval=1")
CHANGES = ("learning_rate=5e-4", "skip_samples=6-7")
BACK = (*EACH, "resume_from_checkpoint=2", *CHANGES)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps of 6, each of them saved."""
    run = tmp_path_factory.mktemp("begun") / "run"
    start(run, *EACH, "run_steps=4")
    return run


@pytest.fixture(scope="module")
def gone_back(begun: Path) -> Path:
    """The same run after a return to step 2 and one step with other settings."""
    run = shutil.copytree(begun, begun.with_name("gone_back"), symlinks=True)
    start(run, *BACK, "run_steps=1")
    return run


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    return shutil.copytree(begun, tmp_path / "run", symlinks=True)


@pytest.fixture
def returned(gone_back: Path, tmp_path: Path) -> Path:
    return shutil.copytree(gone_back, tmp_path / "returned", symlinks=True)


def newest(run: Path, event: str) -> dict[str, Any]:
    return [each for each in events_of(run) if each["event"] == event][-1]


def set_aside(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("set_aside_*/*"))


def test_a_return_sets_newer_checkpoints_aside_begins_a_branch_and_is_recorded(begun: Path, gone_back: Path) -> None:
    assert started_at(gone_back) == 2 and [path.name for path in set_aside(gone_back)] == ["step_3_ckp", "step_4_ckp"]
    assert all(equal(path, begun / "checkpoints" / path.name) for path in set_aside(gone_back))
    assert len(losses_of(gone_back)) == 3  # steps 1, 2, and 3 again
    assert numbers(begun, 4) == [(1, 0)] and numbers(gone_back, 3) == [(1, 0), (2, 2)]
    target, before = (manifest_of(each, 2) for each in (gone_back, begun))
    assert [target[name] for name in ("files", "config", "data")] == [
        before[name] for name in ("files", "config", "data")
    ]
    assert not {"return", "settings", "skip_samples"} & {each["event"] for each in events_of(begun)}
    back = newest(gone_back, "return")
    assert (back["step"], back["set_aside"]) == (2, [str(checkpoint(gone_back, step)) for step in (3, 4)])
    assert newest(gone_back, "settings")["changes"]["learning_rate"] == ["0.001", "0.0005"]
    assert newest(gone_back, "skip_samples")["samples"] == [[6, 7]]
    assert "resume_from_checkpoint: '2'" in manifest_of(gone_back, 3)["config"]


@pytest.mark.parametrize("repeats_the_command", [True, False])
def test_a_return_is_not_repeated_and_trains_as_if_the_newer_checkpoints_did_not_exist(
    repeats_the_command: bool, returned: Path, begun: Path, tmp_path: Path
) -> None:
    start(returned, *BACK, "run_steps=1", "keep_last=1") if repeats_the_command else resume(returned, "run_steps=1")
    assert started_at(returned) == 3 and checkpoint(returned, 2).exists() != repeats_the_command
    assert "resume_from_checkpoint: '2'" in manifest_of(returned, 4)["config"]  # a requeued job has done it, too
    start(returned, *BACK) if repeats_the_command else resume(returned)
    branches = [(3, 2), (4, 4)] if repeats_the_command else [(2, 2), (3, 3), (4, 4)]  # the former has removed step 2
    assert numbers(returned, 6) == [(1, 0), *branches] and len(set_aside(returned)) == 2
    assert len([each for each in events_of(returned) if each["event"] in ("return", "skip_samples")]) == 2
    whole = shutil.copytree(begun, tmp_path / "whole")
    for step in (3, 4):
        shutil.rmtree(checkpoint(whole, step))
    start(whole, *EACH, *CHANGES)
    assert equal(checkpoint(returned, 6), checkpoint(whole, 6)) and losses_of(returned) == losses_of(whole)


def test_a_return_by_path_is_not_repeated_in_a_copy(run: Path, tmp_path: Path) -> None:
    resume(run, f"--resume_from_checkpoint={checkpoint(run, 2)}", "--run_steps=1")
    resume(shutil.copytree(run, tmp_path / "copy", symlinks=True), "--run_steps=1")
    assert started_at(tmp_path / "copy") == 3


def test_a_path_of_a_checkpoint_that_is_set_aside_goes_back_to_it(returned: Path, begun: Path) -> None:
    four = set_aside(returned)[-1]
    resume(returned, "run_steps=1", "skip_samples=", f"resume_from_checkpoint={four}")
    assert started_at(returned) == 4 and numbers(returned, 5) == [(1, 0), (3, 4)]
    assert equal(checkpoint(returned, 4), checkpoint(begun, 4)) and not four.exists()
    # Step 2 got the branch of the first return, so it is no checkpoint before step 4 any more.
    assert [path.name for path in set_aside(returned)] == ["step_3_ckp", "step_2_ckp", "step_3_ckp"]
    resume(returned, "run_steps=1")
    assert started_at(returned) == 5


def test_a_checkpoint_that_a_user_moves_back_is_set_aside_again(returned: Path) -> None:
    set_aside(returned)[-1].rename(checkpoint(returned, 4))
    resume(returned, "run_steps=1")
    assert started_at(returned) == 3 and len(set_aside(returned)) == 2
    assert numbers(returned, 4) == [(1, 0), (2, 2), (3, 3)]


def test_another_request_goes_back_again_and_one_that_ended_halfway_does_the_rest(
    run: Path, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(run, *EACH, "resume_from_checkpoint=4", "run_steps=1")
    assert saved(run)[-1] == "step_5_ckp" and checkpoint(run, 4).exists()
    rename, renamed = Path.rename, list[Path]()

    def fail_after_the_first(path: Path, target: Path) -> Path:
        if renamed:
            raise OSError(5, "Input/output error", str(path))
        renamed.append(path)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_after_the_first)
        assert refusal(run, "resume_from_checkpoint=3", "run_steps=1").path == checkpoint(run, 5)
    for name in ("mine", "step_9_ckp"):  # a start would resume from a user's copy, too; the other is unreadable
        shutil.copytree(checkpoint(begun, 4), run / "checkpoints" / name)
    (checkpoint(run, 9) / "manifest.json").write_text("{")
    start(run, *EACH, "resume_from_checkpoint=3", "run_steps=1")
    moved = sorted(path.name for path in set_aside(run))
    assert started_at(run) == 3 and moved == ["step_4_ckp", "step_5_ckp"]
    resume(run, "run_steps=1")
    assert started_at(run) == 4 and {"mine", "step_9_ckp"} <= checkpoints_of(run)  # neither is moved nor used


@pytest.mark.parametrize("killed", ["return_to", "set_aside_others", "_write_records"])
def test_a_return_that_is_killed_is_done_or_not(run: Path, monkeypatch: pytest.MonkeyPatch, killed: str) -> None:
    def die(*arguments: object) -> None:
        raise CheckpointError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(build if killed == "_write_records" else manager, killed, die)
        assert str(refusal(run, *BACK)) == "killed"
    is_done = killed != "return_to"
    assert checkpoint(run, 4).exists() == (killed != "_write_records")
    assert load_config(run / "config.yaml").checkpoint.resume_from_checkpoint is None
    resume(run, "run_steps=1")
    assert started_at(run) == (2 if is_done else 4)


def test_a_return_that_is_refused_moves_nothing(run: Path, begun: Path) -> None:
    (run / "checkpoints" / "aside" / "2").mkdir(parents=True)
    before = saved(run)
    others = ["7", "step_7_ckp", checkpoint(begun, 7), run, run / "checkpoints", run / "checkpoints" / "aside" / "2"]
    for request in others:
        error = refusal(run, f"resume_from_checkpoint={request}")
        assert isinstance(error, CheckpointError) and error.settings == ("resume_from_checkpoint",), request
    for flag in ("optimizer=sgdm", "seq_length=16", "hidden_size=16", "weights_only=true", f"ckpt_load_path={begun}"):
        assert flag.partition("=")[0] in str(refusal(run, "resume_from_checkpoint=2", flag))
    damage(checkpoint(run, 2))
    (checkpoint(run, 3) / "manifest.json").write_text("{}")
    for step in (2, 3):
        error = refusal(run, f"resume_from_checkpoint={step}")
        assert str(checkpoint(run, step)) in str(error) and error.settings == ("resume_from_checkpoint",)
    assert saved(run) == before


def test_a_request_that_is_done_is_not_mentioned_and_a_save_without_it_ends_that(
    returned: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    start(returned, *BACK, "run_steps=1")
    assert started_at(returned) == 3 and "resume_from_checkpoint" not in caplog.text
    start(returned, *EACH, "run_steps=1")
    start(returned, *BACK, "run_steps=1")
    assert started_at(returned) == 2 and f"train {returned} --resume_from_checkpoint=" in caplog.text
    folder = set_aside(returned)[-1].parent
    assert f"from step 2: 3 other checkpoints up to step 5 moved to {folder}" in caplog.text


def samples_of(capsys: pytest.CaptureFixture[str], *words: object) -> list[list[int]]:
    """Return the tokens of the samples that `inspect` shows."""
    capsys.readouterr()
    main(["inspect", *map(str, words), "--json=true", "--tokens=true"])
    lines = capsys.readouterr().out.splitlines()
    return sorted(json.loads(line)["ids"] for line in lines if line.startswith("{"))


def test_inspect_shows_a_run_after_a_return_and_takes_a_step_a_name_or_a_path(
    returned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now, then = (samples_of(capsys, returned, *more, "--step=4") for more in ([], ["--resume_from_checkpoint=2"]))
    assert now != then
    for request in ("2", "step_2_ckp", checkpoint(returned, 2)):
        before = [f"--resume_from_checkpoint={request}", "--step=4"]
        assert samples_of(capsys, returned, *before) == then
        flags = [*TINY, "use_dummy_dataset=true", f"ckpt_save_path={returned}"]
        assert samples_of(capsys, *flags, *before) == then
        assert samples_of(capsys, *flags, *before, "--skip_samples=6-7") == now


def listed(run: Path | str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """Return the rows of `pretrain list` by name."""
    capsys.readouterr()
    main(["list", str(run), "--json"])
    return {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}


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
    for request in ("step_4_ckp", "4"):
        error = str(refusal(run, *flags, f"resume_from_checkpoint={request}"))
        assert f"give its path: --resume_from_checkpoint={path}" in error
    shutil.rmtree(run)  # the mirror's is set aside in a folder of another name
    [record] = (tmp_path / "store").rglob("set_aside_*/*/manifest.json")
    there = run / record.parent.relative_to(tmp_path / "store")
    start(run, *flags, "num_steps=5", f"resume_from_checkpoint={there}")
    assert started_at(run) == 4 and equal(checkpoint(run, 4), four)


def test_a_checkpoint_shows_the_evaluation_of_its_own_step_or_none_and_best_has_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    evaluated = ("held_out_fraction=0.1", "eval_interval=4", "eval_batches=1", "num_steps=10", "checkpoint_interval=3")
    start(tmp_path, *evaluated, "learning_rate=1e-2", "run_steps=4")
    start(tmp_path, *evaluated, "learning_rate=3")
    shown = {name for name, row in listed(tmp_path, capsys).items() if row["evaluation_loss"] is not None}
    assert shown == {"step_4_ckp", "step_10_ckp"}  # step 8 was evaluated and not saved
    assert manifest_of(tmp_path, 6)["evaluation_loss"] == manifest_of(tmp_path, 4)["evaluation_loss"]  # the newest one
    best = tmp_path / "checkpoints" / "best"
    assert best.readlink() == Path("step_4_ckp")
    shutil.rmtree(best.resolve())
    caplog.clear()
    start(tmp_path, *evaluated, "learning_rate=3")
    assert best.readlink() == Path("step_10_ckp") and f"is gone from {tmp_path}" in caplog.text


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
    (tmp_path / "run").rename(tmp_path / "first")
    (tmp_path / "old").rename(tmp_path / "run")  # as on another machine
    start(tmp_path / "run", *flags, "run_steps=2")
    assert "step_4_ckp" in caplog.text and checkpoints_of(tmp_path / "run") >= {"step_4_ckp", "step_6_ckp"}
    assert equal(checkpoint(tmp_path / "run", 4), checkpoint(tmp_path / "first", 4))
    assert not list((tmp_path / "store").rglob("set_aside_*"))
