from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from helpers import PATIENCE_SECONDS

from pretraining.checkpoint import lease as lease_module
from pretraining.checkpoint.lease import LEASE, STALE_SECONDS, Holder, Lease, hold_lease
from pretraining.distributed.processes import join_processes
from pretraining.errors import CheckpointError
from pretraining.launch.layout import resolve_layout


def never(seconds: float) -> None:
    raise AssertionError("there is nothing to wait for")


@contextmanager
def held(run: Path, pause: Callable[[float], None] = never) -> Iterator[Lease]:
    lease = Lease(run, pause)
    lease.acquire()
    try:
        yield lease
    finally:
        lease.release()


def write(run: Path, holder: Holder, seconds_ago: float = 0.0) -> Path:
    """A lease that another process has taken."""
    path = run / LEASE
    path.write_text(json.dumps(asdict(holder)))
    os.utime(path, (time.time() - seconds_ago,) * 2)
    return path


def elsewhere() -> Holder:
    return replace(Holder.this_process(), host="node7", machine="another boot")


def test_a_lease_is_there_while_it_is_held_and_its_content_says_by_whom(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with held(run) as lease:
        lease.check()
        content = json.loads((run / LEASE).read_text())
        assert content["pid"] == os.getpid() and content["host"] and content["started"] and content["process_start"]
        assert [path.name for path in run.iterdir()] == [LEASE]
        (run / "something").touch()
    assert [path.name for path in run.iterdir()] == ["something"]


def test_a_start_that_was_refused_before_it_wrote_leaves_no_folder(tmp_path: Path) -> None:
    with join_processes(resolve_layout({})) as processes, hold_lease(tmp_path / "run", processes) as lease:
        lease.check()
    assert not (tmp_path / "run").exists()


def test_a_heartbeat_renews_it_also_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed, tried = threading.Event(), []

    def utime(path: Path) -> None:
        tried.append(path)
        if len(tried) == 1:
            raise OSError(5, "Input/output error")
        renewed.set()

    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.001)
    monkeypatch.setattr(os, "utime", utime)
    with held(tmp_path):
        assert renewed.wait(PATIENCE_SECONDS)
    assert all(thread.name != "lease" for thread in threading.enumerate())


def test_a_second_start_is_refused_at_once_while_the_first_lives(tmp_path: Path) -> None:
    with held(tmp_path), pytest.raises(CheckpointError) as raised:
        Lease(tmp_path, never).acquire()
    assert raised.value.path == tmp_path and raised.value.settings == ("ckpt_save_path",)
    assert f"process {os.getpid()} on" in str(raised.value)


def ended_process(collected: bool) -> int:
    process = subprocess.Popen(["true"])
    if collected:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process.pid


@pytest.mark.parametrize("collected", [True, False], ids=["gone", "zombie"])
def test_the_lease_of_a_process_that_ended_on_this_machine_is_taken_over_at_once(
    tmp_path: Path, collected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, replace(Holder.this_process(), pid=ended_process(collected), process_start="1"))
    with held(tmp_path, never) as lease:
        lease.check()
    assert caplog.messages == []


def test_a_later_process_with_the_same_number_is_not_taken_for_it(tmp_path: Path) -> None:
    write(tmp_path, replace(Holder.this_process(), process_start="an earlier one"))
    with held(tmp_path) as lease:
        lease.check()


def here(machine: str) -> Holder:
    """This process number with the same start time, on a machine that this one may not be."""
    own = Holder.this_process()
    boot, space = own.machine.split(" ")
    return replace(own, machine=machine.format(boot=boot, space=space))


