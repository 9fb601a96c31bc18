"""Starts that resume or go back, as whole runs in this process: damaged checkpoints leave no trace."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import first_quick
from training_runs import TINY, events_of, losses_of, status_of
from unit.checkpoint.examples import manifest_of
from unit.train import whole_runs
from unit.train.whole_runs import checkpoint, damage, equal, saved, started_at, write_tokenizer

from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.config.recipes import load_config
from pretraining.config.training import TrainConfig
from pretraining.distributed.processes import Processes
from pretraining.errors import CheckpointError, ConfigError, PretrainError
from pretraining.launch.cpu_threads import CpuThreads
from pretraining.train.plan import restore_cpu_threads

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


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return shutil.copytree(begun, tmp_path / "run", symlinks=True)


def test_a_start_that_skips_a_damaged_checkpoint_trains_as_if_it_did_not_exist(
    run: Path, begun: Path, tmp_path: Path
) -> None:
    without = shutil.copytree(begun, tmp_path / "without")
    damage(checkpoint(run, 4))
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
    assert (status["status"], status["step"], status["started_at_step"]) == ("failed", 4, 4)
    assert "seed was 2023 and is 7" in status["reason"]
    assert (run / "config.yaml").read_text() == (begun / "config.yaml").read_text()


def test_where_none_is_good_nothing_is_trained_and_all_are_named(run: Path, tmp_path: Path) -> None:
    for step in (2, 4):
        damage(checkpoint(run, step))
    said = str(refusal(run))
    assert said.index(str(checkpoint(run, 4))) < said.index(str(checkpoint(run, 2)))
    assert status_of(run)["status"] == "failed" and status_of(run)["starts_without_progress"] == 0
    for flags in ([], ["weights_only=true"], ["load_optimizer=false"]):
        error = refusal(tmp_path / "new", f"ckpt_load_path={checkpoint(run, 4)}", *flags)
        assert str(checkpoint(run, 4)) in str(error) and error.settings == ("ckpt_load_path",)
        assert not (tmp_path / "new" / "config.yaml").exists()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


FITTING = CpuThreads(4, is_chosen=True)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("world", "threads", "kept", "is_said"),
    [
        ({"cpu_threads": 4}, FITTING, 4, True),
        ({"cpu_threads": 8}, FITTING, 2, True),
        ({"cpu_threads": 0}, FITTING, 2, True),
        ({"cpu_threads": 1}, CpuThreads(4, is_chosen=False), 2, True),
        ({"cpu_threads": 2}, FITTING, 2, False),
        ({"cpu_threads": "1"}, FITTING, 2, False),
        ({"cpu_threads": 1, "processes": 2}, FITTING, 2, False),
        ({"cpu_threads": 1, "sharding_strategy": "ddp"}, FITTING, 2, False),
        ({"cpu_threads": 1, "context_parallel_size": 2}, FITTING, 2, False),
    ],
    ids=str,
)
@pytest.mark.usefixtures("single_process")
def test_a_run_resumes_with_its_number_of_threads_if_they_fit_and_logs_if_not(
    world: dict[str, Any], threads: CpuThreads, kept: int, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pretraining")
    manifest = replace(manifest_of(1), world={"processes": 1, "sharding_strategy": "fsdp", **world})
    alone = Processes(0, 1, 0, 1, torch.device("cpu"))
    restore_cpu_threads(CheckpointRef(Path("c"), manifest), TrainConfig(), alone, threads)
    assert torch.get_num_threads() == kept and len(caplog.messages) == is_said


def test_another_optimizer_is_refused_unless_its_state_is_left_behind(run: Path, begun: Path, tmp_path: Path) -> None:
    error = refusal(run, "optimizer=sgdm")
    assert isinstance(error, ConfigError) and {"optimizer", "load_optimizer"} <= set(error.settings)
    changed = ["optimizer=sgdm", "load_optimizer=false", EACH]
    start(run, *changed, "run_steps=1")
    start(run, *changed)  # the same command, as in a restarted job: momentum continues
    whole = shutil.copytree(begun, tmp_path / "whole")
    start(whole, *changed)
    assert equal(checkpoint(run, 6), checkpoint(whole, 6))


def test_load_optimizer_false_holds_until_a_save_was_made_with_it(run: Path, begun: Path, tmp_path: Path) -> None:
    fresh_optimizer = ["load_optimizer=false", EACH]
    start(run, *fresh_optimizer, "run_steps=1")
    start(run, *fresh_optimizer)  # the same command, as in a restarted job
    whole, kept = (shutil.copytree(begun, tmp_path / name) for name in ("whole", "kept"))
    start(whole, *fresh_optimizer)
    start(kept, EACH)
    assert equal(checkpoint(run, 6), checkpoint(whole, 6)) and not equal(checkpoint(run, 6), checkpoint(kept, 6))


def test_a_start_that_is_killed_after_a_rewind_starts_a_new_optimizer_again(run: Path, tmp_path: Path) -> None:
    start(run, "load_optimizer=false", EACH, "run_steps=1")  # a script may always pass it
    back = ["resume_from_checkpoint=5", "load_optimizer=false", EACH]
    killed, whole = (shutil.copytree(run, tmp_path / name) for name in ("killed", "whole"))
    start(whole, *back)
    start(killed, *back)
    shutil.rmtree(checkpoint(killed, 6))  # the state after a kill before the first save
    start(killed, *back)
    assert equal(checkpoint(killed, 6), checkpoint(whole, 6))
    start(run, EACH)
    assert not equal(checkpoint(run, 6), checkpoint(whole, 6))


def test_state_without_momentum_is_no_start_with_it(tmp_path: Path) -> None:
    start(tmp_path, "optimizer=rmsprop", "run_steps=2")
    assert "load_optimizer" in refusal(tmp_path, "optimizer=rmsprop", "momentum=0.9").settings
    start(tmp_path, "optimizer=rmsprop", "momentum=0.9", "load_optimizer=false")


@pytest.mark.parametrize("form", first_quick("path", "name", "step"))
def test_a_run_goes_back_to_an_older_checkpoint_of_its_own_once(
    form: str, run: Path, begun: Path, tmp_path: Path
) -> None:
    request = {"path": str(checkpoint(run, 2)), "name": "step_2_ckp", "step": "2"}[form]
    back = [f"resume_from_checkpoint={request}", EACH, "learning_rate=2e-3"]
    start(run, *back, "run_steps=1")
    (aside,) = (run / "checkpoints").glob("set_aside_*")
    assert started_at(run) == 2 and [path.name for path in aside.iterdir()] == ["step_4_ckp"]
    assert equal(aside / "step_4_ckp", checkpoint(begun, 4))
    assert len(losses_of(run)) == 3  # steps 1, 2, and 3 again
    # The same command, as in a restarted job: first from the newer checkpoint, then from the end.
    start(run, *back, "run_steps=2", "keep_last=1")
    assert started_at(run) == 3 and not checkpoint(run, 2).exists() and (aside / "step_4_ckp").exists()
    start(run, *back)
    whole = shutil.copytree(begun, tmp_path / "whole")
    shutil.rmtree(checkpoint(whole, 4))
    start(whole, "learning_rate=2e-3")
    assert equal(checkpoint(run, 6), checkpoint(whole, 6)) and losses_of(run) == losses_of(whole)


def test_another_request_goes_back_again_and_one_that_ended_halfway_does_the_rest(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(run, "resume_from_checkpoint=4", EACH, "run_steps=1")
    assert saved(run)[-1] == "step_5_ckp" and checkpoint(run, 4).exists()
    rename, renamed = Path.rename, list[Path]()

    def fail_after_the_first(path: Path, target: Path) -> Path:
        if renamed:
            raise OSError(5, "Input/output error", str(path))
        renamed.append(path)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_after_the_first)
        assert refusal(run, "resume_from_checkpoint=2", "run_steps=1").path == checkpoint(run, 5)
    start(run, "resume_from_checkpoint=2", "run_steps=1", EACH)
    assert started_at(run) == 2
    moved = sorted(path.name for path in (run / "checkpoints").glob("set_aside_*/*"))
    assert moved == ["step_4_ckp", "step_5_ckp"]


@pytest.mark.parametrize(
    "request_of_run",
    ["3", "step_3_ckp", "{begun}/checkpoints/step_3_ckp", "{run}", "{run}/checkpoints", "{run}/checkpoints/aside/2"],
)
def test_a_rewind_to_a_checkpoint_of_another_run_is_refused(request_of_run: str, run: Path, begun: Path) -> None:
    (run / "checkpoints" / "aside" / "2").mkdir(parents=True)
    error = refusal(run, f"resume_from_checkpoint={request_of_run.format(run=run, begun=begun)}")
    assert isinstance(error, CheckpointError) and error.settings == ("resume_from_checkpoint",)


@pytest.mark.parametrize("part", ["content", "manifest"])
def test_nothing_is_moved_for_a_start_that_is_refused(part: str, run: Path) -> None:
    for flag in ("optimizer=sgdm", "seq_length=16", "hidden_size=16"):
        refusal(run, "resume_from_checkpoint=2", flag)
    assert "weights_only" in refusal(run, "resume_from_checkpoint=2", "weights_only=true").settings
    if part == "content":
        damage(checkpoint(run, 2))
    else:
        (checkpoint(run, 2) / "manifest.json").write_text("{}")
    error = refusal(run, "resume_from_checkpoint=2")
    assert str(checkpoint(run, 2)) in str(error) and error.settings == ("resume_from_checkpoint",)
    assert checkpoint(run, 4).exists() and not list((run / "checkpoints").glob("set_aside_*"))
    start(run, "run_steps=1")
    assert started_at(run) == 4


def test_copies_of_the_step_stay_where_they_are(run: Path) -> None:
    copy = shutil.copytree(checkpoint(run, 2), run / "checkpoints" / "mine")
    start(run, "resume_from_checkpoint=2", "run_steps=1")
    assert copy.exists() and not checkpoint(run, 4).exists()


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


def test_a_checkpoint_of_elsewhere_begins_a_run_and_is_left_alone_where_there_is_one(
    begun: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    elsewhere = f"resume_from_checkpoint={checkpoint(begun, 2)}"
    for begins in (2, 3):
        start(run, elsewhere, "run_steps=1", EACH)
        assert started_at(run) == begins
    assert refusal(tmp_path / "other", "resume_from_checkpoint=/nowhere").settings == ("resume_from_checkpoint",)
    for load_path, begins in ((checkpoint(run, 3), 4), (begun, 5)):  # besides the run's own checkpoints
        start(run, f"ckpt_load_path={load_path}", "run_steps=1")
        assert started_at(run) == begins
    assert "ckpt_load_path" in refusal(run, "resume_from_checkpoint=2", f"ckpt_load_path={begun}").settings


def test_a_vocabulary_that_is_not_given_is_big_enough_for_the_tokenizer(tmp_path: Path) -> None:
    assert 256 < write_tokenizer(tmp_path / "tokenizer", 300) < 384
    model = [each for each in TINY if not each.startswith("vocab_size=")]
    flags = ["num_steps=2", "sample_tokens=0", f"tokenizer_path={tmp_path / 'tokenizer'}"]
    # A run that began with another number keeps it.
    for run, given, rows in ((tmp_path / "run", [], 384), (tmp_path / "other", ["vocab_size=400"], 400)):
        whole_runs.start(run, *flags, *given, "run_steps=1", model=model)
        whole_runs.start(run, *flags, model=model)
        assert load_config(run / "config.yaml").model.vocab_size == rows
    assert "sep_token" in whole_runs.refusal(tmp_path / "none", *flags, "sep_token=384", model=model).settings


def test_a_script_may_name_one_folder_as_both_paths_from_its_first_start_on(tmp_path: Path) -> None:
    run, empty = tmp_path / "run", tmp_path / "empty"
    (empty / "below").mkdir(parents=True)
    start(empty, f"ckpt_load_path={empty / 'below'}", "run_steps=1")
    for begins, load_path in enumerate((run, run, run / "checkpoints")):
        start(run, f"ckpt_load_path={load_path}", "run_steps=1")
        assert started_at(run) == begins
    assert refusal(tmp_path / "other", f"ckpt_load_path={tmp_path / 'nowhere'}").settings == ("ckpt_load_path",)
