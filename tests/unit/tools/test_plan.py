"""`pretrain plan`: what is printed, what is searched, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, plain_environment

from pretraining.cli import main
from pretraining.config.commands import PlanConfig
from pretraining.config.fields import settings_of
from pretraining.config.variants import VARIANTS, parameter_count
from pretraining.estimate.devices import GPUS


def said(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    main(["plan", *flags])
    return capsys.readouterr().out


def documents(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said(capsys, *flags, "--json=true").splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit):
        main(["plan", *flags])
    return capsys.readouterr().err


def test_the_account_has_memory_time_and_price(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--model_variant=7b", "--num_steps=1Ttok", "--global_batch_size=1024", "--gpus=64")
    lines = {line.split()[0]: line for line in text.splitlines() if not line.startswith(" ")}
    assert list(lines) == ["plan", "layout", "memory", "step", "speed", "run", "checkpoint"]
    assert "7b, 6,738,415,616 parameters, on 64 x h100 (8 nodes of 8, 3200 Gbit/s each)" in lines["plan"]
    assert (
        "fsdp, checkpointing none; 1024 sequences a step: 64 data-parallel ranks x 8 micro-batches" in lines["layout"]
    )
    assert lines["memory"].endswith(": fits") and "days" in lines["run"] and "GPU-hours" in lines["run"]
    assert lines["checkpoint"] == "checkpoint  75.3 GiB each"


def test_the_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    (plan,) = documents(capsys, "--model_variant=7b", "--gpus=16", "--sharding_strategy=hsdp", "--num_steps=500")
    memory, step = plan["memory_bytes"], plan["step_seconds"]
    count = parameter_count(VARIANTS["7b"])
    assert (memory["parameters"], memory["gradients"], memory["optimizer_state"]) == (
        *(4 * count // 8, 4 * count // 8),
        8 * count // 8,
    )
    assert memory["total"] == sum(size for name, size in memory.items() if name not in ("total", "of_gpu"))
    assert step["total"] == pytest.approx(step["compute"] + step["unhidden"] + step["exposed"])
    assert plan["tokens"] == 500 * plan["global_batch_size"] * 4096 and plan["group_size"] == 8
    assert plan["tokens_per_second_per_gpu"] == pytest.approx(plan["tokens"] / plan["seconds"] / 16)
    assert plan["gpu_hours"] == pytest.approx(plan["seconds"] / 3600 * 16)
    assert plan["checkpoint_bytes"] == 12 * count and plan["fits"]


def test_the_optimizer_decides_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    def state(*flags: str) -> int:
        (plan,) = documents(capsys, "--model_variant=1b", "--gpus=1", *flags)
        return int(plan["memory_bytes"]["optimizer_state"])

    count = parameter_count(VARIANTS["1b"])
    assert (state(), state("--optimizer=sgd"), state("--optimizer=sgdm")) == (8 * count, 0, 4 * count)
    own = "--optimizer=mine:Own"
    assert (state(own), state(own, "--optimizer_state_bytes=2.5")) == (8 * count, round(2.5 * count))
    assert "counted as AdamW: give --optimizer_state_bytes" in said(capsys, "--model_variant=1b", own)


def test_a_search_lists_what_fits_the_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model_variant=13b", "--gpus=32", "--search=true", "--global_batch_size=512")
    plans = documents(capsys, *flags)
    speeds = [plan["tokens_per_second_per_gpu"] for plan in plans]
    assert speeds == sorted(speeds, reverse=True) and len(plans) > 15
    assert {plan["global_batch_size"] for plan in plans} == {512}
    assert all(plan["memory_bytes"]["total"] <= 0.9 * plan["memory_bytes"]["of_gpu"] for plan in plans)
    assert {plan["sharding_strategy"] for plan in plans} >= {"fsdp", "hsdp"}
    lines = said(capsys, *flags).splitlines()
    assert len(lines) == 2 + 15 + 1 and lines[-1].endswith(f"and {len(plans) - 15} slower ones; --json=true prints all")
    # The flags of a line are a plan by themselves, with the same numbers.
    shown = lines[2].split("  ")[-1].split()
    (again,) = documents(capsys, "--model_variant=13b", "--gpus=32", "--global_batch_size=512", *shown)
    assert again == plans[0]


def test_what_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--model_variant=13b", "--gpus=8", "--gpu=a100", "--batch_size=8")
    assert ": does not fit" in text and "what fits   --sharding_strategy=" in text
    text = said(capsys, "--model_variant=70b", "--gpus=8")
    assert "nothing fits on 8 x h100: parameters, gradients and optimizer alone take 1,027.8 GiB, which is 15" in text
    assert "nothing fits on 8 x h100" in refused(capsys, "--model_variant=70b", "--gpus=8", "--search=true")


def test_a_recipe_is_planned_as_it_would_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    (plan,) = documents(capsys, "--recipe=demo", "--gpus=1", "--gpu=L40S")
    assert (plan["model"], plan["steps"], plan["seq_length"]) == ("demo", 700, 256)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--gpu=h1000",), "--gpu=h1000 is not known: did you mean h100? Known are h100, h200"),
        (("--sharding_strategy=hsdp", "--gpus=12", "--hsdp_group_size=8"), "12 processes / 8 (hsdp_group_size) = 1.50"),
        (("--num_steps=2ep",), "--num_steps=2ep counts passes over a dataset"),
        (("--picture=plan.pdf",), "--picture=plan.pdf must end in .png or .svg"),
        (("--gpus=0",), "--gpus=0: the smallest value is 1"),
    ],
)
def test_bad_input_is_one_error(flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, "--model_variant=7b", *flags)


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    said(capsys, "--model_variant=7b", f"--picture={tmp_path / 'new' / 'plan.svg'}")
    content = (tmp_path / "new" / "plan.svg").read_text()
    assert content.count("<svg") == 1 and "activations" in content and "exposed" in content


def test_a_picture_without_its_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "needs matplotlib: pip install 'pretraining[report]'" in refused(
        capsys, "--model_variant=7b", f"--picture={tmp_path / 'plan.png'}"
    )


def test_help_names_every_gpu() -> None:
    assert ", ".join(GPUS).replace(", 4090", " or 4090") in settings_of(PlanConfig)["gpu"].help


def test_no_torch_is_needed() -> None:
    program = (
        "import sys; from pretraining.cli import main; main(['plan', '--model_variant=70b', '--gpus=1024', "
        "'--search=true']); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=plain_environment(), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