@pytest.mark.parametrize(
    ("holder", "seconds_ago"),
    [
        (elsewhere(), 5),
        (elsewhere(), 3600),
        (elsewhere(), -3 * 3600),  # of a clock that was set
        (replace(elsewhere(), machine=""), 5),  # of a system that does not tell its boot
        (here("{boot} pid:[1]"), 5),  # of another container
        (here("an-earlier-boot {space}"), 5),
    ],
)
def test_a_lease_is_free_once_it_was_unchanged_for_a_minute_of_our_own_clock(
    tmp_path: Path, holder: Holder, seconds_ago: float, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, holder, seconds_ago)
    now = [1000.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    lease = Lease(tmp_path, pause, clock=lambda: now[0])
    lease.acquire()
    lease.check()
    lease.release()
    assert now[0] - 1000 == STALE_SECONDS and str(holder) in caplog.text


@pytest.mark.parametrize("content", [None, "", "{"])
def test_a_lease_that_is_new_is_waited_for_also_where_nobody_can_read_it_and_free_once_it_is_gone(
    tmp_path: Path, content: str | None
) -> None:
    path = write(tmp_path, elsewhere(), seconds_ago=5)
    if content is not None:
        path.write_text(content)
    waited: list[float] = []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        path.unlink()

    with held(tmp_path, pause) as lease:
        lease.check()
    assert waited


LOST: dict[str, tuple[Callable[[Path], object], str]] = {
    "taken over": (lambda run: write(run, elsewhere()), r"process \d+ on node7"),
    "being taken over": (lambda run: (run / LEASE).write_text(""), "removed"),
    "removed": (lambda run: (run / LEASE).unlink(), "removed"),
    "renamed": (lambda run: run.rename(run.with_name("renamed")), "removed"),
}


@pytest.mark.parametrize("fault", LOST)
def test_a_lease_that_was_lost_is_noticed_before_a_commit_and_left_alone(tmp_path: Path, fault: str) -> None:
    run, (lose, how) = tmp_path / "run", LOST[fault]
    with held(run) as lease:
        lose(run)
        with pytest.raises(CheckpointError, match=how) as raised:
            lease.check()
    assert raised.value.path == run and (fault in ("removed", "renamed") or (run / LEASE).exists())


def test_a_lease_from_elsewhere_that_is_renewed_refuses_the_start(tmp_path: Path) -> None:
    path = write(tmp_path, elsewhere(), seconds_ago=5)
    with pytest.raises(CheckpointError, match="on node7"):
        Lease(tmp_path, lambda seconds: os.utime(path)).acquire()


def test_of_two_starts_that_find_it_stale_one_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, replace(Holder.this_process(), pid=ended_process(True), process_start="1"))
    rename, winner = Path.rename, Lease(tmp_path, never)

    def another_was_faster(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        path.unlink()
        winner.acquire()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", another_was_faster)
    with pytest.raises(CheckpointError):
        Lease(tmp_path, never).acquire()
    winner.check()
    winner.release()


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as refused:
        Lease(tmp_path / "file" / "run").acquire()
    assert refused.value.path == tmp_path / "file" / "run" and refused.value.settings == ("ckpt_save_path",)


def flipped(content: bytes) -> Iterator[bytes]:
    """The content with one flipped bit, of each byte in turn."""
    for at in range(len(content)):
        yield content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]


def test_any_flipped_bit_of_a_lease_that_is_held_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / LEASE
    with held(tmp_path) as lease:
        for damaged in flipped(path.read_bytes()):
            path.write_bytes(damaged)
            lease.check()
            with pytest.raises(CheckpointError):
                Lease(tmp_path, lambda seconds: os.utime(path)).acquire()
    assert not path.exists()


def test_any_flipped_bit_of_a_lease_whose_holder_is_gone_refuses_no_start(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    with held(tmp_path):
        content = (tmp_path / LEASE).read_bytes()
    for damaged in flipped(content):
        (tmp_path / LEASE).write_bytes(damaged)
        if lease_module._read(tmp_path / LEASE) is not None:
            continue  # in the name of the checksum: the rest is whole, and says who it is
        ticks = iter((0.0, STALE_SECONDS))
        lease = Lease(tmp_path, never, clock=lambda ticks=ticks: next(ticks))  # type: ignore[misc]
        lease.acquire()
        lease.release()
