"""Starts that resume, as whole runs in this process: from what, with which optimizer, and what they refuse."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import events_of, losses_of, status_of
from unit.checkpoint import examples
from unit.train import whole_runs
from unit.train.whole_runs import checkpoint, damage, equal, started_at

from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.config.training import TrainConfig
from pretraining.distributed.processes import Processes
from pretraining.errors import ConfigError, PretrainError
from pretraining.files import with_checksum
from pretraining.launch.cpu_threads import CpuThreads
from pretraining.train.build import restore_cpu_threads

EACH = "checkpoint_interval=1"


def start(run: Path, *flags: str) -> None:
    whole_runs.start(run, "num_steps=6", *flags)


def refusal(run: Path, *flags: str) -> PretrainError:
    return whole_runs.refusal(run, "num_steps=6", *flags)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps, stopped at 4, with checkpoints at 2 and 4."""
    run = tmp_path_factory.mktemp("begun") / "run"
    start(run, "checkpoint_interval=2", "run_steps=4")
    return run


@pytest.fixture(scope="module")
def renewed(begun: Path) -> Path:
    """The same run, trained to its end with a new optimizer and a save per step."""
    run = shutil.copytree(begun, begun.with_name("renewed"), symlinks=True)
    start(run, "load_optimizer=false", EACH)
    return run


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return shutil.copytree(begun, tmp_path / "run", symlinks=True)


def with_unreadable_position(folder: Path) -> None:
    document = json.loads((folder / "manifest.json").read_text())
    document["data"]["next_sample"] = "x"
    del document["checksum"]
    (folder / "manifest.json").write_text(json.dumps(with_checksum(document)))


@pytest.mark.parametrize("change", [damage, with_unreadable_position])
def test_a_start_that_skips_a_damaged_checkpoint_trains_as_if_it_did_not_exist(
    change: Any, run: Path, begun: Path, tmp_path: Path
) -> None:
    without = shutil.copytree(begun, tmp_path / "without")
    change(checkpoint(run, 4))
    shutil.rmtree(checkpoint(without, 4))
    start(without)
    start(run)
    (restored,) = (event for event in events_of(run) if event["event"] == "restore")
    assert restored["checkpoint"] == str(checkpoint(run, 2))
    (passed_over,) = restored["passed_over"]
    assert str(checkpoint(run, 4)) in passed_over
    assert equal(checkpoint(run, 6), checkpoint(without, 6)) and losses_of(run) == losses_of(without)
    assert started_at(run) == started_at(without) == 2 and status_of(run)["starts"] == 2


def test_a_start_that_is_refused_keeps_the_step_and_the_settings(run: Path, begun: Path) -> None:
    damage(checkpoint(run, 4))
    assert "seed was 2023 and is 7" in str(refusal(run, "seed=7"))
    status = status_of(run)
    assert (status["status"], status["step"], status["started_at_step"]) == ("finished", 4, 0)
    assert "seed was 2023 and is 7" in events_of(run)[-1]["reason"]
    assert (run / "config.yaml").read_text() == (begun / "config.yaml").read_text()


def test_where_none_is_good_nothing_is_trained_and_all_are_named(run: Path, tmp_path: Path) -> None:
    for step in (2, 4):
        damage(checkpoint(run, step))
    said = str(refusal(run))
    assert said.index(str(checkpoint(run, 4))) < said.index(str(checkpoint(run, 2)))
    assert status_of(run)["status"] == "finished" and status_of(run)["starts_without_progress"] == 0
    error = refusal(tmp_path / "new", f"ckpt_load_path={checkpoint(run, 4)}", "weights_only=true")
    assert str(checkpoint(run, 4)) in str(error) and error.settings == ("ckpt_load_path",)
    assert not (tmp_path / "new" / "config.yaml").exists()


FITTING = CpuThreads(4, is_chosen=True)


