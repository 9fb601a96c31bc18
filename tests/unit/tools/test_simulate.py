"""`pretrain plan --simulate=true`: a step of the real model on devices that are not there, beside the estimate."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from forked import run_forked
from helpers import run_command

from pretraining.cli import main

pytestmark = pytest.mark.thorough

WORKER = Path(__file__).with_name("simulate_worker.py")
SMALL = (
    *("model_variant=tiny", "hidden_size=64", "intermediate_size=176", "num_attention_heads=4"),
    *("num_key_value_heads=2", "vocab_size=512", "gpus=8"),
)
CHECKPOINTING = "fsdp_activation_checkpointing=true"
SHALLOW, DEEP = ("num_hidden_layers=2", "seq_length=256", "batch_size=2"), ("num_hidden_layers=8", "seq_length=256")
STATE = ("parameters", "gradients", "optimizer state")
STRATEGIES = (
    *(("sharding_strategy=ddp",), ("sharding_strategy=zero2",), ("sharding_strategy=fsdp",)),
    *(("sharding_strategy=hsdp", "hsdp_group_size=4"), ("sharding_strategy=hsdp_zero2", "hsdp_group_size=2")),
)
LAYOUTS = [*STRATEGIES, *((*each, "grad_accum_steps=3") for each in (STRATEGIES[0], STRATEGIES[3]))]
OPTIMIZERS = [(f"optimizer={each}",) for each in ("nadam", "normalized_sgdm", "muon")]
LEVERS = [
    *((CHECKPOINTING,), (CHECKPOINTING, "selective_checkpointing=2"), (CHECKPOINTING, "selective_checkpointing=op")),
    *(("vocab_size=4000",), ("num_key_value_heads=4", "batch_size=5"), ("loss_chunk_tokens=100",), ("gpus=1",)),
]
CASES = {(*SHALLOW, *case): None for case in (*LAYOUTS, *OPTIMIZERS, *LEVERS)}
PATTERNS = [(), (CHECKPOINTING, "selective_checkpointing=1/2")]


def simulated(cases: Iterable[tuple[str, ...]], fewest_blocks: int = 4) -> list[dict[str, Any]]:
    """Simulates plans in a process of their own: other tests must not meet a process group that is not there."""
    flags = [list({flag.partition("=")[0]: flag for flag in (*SMALL, *case)}.values()) for case in cases]
    output = run_forked(WORKER, 1, [json.dumps(flags), str(fewest_blocks)]).stdout
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(found) == len(flags)
    return found


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, ...], dict[str, Any]]:
    """All shallow cases, simulated in one process."""
    return dict(zip(CASES, simulated(CASES), strict=True))


def off(simulation: dict[str, Any], name: str) -> float:
    estimated, there = simulation["parts"][name]
    return float(abs(estimated / there - 1))


@pytest.mark.parametrize("case", [*LAYOUTS, *OPTIMIZERS], ids=" ".join)
def test_the_state_is_exact_and_the_peak_close(case: tuple[str, ...], found: dict[tuple[str, ...], Any]) -> None:
    simulation = found[(*SHALLOW, *case)]
    assert all(estimated == there for estimated, there in (simulation["parts"][name] for name in STATE))
    assert off(simulation, "at the peak") < 0.05, simulation


@pytest.mark.parametrize("case", LEVERS, ids=" ".join)
def test_activations_are_those_that_the_estimate_counts(
    case: tuple[str, ...], found: dict[tuple[str, ...], Any]
) -> None:
    assert off(found[(*SHALLOW, *case)], "activations, loss") < 0.05
    assert off(found[(*SHALLOW, *case)], "at the peak") < 0.05


def test_a_few_blocks_say_what_all_would_take() -> None:
    cases = [(*DEEP, *pattern) for pattern in PATTERNS]
    for extended, whole in zip(simulated(cases), simulated(cases, fewest_blocks=8), strict=True):
        assert extended["depths"] == [4, 6] and whole["depths"] == [8]
        assert extended["total"] == pytest.approx(whole["total"], rel=0.002)
        assert extended["largest"] == pytest.approx(whole["largest"], rel=0.002)
        assert extended["peak_moment"] == whole["peak_moment"]


def test_the_comparison_is_printed() -> None:
    command = [sys.executable, "-m", "pretraining", "plan", *SMALL, *DEEP, "use_torch_compile=true", "simulate=true"]
    done = run_command(command)
    lines = done.stdout.splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith("simulated"))
    assert lines[begin].startswith("simulated   rank 0 of 8; most in ")
    assert lines[begin + 1].strip() == "blocks are alike: 4 and 6 of 8 were, the rest follows on a line"
    assert lines[begin + 2].strip() == "--use_torch_compile=true is not simulated: compiled blocks keep less"
    assert lines[begin + 3].split() == ["estimated", "simulated", "difference"]
    names = ("parameters", "gradients", "optimizer state", "gathered", "activations, loss", "at the peak")
    assert tuple(line[2:20].rstrip() for line in lines[begin + 4 :]) == names
    assert lines[begin + 4].endswith(" 0.0%")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--float8=tensorwise",), "--float8=tensorwise cannot be simulated: its products need a GPU"),
        (("--optimizer=mine:Own",), "--optimizer=mine:Own cannot be simulated: an optimizer of your own is tried on"),
        (("--search=true",), "--simulate=true takes a step of one layout, and --search=true tries many: leave one out"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *SMALL, *flags, "--simulate=true"])
    assert said in capsys.readouterr().err


def test_a_pytorch_without_fake_processes_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.testing._internal.distributed.fake_pg", None)
    with pytest.raises(SystemExit):
        main(["plan", *SMALL, *SHALLOW, "--simulate=true"])
    assert "--simulate=true needs parts of PyTorch that " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("fsdp_activation_checkpointing=true",), ("sharding_strategy=hsdp",)])
def test_a_70b_on_1024_gpus_is_simulated_on_a_laptop(flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pretraining", "plan", "--model_variant=70b", "--gpus=1024", "--batch_size=1"]
    command += ["--seq_length=8192", *flags, "--simulate=true", "--json=true"]
    done = run_command(command)
    document = json.loads(done.stdout)
    found, memory = document["simulated"], document["memory_bytes"]
    assert found["depths"] == [4, 6]
    assert found["largest"]["parameters"] == memory["parameters"]
    assert found["total"] == pytest.approx(memory["total"] - memory["runtime"], rel=0.05)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4 * 2**20
