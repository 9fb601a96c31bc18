"""`pretraining.Trainer` in several processes: the metrics of one, runs one after the other, one error for all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import run_forked
from helpers import ROOT, free_ports, run_command
from training_runs import TINY, metrics_of

pytestmark = pytest.mark.thorough

WORKER = Path(__file__).with_name("trainer_worker.py")
BLOCK = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)


def settings(data_path: Path, run: Path, mode: str = "measured", **more: Any) -> str:
    """Three steps of 10 sequences, of which ranks have unequal shares, in micro-batches of two; two sets."""
    given = dict(flag.split("=") for flag in TINY) | {"data_path": str(data_path), "sep_token": 0, "logical_shards": 8}
    given |= {"global_batch_size": 10, "batch_size": 2, "num_steps": 3, "held_out_fraction": 0.2, "eval_batches": 2}
    return json.dumps({"mode": mode, **given, "eval_interval": 2, "ckpt_save_path": str(run), **more})


def found_by(done: subprocess.CompletedProcess[str]) -> dict[int, list[Any]]:
    """What each rank has found."""
    lines = [json.loads(line.removeprefix("FOUND ")) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return {line["rank"]: line["found"] for line in lines}


def custom_of(run: Path) -> list[dict[str, float]]:
    return [{name: line[name] for name in line if "custom/" in name} for line in metrics_of(run)]


def test_every_rank_has_the_metrics_of_one_process_in_any_layout(data_path: Path, tmp_path: Path) -> None:
    more: dict[str, dict[str, Any]] = {"fsdp": {}, "ddp": {}, "zero2": {"document_mask": True}}
    more["shared"] = {"sharding_strategy": "fsdp", "document_mask": True}
    found = {}
    for processes in (1, 2):
        more["shared"]["context_parallel_size"] = processes
        runs = [
            settings(data_path, tmp_path / f"{name}_{processes}", **{"sharding_strategy": name, **given})
            for name, given in more.items()
        ]
        found[processes] = found_by(run_forked(WORKER, processes, runs))
    assert found[2][0] == found[2][1]
    for one, two in zip(found[1][0], found[2][0], strict=True):
        assert one[:2] == two[:2] == ["finished", 3] and one[2:] == pytest.approx(two[2:], rel=1e-5)
    for name in more:
        one, two = (custom_of(tmp_path / f"{name}_{processes}") for processes in (1, 2))
        sets = [f"evaluation_custom/norm{each}" for each in ("", "/first", "/second")]
        assert len(one) == len(two) == 5 and {*sets} <= {name for line in one for name in line}
        for line, other in zip(one, two, strict=True):
            assert line == pytest.approx(other, rel=1e-5) and line


def test_an_error_of_one_rank_in_the_first_step_stops_all(data_path: Path, tmp_path: Path) -> None:
    found = found_by(run_forked(WORKER, 2, [settings(data_path, tmp_path, "failing")]))
    assert found[0][0].startswith("PretrainError: rank 1 failed: KeyError: 'a mistake of mine'")
    assert found[1][0].startswith("KeyError: 'a mistake of mine'")


def test_after_an_error_that_all_ranks_have_the_next_run_trains(data_path: Path, tmp_path: Path) -> None:
    bad = settings(data_path, tmp_path / "bad", "other names")
    found = found_by(run_forked(WORKER, 2, [bad, settings(data_path, tmp_path / "good", num_steps=1)]))
    for first, second in found.values():
        assert first.startswith("ConfigError: extra_metrics returned of_0 on rank 0 first and of_1 on rank 1")
        assert second[:2] == ["finished", 1]


def test_a_process_may_join_the_next_run_before_its_peer_left_the_last(data_path: Path, tmp_path: Path) -> None:
    # What shards leaves a group, and with it the store, behind.
    ddp: dict[str, Any] = {"num_steps": 1, "sharding_strategy": "ddp"}
    runs = [settings(data_path, tmp_path / str(number), **ddp) for number in range(2)]
    found = found_by(run_forked(WORKER, 2, runs, {"LEAVE_LATE": str(tmp_path / "come")}))
    assert [[each[:2] for each in found[rank]] for rank in (0, 1)] == [[["finished", 1]] * 2] * 2


def test_the_scripts_of_the_page_train_alone_and_under_torchrun(tmp_path: Path) -> None:
    for name, code in BLOCK.findall((ROOT / "docs" / "python.md").read_text(encoding="utf-8")):
        (tmp_path / name).write_text(code)
    out = run_forked(tmp_path / "from_settings.py", 1, cwd=tmp_path).stdout
    assert re.search(r"^finished 4 \d\.\d+ runs/tiny/checkpoints/step_4_ckp$", out, re.MULTILINE), out
    alone = run_forked(tmp_path / "my_training.py", 1, cwd=tmp_path).stdout
    (tmp_path / "runs" / "with_metrics").rename(tmp_path / "runs" / "alone")
    port = str(free_ports(1)[0])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    together = run_command([*torchrun, "my_training.py"], cwd=tmp_path).stdout
    numbers = [float(number) for number in alone.splitlines()[-1].split()]
    said = [line for line in together.splitlines() if re.fullmatch(r"\d\.\d+ \d\.\d+", line)]
    assert len(numbers) == 2 and len(said) == 2  # a line of each process
    for line in said:
        assert [float(number) for number in line.split()] == pytest.approx(numbers, rel=1e-3)
    assert len(custom_of(tmp_path / "runs" / "with_metrics")) == 4
