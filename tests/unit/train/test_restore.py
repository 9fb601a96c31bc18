"""Starts that find their newest checkpoint damaged, as whole runs in this process: nothing of it stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import TINY, losses_of

from pretraining.checkpoint.start_point import named_checkpoint, open_tensors
from pretraining.cli import main
from pretraining.config.recipes import load_config
from pretraining.config.training import ParallelConfig
from pretraining.data.tokenizer import train_tokenizer
from pretraining.launch.cpu_threads import CpuThreads
from pretraining.train.restore import take_threads


def start(run: Path, *flags: str) -> None:
    main(["train", *TINY, "num_steps=6", "batch_size=2", "use_dummy_dataset=true", f"ckpt_save_path={run}", *flags])


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step}_ckp"


def damage(folder: Path) -> None:
    """Changes the last tensor of a checkpoint by much: used, it would show."""
    shard = max(folder.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 0x40
    shard.write_bytes(content)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    source = open_tensors(named_checkpoint(str(path)))
    return {name: source.read(name) for name in source.shapes()}


def equal(first: Path, second: Path) -> bool:
    ours, theirs = tensors_of(first), tensors_of(second)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def status_of(run: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((run / "run_status.json").read_text())
    return status


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4, of 6."""
    run = tmp_path_factory.mktemp("begun") / "run"
    start(run, "checkpoint_interval=2", "run_steps=4")
    return run


