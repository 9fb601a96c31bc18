"""Whole runs in this process: their messages and files, lengths and rates, and what may change at a second start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from training_runs import (
    TINY,
    VOCABULARY,
    events_of,
    losses_of,
    metrics_of,
    reports_of,
    status_of,
    write_dataset,
    write_two_datasets,
)
from unit.train.whole_runs import equal, manifest_of, refusal, saved, start, started_at, write_tokenizer

from pretraining.checkpoint.run_folder import newest_run_path
from pretraining.cli import main
from pretraining.config.read import load_train_config
from pretraining.config.recipe_files import load_config
from pretraining.errors import CheckpointError
from pretraining.launch.terminal import escape_controls


def tokens_seen(run: Path) -> list[int]:
    return [line["tokens_seen"] for line in metrics_of(run, "loss")]


def test_a_run_logs_what_it_trains_and_where_its_files_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    start(run, "tracker=tensorboard", "held_out_fraction=0.1", "eval_interval=2", "eval_batches=2")
    out = capsys.readouterr().out
    for part in (
        f"float32, fsdp over 1 x cpu, {torch.get_num_threads()} thread",
        "4 steps, 256 tokens",
        "from initial weights, seed 2023",
        "step 4/4  loss",
        "step 2  evaluation_loss",
        f"checkpoint   {run}/checkpoints/step_4_ckp",
        f"metrics      {run}/logs/metrics.jsonl",
    ):
        assert part in out, out
    assert {path.name for path in run.iterdir()} == {"config.yaml", "run_status.json", "checkpoints", "logs"}
    assert any(path.name.startswith("events.out.tfevents") for path in (run / "logs").iterdir())
    assert [line["step"] for line in metrics_of(run, "loss")] == [1, 2, 3, 4]
    assert [line["step"] for line in metrics_of(run, "evaluation_loss")] == [2, 4]
    assert tokens_seen(run) == [64, 128, 192, 256]


def test_the_resolved_settings_are_written_out_and_start_the_same_run(tmp_path: Path) -> None:
    start(tmp_path, "learning_rate=2e-3")
    written = load_config(tmp_path / "config.yaml")
    assert written.optimizer.learning_rate == 2e-3 and written.model.hidden_size == 32
    assert load_train_config([f"recipe={tmp_path / 'config.yaml'}"], {}) == written
    assert "learning_rate: 0.002" in manifest_of(tmp_path, 4)["config"]


def test_events_of_all_starts_are_kept(tmp_path: Path) -> None:
    evaluating = ["held_out_fraction=0.1", "eval_interval=2", "eval_batches=1", "checkpoint_interval=2"]
    start(tmp_path, "run_steps=3", *evaluating)
    start(tmp_path, *evaluating, "global_batch_size=4")
    assert 0 < manifest_of(tmp_path, 2)["seconds"] < manifest_of(tmp_path, 4)["seconds"]
    at = {step: f"{tmp_path}/checkpoints/step_{step}_ckp" for step in (2, 3, 4)}
    evaluations = [event for event in events_of(tmp_path) if event["event"] == "evaluation"]
    assert [event["step"] for event in evaluations] == [2, 4]
    assert all(event["evaluation_loss"] > 0 for event in evaluations)
    first, second = "3 of 4 steps are done", "4 of 4 steps are done"
    assert [event for event in events_of(tmp_path) if event["event"] != "evaluation"] == [
        {"step": 0, "event": "start", "number": 1},
        {"step": 0, "event": "phase", "global_batch_size": 2, "weights": {"dummy": 1}},
        {"step": 2, "event": "checkpoint", "kind": "interval", "path": at[2]},
        {"step": 3, "event": "checkpoint", "kind": "interval", "path": at[3]},
        {"step": 3, "event": "end", "status": "finished", "reason": first},
        {"step": 3, "event": "restart", "number": 2, "previous_status": "finished", "previous_reason": first},
        {"step": 3, "event": "restore", "checkpoint": at[3], "weights_only": False, "passed_over": []},
        {"step": 3, "event": "phase", "global_batch_size": 4, "weights": {"dummy": 1}},
        {"step": 4, "event": "checkpoint", "kind": "final", "path": at[4]},
        {"step": 4, "event": "end", "status": "finished", "reason": second},
    ]


def test_metrics_that_cannot_be_written_end_a_run_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    error = refusal(tmp_path / "run", "tracker=tensorboard", f"tracker_dir={tmp_path / 'taken' / 'curves'}")
    assert "tracker_dir" in error.settings and saved(tmp_path / "run") == []


def test_a_loss_that_is_not_finite_is_null_in_the_manifest_and_the_last_finite_ones_survive(tmp_path: Path) -> None:
    start(tmp_path, "num_steps=2", "held_out_fraction=0.1", "eval_batches=1")
    before = manifest_of(tmp_path, 2)
    assert before["loss"] > 0 and before["evaluation_loss"] > 0
    flags = ["held_out_fraction=0.1", "eval_batches=1", "report_interval=0", "eval_interval=0", "checkpoint_interval=1"]
    start(tmp_path, *flags)
    resumed = manifest_of(tmp_path, 3)
    assert (resumed["loss"], resumed["evaluation_loss"]) == (before["loss"], before["evaluation_loss"])
    start(tmp_path / "diverged", "learning_rate=1e30", "grad_clip_thresh=0")
    assert manifest_of(tmp_path / "diverged", 4)["loss"] is None


def test_a_last_state_that_is_not_finite_is_no_checkpoint_and_the_exit_code_says_it(tmp_path: Path) -> None:
    start(tmp_path, "num_steps=2")
    error = refusal(tmp_path, "num_steps=3", "learning_rate=3e38", "schedule=constant", "warmup_steps=0")
    assert isinstance(error, CheckpointError) and error.exit_code == 1
    assert saved(tmp_path) == ["step_2_ckp"]


def test_lengths_and_intervals_may_be_tokens_epochs_and_time(tmp_path: Path) -> None:
    data = write_two_datasets(tmp_path / "data")
    start(tmp_path / "tokens", "num_steps=256tok", "checkpoint_interval=128tok")
    assert len(losses_of(tmp_path / "tokens")) == 4 and saved(tmp_path / "tokens") == ["step_2_ckp", "step_4_ckp"]
    epochs = ["num_steps=0.01ep", "checkpoint_interval=0.005ep", "report_interval=1h"]
    start(tmp_path / "epochs", f"data_path={data}", *epochs)
    (last,) = metrics_of(tmp_path / "epochs")  # the last step is always reported
    assert last["step"] > 2 and len(saved(tmp_path / "epochs")) == 2


def test_a_run_with_a_tokenizer_ends_with_generated_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    flags = [f"vocab_size={write_tokenizer(tmp_path / 'tokenizer')}", f"tokenizer_path={tmp_path / 'tokenizer'}"]
    flags += ["sample_prompt=def", "sample_tokens=5", "num_steps=2", "held_out_fraction=0.1", "eval_interval=1"]
    start(run, *flags, "sample_at_evaluations=true", "eval_batches=1")
    out = capsys.readouterr().out
    start(run, *flags)  # the run is finished: the same files are written
    (_, kept) = (event for event in events_of(run) if event["event"] == "sample")
    assert out.count("generated text") == out.count("evaluation_loss") == 2
    assert kept["prompt"] == "def" and f"    def{escape_controls(kept['text'].splitlines()[0])}" in out
    error = refusal(tmp_path / "refused", *flags, "vocab_size=64")  # before training
    assert "vocab_size" in error.settings and not (tmp_path / "refused").exists()


def test_the_batch_is_kept_at_a_resume_unless_named(tmp_path: Path) -> None:
    start(tmp_path, "num_steps=2", "batch_size=3", "grad_accum_steps=2")
    start(tmp_path, "num_steps=4", "batch_size=2")
    start(tmp_path, "num_steps=6", "global_batch_size=4")
    start(tmp_path, "num_steps=7")
    assert tokens_seen(tmp_path) == [192, 384, 576, 768, 768 + 128, 768 + 256, 768 + 384]
    phases = [event for event in events_of(tmp_path) if event["event"] == "phase"]
    assert [(event["step"], event["global_batch_size"]) for event in phases] == [(0, 6), (4, 4)]


def test_micro_batches_that_do_not_divide_a_share_are_refused_at_first_and_derived_at_a_resume(tmp_path: Path) -> None:
    flags = ("batch_size=4", "global_batch_size=8", "grad_accum_steps=3")
    assert "grad_accum_steps" in refusal(tmp_path, *flags).settings
    start(tmp_path, "global_batch_size=8", "batch_size=4", "num_steps=1")
    start(tmp_path, *flags, "num_steps=2")
    assert tokens_seen(tmp_path) == [256, 512]


def test_sequences_beyond_the_context_of_the_model_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for length, is_said in ((32, False), (33, True)):
        start(tmp_path / str(length), "max_position_embeddings=32", f"seq_length={length}", "num_steps=1")
        assert ("the model's context has 32 (--max_position_embeddings)" in capsys.readouterr().out) is is_said


def test_a_refused_start_leaves_the_status_of_a_finished_run(tmp_path: Path) -> None:
    data = write_two_datasets(tmp_path / "data")
    run = tmp_path / "run"
    start(run, f"data_path={data}", "num_steps=2")
    refusal(run, f"data_path={data}", "num_steps=4", "datasets=first,nowhere")
    assert (status_of(run)["status"], status_of(run)["step"]) == ("finished", 2)
    assert [event["status"] for event in events_of(run) if event["event"] == "end"] == ["finished", "refused"]


def test_weights_datasets_and_batch_change_at_a_resume_and_the_length_in_tokens_holds(tmp_path: Path) -> None:
    data = write_two_datasets(tmp_path / "data")
    write_dataset(tmp_path / "data" / "third", seed=2)
    run, length = tmp_path / "run", ["num_steps=2560tok", f"data_path={data}", "min_lr_ratio=0.1"]
    start(run, *length, "datasets=first,second", "weights=3,1", "global_batch_size=8", "run_steps=4")
    start(run, *length, "datasets=first,third", "weights=1,1", "global_batch_size=5", "run_steps=4")
    for _ in range(2):  # at the second start the run is finished
        start(run, *length, "datasets=first,second,third", "weights=1,1,2")
    assert tokens_seen(run) == [256, 512, 768, 1024, *(1024 + 160 * step for step in range(1, 11))]
    manifest = manifest_of(run, 14)  # 10 steps of 160 for the 1,536 remaining tokens
    assert (manifest["tokens_seen"], manifest["global_batch_size"]) == (2624, 5)
    assert [phase["first_step"] for phase in manifest["data"]["phases"]] == [0, 4, 8]
    assert manifest["data"]["next_sample"] == 82
    rates = [line["learning_rate"] for line in metrics_of(run)]
    assert min(rates) == rates[-1] == pytest.approx(1e-4)


def test_another_schedule_or_length_at_a_resume_changes_the_learning_rate_from_there_on(tmp_path: Path) -> None:
    for flags in (
        ["num_steps=5", "run_steps=2", "schedule=linear"],
        ["num_steps=9", "run_steps=1", "schedule=linear"],
        ["num_steps=9", "run_steps=1", "schedule=linear"],
        ["num_steps=9", "schedule=wsd", "decay_steps=2"],
    ):
        start(tmp_path, "warmup_steps=0", "min_lr_ratio=0", "learning_rate=0.01", *flags)
    rates = [line["learning_rate"] for line in metrics_of(tmp_path, "learning_rate")]
    assert rates == pytest.approx([0.01, 0.0075, 0.0075, 0.00625, 0.01, 0.01, 0.01, 0.01 * (1 - 0.5**0.5), 0.0])


def test_a_run_resumes_after_a_time_limit_and_a_limit_shorter_than_a_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRETRAINING_STARTED_AT", "0")
    ends = [
        refusal(tmp_path, f"time_limit={limit}", "max_starts_without_progress=2") for limit in ("1h30min", "9s", "9s")
    ]
    assert [error.exit_code for error in ends] == [75, 75, 1]
    assert {"time_limit", "max_starts_without_progress"} <= set(ends[-1].settings)
    start(tmp_path, "time_limit=0s", "max_starts_without_progress=0")
    assert status_of(tmp_path)["status"] == "finished"


def test_a_float16_run_resumes_bit_for_bit_with_the_scale_of_its_loss(tmp_path: Path) -> None:
    whole, stopped, flags = tmp_path / "whole", tmp_path / "stopped", ["mixed_precision=true", "mp_dtype=float16"]
    start(whole, *flags)
    for _ in range(2):
        start(stopped, *flags, "run_steps=2")
    assert losses_of(whole) == losses_of(stopped) and equal(whole, stopped)
    for run in (whole, stopped):
        assert manifest_of(run, 4)["state"]["loss_scale"] == {"scale": 2.0**16, "steps": 4}


@pytest.mark.parametrize("tied", ["false", "true"])
def test_a_model_made_whole_has_the_same_weights_as_one_made_in_shards(tied: str, tmp_path: Path) -> None:
    for whole in ("true", "false"):
        start(tmp_path / whole, f"tie_word_embeddings={tied}", f"low_cpu_fsdp={whole}", "num_steps=3")
    assert losses_of(tmp_path / "true") == losses_of(tmp_path / "false")


def test_blocks_are_not_recompiled_for_the_documents_of_each_step(tmp_path: Path) -> None:
    error = refusal(tmp_path, "use_torch_compile=true", "document_mask=true")
    assert {"use_torch_compile", "document_mask"} <= set(error.settings)


def test_a_warm_up_in_another_systems_file_that_is_too_long_is_refused_by_its_place(
    tmp_path: Path,
) -> None:
    write_dataset(tmp_path / "data" / "a")
    model = {"d_model": 32, "n_heads": 4, "n_layers": 2, "d_ff": 64, "vocab_size": VOCABULARY, "max_seq_len": 256}
    guide = tmp_path / "guide.json"
    guide.write_text(json.dumps({**model, "num_epochs": 1, "use_amp": False, "batch_size": 8, "warmup_steps": 9999}))
    flags = [str(guide), f"--data_path={tmp_path / 'data'}", "--sep_token=0", "--logical_shards=8", "--run_steps=1"]
    with pytest.raises(SystemExit) as error:
        main(["train", *flags, f"--ckpt_save_path={tmp_path / 'b'}"])
    assert f"{guide}: warmup_steps: 9999" in str(error.value.__context__)


def test_a_refused_start_is_no_run_to_go_on_with(tmp_path: Path) -> None:
    refusal(tmp_path / "runs" / "{timestamp}", "warmup_steps=2ep")
    pattern = str(tmp_path / "runs" / "{timestamp}")
    [refused] = (tmp_path / "runs").iterdir()
    assert newest_run_path(pattern) == pattern
    start(tmp_path / "runs" / "{timestamp}", "num_steps=1")
    assert list((tmp_path / "runs").iterdir()) == [refused] and newest_run_path(pattern) == str(refused)


def test_the_header_names_the_family_its_switches_and_the_factor_of_muons_updates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An orthogonal update of an m x n matrix has 0.2 sqrt(max(m, n)) here, and sqrt(max(1, m / n)) in plain Muon."""
    caplog.set_level("INFO")
    start(tmp_path / "a", "model_variant=qwen3_0.6b", "head_dim=16", "dry_run=true")
    assert "model       qwen3, " in caplog.text and "qk_norm head, model_family qwen3" in caplog.text
    start(tmp_path / "b", "optimizer=muon", "intermediate_size=128", "dry_run=true")
    assert "updates of matrices are 1.13, 2.26 (down_proj) times as long as of plain Muon" in caplog.text


