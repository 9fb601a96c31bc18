"""`pretrain plan`: what is printed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pretraining.cli import main
from pretraining.config.variants import VARIANTS
from pretraining.estimate.costs import parameter_count


def said(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    main(["plan", *flags])
    return capsys.readouterr().out


def documents(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said(capsys, *flags, "--json=true").splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit):
        main(["plan", *flags])
    return capsys.readouterr().err


def test_a_plan_has_memory_time_and_price(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--model_variant=7b", "--num_steps=1Ttok", "--global_batch_size=1024", "--gpus=64")
    lines = {line.split()[0]: line for line in text.splitlines() if not line.startswith(" ")}
    assert list(lines) == ["plan", "layout", "memory", "step", "speed", "run", "checkpoint"]
    assert "6,738,415,616 parameters" in lines["plan"] and lines["memory"].endswith(": fits")
    assert "18d 9h" in lines["run"] and "75.3 GiB" in lines["checkpoint"]


def test_the_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    (plan,) = documents(capsys, "--model_variant=7b", "--gpus=16", "--sharding_strategy=hsdp", "--num_steps=500")
    memory, step, count = plan["memory_bytes"], plan["step_seconds"], parameter_count(VARIANTS["7b"])
    assert memory["parameters"] == memory["gradients"] == memory["optimizer_state"] // 2 == 4 * count // 8
    held = sum(size for name, size in memory.items() if name not in ("total", "of_gpu", "later_gradients"))
    assert memory["total"] == held - memory["later_gradients"] and memory["later_gradients"] == memory["gradients"]
    assert step["total"] == pytest.approx(step["compute"] + step["unhidden"] + step["exposed"])
    assert plan["tokens"] == 500 * plan["global_batch_size"] * 4096 and plan["checkpoint_bytes"] == 12 * count
    assert plan["tokens_per_second_per_gpu"] == pytest.approx(plan["tokens"] / plan["gpu_hours"] / 3600)


def test_the_optimizer_decides_the_memory_of_its_state(capsys: pytest.CaptureFixture[str]) -> None:
    def state(*flags: str) -> int:
        (plan,) = documents(capsys, "--model_variant=1b", "--gpus=1", *flags)
        return int(plan["memory_bytes"]["optimizer_state"])

    count, own = parameter_count(VARIANTS["1b"]), "--optimizer=mine:Own"
    assert (state(), state("--optimizer=sgd"), state("--optimizer=sgdm")) == (8 * count, 0, 4 * count)
    assert (state(own), state(own, "--optimizer_state_bytes=2.5")) == (8 * count, round(2.5 * count))
    signs = "--optimizer=unit.train.own_optimizers:LowBit"
    assert state(signs) == round((1 + 4 / 256**2) * count) and "counted 1.00 bytes" in said(
        capsys, "--model_variant=1b", signs
    )
    assert "counted as AdamW, since it cannot be made here: set --optimizer_state_bytes" in said(
        capsys, "--model_variant=1b", own
    )


def test_shared_sequences_need_less_memory_and_more_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model_variant=llama3_8b", "--seq_length=131072", "--global_batch_size=8", "--gpus=8")
    own = (*flags, "--batch_size=1", "--fsdp_activation_checkpointing=true")
    one, two = (documents(capsys, *own, f"--context_parallel_size={size}")[0] for size in (1, 2))
    assert one["memory_bytes"]["activations"] > 1.8 * two["memory_bytes"]["activations"]
    assert one["step_seconds"]["exposed"] < two["step_seconds"]["exposed"]
    assert one["step_seconds"]["compute"] == pytest.approx(two["step_seconds"]["compute"])
    assert "sequences shared by 8 GPUs" in said(capsys, *own, "--context_parallel_size=8")
    assert any(line.startswith("--context_parallel_size=2") for line in what_fits(capsys, *flags))
    assert "the job has 8, which 16 does not divide" in refused(capsys, *flags, "--context_parallel_size=16")


@pytest.mark.parametrize(
    "flag",
    ["mixed_precision=false", "float8=rowwise", "document_mask=true", "deterministic=true", "low_cpu_fsdp=false"],
)
def test_a_plan_names_what_it_does_not_count(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model_variant=7b", "--batch_size=1")
    (counted,), (plan,) = (documents(capsys, *model, *more) for more in ((), (f"--{flag}",)))
    assert not counted["not_counted"] and [each.split()[0] for each in plan["not_counted"]] == [f"--{flag}"]
    assert f"--{flag} " in said(capsys, *model, f"--{flag}")


def test_a_length_in_epochs_is_left_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "epochs.yaml"
    recipe.write_text("model_variant: 125m\nnum_steps: 3ep\nwarmup_steps: 1ep\ncheckpoint_interval: 1ep\n")
    (plan,) = documents(capsys, f"--recipe={recipe}")
    assert plan["steps"] is plan["seconds"] is plan["gpu_hours"] is None and plan["step_seconds"]["total"] > 0
    assert "3ep are passes over the data" in said(capsys, f"--recipe={recipe}")
    (plan,) = documents(capsys, f"--recipe={recipe}", "--num_steps=1000")
    assert plan["steps"] == 1000


def what_fits(capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    with pytest.raises(SystemExit) as exited:
        main(["plan", *flags])
    text = capsys.readouterr().out
    assert ": does not fit" in text and exited.value.code == 1
    return [line.strip() for line in text.partition("what fits")[2].splitlines()]


def test_a_plan_that_does_not_fit_names_changes_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    least = "--sharding_strategy=fsdp --fsdp_activation_checkpointing=true --batch_size=1"
    flags = ("--model_variant=13b", "--gpus=8", "--gpu=a100", "--batch_size=8")
    lines = what_fits(capsys, *flags)
    assert lines[0].startswith("--batch_size=1 (about ") and lines[-1].startswith(f"{least} (about ")
    for line in (lines[0], lines[1], lines[-1]):
        changes, _, size = line.removesuffix(" GiB)").partition(" (about ")
        (plan,) = documents(capsys, *flags[:3], *(changes.split() if "batch" in changes else [flags[3], changes]))
        assert plan["memory_bytes"]["total"] / 2**30 == pytest.approx(float(size), abs=0.06) and plan["fits"]
    lines = what_fits(capsys, "--model_variant=70b")
    assert lines[1] == f"with {least}:" and lines[2].startswith("32 GPUs with --sharding_strategy=fsdp")
    own = ("--gpus=1", "--gpu=4090", "--optimizer=my:Own", "--optimizer_state_bytes=400")
    assert "4 GPUs with" in what_fits(capsys, "--model_variant=125m", *own)[0]


def test_the_search_of_an_earlier_version_is_refused_with_the_way_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--search is not known: plan searches for no layout" in refused(capsys, "--search=true")


@pytest.mark.parametrize("flag", ["gpu=h1000", "hsdp_group_size=8", "network=0", "gpus=1e12", "gpus=0"])
def test_bad_input_is_one_error(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model_variant=7b", "--sharding_strategy=hsdp", "--gpus=12", f"--{flag}")
    assert f"--{flag.partition('=')[0]}" in refused(capsys, *flags)
