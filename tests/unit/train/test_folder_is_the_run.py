"""The folder is the run: copied, moved or named by any path, it resumes there and leaves the original alone."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from helpers import ROOT
from training_runs import TINY, status_of, write_dataset
from unit.train.whole_runs import checkpoint, error_of, manifest_of, resume, saved, start, started_at

from pretraining import Trainer
from pretraining.checkpoint.lease import LEASE, Holder
from pretraining.cli import main
from pretraining.config.recipe_files import load_config
from pretraining.config.run_recipe import comment_of_start, last_start
from pretraining.files import with_checksum


def train(*words: object) -> None:
    main(["train", *map(str, words)])


def refused(*words: object) -> str:
    return str(error_of(lambda: train(*words)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps that saves every step; its path was typed relative to `here`."""
    here = tmp_path_factory.mktemp("here")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        start(Path("runs/a"), "checkpoint_interval=1", "init_from=scratch", "held_out_fraction=0.2", "eval_batches=1")
    return here / "runs" / "a"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A folder of its own for each test, whose config.yaml still names the place where it began."""
    return shutil.copytree(trained, tmp_path / "b", symlinks=True)


def test_a_copy_resumes_by_itself_from_any_working_directory_and_in_python(
    trained: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted((trained / "checkpoints").iterdir())
    for number, words in enumerate((["b"], ["--recipe=b/config.yaml"], ["b/config.yaml"], [])):
        copied = shutil.copytree(run, tmp_path / str(number) / "b", symlinks=True)
        monkeypatch.chdir(copied.parent)
        if words:
            train(*words, "num_steps=5")
            assert load_config(copied / "config.yaml").checkpoint.ckpt_save_path == str(copied)
        else:
            assert Trainer.from_recipe("b/config.yaml", num_steps=5).train().run_path == copied
        assert "step_5_ckp" in saved(copied) and started_at(copied) == 4
    assert sorted((trained / "checkpoints").iterdir()) == before and status_of(trained)["starts"] == 1


def test_a_later_recipe_or_flag_gives_another_folder(run: Path, tmp_path: Path) -> None:
    (tmp_path / "later.yaml").write_text(f"ckpt_save_path: {tmp_path}/c\n")
    train(f"--recipe={run}/config.yaml,{tmp_path}/later.yaml", "--dry_run=true")
    resume(run, f"--ckpt_save_path={tmp_path}/d", "num_steps=1")
    assert "step_1_ckp" in saved(tmp_path / "d") and status_of(run)["starts"] == 1


def test_a_dry_run_an_evaluation_and_inspect_mean_the_run_in_the_folder(
    trained: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume(run, "--dry_run=true", "num_steps=9")
    assert f"from {checkpoint(run, 4)}" in capsys.readouterr().out
    main(["inspect", str(run), "--step=1", "--json=true"])
    assert {json.loads(line)["sample_id"] for line in capsys.readouterr().out.splitlines()} == {0, 1}
    began, flags = tmp_path / "began", ["weights_only=true", "num_steps=2", "held_out_fraction=0.2", "eval_batches=1"]
    start(began, f"ckpt_load_path={checkpoint(trained, 2)}", *flags)
    capsys.readouterr()
    resume(began, "--eval_only=true")  # not the weights that it began with
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["checkpoint"] == str(checkpoint(began, 2))


@pytest.mark.parametrize("beside", ["", "logs", "checkpoints"])
def test_another_file_of_this_name_is_a_recipe(run: Path, tmp_path: Path, beside: str) -> None:
    (tmp_path / "conf" / beside).mkdir(parents=True)
    text = (run / "config.yaml").read_text().replace("ckpt_save_path: runs/a", f"ckpt_save_path: {tmp_path}/there")
    if beside == "checkpoints":  # a user's own, beside checkpoints of another program
        settings = [*TINY, "use_dummy_dataset=true", f"ckpt_save_path={tmp_path}/there"]
        text = "".join(f"{each.replace('=', ': ', 1)}\n" for each in settings)
    (tmp_path / "conf" / "config.yaml").write_text(text)
    train(f"--recipe={tmp_path}/conf/config.yaml", "num_steps=1")
    assert "step_1_ckp" in saved(tmp_path / "there")


def test_a_folder_without_settings_is_one_error_with_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    error = refused(tmp_path / "empty")
    assert f"{tmp_path}/empty holds no config.yaml" in error and f"--ckpt_save_path={tmp_path}/empty" in error
    assert "the folder of a run (there is no such one)" in refused(tmp_path / "typo")


# A copy


@pytest.mark.parametrize("place", ["copied", "the folder itself", "another mount"])
def test_a_lease_holds_its_own_folder_and_no_copy(trained: Path, run: Path, place: str) -> None:
    """The holder is this living process."""
    folder = str(run) if place == "the folder itself" else str(trained)
    (run / LEASE).touch()
    inode = 1 if place in ("copied", "the folder itself") else (run / LEASE).stat().st_ino
    document = asdict(replace(Holder.this_process(), folder=folder, inode=inode))
    (run / LEASE).write_text(json.dumps(with_checksum(document)))
    if place == "copied":
        (run / "checkpoints" / "step_5_ckp.1f9c.tmp").mkdir()
        resume(run, "num_steps=5")
        assert started_at(run) == 4 and not (run / LEASE).exists()
    else:
        assert "another run writes into it" in refused(run, "num_steps=5")


@pytest.fixture(scope="module")
def with_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run `a` with a mirror `store` and a tracker with an id."""
    folder = tmp_path_factory.mktemp("with_store")
    start(folder / "a", f"ckpt_mirror_path=file://{folder}/store", model=TRACKED)
    return folder


