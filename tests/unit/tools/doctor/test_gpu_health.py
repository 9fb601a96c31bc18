"""What nvidia-smi says of a GPU becomes verdicts; its answers are in the form that it prints."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pretraining.tools.doctor import gpu_health
from pretraining.tools.doctor.gpu_health import check_gpu, gpu_state, parse_gpu_state
from pretraining.tools.doctor.verdicts import Check

UUID = "5a1c2f1e-5d0b-8a38-0c2f-3f9f0c6a7b11"
# uuid, name, clock, its maximum, reasons, °C, W, W by default, ECC, corrected, uncorrected, lanes, at most, persistence
SOUND = f"GPU-{UUID}, NVIDIA H200, 1830, 1980, 0x0000000000000004, 61, 700.00, 700.00, Enabled, 0, 0, 16, 16, Enabled"
OTHER = "GPU-0, NVIDIA H200, 345, 1980, 0x0000000000000001, 30, 700.00, 700.00, Enabled, 0, 9, 16, 16, Enabled"
CONSUMER = (
    f"GPU-{UUID}, NVIDIA GeForce RTX 4090, 2520, 3105, 0x0000000000000000, 55, 450.00, 450.00, [N/A], [N/A], [N/A], "
    "16, 16, Disabled"
)


def checks(answer: str, rows: str = "") -> dict[str, Check]:
    return {check.item: check for check in check_gpu(parse_gpu_state(UUID, answer, rows))}


def test_every_item_of_a_sound_gpu_is_good() -> None:
    found = checks(f"{OTHER}\n{SOUND}\n")
    assert {check.verdict for check in found.values()} == {"good"}
    assert found["GPU clocks"].found == "1830 of 1980 MHz under load at 61 °C"
    assert found["GPU power limit"].found == "700 W of 700 W by default"
    assert found["GPU memory errors"].found == "0 corrected, none uncorrected"
    assert found["GPU link"].found == "16 of 16 lanes of PCI Express"


def test_a_gpu_that_counts_no_errors_is_not_bad_for_that() -> None:
    found = checks(CONSUMER)
    assert {check.verdict for name, check in found.items() if name != "GPU memory errors"} == {"good"}
    assert found["GPU memory errors"].verdict == "not known"


@pytest.mark.parametrize(
    ("was", "becomes", "item", "verdict", "said"),
    [
        ("0x0000000000000004", "0x0000000000000040", "GPU clocks", "bad", "it is too hot"),
        ("0x0000000000000004", "0x0000000000000088", "GPU clocks", "bad", "asks it to brake"),
        ("0x0000000000000004", "0x0000000000000022", "GPU clocks", "look at", "fixed by an administrator"),
        ("1830", "700", "GPU clocks", "look at", "less than half"),
        ("0x0000000000000004", "[N/A]", "GPU clocks", "not known", "does not say"),
        ("700.00, 700.00", "400.00, 700.00", "GPU power limit", "look at", "400 W of 700 W"),
        ("Enabled, 0, 0,", "Enabled, 0, 3,", "GPU memory errors", "bad", "3 uncorrected"),
        ("Enabled, 0, 0,", "Enabled, 5000, 0,", "GPU memory errors", "look at", "5000 corrected"),
        ("Enabled, 0, 0,", "Disabled, [N/A], [N/A],", "GPU memory errors", "look at", "ECC is off"),
        ("16, 16", "4, 16", "GPU link", "look at", "4 of 16 lanes"),
    ],
)
def test_what_is_wrong_with_a_gpu_is_named_with_what_to_do(
    was: str, becomes: str, item: str, verdict: str, said: str
) -> None:
    assert was in SOUND
    found = checks(SOUND.replace(was, becomes, 1))
    assert found[item].verdict == verdict and said in found[item].found
    assert bool(found[item].advice) is (verdict != "not known")
    assert {check.verdict for name, check in found.items() if name != item} == {"good"}


@pytest.mark.parametrize(
    ("rows", "verdict"), [("Yes, No", "look at"), ("No, Yes", "bad"), ("1, 0", "look at"), ("No, No", "good")]
)
def test_rows_of_its_memory_that_are_replaced_count(rows: str, verdict: str) -> None:
    assert checks(SOUND, f"GPU-{UUID}, {rows}")["GPU memory errors"].verdict == verdict


@pytest.mark.parametrize("answer", ["", OTHER, 'Field "x" is not a valid field to query.', f"GPU-{UUID}, short"])
def test_a_gpu_of_which_nothing_is_said_is_not_known(answer: str) -> None:
    assert parse_gpu_state(UUID, answer) is None
    (check,) = check_gpu(None)
    assert check.verdict == "not known" and "nvidia-smi does not answer" in check.found


def put_program(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Makes nvidia-smi of this process a script."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_it_is_asked_while_the_gpu_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_program(tmp_path, monkeypatch, f'sleep 0.2; case $1 in --query-gpu=*) echo "{SOUND}";; *) exit 2;; esac')
    calls: list[int] = []
    state = gpu_state(UUID, lambda: calls.append(1))
    assert state is not None and state.name == "NVIDIA H200" and state.failed_rows is None and calls


def test_a_field_that_a_driver_does_not_know_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = "echo 'Field \"persistence_mode\" is not a valid field to query.'; exit 2"
    answer = SOUND.rpartition(",")[0]
    script = f'case $1 in *persistence_mode*) {unknown};; --query-gpu=*) echo "{answer}";; *) exit 2;; esac'
    put_program(tmp_path, monkeypatch, script)
    state = gpu_state(UUID, lambda: None)
    assert state is not None and state.is_persistent is None and state.max_link_width == 16


@pytest.mark.parametrize("script", ["exit 9", "sleep 600"])
def test_an_answer_that_does_not_come_is_none(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_program(tmp_path, monkeypatch, f"exec {script}" if "sleep" in script else script)
    monkeypatch.setattr(gpu_health, "ANSWER_SECONDS", 0.3)
    assert gpu_state(UUID, lambda: None) is None


def test_without_the_program_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_state(UUID, lambda: None) is None
