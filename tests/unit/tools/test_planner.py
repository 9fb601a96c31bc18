"""`pretrain plan`: what is printed, what is searched, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import run_command

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
        "fsdp, checkpointing none; 1,024 sequences a step: 64 data-parallel ranks x 8 micro-batches" in lines["layout"]
    )
    assert lines["memory"].endswith(": fits") and "18d 9h" in lines["run"] and "GPU-hours" in lines["run"]
    assert lines["checkpoint"] == "checkpoint  75.3 GiB each"


def test_a_run_of_seconds_does_not_take_no_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    assert " tokens: 2s, " in said(capsys, "--model_variant=tiny", "--num_steps=1000")


def test_the_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    (plan,) = documents(capsys, "--model_variant=7b", "--gpus=16", "--sharding_strategy=hsdp", "--num_steps=500")
    memory, step = plan["memory_bytes"], plan["step_seconds"]
    count = parameter_count(VARIANTS["7b"])
    assert (memory["parameters"], memory["gradients"], memory["optimizer_state"]) == (
        *(4 * count // 8, 4 * count // 8),
        8 * count // 8,
    )
    apart = ("total", "of_gpu", "later_gradients")
    there = sum(size for name, size in memory.items() if name not in apart)
    assert memory["total"] == there - memory["later_gradients"] and memory["later_gradients"] == memory["gradients"]
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
    places = [(-round(plan["tokens_per_second_per_gpu"]), plan["memory_bytes"]["total"]) for plan in plans]
    assert places == sorted(places) and len(plans) > 15 and len({speed for speed, _ in places}) < len(places)
    assert {plan["global_batch_size"] for plan in plans} == {512}
    assert all(plan["memory_bytes"]["total"] <= 0.9 * plan["memory_bytes"]["of_gpu"] for plan in plans)
    assert {plan["sharding_strategy"] for plan in plans} >= {"fsdp", "hsdp"}
    lines = said(capsys, *flags).splitlines()
    assert "512 sequences" in lines[1]
    assert len(lines) == 3 + 15 + 1 and lines[-1].endswith(f"and {len(plans) - 15} slower ones; --json=true prints all")
    # The flags of a line are a plan by themselves, with the same numbers.
    shown = lines[3].split("  ")[-1].split()
    (again,) = documents(capsys, "--model_variant=13b", "--gpus=32", *shown)
    assert again == plans[0]


def test_a_search_learns_the_same_in_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model_variant=7b", "--batch_size=6", "--grad_accum_steps=2", "--fsdp_activation_checkpointing=true")
    plans = documents(capsys, *flags, "--search=true")
    assert {plan["global_batch_size"] for plan in plans} == {6 * 2 * 8}
    assert {(plan["micro_batch_size"], plan["grad_accum_steps"]) for plan in plans} >= {(1, 12), (3, 4), (6, 2)}
    lines = said(capsys, *flags, "--search=true").splitlines()
    assert "96 sequences" in lines[1]
    # Beside the flags that were given, those of each line are its plan.
    for line, plan in zip(lines[3:-1], plans, strict=False):
        shown = line.split("  ")[-1].split()
        assert "--global_batch_size=96" in shown and "--use_torch_compile=true" in shown
        assert documents(capsys, *flags, *shown) == [plan]


def test_a_search_falls_back_to_other_global_batches_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    line = "nothing fits with a global batch of 16 sequences; these have others, and learn otherwise"
    lines = said(capsys, "--model_variant=34b", "--search=true").splitlines()
    assert lines[1].endswith(line) and "--global_batch_size=8 " in lines[3]
    assert said(capsys, "--model_variant=34b").splitlines()[-1].endswith(line)
    advice = "nothing fits on 8 x h100 with --global_batch_size=16. What would fit: "
    assert advice in refused(capsys, "--model_variant=34b", "--global_batch_size=16", "--search=true")


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--mixed_precision=false", "--mixed_precision=false is counted in the memory, and not in the time"),
        ("--float8=rowwise", "--float8=rowwise is not counted"),
        ("--document_mask=true", "--document_mask=true is not counted"),
        ("--deterministic=true", "--deterministic=true is not counted"),
        ("--low_cpu_fsdp=false", "--low_cpu_fsdp=false is not counted"),
        ("--device=cpu", "--device=cpu is not counted"),
    ],
)
def test_what_a_plan_does_not_count_is_said(flag: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in said(capsys, "--model_variant=7b", flag) and line in said(
        capsys, "--model_variant=7b", "--search=true", flag
    )
    (plan,) = documents(capsys, "--model_variant=7b", flag)
    assert [each.startswith(line) for each in plan["not_counted"]] == [True]
    assert "not counted" not in said(capsys, "--model_variant=7b")


def test_precision_and_compilation_are_those_of_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    def heading(*flags: str) -> str:
        return said(capsys, "--model_variant=7b", *flags).splitlines()[0].partition("), ")[2]

    assert heading() == "in bfloat16, as if compiled (--use_torch_compile=true)"
    assert heading("--mixed_precision=false", "--use_torch_compile=true") == "in float32, compiled"
    assert heading("--mp_dtype=float16", "--use_torch_compile=true") == "in float16, compiled"
    (half,), (full,) = (documents(capsys, "--model_variant=7b", *flag) for flag in ((), ("--mixed_precision=false",)))
    assert full["memory_bytes"]["activations"] > 1.9 * half["memory_bytes"]["activations"]


def test_a_length_in_epochs_is_left_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "epochs.yaml"
    recipe.write_text("model_variant: 125m\nnum_steps: 3ep\nwarmup_steps: 1ep\ncheckpoint_interval: 1ep\n")
    text = said(capsys, f"--recipe={recipe}")
    assert "run         3ep are passes over the data, which a plan does not read: give steps or tokens" in text
    (plan,) = documents(capsys, f"--recipe={recipe}")
    assert plan["steps"] is plan["seconds"] is plan["gpu_hours"] is None and plan["step_seconds"]["total"] > 0
    assert "          -  --sharding_strategy=" in said(capsys, f"--recipe={recipe}", "--search=true")
    assert "1,000 steps" in said(capsys, f"--recipe={recipe}", "--num_steps=1000")


def test_what_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--model_variant=13b", "--gpus=8", "--gpu=a100", "--batch_size=8")
    assert ": does not fit" in text and "what fits   --sharding_strategy=" in text
    assert "what fits   nothing fits on 8 x h100. What would fit: 32 GPUs" in said(capsys, "--model_variant=70b")
    assert "nothing fits on 8 x h100" in refused(capsys, "--model_variant=70b", "--gpus=8", "--search=true")


def test_advice_counts_a_users_own_optimizer_and_accumulation(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model_variant=125m", "--gpus=1", "--gpu=4090", "--optimizer=my:Own", "--optimizer_state_bytes=400")
    said = refused(capsys, *flags, "--search=true")
    assert "4 GPUs with" in said and "--seq_length" not in said
    accumulating = ("--model_variant=34b", "--global_batch_size=16", "--search=true")
    assert "--global_batch_size=8 or less" in refused(capsys, *accumulating)


def test_a_recipe_is_planned_as_it_would_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    (plan,) = documents(capsys, "--recipe=demo", "--gpus=1", "--gpu=L40S")
    assert (plan["model"], plan["steps"], plan["seq_length"]) == ("demo", 600, 256)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--gpu=h1000",), "--gpu=h1000: not known (did you mean h100?), use one of h100, h200"),
        (("--sharding_strategy=hsdp", "--gpus=12", "--hsdp_group_size=8"), "set --hsdp_group_size to a divisor of 12"),
        (("--network=0",), "--network=0: the smallest value is 0.001"),
        (("--gpus=1e12",), "--gpus=1e12: the largest value is 1e+06"),
        (("--optimizer_state_bytes=1e308",), "--optimizer_state_bytes=1e308: the largest value is 1024"),
        (("--gpus=0",), "--gpus=0: the smallest value is 1"),
    ],
)
def test_bad_input_is_one_error(flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, "--model_variant=7b", *flags)


def test_help_names_every_gpu() -> None:
    gpu = settings_of(PlanConfig)["gpu"]
    assert ", ".join(GPUS).replace(", 4090", " or 4090") in gpu.help and gpu.choices == tuple(GPUS)


def test_no_torch_is_needed() -> None:
    program = (
        "import sys; from pretraining.cli import main; main(['plan', '--model_variant=70b', '--gpus=1024', "
        "'--search=true']); assert 'torch' not in sys.modules"
    )
    run_command([sys.executable, "-c", program])