LINE = {step: 2e-3 * (12 - step) / 3 for step in range(9, 13)}  # the rate of the update that ends in a step


def rates(run: Path) -> dict[int, float]:
    return {report["step"]: report["learning_rate"] for report in reports_of(run)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    start(tmp_path / "source", "num_steps=8", "learning_rate=2e-3", "schedule=constant", "warmup_steps=0")
    return tmp_path / "source"


def anneal(run: Path, *flags: str) -> None:
    start(run, "training_stage=annealing", "learning_rate=2e-3", "num_steps=12", "checkpoint_interval=1", *flags)


def test_annealing_begins_at_the_checkpoint_of_another_run_and_continues_in_restarts(
    source: Path, tmp_path: Path
) -> None:
    run = tmp_path / "annealed"
    for _ in range(4):
        anneal(run, f"ckpt_load_path={source}", "run_steps=1")
    assert rates(run) == pytest.approx(LINE)
    assert manifest_of(run, 9)["data"]["next_sample"] == manifest_of(source, 8)["data"]["next_sample"] + 2


def test_annealing_begins_in_the_same_run_and_again_after_a_return(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    anneal(source, "run_steps=2")
    assert "learning rate is 0.002" in "".join(capsys.readouterr())
    anneal(source)
    assert {step: rate for step, rate in rates(source).items() if step > 8} == pytest.approx(LINE)
    start(
        source, "resume_from_checkpoint=8", "schedule=constant", "warmup_steps=0", "num_steps=10", "learning_rate=2e-3"
    )
    anneal(source, "num_steps=14")
    assert rates(source)[11] == pytest.approx(2e-3) and rates(source)[14] == pytest.approx(0.0, abs=1e-12)


def test_a_length_that_ends_before_the_start_point_is_logged_with_what_it_counts_from(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    anneal(tmp_path / "annealed", f"ckpt_load_path={source}", "num_steps=4")
    said = "".join(capsys.readouterr())
    assert "at step 8 of 4" in said and "--num_steps counts from step 0" in said and "above 8" in said
    assert started_at(tmp_path / "annealed") == 8


def test_a_start_refuses_float8_on_a_device_without_it(tmp_path: Path) -> None:
    model = [flag for flag in TINY if flag != "mixed_precision=false"]
    assert "--float8=rowwise needs a GPU with float8 hardware" in str(refusal(tmp_path, "float8=rowwise", model=model))
