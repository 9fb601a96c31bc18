"""The same run on any layout, and the same run again after a stop."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tiers import first_quick
from training_runs import (
    EVERY_SWITCH,
    GOLDEN_RUN,
    assert_same_tensors,
    losses_of,
    metrics_of,
    reports_of,
    shards_of,
    train_runs,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "loss_curve.json"

# Every strategy at least once with replicas, with shards, and with both, and with a world that divides nothing evenly.
LAYOUTS = {
    1: ["ddp", "zero2", "fsdp", "hsdp", "hsdp_zero2"],
    2: ["ddp", "zero2", "fsdp"],
    3: ["fsdp", "ddp"],
    4: ["hsdp", "hsdp_zero2", "fsdp", "zero2", "ddp"],
}


@pytest.mark.parametrize(("processes", "steps"), first_quick((2, 30), (1, 15), (3, 15), (4, 15)))
def test_every_layout_has_the_golden_loss_curve(processes: int, steps: int, data_path: Path, tmp_path: Path) -> None:
    runs = {strategy: tmp_path / strategy for strategy in LAYOUTS[processes]}
    settings = []
    for strategy, run in runs.items():
        group = ["hsdp_group_size=2"] if strategy.startswith("hsdp") and processes == 4 else []
        flags = [f"run_steps={steps}", f"sharding_strategy={strategy}", f"ckpt_save_path={run}"]
        settings.append([*GOLDEN_RUN, *group, *flags])
    train_runs(processes, data_path, settings)
    golden = json.loads(GOLDEN.read_text())["losses"]
    for run in runs.values():
        assert losses_of(run) == pytest.approx(golden[:steps], rel=1e-4), run.name
        assert reports_of(run)[-1]["param_norm"] == pytest.approx(norm_of(run / "checkpoints" / f"step_{steps}_ckp"))


@pytest.mark.parametrize("processes", first_quick(2, 3))
def test_low_precision_replicas_sum_gradients_of_one_process(processes: int, data_path: Path, tmp_path: Path) -> None:
    runs = {
        kind: ["num_steps=4", "global_batch_size=6", "batch_size=1", "sharding_strategy=ddp", *flags]
        for kind, flags in {
            "float32": ["tie_word_embeddings=true"],
            "bfloat16": ["mixed_precision=true"],
            "recomputed": ["mixed_precision=true", "tie_word_embeddings=true", "fsdp_activation_checkpointing=true"],
        }.items()
    }
    for each in (1, processes):
        train_runs(each, data_path, [[*run, f"ckpt_save_path={tmp_path}/{kind} {each}"] for kind, run in runs.items()])
    for kind in runs:
        one, several = (numbers_of(tmp_path / f"{kind} {each}") for each in (1, processes))
        assert several == pytest.approx(one, rel=1e-5 if kind == "float32" else 2e-3), kind


@pytest.mark.thorough
def test_a_model_with_every_switch_learns_what_one_process_does_on_four(data_path: Path, tmp_path: Path) -> None:
    settings = [*EVERY_SWITCH, "global_batch_size=8", "num_steps=10", "batch_size=1", "document_mask=true"]
    settings += ["tie_word_embeddings=true", "z_loss_weight=0.01", "loss_chunk_tokens=5"]
    settings += ["held_out_fraction=0.1", "eval_interval=5", "eval_batches=1"]
    train_runs(1, data_path, [[*settings, f"ckpt_save_path={tmp_path / 'one'}"]])
    strategies = {"fsdp": [], "hsdp": ["hsdp_group_size=2"], "ddp": [], "zero2": ["fsdp_activation_checkpointing=true"]}
    runs = [
        [*settings, *flags, f"sharding_strategy={name}", f"ckpt_save_path={tmp_path / name}"]
        for name, flags in strategies.items()
    ]
    train_runs(4, data_path, runs)
    expected = numbers_of(tmp_path / "one")
    assert not expected["10 z_loss"] == expected["1 z_loss"] > 0
    for name in strategies:
        assert numbers_of(tmp_path / name) == pytest.approx(expected, rel=1e-4), name
        assert losses_of(tmp_path / name) == pytest.approx(losses_of(tmp_path / "one"), rel=2e-5), name


def numbers_of(run: Path) -> dict[str, float]:
    """Losses, accuracies and gradient norms of a run's reports and evaluations, by step."""
    names = ("loss", "z_loss", "grad_norm", "token_accuracy", "loss/first", "loss/second", "evaluation_loss")
    return {f"{line['step']} {name}": line[name] for line in metrics_of(run) for name in names if name in line}


def norm_of(checkpoint: Path) -> float:
    """The Euclidean norm of a checkpoint's parameters, whose pieces lie in several files."""
    pieces = [piece for key, piece in shards_of(checkpoint).items() if ":optimizer." not in key]
    return math.sqrt(sum(float(piece.double().square().sum()) for piece in pieces))


@pytest.mark.parametrize(("processes", "strategy"), first_quick((2, "fsdp"), (1, "fsdp"), (2, "ddp")))
def test_a_resumed_run_repeats_the_whole_one(processes: int, strategy: str, data_path: Path, tmp_path: Path) -> None:
    common = ["num_steps=8", "batch_size=2", "grad_accum_steps=2", f"sharding_strategy={strategy}"]
    common += ["held_out_fraction=0.1", "eval_interval=3", "eval_batches=2"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    runs = [[*common, f"ckpt_save_path={whole}"]]
    runs += [[*common, f"ckpt_save_path={stopped}", f"run_steps={steps}"] for steps in (1, 4, 3)]
    train_runs(processes, data_path, runs)
    assert losses_of(stopped) == losses_of(whole)
    assert_same_tensors(*(each / "checkpoints" / "step_8_ckp" for each in (stopped, whole)))


@pytest.mark.thorough
def test_a_run_resumes_with_any_number_of_processes_and_any_strategy(data_path: Path, tmp_path: Path) -> None:
    kinds = {"plain": [], "masked": ["document_mask=true"]}
    common = ["num_steps=8", "batch_size=2"]
    batch = "global_batch_size=6"
    train_runs(
        1, data_path, [[*common, *kind, batch, f"ckpt_save_path={tmp_path}/{name}"] for name, kind in kinds.items()]
    )
    stages = [(2, "ddp"), (4, "hsdp"), (1, "zero2"), (3, "fsdp")]
    for processes, strategy in stages:
        stage = [*common, "run_steps=2", f"sharding_strategy={strategy}"]
        # The global batch is kept from the checkpoint; only the first stage has to name it.
        stage += [batch] if processes == 2 else []
        runs = [[*stage, *kind, f"ckpt_save_path={tmp_path}/{name}_moved"] for name, kind in kinds.items()]
        train_runs(processes, data_path, runs)
    for name in kinds:
        assert losses_of(tmp_path / f"{name}_moved") == pytest.approx(losses_of(tmp_path / name), rel=1e-4)
    assert losses_of(tmp_path / "masked") != pytest.approx(losses_of(tmp_path / "plain"), rel=1e-4)
