"""Whole runs in this process: what they print, what they leave behind, and what a second start does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from training_runs import TINY, events_of, losses_of, write_dataset, write_two_datasets

from pretraining.cli import main
from pretraining.config.command_line import load_train_config
from pretraining.config.recipes import load_config
from pretraining.data.batch import StepBatch
from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import Preempted
from pretraining.launch.terminal import escape_controls
from pretraining.observability.step_outcome import StepOutcome
from pretraining.observability.trackers import TrackedRun
from pretraining.train import build, loop
from pretraining.train.preemption import StopRequests
from pretraining.train.step import StepContext


def start(run: Path, *flags: str) -> None:
    """Trains with made-up data unless the flags say otherwise."""
    data = [] if any("data_path" in flag for flag in flags) else ["use_dummy_dataset=true"]
    names = {flag.partition("=")[0] for flag in flags}
    common = [flag for flag in (*TINY, "num_steps=4") if flag.partition("=")[0] not in names]
    main(["train", *common, *data, f"ckpt_save_path={run}", *flags])


def test_a_run_says_what_it_trains_and_where_everything_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    start(run, "tracker=tensorboard", "held_out_fraction=0.1", "eval_interval=2", "eval_batches=2")
    out = capsys.readouterr().out
    for part in (
        f"float32, fsdp over 1 x cpu, {torch.get_num_threads()} thread",
        "torch is imported already: it keeps its number of threads",
        "4 steps, 256 tokens",
        "from initial weights, seed 2023",
        "step 4/4  loss",
        "step 2  evaluation_loss",
        "step 4  evaluation_loss",
        f"checkpoint   {run}/checkpoints/step_4_ckp",
        f"metrics      {run}/logs/metrics.jsonl",
        f"tensorboard --logdir {run}/logs",
        "--num_steps=8",
    ):
        assert part in out, out
    header = out[: out.index("step 1/4")].splitlines()
    assert len([line for line in header if "torch is imported" not in line]) <= 8
    assert {path.name for path in run.iterdir()} == {"config.yaml", "run_status.json", "checkpoints", "logs"}
    assert any(path.name.startswith("events.out.tfevents") for path in (run / "logs").iterdir())


def test_metrics_have_a_line_a_report_and_a_line_an_evaluation(tmp_path: Path) -> None:
    start(tmp_path, "held_out_fraction=0.1", "eval_interval=2", "eval_batches=2")
    lines = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "evaluation_loss" in line] == [2, 4]
    assert [line["tokens_seen"] for line in lines if "loss" in line] == [64, 128, 192, 256]


def test_the_resolved_settings_are_written_out_and_start_the_same_run(tmp_path: Path) -> None:
    start(tmp_path, "learning_rate=2e-3")
    written = load_config(tmp_path / "config.yaml")
    assert written.optimizer.learning_rate == 2e-3 and written.model.hidden_size == 32
    assert load_train_config([f"recipe={tmp_path / 'config.yaml'}"], {}) == written
    manifest = json.loads((tmp_path / "checkpoints" / "step_4_ckp" / "manifest.json").read_text())
    assert "learning_rate: 0.002" in manifest["config"]


def test_a_second_start_continues_and_a_third_says_how_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path, "run_steps=3")
    assert "Stopped at step 3 of 4, as asked" in capsys.readouterr().out
    start(tmp_path)
    out = capsys.readouterr().out
    assert f"from {tmp_path}/checkpoints/step_3_ckp, step 3" in out and "step 4/4" in out and "step 3/4" not in out
    start(tmp_path)
    out = capsys.readouterr().out
    assert "finished already, at step 4 of 4: nothing was trained" in out and "--num_steps=8" in out
    assert len(losses_of(tmp_path)) == 4


def test_what_happens_to_a_run_is_kept_over_all_of_its_starts(tmp_path: Path) -> None:
    evaluating = ["held_out_fraction=0.1", "eval_interval=2", "eval_batches=1", "checkpoint_interval=2"]
    start(tmp_path, "run_steps=3", *evaluating)
    start(tmp_path, *evaluating, "global_batch_size=4")
    saved = {step: f"{tmp_path}/checkpoints/step_{step}_ckp" for step in (2, 3, 4)}
    evaluations = [event for event in events_of(tmp_path) if event["event"] == "evaluation"]
    assert [event["step"] for event in evaluations] == [2, 4]
    assert all(event["evaluation_loss"] > 0 for event in evaluations)
    first, second = "3 of 4 steps are done, as many as --run_steps asked for", "4 of 4 steps are done"
    assert [event for event in events_of(tmp_path) if event["event"] != "evaluation"] == [
        {"step": 0, "event": "start", "number": 1},
        {"step": 0, "event": "phase", "global_batch_size": 2, "weights": {"dummy": 1}},
        {"step": 2, "event": "checkpoint", "kind": "interval", "path": saved[2]},
        {"step": 3, "event": "checkpoint", "kind": "interval", "path": saved[3]},
        {"step": 3, "event": "end", "status": "finished", "reason": first},
        {"step": 3, "event": "restart", "number": 2, "previous_status": "finished", "previous_reason": first},
        {"step": 3, "event": "restore", "checkpoint": saved[3], "weights_only": False, "passed_over": []},
        {"step": 3, "event": "phase", "global_batch_size": 4, "weights": {"dummy": 1}},
        {"step": 4, "event": "checkpoint", "kind": "final", "path": saved[4]},
        {"step": 4, "event": "end", "status": "finished", "reason": second},
    ]


def test_a_run_starts_from_another_runs_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path / "first", "num_steps=2")
    start(tmp_path / "second", f"ckpt_load_path={tmp_path / 'first'}")
    assert f"from {tmp_path}/first/checkpoints/step_2_ckp" in capsys.readouterr().out
    assert len(losses_of(tmp_path / "second")) == 2


class Service:
    """A tracker of the user's own that keeps what it was told first."""

    def __init__(self, run: TrackedRun) -> None:
        self.run_id = run.run_id or f"{run.name} from {run.restored_step}"

    def log(self, step: int, values: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_run_keeps_its_id_in_checkpoints_and_one_that_starts_from_it_has_its_own(tmp_path: Path) -> None:
    own = "unit.train.test_run:Service"
    start(tmp_path / "first", f"tracker={own}", "run_steps=2")
    (tmp_path / "first" / "logs" / "tracker_ids.json").unlink()  # as by a version that kept ids in checkpoints only
    start(tmp_path / "first", f"tracker={own}")
    start(tmp_path / "second", f"tracker={own}", f"ckpt_load_path={tmp_path}/first", "num_steps=5")
    for name, step, run_id in (("first", 4, "first from 0"), ("second", 5, "second from 4")):
        manifest = json.loads((tmp_path / name / "checkpoints" / f"step_{step}_ckp" / "manifest.json").read_text())
        assert manifest["state"]["trackers"] == {own: run_id}


def test_what_an_interrupted_save_left_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path, "num_steps=2")
    (tmp_path / "checkpoints" / "step_3_ckp.tmp").mkdir()
    start(tmp_path)
    assert "step_3_ckp.tmp is incomplete: ignored" in capsys.readouterr().out


