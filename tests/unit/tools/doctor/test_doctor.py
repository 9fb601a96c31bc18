"""`pretrain doctor` in this process alone."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pretraining import cli
from pretraining.cli import main
from pretraining.config.commands import DoctorConfig
from pretraining.config.training import ParallelConfig
from pretraining.tools.doctor import doctor, measure
from pretraining.tools.doctor.measure import Rate, message_sizes
from pretraining.tools.doctor.verdicts import Check, Verdict


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MATMUL_SIZES", {"cpu": (32,), "cuda": (32,)})
    monkeypatch.setattr(measure, "copy_bytes", lambda device, local_world_size: 2**20)
    monkeypatch.setattr(measure, "BUDGET_SECONDS", 0.01)


def test_one_process_measures_its_device_and_its_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", f"--disk_path={tmp_path}", "--disk_mib=2", "--json"])
    found = json.loads(capsys.readouterr().out)
    (rank,) = found["ranks"]
    names = [rate["name"] for rate in rank["rates"]]
    assert names[:2] == ["matmul bfloat16 32", "matmul float32 32"] and names[-2:] == [
        "disk write + fsync",
        "disk read",
    ]
    assert all(rate["value"] > 0 for rate in rank["rates"]) and found["links"] == found["collectives"] == []
    assert rank["rates"][2]["counted"] == "1 MiB read, 1 MiB written a copy"
    assert list(tmp_path.iterdir()) == []


def test_without_a_disk_none_is_touched(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--disk_path=none"])
    out = capsys.readouterr().out
    assert "disk" not in out and "matmul float32 32" in out


@pytest.mark.parametrize("missing", [True, False])
def test_a_folder_that_cannot_be_used_is_one_error(
    missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, *arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    if not missing:
        monkeypatch.setattr(Path, "open", full)
    with pytest.raises(SystemExit) as ending:
        main(["doctor", f"--disk_path={tmp_path / 'missing' if missing else tmp_path}"])
    said = capsys.readouterr().err
    assert ending.value.code == 1 and said.startswith("error: ") and "--disk_path=" in said
    assert ("is not a folder" in said) is missing and ("No space left" in said) is not missing


def test_messages_grow_from_the_smallest_to_the_largest() -> None:
    assert message_sizes(16 * 2**20) == [2**10, 2**15, 2**20, 2**24]


def checks_of(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, dict[str, str]]:
    """The verdicts of a doctor's visit, by item."""
    with suppress(SystemExit):
        main(["doctor", *flags, "--disk_mib=1", "--json"])
    return {check["item"]: check for check in json.loads(capsys.readouterr().out)["checks"]}


def test_the_place_of_checkpoints_is_tried_by_a_save_and_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--disk_path=none", f"--ckpt_save_path={tmp_path}/runs/new"]
    found = checks_of(capsys, *flags)
    assert found["saves"]["verdict"] == found["room for checkpoints"]["verdict"] == "good"
    assert "GiB/s, all processes together, in " in found["saves"]["found"]
    found = checks_of(capsys, *flags, "--model_variant=tiny")
    assert "a checkpoint takes 0.24 GiB" in found["room for checkpoints"]["found"]
    assert "s a checkpoint of tiny" in found["saves"]["found"]
    assert list(tmp_path.iterdir()) == []
    assert "saves" not in checks_of(capsys, "--disk_path=none")


@pytest.mark.parametrize(("free", "verdict"), [(2**20, "bad"), (2**29, "look at"), (2**32, "good")])
def test_room_is_compared_with_the_size_of_a_checkpoint(
    free: int, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage
    usage = SimpleNamespace(total=2**40, used=0, free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage if path == tmp_path else real(path))
    flags = ["--disk_path=none", f"--ckpt_save_path={tmp_path}/new", "--model_variant=tiny"]
    assert checks_of(capsys, *flags)["room for checkpoints"]["verdict"] == verdict


def test_a_save_that_takes_minutes_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "measure_saves", lambda folder, size: 1e-4)
    flags = ["--disk_path=none", f"--ckpt_save_path={tmp_path}/new", "--model_variant=tiny"]
    assert checks_of(capsys, *flags)["saves"]["verdict"] == "look at"


@pytest.mark.parametrize("broken", ["mkdtemp", "write"])
def test_a_place_where_nothing_can_be_saved_is_one_error(
    broken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    if broken == "mkdtemp":
        monkeypatch.setattr(tempfile, "mkdtemp", full)
    else:
        monkeypatch.setattr("pretraining.checkpoint.writer._write_all", full)
    with pytest.raises(SystemExit) as ending:
        main(["doctor", "--disk_path=none", f"--ckpt_save_path={tmp_path}/new", "--disk_mib=1"])
    said = capsys.readouterr().err
    assert ending.value.code == 1 and said.startswith("error: a checkpoint cannot be saved in ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("verdict", "code"), [("bad", 1), ("look at", 0), ("good", 0)])
def test_the_exit_code_says_whether_something_is_bad(
    verdict: str, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Check("cores", cast(Verdict, verdict), "few", "ask for more")
    monkeypatch.setattr(doctor, "check_machine", lambda *arguments: [check])
    monkeypatch.setattr(doctor, "slow_bfloat16", lambda *arguments, **more: ())
    try:
        main(["doctor", "--disk_path=none"])
        status: object = 0
    except SystemExit as ending:
        status = ending.code
    assert status == code
    end = {
        "bad": "bad: few: ask for more",
        "look at": "look at: few: ask for more",
        "good": "all good: 2 items; 1 more not known",
    }
    assert capsys.readouterr().out.splitlines()[-1] == end[verdict]


def test_threads_are_those_of_the_flag(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wanted: list[int | None] = []
    monkeypatch.setattr(cli, "set_threads", lambda threads, layout: wanted.append(threads))
    checks_of(capsys, "--disk_path=none", "--cpu_threads=1")
    checks_of(capsys, "--disk_path=none")
    assert wanted == [1, None]


def test_variables_are_looked_at(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_DISABLED", "1")
    found = checks_of(capsys, "--disk_path=none")["NCCL_IB_DISABLED"]
    assert (found["verdict"], found["advice"]) == ("look at", "did you mean NCCL_IB_DISABLE?")


def test_a_gpu_is_asked_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    worked: list[object] = []
    monkeypatch.setattr(torch, "randn", lambda *size, **more: torch.zeros(2, 2))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    monkeypatch.setattr(doctor, "synchronize", worked.append)
    monkeypatch.setattr(doctor, "gpu_state", lambda uuid, work: work() or uuid)
    answer: Any = doctor._gpu_under_load(torch.device("cuda"))
    assert answer == "abc" and len(worked) == 1


def test_bfloat16_that_a_run_would_not_choose_is_good_whatever_it_is() -> None:
    rates = [Rate("matmul bfloat16 32", 0.1, ""), Rate("matmul float32 32", 1.0, "")]
    for chosen, verdict in ((None, "good"), (True, "look at")):
        config = DoctorConfig(parallel=ParallelConfig(mixed_precision=bool(chosen)))
        (check,) = doctor._check_bfloat16(config, rates, torch.device("cpu"))
        assert check.verdict == verdict and "10 times slower" in check.found
