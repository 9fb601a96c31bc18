"""`pretrain doctor` in this process alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretraining.cli import main
from pretraining.tools.doctor import measure
from pretraining.tools.doctor.measure import message_sizes


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
