from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from pretraining.distributed.processes import Processes
from pretraining.observability.environment import (
    ENVIRONMENT_FILE,
    _by_host,
    _git_state,
    masked,
    record_environment,
)

ALONE = Processes(0, 1, 0, 1, torch.device("cpu"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def records_of(run: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads((run / "logs" / ENVIRONMENT_FILE).read_text())
    return records


@pytest.mark.usefixtures("single_process")
def test_each_start_adds_a_record_of_what_it_was_started_with_and_on_what(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["main_training.py", "--api_key=abc", "--datasets=a b"])
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    record_environment(run, 0, "single", ALONE)
    record_environment(run, 40, "torchrun", ALONE)
    first, second = records_of(run)
    assert (first["step"], second["step"], second["launcher"], second["processes"]) == (0, 40, "torchrun", 1)
    assert first["command"] == "main_training.py '--api_key=***' '--datasets=a b'"
    assert torch.__version__.startswith(first["packages"]["torch"]) and "numpy" in first["packages"]
    assert first["variables"]["OMP_NUM_THREADS"] == "2" and "a-secret" not in json.dumps(first)
    (host,) = first["hosts"]
    assert host["ranks"] == [0] and host["threads"] == [torch.get_num_threads()]
    assert first["time"].endswith("Z") and first["working_folder"] == str(Path.cwd())


def test_ranks_are_told_by_host() -> None:
    told = [("a", "H100", 2, 16), ("a", "H100", 2, 16), ("b", "H200", 1, 8)]
    assert _by_host(told) == [
        {"host": "a", "cores": 16, "ranks": [0, 1], "devices": ["H100", "H100"], "threads": [2, 2]},
        {"host": "b", "cores": 8, "ranks": [2], "devices": ["H200"], "threads": [1]},
    ]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--wandb_api_key=x1"], ["--wandb_api_key=***"]),
        (["--api-key", "x1", "--num_steps=4"], ["--api-key", "***", "--num_steps=4"]),
        (["--password", "--seed=1"], ["--password", "--seed=1"]),
        (["--tracker.secret=a,b"], ["--tracker.secret=***"]),
        (["--optimizer_options=lr=1,hub_token=x1,beta=2"], ["--optimizer_options=lr=1,hub_token=***,beta=2"]),
        (["--data_path=s3://me:pass@host/data"], ["--data_path=s3://***@host/data"]),
        (["--sample_prompt=hf_abcdefghijklmnopqrst"], ["--sample_prompt=***"]),
        # Of our own settings, and of paths, none is a secret.
        (
            ["--sep_token=0", "data.bos_token=1", "--tokenizer_path=a/tokens", "--num_key_value_heads=2"],
            ["--sep_token=0", "data.bos_token=1", "--tokenizer_path=a/tokens", "--num_key_value_heads=2"],
        ),
        (["/home/me/secret/main_training.py", "train"], ["/home/me/secret/main_training.py", "train"]),
    ],
)
def test_what_looks_like_a_secret_is_not_written(given: list[str], shown: list[str]) -> None:
    assert masked(given) == shown


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("content", [b"[{]", b'{"a": 1}', b"[" * 100_000, b"\xff"])
def test_a_damaged_file_is_put_aside_and_refuses_nothing(content: bytes, run: Path) -> None:
    path = run / "logs" / ENVIRONMENT_FILE
    path.write_bytes(content)
    record_environment(run, 3, "single", ALONE)
    assert [record["step"] for record in records_of(run)] == [3]
    assert (run / "logs" / f"{ENVIRONMENT_FILE}.damaged").read_bytes() == content


@pytest.mark.usefixtures("single_process")
def test_a_start_goes_on_without_a_place_to_write_without_git_and_without_its_folder(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (run / "gone").mkdir()
    monkeypatch.chdir(run / "gone")
    (run / "gone").rmdir()
    monkeypatch.setenv("PATH", "")
    record_environment(run, 3, "single", ALONE)
    [record] = records_of(run)
    assert record["working_folder"] is None
    (run / "logs" / ENVIRONMENT_FILE).unlink()
    os.mkfifo(run / "logs" / ENVIRONMENT_FILE)
    record_environment(run, 4, "single", ALONE)
    assert ENVIRONMENT_FILE in caplog.messages[-1]


def test_the_commit_is_that_of_this_code_and_changed_files_are_dirt(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    (tmp_path / "runs").mkdir()
    assert _git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "code.py").write_text("2")
    assert _git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": True}
    assert _git_state(tmp_path / "runs") is None  # a folder of another repository is none of this code