TRACKED = [*(each for each in TINY if "tracker" not in each), f"tracker={__name__}:Service"]


class Service:
    """A tracker with an id, as wandb and mlflow have one."""

    ids: ClassVar[list[str | None]] = []

    def __init__(self, run: Any) -> None:
        self.run_id = run.run_id or "first"
        Service.ids.append(run.run_id)

    def log(self, *values: object) -> None: ...

    def close(self) -> None: ...


def test_a_copy_writes_neither_into_the_mirror_nor_into_the_tracker_of_its_original(
    with_store: Path, tmp_path: Path
) -> None:
    run, store = with_store / "a", with_store / "store"
    mirror, tracker = f"--ckpt_mirror_path=file://{tmp_path}/other", "--tracker_run_id=second"
    copied = shutil.copytree(run, tmp_path / "b", symlinks=True)
    error = refused(copied, "num_steps=5", "--tracker=none")
    assert f"copy of the run in {run}" in error and "--ckpt_mirror_path=<another address, or none>" in error
    assert "--tracker_run_id" not in error
    error = refused(copied, "num_steps=5", mirror)
    assert "run first of" in error and "--tracker_run_id=<a new one>" in error and "mirror" not in error
    assert "is a copy" in refused(copied, "num_steps=5", "--dry_run=true")
    assert "is a copy" in refused(copied, "num_steps=5", mirror, "--tracker_run_id=first")
    (copied / "run_status.json").unlink()  # fetched from a store
    assert "is a copy" in refused(copied, "num_steps=5", tracker, f"--ckpt_mirror_path=file://{store}/")
    with pytest.raises(SystemExit):
        main(["push", str(copied)])
    resume(copied, "num_steps=5", mirror, tracker)
    resume(copied, "num_steps=6")  # from now on a run of its own
    resume(run, "num_steps=5")
    start(tmp_path / "new", f"ckpt_load_path={copied}", "num_steps=7", model=TRACKED)
    assert Service.ids[-4:] == ["second", "second", "first", None]
    ids = [manifest_of(each, step)["state"]["trackers"] for each, step in ((copied, 6), (tmp_path / "new", 7))]
    assert ids == [{f"{__name__}:Service": each} for each in ("second", "first")]
    assert (tmp_path / "other/checkpoints/step_6_ckp").exists() and not (store / "checkpoints/step_6_ckp").exists()