@pytest.mark.parametrize(
    ("world", "threads", "chosen", "is_said"),
    [
        ({"cpu_threads": 4}, FITTING, [4], True),
        ({"cpu_threads": 8}, FITTING, [], True),
        ({"cpu_threads": 0}, FITTING, [], True),
        ({"cpu_threads": 1}, CpuThreads(4, is_chosen=False), [], True),
        ({"cpu_threads": 2}, FITTING, [], False),
        ({"cpu_threads": "1"}, FITTING, [], False),
        ({"cpu_threads": 1, "processes": 2}, FITTING, [], False),
        ({"cpu_threads": 1, "context_parallel_size": 2}, FITTING, [], False),
    ],
    ids=str,
)
@pytest.mark.usefixtures("single_process")
def test_a_run_resumes_with_its_number_of_threads_if_they_fit_and_logs_if_not(
    world: dict[str, Any], threads: CpuThreads, chosen: list[int], is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pretraining")
    found = list[int]()
    manifest = replace(examples.manifest_of(1), world={"processes": 1, "sharding_strategy": "fsdp", **world})
    alone = Processes(0, 1, 0, 1, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        patch.setattr(torch, "set_num_threads", found.append)
        restore_cpu_threads(CheckpointRef(Path("c"), manifest), TrainConfig(), alone, threads)
    assert found == chosen and len(caplog.messages) == is_said


def test_another_optimizer_is_refused_unless_its_state_is_left_behind(run: Path, begun: Path, tmp_path: Path) -> None:
    error = refusal(run, "optimizer=sgdm")
    assert isinstance(error, ConfigError) and {"optimizer", "load_optimizer"} <= set(error.settings)
    changed = ["optimizer=sgdm", "load_optimizer=false", EACH]
    start(run, *changed, "run_steps=1")
    start(run, *changed)  # the same command, as in a restarted job: momentum continues
    whole = shutil.copytree(begun, tmp_path / "whole")
    start(whole, *changed)
    assert equal(checkpoint(run, 6), checkpoint(whole, 6))
    plain = tmp_path / "plain"
    start(plain, "optimizer=rmsprop", "run_steps=1")
    assert "load_optimizer" in refusal(plain, "optimizer=rmsprop", "momentum=0.9").settings
    start(plain, "optimizer=rmsprop", "momentum=0.9", "load_optimizer=false")


def test_load_optimizer_false_holds_until_a_save_was_made_with_it(run: Path, renewed: Path) -> None:
    for _ in range(2):  # the same command, as in a restarted job
        start(run, "load_optimizer=false", EACH, "run_steps=1")
    assert equal(checkpoint(run, 6), checkpoint(renewed, 6))
    shutil.rmtree(checkpoint(run, 6))
    shutil.rmtree(checkpoint(run, 5))
    start(run)
    assert not equal(checkpoint(run, 6), checkpoint(renewed, 6))


def test_a_start_that_is_killed_after_a_return_starts_a_new_optimizer_again(renewed: Path, tmp_path: Path) -> None:
    back = ["resume_from_checkpoint=5", "load_optimizer=false", EACH]  # a script may always pass it
    run = shutil.copytree(renewed, tmp_path / "run", symlinks=True)
    start(run, *back)
    assert not equal(checkpoint(run, 6), checkpoint(renewed, 6))
    first = checkpoint(run, 6).rename(tmp_path / "first")  # the state after a kill before the first save
    start(run, *back)
    assert equal(checkpoint(run, 6), first)


def test_init_from_checks_the_start_point(run: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    assert "init_from" in refusal(run, "init_from=scratch").settings
    assert "init_from" in refusal(fresh, "init_from=resume").settings
    start(run, "init_from=resume", "run_steps=1")
    assert started_at(run) == 4
    for _ in range(2):  # a restarted job resumes
        start(fresh, "init_from=scratch", "run_steps=2")
    assert started_at(fresh) == 2
    assert "resume_from_checkpoint" in refusal(fresh, "init_from=scratch", "resume_from_checkpoint=2").settings


def test_a_start_point_elsewhere_begins_a_run_and_is_ignored_once_the_run_has_checkpoints(
    begun: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    said = "was for an earlier start of this run, which resumes. For a new run give another --ckpt_save_path"
    run, other = tmp_path / "run", tmp_path / "other"
    flags = ["init_from=scratch", f"resume_from_checkpoint={checkpoint(begun, 2)}", f"ckpt_load_path={begun}"]
    for flag, begins in zip(flags, (0, 2, 4), strict=True):
        place = run / flag[:6]
        caplog.clear()
        start(place, flag, "run_steps=1")
        assert started_at(place) == begins and said not in caplog.text
        start(place, flag, "run_steps=1")
        is_said = not flag.startswith("resume")  # this request is done
        assert started_at(place) == begins + 1 and (f"{flag} {said}" in caplog.text) == is_said
    for flag in ("resume_from_checkpoint=/nowhere", f"ckpt_load_path={tmp_path / 'nowhere'}"):
        assert refusal(other, flag).settings == (flag.partition("=")[0],)


def test_a_checkpoint_of_another_run_is_refused_unless_the_newest_was_saved_under_this_request(
    begun: Path, tmp_path: Path
) -> None:
    whole_runs.start(tmp_path / "mine", "num_steps=2")
    request = f"resume_from_checkpoint={checkpoint(begun, 4)}"
    error = str(refusal(tmp_path / "mine", request))
    assert "is no checkpoint of the run" in error and "step 2" in error
    for flags in ([request], [request], []):
        start(tmp_path / "next", *flags, "num_steps=7", "run_steps=1")
    assert started_at(tmp_path / "next") == 6
    assert "is no checkpoint of the run" in str(refusal(tmp_path / "next", request, "num_steps=8"))


def test_a_script_may_name_one_folder_as_both_paths_from_its_first_start_on(tmp_path: Path) -> None:
    run, empty = tmp_path / "run", tmp_path / "empty"
    (empty / "below").mkdir(parents=True)
    start(empty, f"ckpt_load_path={empty / 'below'}", "run_steps=1")
    for begins, load_path in enumerate((run, run, run / "checkpoints")):
        start(run, f"ckpt_load_path={load_path}", "run_steps=1")
        assert started_at(run) == begins
