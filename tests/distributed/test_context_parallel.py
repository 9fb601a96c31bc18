"""Context parallelism: ranks that share sequences train as one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiers import first_quick
from training_runs import EVERY_SWITCH, losses_of, metrics_of, train_runs

# Six steps on two datasets, whose documents end at places that no chunk knows of, and an evaluation of each.
COMMON = [
    *("datasets=first,second", "weights=3,1", "num_steps=6", "global_batch_size=4", "batch_size=2"),
    *("held_out_fraction=0.1", "eval_interval=3", "eval_batches=3", "norms_interval=3"),
]
KINDS = {
    "stream": [],
    "masked": ["document_mask=true"],
    "best_fit": ["packing=best_fit"],
    "best_fit_masked": ["packing=best_fit", "document_mask=true"],
}
LAYOUTS = {
    2: {"fsdp": ["context_parallel_size=2"]},
    4: {
        "fsdp_2": ["context_parallel_size=2"],
        "fsdp_4": ["context_parallel_size=4"],
        "hsdp_2": ["context_parallel_size=2", "sharding_strategy=hsdp", "hsdp_group_size=2"],
        "ddp_4": ["context_parallel_size=4", "sharding_strategy=ddp"],
    },
}
# Flags of the run of two ranks, and those that one process has, too.
SETTINGS = {
    "recomputed": (["fsdp_activation_checkpointing=true"], ["document_mask=true", "z_loss_weight=1e-3"]),
    "op": (["fsdp_activation_checkpointing=true", "selective_checkpointing=op"], KINDS["masked"]),
    "compiled and recomputed": (
        ["use_torch_compile=true", "fsdp_activation_checkpointing=true"],
        ["loss_chunk_tokens=8"],
    ),
    "compiled": (["use_torch_compile=true", "sharding_strategy=zero2"], []),
    "every switch": ([], [*EVERY_SWITCH, "document_mask=true"]),
}
UNLIKE = ("stream", "best_fit_masked")
TIMES = ("seconds", "per_", "share", "gib")  # parts of the names of values that each run has of its own


def assert_same_reports(run: Path, expected: Path) -> None:
    """Every reported number of two runs is the same, with evaluations and norms by block, to rounding in float32."""
    lines, others = (
        [
            {
                name: each
                for name, each in line.items()
                if isinstance(each, float) and not any(part in name for part in TIMES)
            }
            for line in metrics_of(path)
        ]
        for path in (run, expected)
    )
    assert len(lines) == 8 and {"grad_norm", "loss/second", "token_accuracy"} <= lines[0].keys()
    for name in ("evaluation_loss/second", "norms/update/head", "norms/output/layers.0"):
        assert any(name in line for line in lines)
    for line, other in zip(lines, others, strict=True):
        assert line == pytest.approx(other, rel=2e-5), run.name


@pytest.fixture(scope="module")
def alone(data_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the runs of one process."""
    folder = tmp_path_factory.mktemp("alone")
    train_runs(1, data_path, [[*COMMON, *kind, f"ckpt_save_path={folder / name}"] for name, kind in KINDS.items()])
    return folder


@pytest.mark.parametrize("processes", first_quick(2, 4))
def test_sharing_ranks_report_what_one_process_does(
    processes: int, alone: Path, data_path: Path, tmp_path: Path
) -> None:
    layouts = LAYOUTS[processes]
    # Every kind in the first layout; in the others, the two that are least alike.
    pairs = [(kind, layout) for layout in layouts for kind in KINDS if layout in ("fsdp", "fsdp_2") or kind in UNLIKE]
    runs = [
        [*COMMON, *KINDS[kind], *layouts[layout], f"ckpt_save_path={tmp_path / layout / kind}"]
        for kind, layout in pairs
    ]
    train_runs(processes, data_path, runs)
    for kind, layout in pairs:
        assert_same_reports(tmp_path / layout / kind, alone / kind)


@pytest.mark.thorough
def test_other_settings_hold_with_shared_sequences(data_path: Path, tmp_path: Path) -> None:
    one = [[*COMMON, *both, f"ckpt_save_path={tmp_path / name} alone"] for name, (_, both) in SETTINGS.items()]
    train_runs(1, data_path, one)
    context = [*COMMON, "context_parallel_size=2"]
    two = [[*context, *both, *own, f"ckpt_save_path={tmp_path / name}"] for name, (own, both) in SETTINGS.items()]
    train_runs(2, data_path, two)
    for name in SETTINGS:
        assert_same_reports(tmp_path / name, tmp_path / f"{name} alone")


@pytest.mark.thorough
def test_a_run_resumes_with_another_number_of_ranks_per_sequence(alone: Path, data_path: Path, tmp_path: Path) -> None:
    stages = [(4, "context_parallel_size=2"), (2, "context_parallel_size=1"), (2, "context_parallel_size=2")]
    worlds = []
    for number, (processes, flag) in enumerate(stages, start=1):
        train_runs(processes, data_path, [[*COMMON, flag, "run_steps=2", f"ckpt_save_path={tmp_path}"]])
        manifest = json.loads((tmp_path / f"checkpoints/step_{2 * number}_ckp/manifest.json").read_text())
        worlds.append((manifest["world"]["processes"], manifest["world"].get("context_parallel_size")))
    assert worlds == [(4, 2), (2, None), (2, 2)]
    assert losses_of(tmp_path) == pytest.approx(losses_of(alone / "stream"), rel=2e-5)
