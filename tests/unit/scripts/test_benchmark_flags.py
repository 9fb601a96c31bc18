"""Benchmarks refuse what they cannot measure before they begin, and keep what they have measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_starts import pretend_a_gpu, start
from helpers import ROOT

from scripts.benchmark import common
from scripts.benchmark.common import Table

FOLDER = ROOT / "scripts" / "benchmark"
BENCHMARKS = sorted(
    f"{path.parent.name}.{path.stem}"
    for folder in ("measure", "compare")
    for path in (FOLDER / folder).glob("*.py")
    if "__main__" in path.read_text()
)
NEEDED = {"measure.throughput": ["--model_variant=tiny"]}
"""Flags without which a benchmark has nothing to measure on a CPU."""


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_flags_can_be_checked_without_measuring(benchmark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if benchmark == "compare.against_torchtitan":
        pretend_a_gpu(monkeypatch)
    assert start(benchmark, *NEEDED.get(benchmark, []), "--check_flags") is None


@pytest.mark.parametrize(
    ("benchmark", "flags", "named"),
    [
        ("measure.loader", ["--tokens=5"], "--tokens: must be 10,000,000"),
        ("measure.checkpoints", ["--save_total_limit=3"], "--keep_last"),
        ("measure.throughput", ["--vary=num_steps:3"], "--vary=num_steps"),
        ("measure.throughput", [], "--model_variant=tiny"),
        ("measure.training_loop", ["--report_interval=161"], "--report_interval=161"),
        ("compare.against_ddp", ["--run.num_steps=3"], "--num_steps"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    benchmark: str, flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = start(benchmark, *flags)
    assert code not in (0, None) and named in f"{code} {capsys.readouterr().err}"


def test_a_row_is_kept_as_soon_as_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(common.RESULTS, str(tmp_path / "results.jsonl"))
    Table("model", "MFU").add("tiny", "50%")
    [kept] = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert kept["row"] == {"model": "tiny", "MFU": "50%"}
