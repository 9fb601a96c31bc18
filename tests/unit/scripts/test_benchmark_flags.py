"""Benchmarks refuse what they cannot measure before they begin, name the flag, and say how long they will take."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import re
from pathlib import Path

import pytest
import torch
from benchmark_starts import pretend_a_gpu, start
from helpers import ROOT

from scripts.benchmark import common
from scripts.benchmark.common import Number, Table, announce_rest, flag_parser, in_turn, parse_with_settings
from scripts.benchmark.measure.startup import MARKED

FOLDER = ROOT / "scripts" / "benchmark"
BENCHMARKS = sorted(
    f"{path.parent.name}.{path.stem}"
    for folder in ("measure", "compare")
    for path in (FOLDER / folder).glob("*.py")
    if "__main__" in path.read_text()
)
NEEDED = {"measure.sweep": ["--vary=batch_size:1"], "measure.throughput": ["--model_variant=tiny"]}
"""Flags without which a benchmark has nothing to measure on a CPU."""
RACES = ("measure.training_loop", "measure.host_memory", "compare.against_ddp", "compare.against_trainer")


def test_all_benchmarks_are_found() -> None:
    assert {"measure.loader", "measure.startup", "compare.against_torchtitan", *RACES} <= set(BENCHMARKS)


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_flags_can_be_checked_without_measuring(
    benchmark: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if benchmark == "compare.against_torchtitan":
        pretend_a_gpu(monkeypatch)
    assert start(benchmark, *NEEDED.get(benchmark, []), "--check_flags") is None
    assert "flags     are fine; nothing is measured" in capsys.readouterr().out


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_a_flag_that_nobody_knows_is_refused_in_a_sentence(benchmark: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = start(benchmark, *NEEDED.get(benchmark, []), "--batch_sizes=4")
    assert "batch_sizes" in (str(code) if code != 2 else capsys.readouterr().err)


@pytest.mark.parametrize(
    ("benchmark", "flags", "problem"),
    [
        ("measure.loader", ["--steps=5"], "argument --steps: must be 20 or more"),
        ("measure.loader", ["--tokens=1000"], "argument --tokens: must be 10,000,000 or more"),
        ("measure.optimizers", ["--optimizers=adamw,moun"], "--optimizers=adamw,moun: give any of adamw, adam"),
        ("measure.optimizers", ["--processes=1,none"], "--processes=1,none: write numbers of processes"),
        ("measure.optimizers", ["--optimizer=sgd"], "--optimizer is the benchmark's own choice"),
        ("measure.throughput", ["--steps=9"], "argument --steps: must be 10 or more"),
        ("measure.throughput", ["--report_interval=100"], "--report_interval is the benchmark's own choice"),
        ("measure.prepare", ["--vocabulary=256"], "argument --vocabulary: must be 257 or more"),
        ("measure.loss", ["--seq_length=8"], "unrecognized arguments: --seq_length=8"),
        ("measure.garbage", ["--steps=0"], "argument --steps: must be 1 or more"),
        ("measure.profiles", ["--profile_steps=1-3"], "--profile_steps is the benchmark's own choice"),
        ("measure.levers", ["--use_torch_compile=true"], "--use_torch_compile is the benchmark's own choice"),
        ("measure.checkpoints", ["--checkpoint-interval=3"], "--checkpoint_interval is the benchmark's own choice"),
        ("measure.checkpoints", ["--save_total_limit=3"], "--keep_last is the benchmark's own choice"),
        ("measure.startup", ["--ckpt_save_path=/runs"], "--ckpt_save_path is the benchmark's own choice"),
        ("measure.sweep", ["--vary=num_steps:3"], "--vary=num_steps: that is the benchmark's own choice"),
        ("measure.sweep", ["--vary=batch_size:3", "--vary=batch_size:4"], "--vary=batch_size is there twice"),
        ("compare.against_loaders", ["--rounds=0"], "argument --rounds: must be 1 or more"),
        *((race, ["--run.num_steps=3"], "--num_steps is the benchmark's own choice") for race in RACES),
    ],
)
def test_a_flag_that_gives_nothing_to_measure_is_refused_at_once(
    benchmark: str, flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = [] if flags[0].startswith("--vary") else NEEDED.get(benchmark, [])
    assert start(benchmark, *needed, *flags) == 2
    said = capsys.readouterr()
    assert problem in said.err and said.out == ""


@pytest.mark.parametrize(
    ("benchmark", "flag", "problem"),
    [
        ("measure.throughput", "", "no GPU here: describe a model"),
        ("measure.throughput", "--batch_size=0", "the smallest value is 1"),
        ("measure.garbage", "--gc_interval=0", "--gc_interval=0 is what the interval is compared with"),
        ("measure.loader", f"--folder={__file__}/new", f"is no folder that can be written: {__file__} is none"),
        ("measure.checkpoints", "--folder=/no/such", "--folder=/no/such is not a folder that is there"),
        ("compare.against_loaders", "--fms_fsdp=/no/such", "--fms_fsdp=/no/such is not a folder that is there"),
        ("measure.training_loop", "--report_interval=1Mtok", "--report_interval=1Mtok must be 1 to 160, the steps"),
        ("measure.training_loop", "--report_interval=161", "--report_interval=161 must be 1 to 160, the steps"),
        ("measure.startup", "--seq_length=0", "the smallest value is 1"),
        ("measure.profiles", "--seq_length=0", "the smallest value is 1"),
        ("compare.against_torchtitan", "--sharding_strategy=hsdp", "is not compared; ddp, fsdp and zero2 are"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(benchmark: str, flag: str, problem: str) -> None:
    code = start(benchmark, *filter(None, [flag]))
    assert str(code).startswith("error: ") and problem in str(code)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for benchmark, *flags in (("measure.training_loop",), ("measure.sweep", "--vary=batch_size:1")):
        code = start(benchmark, *flags, "--processes=2")
        assert code == "error: --processes=2: each takes a GPU, and there are 1 here"


def test_a_batch_that_cannot_be_dealt_out_is_refused() -> None:
    code = start("measure.training_loop", "--processes=3", "--global_batch_size=4", "--grad_accum_steps=9")
    assert str(code).startswith("error: ") and "global_batch_size" in str(code)


def test_numbers_are_whole_and_large_enough(capsys: pytest.CaptureFixture[str]) -> None:
    parser = flag_parser("Something.", steps=Number(1_000, "of a run", least=10))
    assert parser.parse_args([]).steps == 1_000 and parser.parse_args(["--steps=10"]).steps == 10
    for text in ("9", "ten", "-1"):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--steps={text}"])
    assert "invalid whole_number value: 'ten'" in capsys.readouterr().err
    assert "of a run (default 1,000)" in parser.format_help()


@pytest.mark.parametrize("form", ["--num_steps=3", "num_steps=3", "--run.num-steps=3", "--max_tokens=3"])
def test_a_benchmarks_own_choice_is_known_in_every_form(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_with_settings(flag_parser("Something."), arguments=[form])
    assert "--num_steps is the benchmark's own choice: leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, _, _ in MARKED])
def test_what_the_start_is_divided_by_exists(name: str) -> None:
    module, _, function = name.partition(".")
    assert callable(getattr(importlib.import_module(f"pretraining.train.{module}"), function))


# How long it takes


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_every_benchmark_says_how_long_it_takes(benchmark: str) -> None:
    """By one of the functions that do, which it calls itself or through what it measures with."""
    source = (FOLDER / f"{benchmark.replace('.', '/')}.py").read_text()
    assert re.search(r"\b(announce_rest|in_turn|race|run_race|take_turns)\(", source)


def test_the_rest_is_judged_by_the_first_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([100.0, 110.0])
    monkeypatch.setattr("scripts.benchmark.common.time.perf_counter", lambda: next(times))
    assert list(in_turn("abcd")) == ["a", "b", "c", "d"]
    assert capsys.readouterr().out == "takes     about 30 s\n"
    elsewhere = io.StringIO()
    announce_rest(600, elsewhere)
    assert elsewhere.getvalue() == "takes     about 10 min\n"


# What is kept


def test_a_row_is_kept_as_soon_as_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(common.RESULTS, str(tmp_path / "results.jsonl"))
    table = Table("model", "MFU")
    table.add("tiny", "50%")
    [kept] = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert kept["row"] == {"model": "tiny", "MFU": "50%"}
    assert kept["command"].startswith("python ") and "torch" in kept["machine"]
    table.add("small", "40%")
    table.print()
    assert capsys.readouterr().out == "\n| model | MFU |\n| :---- | --: |\n| tiny  | 50% |\n| small | 40% |\n"
    with pytest.raises(ValueError, match="argument"):
        table.add("one cell for two columns")


def test_flags_that_are_fine_are_announced_with_machine_and_command(capsys: pytest.CaptureFixture[str]) -> None:
    common.announce(argparse.Namespace(check_flags=False))
    assert re.fullmatch(r"machine   .*torch .*\ncommand   python .*\n", capsys.readouterr().out)
