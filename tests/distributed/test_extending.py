"""The examples of docs/extending.md, in a folder outside of the project: they train, on one process and on two."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from forked import run_forked
from helpers import ROOT
from training_runs import TINY, metrics_of, reports_of

pytestmark = pytest.mark.thorough

WORKER = Path(__file__).with_name("command_worker.py")
BLOCK = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)
FLAGS = [
    *("optimizer=my_optimizers:Lion", "optimizer_options=beta1=0.95,beta2=0.98", "schedule=my_schedules:triangle"),
    *("tracker=my_trackers:Csv", "extra_scores=my_scores:Surprises", "held_out_fraction=0.2", "eval_batches=2"),
    *("evaluators=my_evaluators:Repeats", "best_by=repeats"),
    *("warmup_steps=2", "min_lr_ratio=0", "use_dummy_dataset=true", "learning_rate=1e-3"),
]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with the modules that the page shows."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    for name, code in BLOCK.findall(page):
        (tmp_path / name).write_text(code)
    return tmp_path


def train(outside: Path, processes: int, run: str, *flags: str) -> str:
    settings = [*(flag for flag in TINY if not flag.startswith(("tracker", "learning_rate"))), *FLAGS, *flags]
    return run_forked(WORKER, processes, ["train", *settings, f"ckpt_save_path={run}"], cwd=outside).stdout


def run_pretrain(
    outside: Path, *arguments: str, processes: int = 1, check: bool = True
) -> subprocess.CompletedProcess[str]:
    return run_forked(WORKER, processes, arguments, check=check, cwd=outside)


def test_user_defined_optimizer_schedule_tracker_and_score_train_and_resume_on_any_layout(outside: Path) -> None:
    batch = ["global_batch_size=4", "batch_size=2", "num_steps=6"]
    train(outside, 1, "whole", *batch)
    train(outside, 2, "parts", *batch, "run_steps=3")
    out = train(outside, 1, "parts", *batch)
    assert "step 3" in out and "waits for the device" not in out
    whole, parts = (reports_of(outside / name) for name in ("whole", "parts"))
    assert [each["loss"] for each in parts] == pytest.approx([each["loss"] for each in whole], rel=1e-5)
    surprises = [[each["custom/Surprises"] for each in run] for run in (parts, whole)]
    assert surprises[0] == pytest.approx(surprises[1]) and 0 < min(surprises[0]) <= 1
    evaluations = [metrics_of(outside / name)[-1]["evaluation_custom/Surprises"] for name in ("whole", "parts")]
    assert evaluations[0] == pytest.approx(evaluations[1]) and 0 < evaluations[0] <= 1
    repeats = [metrics_of(outside / name)[-1]["evaluation_custom/repeats"] for name in ("whole", "parts")]
    assert repeats[0] == pytest.approx(repeats[1], abs=1e-6)
    rates = [each["learning_rate"] for each in whole]
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 2e-3 / 3, 1e-3 / 3, 0.0])
    rows = (outside / "parts" / "logs" / "losses.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    manifest = json.loads((outside / "parts" / "checkpoints" / "step_6_ckp" / "manifest.json").read_text())
    assert manifest["state"]["trackers"] == {"my_trackers:Csv": "parts from step 0"}


def test_a_user_defined_block_trains_resumes_samples_and_is_planned(outside: Path) -> None:
    flags = ["block=my_blocks:SquaredReluBlock", "global_batch_size=4", "batch_size=2", "num_steps=4"]
    train(outside, 1, "own", *flags)
    train(outside, 2, "apart", *flags, "run_steps=2")
    train(outside, 1, "apart", *flags)
    whole, apart = ([each["loss"] for each in reports_of(outside / name)] for name in ("own", "apart"))
    assert apart == pytest.approx(whole, rel=1e-5)
    manifest = json.loads((outside / "own/checkpoints/step_4_ckp/manifest.json").read_text())
    assert manifest["model"]["block"] == "my_blocks:SquaredReluBlock"
    other = run_pretrain(outside, "train", *TINY, "use_dummy_dataset=true", "ckpt_save_path=own", check=False)
    assert other.returncode == 1 and "block: my_blocks:SquaredReluBlock in the checkpoint, None in" in other.stderr
    own = "--block=my_blocks:SquaredReluBlock"
    sampled = run_pretrain(outside, "sample", "own", "--prompt_tokens=1,2", "--max_new_tokens=3", own)
    assert len(sampled.stdout.split()) >= 1
    assert "no faults" in run_pretrain(outside, "verify", "own", own).stdout
    plans = [
        json.loads(run_pretrain(outside, "plan", "--json", "--gpu=h100", "--model_variant=125m", *block).stdout)
        for block in ([], [own])
    ]
    # 12 blocks without a gate of 768 x 2048.
    assert plans[0]["parameters"] - plans[1]["parameters"] == 12 * 768 * 2048
    refused = run_pretrain(outside, "export", "own", "--output_path=out", own, check=False)
    assert refused.returncode == 1 and "config_document(shape)" in refused.stderr


def test_a_checkpoint_alone_imports_no_block(outside: Path) -> None:
    """A downloaded folder may hold code beside its checkpoint, and be the working directory."""
    train(outside, 1, "own", "block=my_blocks:SquaredReluBlock", "num_steps=3")
    (outside / "my_blocks.py").write_text("raise SystemExit('executed')")
    dummy = ["train", "ckpt_load_path=own", "use_dummy_dataset=true"]
    commands = {
        "sample": ["sample", "own", "--prompt_tokens=1"],
        "verify": ["verify", "own"],
        "export": ["export", "own", "--output_path=out"],
        "train": [*dummy, "weights_only=true", "ckpt_save_path=new"],
        "evaluate": [*dummy, "eval_only=true", "held_out_fraction=0.1"],
        "inspect": ["inspect", "own", "--step=1"],
        "list": ["list", "own"],
    }
    for name, command in commands.items():
        done = run_pretrain(outside, *command, check=False)
        assert "executed" not in done.stdout + done.stderr, name
        if name not in ("inspect", "list"):
            assert "give --block=my_blocks:SquaredReluBlock" in done.stdout + done.stderr, (name, done.stderr)


def test_what_is_no_block_is_refused(outside: Path) -> None:
    flags = ["train", *TINY, "use_dummy_dataset=true", "dry_run=true"]
    for block, message in (
        ("my_blocks", "is not of the form package.module:Class"),
        ("my_blocks:Missing", "my_blocks has no Missing"),
        ("my_blocks:torch", "is no torch.nn.Module"),
        ("my_optimizers:Lion", "is no torch.nn.Module"),
    ):
        refused = run_pretrain(outside, *flags, f"block={block}", check=False)
        assert refused.returncode == 1 and message in refused.stderr, block


def test_a_block_shares_sequences_with_other_ranks_unless_its_attention_is_another(outside: Path) -> None:
    flags = ["block=my_blocks:SquaredReluBlock", "global_batch_size=4", "batch_size=2", "num_steps=3"]
    train(outside, 1, "whole", *flags)
    train(outside, 2, "shared", *flags, "context_parallel_size=2")
    whole, shared = ([each["loss"] for each in reports_of(outside / name)] for name in ("whole", "shared"))
    assert shared == pytest.approx(whole, rel=2e-5)
    (outside / "own_attention.py").write_text(
        "import torch\n\n\nclass Block(torch.nn.Linear):\n"
        "    def __init__(self, shape, layer):\n        super().__init__(shape.hidden_size, shape.hidden_size)\n"
    )
    own = [*TINY, "use_dummy_dataset=true", "num_steps=1", "context_parallel_size=2", "block=own_attention:Block"]
    refused = run_pretrain(outside, "train", *own, processes=2, check=False)
    assert refused.returncode == 1
    assert "own_attention:Block has no module of pretraining.model.attention.Attention" in refused.stderr


def test_an_error_of_an_evaluator_on_one_rank_ends_all_with_its_name(outside: Path) -> None:
    (outside / "broken.py").write_text(
        "import torch\n\n\n"
        "class Broken:\n"
        "    def __call__(self, model, tokenizer, step):\n"
        "        model(torch.zeros(1, 8, dtype=torch.int64))\n"
        "        if torch.distributed.get_rank() == 1:\n"
        "            raise ValueError('a bug')\n"
        "        return {'fine': 1.0}\n"
    )
    flags = [*TINY, "use_dummy_dataset=true", "num_steps=2", "evaluators=broken:Broken", "ckpt_save_path=none"]
    done = run_pretrain(outside, "train", *flags, processes=2, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "--evaluators=broken:Broken fails: ValueError: a bug (" in done.stderr
    assert "broken.py, line 8)" in done.stderr