def test_what_a_first_save_left_is_named_though_nothing_is_restored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints" / "step_2_ckp.tmp").mkdir(parents=True)
    start(tmp_path)
    out = capsys.readouterr().out
    assert "step_2_ckp.tmp is incomplete: ignored" in out and "from initial weights" in out
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_4_ckp"]


def test_a_refused_start_leaves_the_settings_of_the_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path, "num_steps=2")
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(SystemExit):
        start(tmp_path, "seed=1")
    assert "seed was 2023 and is 1" in capsys.readouterr().err
    assert (tmp_path / "config.yaml").read_text() == before


def test_metrics_that_cannot_be_written_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(SystemExit):
        start(tmp_path / "run", "tracker=tensorboard", f"tracker_dir={tmp_path / 'taken' / 'curves'}")
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and "--tracker_dir" in error and "Traceback" not in error


def test_where_an_invocation_ends_is_reported_and_counts_once(tmp_path: Path) -> None:
    start(tmp_path, "num_steps=8", "report_interval=4", "run_steps=6")
    start(tmp_path, "num_steps=8", "report_interval=4")
    lines = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 6, 8]


def test_a_loss_that_is_not_finite_is_null_in_the_manifest_and_the_last_finite_ones_survive(tmp_path: Path) -> None:
    start(tmp_path, "num_steps=2", "held_out_fraction=0.1", "eval_batches=1")
    manifest = json.loads((tmp_path / "checkpoints" / "step_2_ckp" / "manifest.json").read_text())
    assert manifest["loss"] > 0 and manifest["evaluation_loss"] > 0
    flags = ["held_out_fraction=0.1", "eval_batches=1", "report_interval=0", "eval_interval=0", "checkpoint_interval=1"]
    start(tmp_path, "num_steps=4", *flags)
    resumed = json.loads((tmp_path / "checkpoints" / "step_3_ckp" / "manifest.json").read_text())
    assert (resumed["loss"], resumed["evaluation_loss"]) == (manifest["loss"], manifest["evaluation_loss"])
    start(tmp_path / "diverged", "learning_rate=1e30", "grad_clip_thresh=0")
    text = (tmp_path / "diverged" / "checkpoints" / "step_4_ckp" / "manifest.json").read_text()
    assert json.loads(text)["loss"] is None and "NaN" not in text


