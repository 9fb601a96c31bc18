"""What a start would do is shown, refused where a start is, and nothing is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from training_runs import TINY, write_two_datasets

from pretraining.checkpoint.lease import LEASE, Holder
from pretraining.cli import main
from pretraining.config.fields import settings_of
from pretraining.config.recipe_files import load_config
from pretraining.config.training import TrainConfig
from pretraining.files import with_checksum
from pretraining.observability import trackers
from pretraining.tools.dry_run import SLOTS_SHOWN
from pretraining.train.run_status import RunStatus

Show = Callable[..., str]


@pytest.fixture
def show(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Show:
    """Returns what a dry run in the test's folder prints; the folder is as it was before."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)

    def run(*flags: str) -> str:
        before = content_of(tmp_path)
        capsys.readouterr()
        main(["train", *TINY, *flags, "--dry_run=true"])
        assert content_of(tmp_path) == before
        return capsys.readouterr().out

    return run


def content_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file below a folder, and its folders."""
    found = ((path, path.stat()) for path in folder.rglob("*"))
    return {str(path): (0, 0) if path.is_dir() else (status.st_size, status.st_mtime_ns) for path, status in found}


def train(run: Path, *flags: str) -> None:
    main(["train", *TINY, "num_steps=4", f"ckpt_save_path={run}", *flags])


def test_each_given_setting_is_listed_with_its_source_and_the_rest_by_section(tmp_path: Path, show: Show) -> None:
    (tmp_path / "my.yaml").write_text("optimizer: {learning_rate: 2e-3}\nbatch_size: 3\n")
    deepspeed = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5}
    (tmp_path / "ds.json").write_text(json.dumps(deepspeed))
    flags = [f"--recipe={tmp_path}/ds.json,{tmp_path}/my.yaml", "--max_tokens=1k", "--use_dummy_dataset"]
    text = show(*flags, "--learning_rate=2e-3", f"--ckpt_save_path={tmp_path}/run")
    for line in (
        rf"  grad_clip_thresh +0\.5 +translated .*{tmp_path}/ds\.json",
        rf"  batch_size +3 +recipe {tmp_path}/my\.yaml",
        r"  learning_rate +0\.002 +command line",
        r"  num_steps +1ktok +command line, as max_tokens",
    ):
        assert re.search(f"(?m)^{line}$", text), text
    head = re.search(r"(?m)^settings    (\d+) set, (\d+) by default$", text)
    assert head is not None and int(head[1]) + int(head[2]) == len(settings_of(TrainConfig))
    assert re.search(r"(?m)^  parallel    device=auto, backend=auto,", text) and "packing=stream" in text


def test_a_new_run_is_planned_with_its_first_batch(
    tmp_path: Path, show: Show, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_two_datasets(tmp_path / "data")
    flags = [f"--data_path={data}", "--sep_token=0", "--logical_shards=8", "--num_steps=4", "--global_batch_size=3"]
    text = show(*flags, f"--ckpt_save_path={tmp_path}/run", "--batch_size=1", "--held_out_fraction=0.1")
    for begin in ("memory ", "model ", "batch       3 sequences", "length      4 steps, 384 tokens", "FLOPs "):
        assert f"\n{text}".count(f"\n{begin}") == 1, text
    assert "start       from initial weights, seed 2023" in text and "starts with step 1" in text
    main(["inspect", *TINY, *flags, "--held_out_fraction=0.1", "--batch_size=1", "--step=1"])
    assert capsys.readouterr().out in text


def test_an_existing_index_is_used_and_a_missing_one_is_built_elsewhere(tmp_path: Path, show: Show) -> None:
    data = write_two_datasets(tmp_path / "data")
    flags = [f"--data_path={data}", "--num_steps=1", f"--ckpt_save_path={tmp_path}/run", "--packing=best_fit"]
    assert "indexing dataset 'first'" in show(*flags, f"--index_path={tmp_path}/indices")
    assert "indexing dataset 'second'" in show(*flags)
    train(tmp_path / "other", f"data_path={data}", "packing=best_fit", "run_steps=1")
    assert "indexing" not in show(*flags)
    assert "indexing dataset 'first'" not in show(*flags, f"--eval_datasets={data}/second", "--datasets=first")


def test_a_resume_is_planned_from_its_checkpoint_with_the_changes(tmp_path: Path, show: Show) -> None:
    train(tmp_path / "run", "use_dummy_dataset=true", "run_steps=2")
    same = ["--use_dummy_dataset", "--num_steps=4", f"--ckpt_save_path={tmp_path}/run"]
    text = show(*same, "--weight_decay=0.2")
    assert f"start       from {tmp_path}/run/checkpoints/step_2_ckp, step 2" in text
    assert "weight_decay changed from 0.1 to 0.2" in text and "dry_run changed" not in text
    assert "step 3, all ranks: the global batch has 2 slots" in text and "starts with step 3" in text
    train(tmp_path / "run", "use_dummy_dataset=true")
    assert load_config(tmp_path / "run" / "config.yaml").run.dry_run is False
    assert "the run is finished: step 4 of 4" in show(*same)


def test_a_dry_run_on_a_new_disk_starts_from_the_checkpoint_in_the_mirror_of_its_run(
    tmp_path: Path, show: Show
) -> None:
    flags = ["use_dummy_dataset=true", f"ckpt_mirror_path=file://{tmp_path}/store"]
    train(tmp_path / "run", *flags, "run_steps=2")
    (tmp_path / "run").rename(tmp_path / "lost")
    text = show(*flags, "--num_steps=4", f"--ckpt_save_path={tmp_path}/run")
    assert "step_2_ckp, step 2" in text and "starts with step 3" in text
    train(tmp_path / "another", "use_dummy_dataset=true", "seed=5", "run_steps=1")
    with pytest.raises(SystemExit) as ending:
        show(*flags, "--num_steps=4", "--seed=5", f"--ckpt_save_path={tmp_path}/another")
    assert "another run" in str(ending.value.__context__)


def test_no_timestamped_folder_is_made_and_settings_of_the_start_point_are_named(tmp_path: Path, show: Show) -> None:
    flags = ["--use_dummy_dataset", "--num_steps=4", f"--ckpt_save_path={tmp_path}/run.{{timestamp}}"]
    text = show(*flags, f"--batch_size={SLOTS_SHOWN + 5}")
    assert f"run folder  {tmp_path}/run.{{timestamp}}" in text and "and 5 more slots" in text
    main(["train", *TINY, *flags, "--run_steps=1"])
    (made,) = tmp_path.glob("run.2*")
    text = show(*flags)
    assert f"run folder  {made}" in text and "starts with step 2" in text
    assert re.search(rf"(?m)^  ckpt_save_path +{made} +follows from other settings or the data$", text)
    own = [f"--recipe={made}/config.yaml", "--model_variant=none", "--hidden_size=none", "--num_hidden_layers=none"]
    assert re.search(rf"(?m)^  hidden_size +32 +taken from {made}/checkpoints/step_1_ckp$", show(*own))


Spoil = Callable[[Path, pytest.MonkeyPatch], object]


def train_a_step(folder: Path, patch: pytest.MonkeyPatch) -> None:
    train(folder / "run", "use_dummy_dataset=true", "run_steps=1")


def crash_again_and_again(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "run").mkdir()
    status = RunStatus(status="running", starts=9, starts_without_progress=9)
    (folder / "run" / "run_status.json").write_text(json.dumps(with_checksum(asdict(status))))


def write_lease(run: Path, holder: Holder) -> None:
    run.mkdir()
    (run / LEASE).touch()
    held = replace(holder, folder=str(run.resolve()), inode=(run / LEASE).stat().st_ino)
    (run / LEASE).write_text(json.dumps(with_checksum(asdict(held))))


def hold_the_lease(folder: Path, patch: pytest.MonkeyPatch) -> None:
    write_lease(folder / "run", Holder.this_process())


@pytest.mark.parametrize(
    ("flags", "spoil", "said"),
    [
        (["--eval_only=true", "--held_out_fraction=0.1"], None, "--eval_only=true"),
        (["--optimizer=torch.optim:Adagrad", "--optimizer_options=rate=3"], None, "Adagrad"),
        (["--schedule=nowhere:Schedule"], None, "nowhere"),
        (["--tracker=nowhere:Tracker"], None, "nowhere"),
        (["--tracker=wandb"], lambda _, patch: patch.setattr(trackers, "find_spec", lambda name: None), "wandb"),
        (["--optimizer=sgd"], train_a_step, "cannot resume"),
        ([], crash_again_and_again, "crash loop"),
        ([], hold_the_lease, "another run"),
    ],
)
def test_a_dry_run_refuses_what_a_start_refuses(
    flags: list[str], spoil: Spoil | None, said: str, tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    if spoil is not None:
        spoil(tmp_path, monkeypatch)
    with pytest.raises(SystemExit) as ending:
        show("--use_dummy_dataset", "--num_steps=4", f"--ckpt_save_path={tmp_path}/run", *flags)
    assert ending.value.code == 1 and said in str(ending.value.__context__)


def test_a_lease_of_another_machine_is_reported(tmp_path: Path, show: Show, caplog: pytest.LogCaptureFixture) -> None:
    write_lease(tmp_path / "run", replace(Holder.this_process(), machine="node7"))
    show("--use_dummy_dataset", "--num_steps=4", f"--ckpt_save_path={tmp_path}/run")
    assert "a start waits up to 60 s" in caplog.text
