from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from training_runs import TINY, status_of, write_dataset
from unit.train.whole_runs import checkpoint, manifest_of, saved, start, started_at

from pretraining import Trainer
from pretraining.checkpoint.lease import LEASE, Holder
from pretraining.cli import main
from pretraining.config.recipes import load_config
from pretraining.config.run_recipe import comment_of_start, last_start
from pretraining.errors import CheckpointError, PretrainError
from pretraining.files import with_checksum
from pretraining.train import build


def go_on(*words: object) -> None:
    main(["train", *map(str, words)])


def refused(*words: object) -> str:
    with pytest.raises(SystemExit) as ending:
        go_on(*words)
    error = ending.value.__context__
    assert isinstance(error, PretrainError)
    return str(error)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps that saves every step; its path was typed relative to `here`."""
    here = tmp_path_factory.mktemp("here")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        start(Path("runs/a"), "checkpoint_interval=1")
    return here / "runs" / "a"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A folder of its own for each test, whose config.yaml still names the place where it began."""
    return shutil.copytree(trained, tmp_path / "b", symlinks=True)


def test_a_copy_goes_on_by_itself_from_any_working_directory(trained: Path, run: Path, tmp_path: Path) -> None:
    before = sorted((trained / "checkpoints").iterdir())
    for words in (["b"], ["--recipe=b/config.yaml"], ["b/config.yaml"]):
        copied = shutil.copytree(run, tmp_path / str(len(words[0])) / "b", symlinks=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(copied.parent)
            go_on(*words, "num_steps=5")
        assert "step_5_ckp" in saved(copied) and started_at(copied) == 4
        assert load_config(copied / "config.yaml").checkpoint.ckpt_save_path == str(copied)
    assert sorted((trained / "checkpoints").iterdir()) == before and status_of(trained)["starts"] == 1


def test_a_moved_run_goes_on_in_its_new_place_and_leaves_nothing_at_the_old_one(run: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    start(old, "checkpoint_interval=2")
    moved = old.rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(moved)
    go_on(tmp_path / "link", "num_steps=5")
    assert started_at(moved) == 4 and not old.exists()


def test_python_goes_on_with_a_runs_config_too(run: Path) -> None:
    trainer = Trainer.from_recipe(run / "config.yaml", num_steps=5)
    result = trainer.train()
    assert result.run_path == run and started_at(run) == 4


def test_a_later_recipe_or_flag_gives_another_folder(run: Path, tmp_path: Path) -> None:
    (tmp_path / "later.yaml").write_text(f"ckpt_save_path: {tmp_path}/c\n")
    go_on(f"--recipe={run}/config.yaml,{tmp_path}/later.yaml", "--dry_run=true")
    go_on(run, f"--ckpt_save_path={tmp_path}/d", "num_steps=1")
    assert saved(tmp_path / "d") == ["step_1_ckp"] and status_of(run)["starts"] == 1


def test_a_dry_run_and_an_evaluation_mean_the_run_in_the_folder(
    trained: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go_on(run, "--dry_run=true", "num_steps=9")
    assert f"from {checkpoint(run, 4)}" in capsys.readouterr().out
    began = tmp_path / "began"
    data = tmp_path / "data"
    write_dataset(data / "first", documents=40)
    flags = ["use_dummy_dataset=none", f"data_path={data}", "sep_token=0", "held_out_fraction=0.2"]
    flags = flags[1:]
    start(began, f"ckpt_load_path={checkpoint(trained, 2)}", "weights_only=true", "num_steps=2", *flags)
    capsys.readouterr()
    go_on(began, "--eval_only=true")  # not the weights that it began with
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["checkpoint"] == str(checkpoint(began, 2))


@pytest.mark.parametrize("beside", ["", "logs"])
def test_another_file_of_this_name_is_a_recipe_as_before(run: Path, tmp_path: Path, beside: str) -> None:
    conf = tmp_path / "conf"
    (conf / beside).mkdir(parents=True)
    text = (run / "config.yaml").read_text().replace("ckpt_save_path: runs/a", f"ckpt_save_path: {tmp_path}/there")
    (conf / "config.yaml").write_text(text)
    go_on(f"--recipe={conf}/config.yaml", "num_steps=1")
    assert saved(tmp_path / "there") == ["step_1_ckp"]


def test_a_users_own_recipe_beside_checkpoints_of_another_program_is_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    settings = "".join(f"{each.replace('=', ': ', 1)}\n" for each in [*TINY, "use_dummy_dataset=true", "num_steps=1"])
    (tmp_path / "config.yaml").write_text(f"{settings}ckpt_save_path: {tmp_path}/there\n")
    go_on(f"--recipe={tmp_path}/config.yaml")
    assert saved(tmp_path / "there") == ["step_1_ckp"]


def test_a_folder_without_settings_is_one_error_with_the_way_on(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    error = refused(tmp_path / "empty")
    assert f"{tmp_path}/empty holds no config.yaml" in error and f"--ckpt_save_path={tmp_path}/empty" in error
    assert "the folder of a run (there is no such one)" in refused(tmp_path / "typo")


# A copy


def live_lease(run: Path, of: Path) -> None:
    """Write the lease of this living process on a folder."""
    holder = replace(Holder.this_process(), folder=str(of), inode=1)
    (run / LEASE).write_text(json.dumps(with_checksum(asdict(holder))))


def test_a_copied_lease_holds_nothing(trained: Path, run: Path) -> None:
    live_lease(run, of=trained)
    (run / "checkpoints" / "step_5_ckp.1f9c.tmp").mkdir()
    go_on(run, "num_steps=5")
    assert started_at(run) == 4 and not (run / LEASE).exists()


@pytest.mark.parametrize("place", ["another mount of the same folder", "the folder itself", "an earlier version"])
def test_a_lease_of_this_folder_holds_it(trained: Path, run: Path, place: str) -> None:
    live_lease(run, of=run if place == "the folder itself" else trained)
    if place != "the folder itself":
        holder = replace(
            Holder.this_process(),
            folder="" if place == "an earlier version" else str(trained),
            inode=(run / LEASE).stat().st_ino,
        )
        document = asdict(holder)
        if place == "an earlier version":
            del document["folder"], document["inode"]
        (run / LEASE).write_text(json.dumps(with_checksum(document)))
    assert "another run writes into it" in refused(run, "num_steps=5")


def with_store(run: Path, store: Path) -> None:
    start(run, "checkpoint_interval=2", f"ckpt_mirror_path=file://{store}")


def test_a_copy_does_not_write_into_the_mirror_of_its_original(tmp_path: Path) -> None:
    run, store = tmp_path / "a", tmp_path / "store"
    with_store(run, store)
    copied = shutil.copytree(run, tmp_path / "b", symlinks=True)
    error = refused(copied, "num_steps=5")
    assert f"copy of the run in {run}" in error and "--ckpt_mirror_path=<another address, or none>" in error
    assert "--tracker_run_id" not in error
    assert "is a copy" in refused(copied, "num_steps=5", "--dry_run=true")
    (copied / "run_status.json").unlink()  # fetched from a store
    assert "is a copy" in refused(copied, "num_steps=5", f"--ckpt_mirror_path=file://{store}/")
    with pytest.raises(SystemExit):
        main(["push", str(copied)])
    go_on(copied, "num_steps=5", f"--ckpt_mirror_path=file://{tmp_path}/other")
    go_on(copied, "num_steps=6")  # from now on a run of its own
    go_on(run, "num_steps=5")
    assert (tmp_path / "other/checkpoints/step_6_ckp").exists() and not (store / "checkpoints/step_6_ckp").exists()


def test_a_run_that_was_moved_goes_on_with_its_mirror(tmp_path: Path) -> None:
    run, store = tmp_path / "a", tmp_path / "store"
    with_store(run, store)
    moved = run.rename(tmp_path / "b")
    start(run, "num_steps=1")  # another run in the old place
    go_on(moved, "num_steps=5")
    assert (store / "checkpoints/step_5_ckp").exists()


def test_a_record_without_id_or_place_is_that_of_a_moved_run(tmp_path: Path) -> None:
    run, store = tmp_path / "a", tmp_path / "store"
    with_store(run, store)
    copied = shutil.copytree(run, tmp_path / "b", symlinks=True)
    lines = (copied / "config.yaml").read_text().splitlines(keepends=True)
    assert last_start(copied).folder == run
    for first in ("", "# Last start: [1, 2]\n", "# Last start: 5\n", "# Last start: {\n", comment_of_start(copied)):
        (copied / "config.yaml").write_text(first + "".join(lines[1:]))
        go_on(copied, "num_steps=5", "--dry_run=true")


class Service:
    """A tracker with an id, as wandb and mlflow have one."""

    ids: ClassVar[list[str | None]] = []

    def __init__(self, run: Any) -> None:
        self.run_id = run.run_id or "first"
        Service.ids.append(run.run_id)

    def log(self, *values: object) -> None: ...

    def close(self) -> None: ...


def test_a_copy_does_not_write_into_the_tracker_of_its_original(tmp_path: Path) -> None:
    run, tracker = tmp_path / "a", f"tracker={__name__}:Service"
    start(run, model=[each for each in TINY if "tracker" not in each] + [tracker])
    copied = shutil.copytree(run, tmp_path / "b", symlinks=True)
    error = refused(copied, "num_steps=5")
    assert "run first of" in error and "--tracker_run_id=<a new one>" in error and "mirror" not in error
    assert "is a copy" in refused(copied, "num_steps=5", "--tracker_run_id=first")
    go_on(copied, "num_steps=5", "--tracker=none")
    shutil.rmtree(copied)
    shutil.copytree(run, copied, symlinks=True)
    go_on(copied, "num_steps=5", "--tracker_run_id=second")
    assert Service.ids[-1] == "second"
    go_on(copied, "num_steps=6")
    go_on(run, "num_steps=5")
    assert Service.ids[-2:] == ["second", "first"]


# Paths


def test_relative_paths_are_found_from_where_they_were_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    work, other = tmp_path / "work", tmp_path / "other"
    for each in (work, other):
        each.mkdir()
    for name in ("data", "held"):
        write_dataset(tmp_path / name / "first", documents=40)
    monkeypatch.chdir(work)
    start(Path("runs/a"), "data_path=../data", "sep_token=0", "eval_datasets=../held/first", "eval_interval=2")
    copied = shutil.copytree(work / "runs" / "a", tmp_path / "elsewhere" / "b", symlinks=True)
    monkeypatch.chdir(other)
    go_on(copied, "num_steps=5")  # ../data is there, too
    assert load_config(copied / "config.yaml").data.data_path == "../data"
    monkeypatch.chdir(copied)
    with caplog.at_level("INFO"):
        go_on(".", "num_steps=6")
    assert "found from the working folder of the last start" in caplog.text
    config = load_config(copied / "config.yaml")
    assert config.data.data_path == f"{other}/../data"
    assert config.evaluation.eval_datasets == (f"{other}/../held/first",)
    (tmp_path / "data").rename(tmp_path / "moved")
    (tmp_path / "held").rename(tmp_path / "held out")
    monkeypatch.chdir(copied)
    error = refused(work / "runs" / "a", "num_steps=6")
    assert error.count("is not in") == 2 and str(copied) in error and f"{work}, the working folder" in error
    assert "data_path: ../data" in error and error.count("--") == 2
    go_on(work / "runs" / "a", f"--data_path={tmp_path}/moved", "--eval_datasets=none", "--dry_run=true")


# What belongs to one start


def test_what_belongs_to_one_start_is_recorded_and_not_repeated(run: Path) -> None:
    go_on(run, "num_steps=8", "--run_steps=1", "--use_profiler=true", "--profile_steps=5")
    config = load_config(run / "config.yaml")
    assert config.run.run_steps == 1 and config.profiler.use_profiler and config.profiler.profile_steps == ("5",)
    assert manifest_of(run, 5)["step"] == 5
    traces = sorted((run / "profile_traces").rglob("*"))
    go_on(run)
    assert saved(run)[-1] == "step_8_ckp" and sorted((run / "profile_traces").rglob("*")) == traces


def test_a_timestamp_run_is_found_after_a_start_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = tmp_path / "try.{timestamp}"
    write_dataset(tmp_path / "data" / "first", documents=40)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    typed = ["use_profiler=true", "profile_steps=1-2", "num_steps=4", "data_path=../data", "sep_token=0"]
    start(pattern, *typed, "run_steps=2")
    [folder] = tmp_path.glob("try*")
    monkeypatch.chdir("/")
    go_on(folder, "--run_steps=1")
    monkeypatch.chdir(tmp_path / "work")
    start(pattern, *typed)
    assert [folder] == list(tmp_path.glob("try*")) and started_at(folder) == 3


def test_a_return_is_the_branch_of_a_copy_and_is_not_repeated(run: Path) -> None:
    go_on(run, "--resume_from_checkpoint=2", "--learning_rate=5e-4", "num_steps=5", "--run_steps=1")
    assert started_at(run) == 2 and "step_4_ckp" not in saved(run)
    assert "resume_from_checkpoint: '2'" in manifest_of(run, 3)["config"]
    go_on(run, "--run_steps=1")
    assert started_at(run) == 3
    assert "resume_from_checkpoint: '2'" in manifest_of(run, 4)["config"]  # a requeued job has done it, too
    go_on(run, "--resume_from_checkpoint=2", "--run_steps=1")
    assert started_at(run) == 4


def test_a_return_that_is_undone_by_hand_is_not_repeated(run: Path) -> None:
    go_on(run, "--resume_from_checkpoint=2", "num_steps=5", "--run_steps=1")
    [aside] = (run / "checkpoints").glob("set_aside_*")
    shutil.rmtree(checkpoint(run, 3))
    for each in aside.iterdir():
        each.rename(run / "checkpoints" / each.name)
    go_on(run)
    assert started_at(run) == 4


def test_a_return_by_path_is_not_repeated_in_a_copy(run: Path, tmp_path: Path) -> None:
    go_on(run, f"--resume_from_checkpoint={checkpoint(run, 2)}", "num_steps=5", "--run_steps=1")
    copied = shutil.copytree(run, tmp_path / "c", symlinks=True)
    go_on(copied)
    assert started_at(copied) == 3


@pytest.mark.parametrize("killed", ["set_aside_newer", "_write_records"])
def test_a_return_that_is_killed_is_done_or_not(run: Path, monkeypatch: pytest.MonkeyPatch, killed: str) -> None:
    def die(*arguments: object) -> None:
        raise CheckpointError("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, killed, die)
        assert refused(run, "--resume_from_checkpoint=2", "--learning_rate=5e-4", "num_steps=5") == "killed"
    is_done = "step_4_ckp" not in saved(run)
    assert is_done == (killed == "_write_records")
    assert load_config(run / "config.yaml").checkpoint.resume_from_checkpoint is None
    go_on(run, "num_steps=5", "--run_steps=1")
    assert started_at(run) == (2 if is_done else 4)


def test_a_run_killed_before_its_first_save_begins_where_it_began(trained: Path, tmp_path: Path) -> None:
    flag, new = f"resume_from_checkpoint={checkpoint(trained, 2)}", tmp_path / "new"
    start(new, flag, "num_steps=3")
    shutil.rmtree(checkpoint(new, 3))
    go_on(new)
    assert started_at(new) == 2 and saved(new) == ["step_3_ckp"]
    go_on(new, "num_steps=4")
    assert started_at(new) == 3
    go_on(new, f"--ckpt_save_path={tmp_path}/next", "num_steps=3")
    assert started_at(tmp_path / "next") == 2


@pytest.mark.parametrize(
    "began",
    [["ckpt_load_path={}/checkpoints/step_2_ckp"], ["ckpt_load_path={}", "weights_only=true"], ["init_from=scratch"]],
)
def test_what_is_recorded_never_collides_with_a_typed_return(trained: Path, tmp_path: Path, began: list[str]) -> None:
    run = tmp_path / "new"
    start(run, *(flag.format(trained) for flag in began), "checkpoint_interval=1")
    go_on(run, "--resume_from_checkpoint=3", "num_steps=5", "--run_steps=1")
    assert started_at(run) == 3 and "step_4_ckp" in saved(run)


def test_typed_weights_replace_a_recorded_beginning(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "new"
    start(run, f"resume_from_checkpoint={checkpoint(trained, 2)}", "num_steps=3")
    other = [f"--ckpt_save_path={tmp_path}/other", "num_steps=4"]
    go_on(run, *other, f"--ckpt_load_path={checkpoint(trained, 3)}")
    assert started_at(tmp_path / "other") == 3
    shutil.rmtree(tmp_path / "other")
    go_on(run, *other, "--init_from=scratch")
    assert started_at(tmp_path / "other") == 0


# inspect


def inspected(capsys: pytest.CaptureFixture[str], *words: object) -> list[int]:
    """Return the samples that `inspect` shows."""
    capsys.readouterr()
    main(["inspect", *map(str, words), "--json=true"])
    lines = capsys.readouterr().out.splitlines()
    return sorted(json.loads(line)["sample_id"] for line in lines if line.startswith("{"))


def test_inspect_shows_a_run_after_a_return_and_takes_a_step_or_a_name(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go_on(run, "--resume_from_checkpoint=2", "--init_from=auto", "--skip_samples=8-9", "num_steps=5")
    assert inspected(capsys, run, "--step=5") == [10, 11]
    for request in ("2", "step_2_ckp", checkpoint(run, 2)):
        before = [f"--resume_from_checkpoint={request}", "--step=5"]
        assert inspected(capsys, run, *before) == [8, 9]
        flags = [*TINY, "use_dummy_dataset=true", f"ckpt_save_path={run}"]
        assert inspected(capsys, *flags, *before) == [8, 9]
        assert inspected(capsys, *flags, *before, "--skip_samples=8-9") == [10, 11]
    with pytest.raises(SystemExit):
        main(["inspect", str(run), "--resume_from_checkpoint=7", "--step=5"])
    assert "--resume_from_checkpoint=7 is no checkpoint of the run" in capsys.readouterr().err


def test_inspect_shows_a_run_that_began_from_scratch_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "run", "init_from=scratch")
    assert inspected(capsys, tmp_path / "run", "--step=1") == [0, 1]