def test_a_last_state_that_is_not_finite_is_no_checkpoint_and_the_exit_code_says_it(tmp_path: Path) -> None:
    start(tmp_path, "num_steps=2")
    with pytest.raises(SystemExit) as ending:
        start(tmp_path, "num_steps=3", "learning_rate=3e38", "schedule=constant", "warmup_steps=0")
    assert ending.value.code == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2_ckp"]


def test_time_goes_on_where_the_invocation_before_ended(tmp_path: Path) -> None:
    start(tmp_path, "run_steps=2")
    start(tmp_path)
    seconds = [
        json.loads((tmp_path / "checkpoints" / f"step_{step}_ckp" / "manifest.json").read_text())["seconds"]
        for step in (2, 4)
    ]
    assert 0 < seconds[0] < seconds[1]


def test_a_finished_run_elsewhere_is_named_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path / "first")
    capsys.readouterr()
    start(tmp_path / "second", f"ckpt_load_path={tmp_path / 'first'}")
    assert f"checkpoint   {tmp_path}/first/checkpoints/step_4_ckp" in capsys.readouterr().out


def test_lengths_and_intervals_may_be_tokens_epochs_and_time(tmp_path: Path) -> None:
    data = write_two_datasets(tmp_path / "data")
    start(tmp_path / "tokens", "num_steps=256tok", "checkpoint_interval=128tok")
    assert len(losses_of(tmp_path / "tokens")) == 4
    assert (tmp_path / "tokens" / "checkpoints" / "step_2_ckp").is_dir()
    epochs = ["num_steps=0.01ep", "checkpoint_interval=0.005ep", "report_interval=1h"]
    start(tmp_path / "epochs", f"data_path={data}", *epochs)
    lines = (tmp_path / "epochs" / "logs" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 1 and json.loads(lines[0])["step"] > 2  # the last step is always reported
    assert len(list((tmp_path / "epochs" / "checkpoints").iterdir())) == 2


def test_a_run_ends_with_a_sample_of_text_where_there_is_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ["def add(left, right):\n    return left + right\n"] * 50
    tokenizer = train_tokenizer(text, 280)
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(tmp_path / "tokenizer")
    size = tokenizer.vocab_size
    flags = [f"tokenizer_path={tmp_path / 'tokenizer'}", "sample_prompt=def", "sample_tokens=5"]
    start(tmp_path / "run", f"vocab_size={size}", *flags)
    out = capsys.readouterr().out
    assert "a sample of its text:\n    def" in out
    start(tmp_path / "run", f"vocab_size={size}", *flags)  # is finished already, and writes the same
    (kept,) = (event for event in events_of(tmp_path / "run") if event["event"] == "sample")
    first_line = escape_controls(kept["text"].splitlines()[0])
    assert kept["prompt"] == "def" and f"    def{first_line}" in out
    capsys.readouterr()
    start(tmp_path / "silent", f"vocab_size={size}", *flags, "sample_tokens=0")
    assert "a sample of its text" not in capsys.readouterr().out


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer").mkdir()
    train_tokenizer(["some text to train on"] * 20, 270).save(tmp_path / "tokenizer")
    with pytest.raises(SystemExit):
        start(tmp_path / "run", f"tokenizer_path={tmp_path / 'tokenizer'}")
    error = capsys.readouterr().err
    assert "more than the model's 64" in error and "--vocab_size=" in error
    assert not (tmp_path / "run").exists()


def test_deterministic_runs_use_deterministic_kernels(tmp_path: Path) -> None:
    try:
        start(tmp_path, "deterministic=true")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(losses_of(tmp_path)) == 4


def test_the_batch_is_kept_at_a_resume_unless_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path, "num_steps=2", "batch_size=3", "grad_accum_steps=2")
    start(tmp_path, "num_steps=4", "batch_size=2")
    out = capsys.readouterr().out.split("from initial weights")[1]
    assert "6 sequences a step" in out and "phase 2" not in out
    start(tmp_path, "num_steps=6", "global_batch_size=4")
    out = capsys.readouterr().out
    assert "4 sequences a step" in out and "phase 2 from step 4: global batch 6 -> 4 sequences" in out
    start(tmp_path, "num_steps=7")
    out = capsys.readouterr().out
    assert "4 sequences a step" in out and "phase" not in out
    assert tokens_seen(tmp_path) == [32 * 6 * step for step in (1, 2, 3, 4)] + [
        32 * 24 + 128 * step for step in (1, 2, 3)
    ]