def test_a_start_that_passed_over_a_damaged_checkpoint_goes_on_as_if_it_were_not_there(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_damaged, without = tmp_path / "with_damaged", tmp_path / "without"
    for run in (with_damaged, without):
        shutil.copytree(begun, run)
    damage(checkpoint(with_damaged, 4))
    shutil.rmtree(checkpoint(without, 4))
    start(without)
    capsys.readouterr()
    start(with_damaged)
    out = capsys.readouterr().out
    assert f"start       from {checkpoint(with_damaged, 2)}, step 2" in out
    assert out.count("is damaged") == out.count("passed over") == out.count("model       ") == 1
    assert equal(checkpoint(with_damaged, 6), checkpoint(without, 6))
    assert losses_of(with_damaged) == losses_of(without)
    assert status_of(with_damaged)["started_at_step"] == status_of(without)["started_at_step"] == 2
    assert status_of(with_damaged)["starts"] == 2


def test_a_start_that_ends_at_once_says_the_step_that_was_restored(begun: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(begun, run)
    damage(checkpoint(run, 4))
    with pytest.raises(SystemExit):
        start(run, "seed=7")  # refused, after the tensors were read
    status = status_of(run)
    assert (status["status"], status["step"], status["started_at_step"]) == ("failed", 2, 2)
    assert "seed was 2023 and is 7" in status["reason"]
    assert (run / "config.yaml").read_text() == (begun / "config.yaml").read_text()  # as copied


def test_moments_of_a_damaged_checkpoint_do_not_stay_where_the_next_one_has_none(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["export", str(checkpoint(begun, 2)), f"--output_path={tmp_path / 'hf'}", "--dtype=float32"])
    runs = [tmp_path / "with_damaged", tmp_path / "without"]
    for run in runs:
        main(["import", str(tmp_path / "hf"), f"--ckpt_save_path={run}"])
    shutil.copytree(checkpoint(begun, 4), checkpoint(runs[0], 4))
    damage(checkpoint(runs[0], 4))
    for run in runs:
        start(run, "run_steps=2")
    assert f"start       at step 0 with the weights of {checkpoint(runs[0], 0)}" in capsys.readouterr().out
    assert equal(checkpoint(runs[0], 2), checkpoint(runs[1], 2))
    assert status_of(runs[0])["started_at_step"] == 0


def test_where_none_is_good_nothing_is_trained_and_all_are_named(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(begun, run)
    for step in (2, 4):
        damage(checkpoint(run, step))
    with pytest.raises(SystemExit):
        start(run)
    error = capsys.readouterr().err
    assert f"--ckpt_save_path={run} holds 2 checkpoints, and none is good:\n" in error and error.count("error:") == 1
    assert error.index(str(checkpoint(run, 4))) < error.index(str(checkpoint(run, 2)))
    assert status_of(run)["status"] == "failed" and status_of(run)["starts_without_progress"] == 0
    for flags in ([], ["weights_only=true"], ["load_optimizer=false"]):
        with pytest.raises(SystemExit):
            start(tmp_path / "new", f"ckpt_load_path={checkpoint(run, 4)}", *flags)
        assert "is damaged" in (error := capsys.readouterr().err)
        assert "Name another checkpoint with --ckpt_load_path." in error
        assert not (tmp_path / "new" / "config.yaml").exists()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("world", "threads", "kept", "line"),
    [
        ({"cpu_threads": 1}, CpuThreads(4, is_chosen=True), 1, "is 1 as before, of 4 that fit"),
        ({"cpu_threads": 4}, CpuThreads(4, is_chosen=True), 4, "is 4 as before, of 4 that fit"),
        ({"cpu_threads": 8}, CpuThreads(4, is_chosen=True), 2, "was 8 and is 2 from here on"),
        ({"cpu_threads": 0}, CpuThreads(4, is_chosen=True), 2, "was 0 and is 2 from here on"),
        ({"cpu_threads": 1}, CpuThreads(4, is_chosen=False), 2, "was 1 and is 2 from here on"),
        ({"cpu_threads": 2}, CpuThreads(4, is_chosen=True), 2, None),
        ({"cpu_threads": "1"}, CpuThreads(4, is_chosen=True), 2, None),
        ({}, CpuThreads(4, is_chosen=True), 2, None),
        ({"cpu_threads": 1, "processes": 2}, CpuThreads(4, is_chosen=True), 2, None),
        ({"cpu_threads": 1, "sharding_strategy": "ddp"}, CpuThreads(4, is_chosen=True), 2, None),
    ],
    ids=[
        "fewer",
        "more",
        "too many",
        "none",
        "the user has chosen",
        "the same",
        "no number",
        "of an older version",
        "other processes",
        "another strategy",
    ],
)
def test_a_run_goes_on_with_its_number_of_threads_where_they_fit_and_says_where_not(
    world: dict[str, Any], threads: CpuThreads, kept: int, line: str | None
) -> None:
    said = take_threads({"processes": 1, "sharding_strategy": "fsdp", **world}, ParallelConfig(), 1, threads)
    assert torch.get_num_threads() == kept
    assert said == line or (line is not None and said is not None and line in said)


def test_another_optimizer_is_refused_unless_its_state_is_left_behind(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(begun, run)
    with pytest.raises(SystemExit):
        start(run, "optimizer=sgdm")
    error = capsys.readouterr().err
    assert "has the state of --optimizer=adamw, which sgdm cannot go on from" in error
    assert "--load_optimizer=false" in error
    changed = ["optimizer=sgdm", "load_optimizer=false", "checkpoint_interval=1"]
    start(run, *changed, "run_steps=1")
    said = capsys.readouterr().out
    assert "optimizer was adamw and is sgdm from here on" in said
    assert "learning_rate was" not in said  # given, and the same
    assert "optimizer   sgdm: learning_rate 0.001, weight_decay 0.0, momentum 0.9, nesterov false" in said
    # The same command again, as a restarted job has it: momentum goes on.
    start(run, *changed)
    assert "optimizer was" not in capsys.readouterr().out
    whole = tmp_path / "whole"
    shutil.copytree(begun, whole)
    start(whole, *changed)
    assert equal(checkpoint(run, 6), checkpoint(whole, 6))


def test_state_without_momentum_is_no_start_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    start(run, "optimizer=rmsprop", "run_steps=2")
    with pytest.raises(SystemExit):
        start(run, "optimizer=rmsprop", "momentum=0.9")
    error = capsys.readouterr().err
    assert "--optimizer=rmsprop with momentum=0, which momentum=0.9 cannot go on from" in error
    start(run, "optimizer=rmsprop", "momentum=0.9", "load_optimizer=false")


def test_what_was_left_to_the_optimizer_and_is_given_now_is_no_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    start(run, "run_steps=1")
    start(run, "run_steps=1", "weight_decay=0.1")
    assert "weight_decay was" not in capsys.readouterr().out
    start(run, "weight_decay=0.2")
    assert "weight_decay was 0.1 and is 0.2 from here on" in capsys.readouterr().out


def copy_of(begun: Path, tmp_path: Path) -> Path:
    run = tmp_path / "run"
    shutil.copytree(begun, run, symlinks=True)
    return run


@pytest.mark.parametrize("form", ["path", "name", "step"])
def test_a_run_goes_back_to_an_older_checkpoint_of_its_own_once(
    form: str, begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(begun, tmp_path)
    kept = tensors_of(checkpoint(run, 4))
    request = {"path": str(checkpoint(run, 2)), "name": "step_2_ckp", "step": "2"}[form]
    back = [f"resume_from_checkpoint={request}", "checkpoint_interval=1", "learning_rate=2e-3"]
    start(run, *back, "run_steps=1")
    said = capsys.readouterr().out
    (aside,) = (run / "checkpoints").glob("set_aside_*")
    assert f"step_4_ckp is newer than step_2_ckp: moved to {aside}" in said
    assert f"start       from {checkpoint(run, 2)}, step 2" in said
    assert [path.name for path in aside.iterdir()] == ["step_4_ckp"]
    moved = tensors_of(aside / "step_4_ckp")
    assert all(torch.equal(moved[name], kept[name]) for name in kept)
    assert len(losses_of(run)) == 3  # steps 1, 2, and 3 anew
    # The same command, as a restarted job has it: once from what came after, at last from the end.
    start(run, *back, "run_steps=2", "keep_last=1")
    said = capsys.readouterr().out
    assert f"--resume_from_checkpoint={request} was done by an earlier start" in said
    assert f"start       from {checkpoint(run, 3)}, step 3" in said
    assert not checkpoint(run, 2).exists() and (aside / "step_4_ckp").exists()
    start(run, *back)
    assert "was done by an earlier start" in capsys.readouterr().out
    whole = tmp_path / "whole"
    shutil.copytree(begun, whole)
    shutil.rmtree(checkpoint(whole, 4))
    start(whole, "learning_rate=2e-3")
    assert equal(checkpoint(run, 6), checkpoint(whole, 6))
    assert losses_of(run) == losses_of(whole)


def test_another_request_goes_back_again_and_one_that_ended_halfway_does_the_rest(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy_of(begun, tmp_path)
    start(run, "resume_from_checkpoint=4", "checkpoint_interval=1", "run_steps=1")
    assert "is newer than" not in capsys.readouterr().out
    rename = Path.rename
    renamed: list[Path] = []

    def failing_after_the_first(path: Path, target: Path) -> Path:
        if renamed:
            raise OSError(5, "Input/output error", str(path))
        renamed.append(path)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing_after_the_first)
        with pytest.raises(SystemExit):
            start(run, "resume_from_checkpoint=2", "run_steps=1")
    capsys.readouterr()
    start(run, "resume_from_checkpoint=2", "run_steps=1", "checkpoint_interval=1")
    assert f"start       from {checkpoint(run, 2)}, step 2" in capsys.readouterr().out
    moved = sorted(path.name for path in (run / "checkpoints").glob("set_aside_*/*"))
    assert moved == ["step_4_ckp", "step_5_ckp"]


def test_going_back_to_what_is_not_there_names_what_is(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(begun, tmp_path)
    for request in ("3", "step_3_ckp", str(checkpoint(begun, 3))):
        with pytest.raises(SystemExit):
            start(run, f"resume_from_checkpoint={request}")
        error = capsys.readouterr().err
        assert f"--resume_from_checkpoint={request} is no checkpoint of the run in {run}" in error
        assert "which holds step_2_ckp, step_4_ckp" in error
    for folder in (run, run / "checkpoints", run / "checkpoints" / "set_aside_1" / "step_2_ckp"):
        folder.mkdir(parents=True, exist_ok=True)
        with pytest.raises(SystemExit):
            start(run, f"resume_from_checkpoint={folder}")
        assert f"{folder} is in the run's folder, and none of its checkpoints" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        start(run, "resume_from_checkpoint=2", "weights_only=true")
    assert "goes on with this run, and --weights_only=true begins a new one" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["content", "manifest"])
def test_nothing_is_moved_for_a_start_that_is_refused(
    part: str, begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(begun, tmp_path)
    for flags in (["optimizer=sgdm"], ["seq_length=16"], ["hidden_size=16"]):
        with pytest.raises(SystemExit):
            start(run, "resume_from_checkpoint=2", *flags)
        assert "error:" in capsys.readouterr().err
    if part == "content":
        damage(checkpoint(run, 2))
    else:
        (checkpoint(run, 2) / "manifest.json").write_text("{}")
    with pytest.raises(SystemExit):
        start(run, "resume_from_checkpoint=2")
    error = capsys.readouterr().err
    assert str(checkpoint(run, 2)) in error and "Name another checkpoint with --resume_from_checkpoint." in error
    assert checkpoint(run, 4).exists() and not list((run / "checkpoints").glob("set_aside_*"))
    start(run, "run_steps=1")
    assert f"start       from {checkpoint(run, 4)}, step 4" in capsys.readouterr().out


def test_what_is_saved_anew_under_the_name_that_was_asked_for_does_not_bring_the_run_back(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(begun, tmp_path)
    (run / "checkpoints" / "best").unlink(missing_ok=True)
    (run / "checkpoints" / "best").symlink_to("step_2_ckp")
    back = [f"resume_from_checkpoint={run}/checkpoints/best", "checkpoint_interval=1", "learning_rate=2e-3"]
    start(run, *back, "run_steps=1")
    assert f"start       from {checkpoint(run, 2)}, step 2" in capsys.readouterr().out
    (run / "checkpoints" / "best").unlink(missing_ok=True)
    (run / "checkpoints" / "best").symlink_to("step_3_ckp")
    start(run, *back, "run_steps=1")
    assert f"start       from {checkpoint(run, 3)}, step 3" in capsys.readouterr().out
    # Another name of the same checkpoint asks for nothing new; a start without the flag, and one with it, does.
    start(run, "resume_from_checkpoint=2", "run_steps=1", "checkpoint_interval=1")
    assert f"start       from {checkpoint(run, 4)}, step 4" in capsys.readouterr().out
    start(run, "run_steps=1", "checkpoint_interval=1")
    start(run, "resume_from_checkpoint=2", "run_steps=1", "checkpoint_interval=1", "load_optimizer=false")
    said = capsys.readouterr().out
    assert f"start       from {checkpoint(run, 2)}, step 2" in said and "optimizer   begins anew" in said


def test_where_it_is_not_known_whether_the_run_went_back_it_goes_on(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(begun, tmp_path)
    (run / "run_status.json").write_text("{")
    start(run, "resume_from_checkpoint=2", "run_steps=1")
    said = capsys.readouterr()
    assert "whether the run has gone back to 2 is not known" in said.out + said.err
    assert f"start       from {checkpoint(run, 4)}, step 4" in said.out


def test_copies_of_the_step_stay_where_they_are(begun: Path, tmp_path: Path) -> None:
    run = copy_of(begun, tmp_path)
    shutil.copytree(checkpoint(run, 2), run / "checkpoints" / "mine")
    start(run, "resume_from_checkpoint=2", "run_steps=1")
    assert (run / "checkpoints" / "mine").exists() and not checkpoint(run, 4).exists()


def test_checkpoints_that_cannot_be_moved_are_named(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy_of(begun, tmp_path)

    def refused(path: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(SystemExit):
        start(run, "resume_from_checkpoint=2")
    error = capsys.readouterr().err
    assert f"{checkpoint(run, 4)} cannot be moved to {run}/checkpoints/set_aside_" in error


def test_what_a_run_begins_with_may_be_said(begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy_of(begun, tmp_path)
    with pytest.raises(SystemExit):
        start(run, "init_from=scratch")
    assert f"begins from initial weights, and {run} holds a run at step 4" in capsys.readouterr().err
    start(run, "init_from=resume", "run_steps=1")
    assert f"start       from {checkpoint(run, 4)}" in capsys.readouterr().out
    fresh = tmp_path / "fresh"
    with pytest.raises(SystemExit):
        start(fresh, "init_from=resume")
    assert f"--init_from=resume goes on with a run, and {fresh} holds no checkpoint" in capsys.readouterr().err
    start(fresh, "init_from=scratch", "run_steps=2")
    start(fresh, "init_from=scratch", "run_steps=2")  # a restarted job
    assert f"start       from {checkpoint(fresh, 2)}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        start(fresh, "init_from=scratch", "resume_from_checkpoint=2")
    assert "--resume_from_checkpoint=2 does not: leave one out" in capsys.readouterr().err


def test_a_checkpoint_of_elsewhere_begins_a_run_and_is_left_alone_where_there_is_one(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    elsewhere = f"resume_from_checkpoint={checkpoint(begun, 2)}"
    start(run, elsewhere, "run_steps=1", "checkpoint_interval=1")
    assert f"start       from {checkpoint(begun, 2)}, step 2" in capsys.readouterr().out
    start(run, elsewhere, "run_steps=1", "checkpoint_interval=1")
    said = capsys.readouterr().out
    assert "is not of this run, which goes on from its own newest" in said
    assert f"start       from {checkpoint(run, 3)}, step 3" in said
    with pytest.raises(SystemExit):
        start(tmp_path / "other", "resume_from_checkpoint=/nowhere")
    assert "--resume_from_checkpoint=/nowhere holds no complete checkpoint" in capsys.readouterr().err
    start(run, f"ckpt_load_path={checkpoint(run, 3)}", "run_steps=1")
    both = capsys.readouterr()
    said = "".join(both)
    assert said.count(f"--resume_from_checkpoint={checkpoint(run, 3)}") == 1
    assert f"the start is from {checkpoint(run, 4)}" in said
    assert f"start       from {checkpoint(run, 4)}, step 4" in said
    start(run, f"ckpt_load_path={checkpoint(run, 5)}")  # the newest itself
    assert "--resume_from_checkpoint" not in "".join(capsys.readouterr())
    start(run, f"ckpt_load_path={begun}")
    said = capsys.readouterr().out
    assert f"the run in {run} goes on from its own newest checkpoint, not from --ckpt_load_path={begun}" in said
    with pytest.raises(SystemExit):
        start(run, "resume_from_checkpoint=2", f"ckpt_load_path={begun}")
    assert "both say what to start from: keep one" in capsys.readouterr().err


def test_steps_that_are_listed_are_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(run, "checkpoint_interval=0", "checkpoint_steps=1,3,100")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_1_ckp", "step_3_ckp", "step_6_ckp"]


def test_a_vocabulary_that_is_not_given_is_big_enough_for_the_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = train_tokenizer(["some text, and more of it"] * 3, 300)
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(tmp_path / "tokenizer")
    entries = tokenizer.vocab_size
    assert 256 < entries < 384
    run, flags = tmp_path / "run", [each for each in TINY if not each.startswith("vocab_size=")]
    flags += ["num_steps=2", "batch_size=1", "use_dummy_dataset=true", f"tokenizer_path={tmp_path / 'tokenizer'}"]
    main(["train", *flags, "run_steps=1", f"ckpt_save_path={run}"])
    said = capsys.readouterr().out
    assert f"vocab_size  384, for the {entries} entries of {tmp_path / 'tokenizer'}" in said
    assert load_config(run / "config.yaml").model.vocab_size == 384
    main(["train", *flags, f"ckpt_save_path={run}"])
    assert "entries of" not in capsys.readouterr().out
    # A run that was begun with another number goes on with it.
    other = tmp_path / "other"
    main(["train", *flags, "vocab_size=400", "run_steps=1", f"ckpt_save_path={other}"])
    main(["train", *flags, f"ckpt_save_path={other}"])
    assert load_config(other / "config.yaml").model.vocab_size == 400
    with pytest.raises(SystemExit):
        main(["train", *flags, "sep_token=384", f"ckpt_save_path={tmp_path / 'none'}"])
    assert "--sep_token=384 is outside a vocabulary of 384" in capsys.readouterr().err


def test_a_script_may_name_one_folder_as_both_paths_from_its_first_start_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    for load_path, first in ((run, True), (run, False), (run / "checkpoints", False)):
        start(run, f"ckpt_load_path={load_path}", "run_steps=1")
        said = capsys.readouterr().out
        assert ("is in the run's own folder and holds no checkpoint yet: a new run begins" in said) == first
        assert ("from initial weights" in said) == first
    empty = tmp_path / "empty"
    (empty / "below").mkdir(parents=True)
    start(empty, f"ckpt_load_path={empty / 'below'}", "run_steps=1")
    assert "a new run begins" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        start(tmp_path / "other", f"ckpt_load_path={tmp_path / 'nowhere'}")
    assert "holds no complete checkpoint" in capsys.readouterr().err