def best_in(run: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the checkpoints that `pretrain list` marks as the best."""
    capsys.readouterr()
    main(["list", str(run), "--json=true"])
    return [row["name"] for row in map(json.loads, capsys.readouterr().out.splitlines()) if row["best"]]


def test_a_copy_that_follows_links_has_its_best_again(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = shutil.copytree(trained, tmp_path / "b")  # cp -rL, scp
    best = run / "checkpoints" / "best"
    [name] = best_in(trained, capsys)
    assert not best.is_symlink() and best_in(run, capsys) == [name] == [(trained / "checkpoints/best").readlink().name]
    shutil.rmtree(best)
    shutil.copytree(checkpoint(run, 1), best)  # made by a copy of an earlier time
    main(["export", str(best), f"--output_path={tmp_path}/full", "--format=full"])
    assert f"step {name.split('_')[1]} of {run / 'checkpoints' / name}" in capsys.readouterr().out
    resume(run, "num_steps=5")
    assert best.readlink().name in best_in(run, capsys) and "cannot be replaced" not in caplog.text
    assert not [each for each in saved(run) if each.endswith(".tmp")]


def test_a_folder_best_that_may_be_the_only_copy_stays_and_is_named_once(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    best = run / "checkpoints" / "best"
    best.unlink()
    shutil.copytree(checkpoint(run, 1), best)
    (best / "notes.md").write_text("mine")
    resume(run, "num_steps=7")
    [line] = [message for message in caplog.messages if "cannot be replaced" in message]
    assert str(best) in line and "rename" in line and (best / "notes.md").exists() and "step_7_ckp" in saved(run)


def test_a_users_own_folder_among_checkpoints_stays(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = shutil.copytree(checkpoint(run, 4), run / "checkpoints" / "step_4_ckp.tmp")
    (theirs / "notes.md").write_text("mine")
    resume(run, "num_steps=5")
    main(["list", str(run), "--json=true"])
    states = {row["name"]: row["state"] for row in map(json.loads, capsys.readouterr().out.splitlines()[-6:])}
    assert (theirs / "notes.md").exists() and states["step_4_ckp.tmp"] == "complete"


def test_a_moved_run_resumes_with_its_mirror_and_leaves_nothing_at_the_old_place(tmp_path: Path) -> None:
    run, store = tmp_path / "a", tmp_path / "store"
    start(run, f"ckpt_mirror_path=file://{store}")
    moved = run.rename(tmp_path / "b")
    (tmp_path / "link").symlink_to(moved)
    resume(tmp_path / "link", "num_steps=5")
    assert started_at(moved) == 4 and not run.exists()
    start(run, "num_steps=1")  # another run in the old place
    resume(moved, "num_steps=6")
    assert (store / "checkpoints/step_6_ckp").exists()


def test_a_record_without_id_or_place_is_that_of_a_moved_run(with_store: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(with_store / "a", tmp_path / "b", symlinks=True)
    lines = (copied / "config.yaml").read_text().splitlines(keepends=True)
    assert last_start(copied).folder == with_store / "a"
    for first in ("", "# Last start: [1, 2]\n", "# Last start: 5\n", "# Last start: {\n", comment_of_start(copied)):
        (copied / "config.yaml").write_text(first + "".join(lines[1:]))
        resume(copied, "num_steps=5", "--dry_run=true")


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
    resume(copied, "num_steps=5")  # ../data is there, too
    assert load_config(copied / "config.yaml").data.data_path == "../data"
    monkeypatch.chdir(copied)
    with caplog.at_level("INFO"):
        train(".", "num_steps=6")
    assert "found from the working folder of the last start" in caplog.text
    config = load_config(copied / "config.yaml")
    assert config.data.data_path == f"{other}/../data"
    assert config.evaluation.eval_datasets == (f"{other}/../held/first",)
    (tmp_path / "data").rename(tmp_path / "moved")
    (tmp_path / "held").rename(tmp_path / "held out")
    error = refused(work / "runs" / "a", "num_steps=6")
    assert error.count("is not in") == 2 and str(copied) in error and f"{work}, the working folder" in error
    assert "data_path: ../data" in error and error.count("--") == 2
    resume(work / "runs" / "a", f"--data_path={tmp_path}/moved", "--eval_datasets=none", "--dry_run=true")


# What belongs to one start, and where a run began


def test_what_belongs_to_one_start_is_recorded_and_not_repeated(run: Path) -> None:
    resume(run, "num_steps=8", "--run_steps=1", "--use_profiler=true", "--profile_steps=5")
    config = load_config(run / "config.yaml")
    assert config.run.run_steps == 1 and config.profiler.use_profiler and config.profiler.profile_steps == ("5",)
    traces = [path.name for path in (run / "profile_traces").iterdir()]
    assert traces == ["steps_5-5_rank0.pt.trace.json.gz"]
    resume(run)
    assert saved(run)[-1] == "step_8_ckp" and [path.name for path in (run / "profile_traces").iterdir()] == traces


def test_a_timestamp_run_is_found_after_a_start_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, work = tmp_path / "try.{timestamp}", tmp_path / "work"
    write_dataset(tmp_path / "data" / "first", documents=40)
    work.mkdir()
    typed = ["use_profiler=true", "profile_steps=1-2", "num_steps=4", "data_path=../data", "sep_token=0"]
    monkeypatch.chdir(work)
    start(pattern, *typed, "run_steps=2")
    [folder] = tmp_path.glob("try*")
    monkeypatch.chdir("/")
    resume(folder, "--run_steps=1")
    monkeypatch.chdir(work)
    start(pattern, *typed)
    assert [folder] == list(tmp_path.glob("try*")) and started_at(folder) == 3


def test_refused_starts_leave_one_folder_with_a_timestamp_which_the_run_takes(tmp_path: Path) -> None:
    pattern, data = tmp_path / "try.{timestamp}", tmp_path / "data"
    flags = [f"data_path={data}", "sep_token=0", "held_out_fraction=0.0001", "eval_batches=1"]
    write_dataset(data / "first", documents=40)
    for _ in range(3):
        assert "held_out" in str(error_of(lambda: start(pattern, *flags)))
    [folder] = tmp_path.glob("try*")
    assert not (folder / "config.yaml").exists()
    start(pattern, *flags[:2])
    assert [folder] == list(tmp_path.glob("try*")) and saved(folder) == ["step_4_ckp"]
    start(pattern, *flags[:2])  # the run is finished: a new one
    assert len(list(tmp_path.glob("try*"))) == 2


def test_a_run_killed_before_its_first_save_begins_where_it_began_unless_something_else_is_typed(
    trained: Path, tmp_path: Path
) -> None:
    flag, new = f"resume_from_checkpoint={checkpoint(trained, 2)}", tmp_path / "new"
    start(new, flag, "num_steps=3")
    shutil.rmtree(checkpoint(new, 3))
    resume(new)
    assert started_at(new) == 2 and saved(new) == ["step_3_ckp"]
    resume(new, "num_steps=4")
    assert started_at(new) == 3
    for name, typed, begins in (
        ("same", [], 2),
        ("other", [f"--ckpt_load_path={checkpoint(trained, 3)}"], 3),
        ("scratch", ["--init_from=scratch"], 0),
    ):
        resume(new, f"--ckpt_save_path={tmp_path / name}", "num_steps=4", *typed)
        assert started_at(tmp_path / name) == begins


@pytest.mark.parametrize("began", [["ckpt_load_path={}/step_2_ckp"], ["ckpt_load_path={}", "weights_only=true"]])
def test_a_recorded_beginning_never_collides_with_a_typed_return(
    trained: Path, tmp_path: Path, began: list[str]
) -> None:
    start(tmp_path / "new", *(flag.format(trained / "checkpoints") for flag in began), "checkpoint_interval=1")
    resume(tmp_path / "new", "--resume_from_checkpoint=3", "num_steps=5", "--run_steps=1")
    assert started_at(tmp_path / "new") == 3 and "step_4_ckp" in saved(tmp_path / "new")


PAGE = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    section = PAGE.partition("## Move, copy, branch, delete")[2].partition("\n## ")[0]
    [block] = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    lines = [line.partition("  #")[0].partition(" # ")[0] for line in block.splitlines()]
    return [command.strip() for line in lines for command in line.split("&&")]


def test_every_command_about_moving_runs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("archive").mkdir()
    start(Path("runs/mine"), "num_steps=30", "checkpoint_interval=10", "report_interval=0")
    asked = commands()
    assert len(asked) == 9 and asked[0].startswith("pretrain train runs/mine ")
    for command in asked:
        if command.startswith("pretrain"):
            main(shlex.split(command)[1:])
        else:
            subprocess.run(command, shell=True, check=True)
    assert started_at(Path("runs/branch")) == 20
    assert len([name for name in saved(Path("runs/branch")) if "set_aside" in name]) == 1
    assert started_at(Path("archive/mine")) == 40 and "step_20_ckp" not in saved(Path("archive/mine"))
    assert started_at(Path("runs/new")) == 0 and not Path("runs/mine").exists()
    assert "learning_rate: 0.0001" in manifest_of(Path("runs/branch"), 40)["config"]