def tokens_seen(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [line["tokens_seen"] for line in lines if "loss" in line]


def test_weights_datasets_and_batch_change_at_a_resume_and_the_length_in_tokens_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_two_datasets(tmp_path / "data")
    write_dataset(tmp_path / "data" / "third", seed=2)
    run, length = tmp_path / "run", ["num_steps=2560tok", f"data_path={data}", "min_lr_ratio=0.1"]
    start(run, *length, "datasets=first,second", "weights=3,1", "global_batch_size=8", "run_steps=4")
    assert "10 steps, 2,560 tokens" in capsys.readouterr().out  # of 256
    changed = [*length, "datasets=first,third", "weights=1,1", "global_batch_size=5"]
    start(run, *changed, "run_steps=4")
    out = capsys.readouterr().out
    assert (
        "phase 2 from step 4: weights first 0.75 -> 0.5, third added at 0.5, second removed; "
        "global batch 8 -> 5 sequences"
    ) in out
    assert "14 steps, 2,624 tokens" in out  # 1,536 tokens were left: 10 steps of 160
    start(run, *length, "datasets=first,second,third", "weights=1,1,2")
    out = capsys.readouterr().out
    assert "phase 3 from step 8: weights first 0.5 -> 0.25, second back at 0.25" in out and "step 14/14" in out
    assert tokens_seen(run) == [256, 512, 768, 1024, *(1024 + 160 * step for step in range(1, 11))]
    manifest = json.loads((run / "checkpoints" / "step_14_ckp" / "manifest.json").read_text())
    assert (manifest["tokens_seen"], manifest["global_batch_size"]) == (2624, 5)
    assert [phase["first_step"] for phase in manifest["data"]["phases"]] == [0, 4, 8]
    assert manifest["data"]["next_sample"] == 82
    rates = [json.loads(line)["learning_rate"] for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert min(rates) == rates[-1] == pytest.approx(1e-4)
    start(run, *length, "datasets=first,second,third", "weights=1,1,2")
    assert "finished already, at step 14 of 14" in capsys.readouterr().out


def test_another_schedule_or_length_at_a_resume_is_said_with_what_it_does_to_the_learning_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["use_dummy_dataset=true", "warmup_steps=0", "min_lr_ratio=0", "learning_rate=0.01"]
    start(tmp_path, *common, "num_steps=5", "run_steps=2", "schedule=linear")
    assert "linear: up over 0 steps, then down to 0 of the peak\n" in capsys.readouterr().out
    start(tmp_path, *common, "num_steps=9", "run_steps=1", "schedule=linear")
    assert "learning rate here 0.0075, and 0.005 before: the rest is that of a run which" in capsys.readouterr().out
    start(tmp_path, *common, "num_steps=9", "run_steps=1", "schedule=linear")
    assert "learning rate here" not in capsys.readouterr().out
    start(tmp_path, *common, "num_steps=9", "schedule=wsd", "decay_steps=2")
    assert "learning rate here 0.01, and 0.005 before" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    assert rates == pytest.approx([0.01, 0.0075, 0.0075, 0.00625, 0.01, 0.01, 0.01, 0.01 * (1 - 0.5**0.5), 0.0])


def test_a_document_mask_may_change_at_a_resume_and_this_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_two_datasets(tmp_path / "data")
    run, common = tmp_path / "run", [f"data_path={data}", "num_steps=6", "sep_token=0"]
    start(run, *common, "run_steps=2")
    start(run, *common, "run_steps=2", "document_mask=true")
    assert "document_mask was false and is true from here on" in capsys.readouterr().out
    start(run, *common, "run_steps=1", "document_mask=true")
    assert "document_mask was" not in capsys.readouterr().out
    start(run, *common)
    assert "document_mask was true and is false from here on" in capsys.readouterr().out
    assert tokens_seen(run) == [64 * step for step in range(1, 7)]


def test_inspect_shows_what_was_trained_before_and_after_a_phase_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_two_datasets(tmp_path / "data")
    run = tmp_path / "run"
    common = [f"data_path={data}", "num_steps=6", "sep_token=0"]
    start(run, *common, "datasets=first", "global_batch_size=4", "run_steps=3")
    start(run, *common, "datasets=first,second", "weights=1,2", "global_batch_size=6")
    assert "phase 2 from step 3" in capsys.readouterr().out

    def inspected(step: int, *flags: str) -> list[dict[str, Any]]:
        main(["inspect", f"ckpt_load_path={run}", f"step={step}", "json=true", *flags])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    first, last = inspected(3), inspected(4)
    assert sorted(slot["sample_id"] for slot in first) == [8, 9, 10, 11]
    assert {slot["dataset"] for slot in first} == {"first"}
    assert sorted(slot["sample_id"] for slot in last) == [12, 13, 14, 15, 16, 17]
    assert {slot["dataset"] for slot in last} == {"first", "second"}
    halves = [inspected(3, "world_size=2", f"rank={rank}") for rank in (0, 1)]
    assert halves[0] + halves[1] == first and len(halves[0]) == 2
    main(["inspect", f"ckpt_load_path={run}", "step=3"])
    assert "the global batch has 4 slots" in capsys.readouterr().out


def test_between_checkpoints_a_newer_one_for_emergencies_takes_the_place_of_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    train_step = loop.train_step

    def watched(context: StepContext, batch: StepBatch, step: int) -> StepOutcome:
        seen.append({path.name for path in (tmp_path / "checkpoints").iterdir()})
        if step == 9:
            raise KeyboardInterrupt
        return train_step(context, batch, step)

    monkeypatch.setattr(loop, "train_step", watched)
    with pytest.raises(SystemExit):
        start(tmp_path, "num_steps=20", "checkpoint_interval=5", "preempt_interval=2")
    dist.destroy_process_group()  # whoever is interrupted just ends
    assert seen[2] == seen[3] == {"step_2_ckp.preempt"}
    assert seen[4] == {"step_4_ckp.preempt"}
    assert seen[5] == {"step_5_ckp"}
    assert seen[6] == {"step_5_ckp", "step_6_ckp.preempt"}
    assert seen[8] == seen[9] == {"step_5_ckp", "step_8_ckp.preempt"}


def test_a_time_limit_ends_a_run_with_the_resumable_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRETRAINING_STARTED_AT", "0")
    with pytest.raises(SystemExit) as ending:
        start(tmp_path, "time_limit=1h30min")
    assert ending.value.code == 75
    said = capsys.readouterr().err
    assert said.startswith("Preempted before the next step (the time limit is near)")
    start(tmp_path, "time_limit=0s")
    assert json.loads((tmp_path / "run_status.json").read_text())["status"] == "finished"


def test_a_job_that_ends_once_it_is_put_together_finds_its_folder_by_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assemble, told = build._assemble, list[str]()

    def assemble_and_tell(*arguments: Any) -> Any:
        told.append("to end")
        return assemble(*arguments)

    def told_to_end(self: StopRequests) -> None:
        if told:
            raise Preempted("told to end")

    monkeypatch.setattr(build, "_assemble", assemble_and_tell)
    monkeypatch.setattr(StopRequests, "end_before_training", told_to_end)
    for _ in range(2):
        told.clear()
        with pytest.raises(SystemExit):
            start(tmp_path / "run.{timestamp}")
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "run_status.json").read_text())["starts"] == 2


def test_a_time_limit_shorter_than_a_start_is_refused_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRETRAINING_STARTED_AT", "0")
    codes = []
    for _ in range(3):
        with pytest.raises(SystemExit) as ending:
            start(tmp_path, "time_limit=30s", "max_starts_without_progress=2")
        codes.append(ending.value.code)
    assert codes == [75, 75, 1]
    assert "its last 2 starts went on from step 0 and ran out of time" in capsys.readouterr().err
    start(tmp_path, "time_limit=0s", "max_starts_without_progress=0")
    assert json.loads((tmp_path / "run_status.json").read_text())["status"] == "finished"


def test_an_interrupt_is_no_crash_and_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train_step", interrupted)
    with pytest.raises(SystemExit) as ending:
        start(tmp_path)
    dist.destroy_process_group()
    status = json.loads((tmp_path / "run_status.json").read_text())
    assert ending.value.code == 130 and list((tmp_path / "checkpoints").iterdir()) == []
    assert (status["status"], status["reason"]) == ("failed", "interrupted (Ctrl-C)")
    assert status["starts_without_progress"] == 0
