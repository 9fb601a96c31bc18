"""`pretrain doctor` in this process alone, and its verdicts on readings of several ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretraining import cli
from pretraining.cli import main
from pretraining.tools import doctor as module
from pretraining.tools.doctor import RankReport, Reading, find_slow


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MATMUL_SIZE", {"cpu": 32})
    monkeypatch.setattr(module, "COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(module, "BUDGET_SECONDS", 0.01)
    monkeypatch.setattr(module, "SLOW_DISK_GIB", 0.0)


def examine(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    """What the command prints as JSON, with rows by their check."""
    try:
        main(["doctor", *flags, "--disk_mib=1", "--json"])
        code: Any = 0
    except SystemExit as ending:
        code = ending.code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return {**document, "code": code, "rows": {row["check"]: row for row in document["rows"]}}


def test_one_process_measures_its_device_and_its_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = examine(capsys, f"--disk_path={tmp_path}")
    (rank,) = found["ranks"]
    checks = [reading["check"] for reading in rank["readings"]]
    assert checks[1:] == ["matmul bfloat16 32", "matmul float32 32", "memory copy", "disk write + fsync", "disk read"]
    assert all(reading["value"] > 0 for reading in rank["readings"]) and set(checks) <= set(found["rows"])
    assert found["rows"]["torch"]["found"] == torch.__version__ and list(tmp_path.iterdir()) == []
    assert "disk" not in " ".join(examine(capsys, "--disk_path=none")["rows"])
    main(["doctor", "--disk_path=none"])
    assert capsys.readouterr().out.splitlines()[0] == "1 process on 1 machine"


@pytest.mark.parametrize(("flag", "place"), [("disk_path", "missing"), ("disk_path", ""), ("ckpt_save_path", "new")])
def test_a_folder_that_cannot_be_used_is_one_error(
    flag: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    if flag == "disk_path":
        monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr("pretraining.checkpoint.manifest.ChecksummedFile.write", full)
    with pytest.raises(SystemExit) as ending:
        main(["doctor", "--disk_path=none", "--model_variant=tiny", f"--{flag}={tmp_path / place}"])
    assert ending.value.code == 1 and f"--{flag}=" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_checkpoint_folder_is_measured_by_a_save_and_left_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--disk_path=none", f"--ckpt_save_path={tmp_path}/runs/new", "--model_variant=tiny"]
    found = examine(capsys, *flags)["rows"]
    assert "0.24 per checkpoint" in found["room for checkpoints"]["found"] and "GiB/s" in found["saves"]["found"]
    assert "name a model" in examine(capsys, *flags[:2])["rows"]["saves"]["found"]
    assert list(tmp_path.iterdir()) == []
    real = shutil.disk_usage
    for free, verdict in ((2**20, "bad"), (2**29, "look at"), (2**32, "good")):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage if path == tmp_path else real(path))
        found = examine(capsys, *flags)
        assert found["rows"]["room for checkpoints"]["verdict"] == verdict and found["code"] == (verdict == "bad")


def test_shared_cores_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cli, "set_threads", lambda *arguments: None)
    for cores, verdict in ((0, "bad"), (2, "good")):
        monkeypatch.setattr(module, "usable_cores", lambda cores=cores: cores)
        assert examine(capsys, "--disk_path=none")["rows"]["cores"]["verdict"] == verdict


def test_emulated_bfloat16_and_a_low_share_of_the_peak_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "matmul_tflops", lambda device, dtype, size: 1.0 if dtype == torch.bfloat16 else 9.0)
    cpu = torch.device("cpu")
    verdicts = [next(module._matmuls(cpu, "x86_64", is_chosen)).verdict for is_chosen in (True, False)]
    assert verdicts == ["look at", "good"]
    assert next(module._matmuls(cpu, "NVIDIA H100", False)).verdict == "look at"


def report(host: str, value: float, version: str = "2.13") -> RankReport:
    return RankReport(host, {"torch": version}, [Reading("copy", value, "GiB/s")])


def test_a_slow_rank_is_named_with_its_machine_and_different_versions_are_reported() -> None:
    rows = list(module._judge([report("a", 10), report("b", 10), report("c", 5), report("d", 3)], 1.3))
    assert [(row.verdict, row.found.partition(":")[0]) for row in rows] == [
        *(("good", "7.5 GiB/s"), ("look at", "rank 2 on c"), ("bad", "rank 3 on d"))
    ]
    assert find_slow({0: 1.0}, 1.3) == find_slow({0: 10.0, 1: 9.0}, 1.3) == {}
    cores = [RankReport("a", {}, [Reading("cores", value, "cores")]) for value in (2.0, 8.0, 8.0)]
    assert [row.verdict for row in module._judge(cores, 1.3)] == ["good"]  # is no rate
    (versions,) = module._same_versions([report("a", 1), report("b", 1, version="2.12")])
    assert (versions.verdict, versions.found) == ("bad", "2.13 on rank 0, 2.12 on rank 1")
