"""`pretrain doctor` in this process alone, and its table of several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pretraining.cli import main
from pretraining.tools import doctor as module
from pretraining.tools.doctor import RankReport, slow_ranks


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MATMUL_SIZE", {"cpu": 32})
    monkeypatch.setattr(module, "FILE_MIB", 1)


def speeds(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, float]:
    """What the command prints as JSON about its only rank."""
    main(["doctor", *flags, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    (rank,) = document["ranks"]
    assert rank["versions"]["torch"] == torch.__version__
    found: dict[str, float] = rank["speeds"]
    return found


def test_one_process_measures_its_device_and_two_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [f"--disk_path={tmp_path}", f"--ckpt_save_path={tmp_path}/runs/new"]
    found = speeds(capsys, *folders, "--mixed_precision=false")
    of_folders = [f"{flag}, GiB/s {done}" for flag in ("disk_path", "ckpt_save_path") for done in ("written", "read")]
    assert list(found) == ["matmul in torch.float32, TFLOP/s", *of_folders]
    assert all(speed > 0 for speed in found.values()) and list(tmp_path.iterdir()) == []
    assert len(speeds(capsys, "--disk_path=none")) == 1
    main(["doctor", "--disk_path=none"])
    assert capsys.readouterr().out.splitlines()[0] == "1 process on 1 machine"


@pytest.mark.parametrize(("flag", "place"), [("disk_path", "missing"), ("disk_path", ""), ("ckpt_save_path", "new")])
def test_a_folder_that_cannot_be_used_is_one_error(
    flag: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    if not place or flag == "ckpt_save_path":
        monkeypatch.setattr(Path, "open", full)
    with pytest.raises(SystemExit) as ending:
        main(["doctor", "--disk_path=none", f"--{flag}={tmp_path / place}"])
    assert ending.value.code == 1 and f"--{flag}: {tmp_path}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def report(host: str, speed: float, version: str = "2.13") -> RankReport:
    return RankReport(host, {"torch": version}, {"matmul": speed})


def test_slow_ranks_and_different_versions_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [report("a", 10), report("b", 10), report("c", 5), report("d", 9, "2.12")]
    versions, matmul = module._rows(ranks)
    assert versions == ("torch", "2.13", "rank 3 has 2.12")
    assert matmul == ("matmul", "9.5", "slow: rank 2 on c 5")
    assert slow_ranks({0: 1.0}) == slow_ranks({0: 10.0, 1: 9.0}) == []
    monkeypatch.setattr(module, "gather_from_every_rank", lambda function: ranks)
    with pytest.raises(SystemExit) as ending:
        main(["doctor"])
    assert ending.value.code == 1 and "rank 3 has 2.12" in capsys.readouterr().out


def test_the_settings_of_an_earlier_version_are_refused_with_the_way_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--disk_mib=1", "--message_mib=1", "--slow_factor=2"])
    said = capsys.readouterr().err
    assert "with fio" in said and "with nccl-tests" in said and "1.3 times slower" in said
