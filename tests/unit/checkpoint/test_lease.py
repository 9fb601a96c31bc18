from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_SECONDS

from pretraining.checkpoint import lease as lease_module
from pretraining.checkpoint.lease import LEASE, STALE_SECONDS, Holder, Lease, hold_lease
from pretraining.distributed.processes import join_processes
from pretraining.errors import CheckpointError
from pretraining.files import with_checksum
from pretraining.launch.layout import resolve_layout


class Clock:
    """Fake clock; an action can run whenever a start sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited, self.happens = 0.0, lambda: None
        monkeypatch.setattr(lease_module, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.waited += seconds
        self.happens()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@contextmanager
def held(run: Path) -> Iterator[Lease]:
    lease = Lease(run)
    lease.acquire()
    try:
        yield lease
    finally:
        lease.release()


def write(run: Path, holder: Holder) -> Path:
    """Return a lease of another process."""
    (run / LEASE).write_text(json.dumps(with_checksum(asdict(holder))))
    return run / LEASE


def other(machine: str = "{boot} {space}", **changes: Any) -> Holder:
    """Return a holder with this process's id and start time on some machine, except for the changes."""
    own = Holder.this_process()
    boot, space = own.machine.split(" ")
    return replace(own, machine=machine.format(boot=boot, space=space), **changes)


def test_a_lease_is_there_while_it_is_held_and_refuses_a_second_start_at_once(tmp_path: Path, clock: Clock) -> None:
    run = tmp_path / "run"
    with held(run) as lease:
        lease.check()
        content = json.loads((run / LEASE).read_text())
        assert content["pid"] == os.getpid() and content["host"] and content["started"] and content["process_start"]
        assert [path.name for path in run.iterdir()] == [LEASE]
        with pytest.raises(CheckpointError, match=str(os.getpid())) as refused:
            Lease(run).acquire()
        assert (refused.value.path, refused.value.settings, clock.waited) == (run, ("ckpt_save_path",), 0)
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


def ended_process(collected: bool) -> int:
    process = subprocess.Popen(["true"])
    if collected:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process.pid


FREE: dict[str, tuple[Callable[[], Holder], float]] = {
    "gone": (lambda: other(pid=ended_process(True), process_start="1"), 0),
    "a zombie": (lambda: other(pid=ended_process(False), process_start="1"), 0),
    "a later process with its number": (lambda: other(process_start="an earlier one"), 0),
    "of another machine": (lambda: other("another boot"), STALE_SECONDS),
    "of another container": (lambda: other("{boot} pid:[1]"), STALE_SECONDS),
    "of an earlier boot": (lambda: other("an-earlier-boot {space}"), STALE_SECONDS),
}
"""Holders of free leases, and how long a start waits until it knows."""


@pytest.mark.parametrize("changed_at", [0, 3 * 3600 * 10**9, 2**33 * 10**9], ids=["past", "then", "future"])
@pytest.mark.parametrize("name", FREE)
def test_row_31_a_lease_is_free_when_its_process_is_gone_or_a_minute_of_our_own_clock_changed_nothing(
    tmp_path: Path, name: str, changed_at: int, clock: Clock
) -> None:
    holder, seconds = FREE[name]
    os.utime(write(tmp_path, holder()), ns=(changed_at, changed_at))
    with held(tmp_path) as lease:
        lease.check()
    assert clock.waited == seconds


def test_a_machine_that_does_not_tell_its_boot_is_the_same_as_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_file(path: Path) -> Path:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "readlink", no_such_file)
    assert Holder.this_process().machine != Holder.this_process().machine != ""


@pytest.mark.parametrize("content", [None, "", "{"])
def test_a_lease_of_an_unknown_holder_is_free_once_removed(tmp_path: Path, content: str | None, clock: Clock) -> None:
    path = write(tmp_path, other("another boot", host="node7"))
    if content is not None:
        path.write_text(content)
    clock.happens = path.unlink
    with held(tmp_path) as lease:
        lease.check()
    assert clock.waited == 1


def test_a_lease_from_elsewhere_that_is_renewed_refuses_the_start(tmp_path: Path, clock: Clock) -> None:
    path = write(tmp_path, other("another boot", host="node7"))
    clock.happens = lambda: os.utime(path)
    with pytest.raises(CheckpointError) as raised:
        Lease(tmp_path).acquire()
    assert raised.value.path == tmp_path and "node7" in str(raised.value) and path.exists()


def test_of_two_starts_that_find_it_free_one_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, FREE["gone"][0]())
    look, winner = lease_module.must_wait_for_lease, Lease(tmp_path)

    def another_is_faster(run: Path) -> bool:
        has_to_wait = look(run)
        monkeypatch.setattr(lease_module, "must_wait_for_lease", look)
        winner.acquire()
        return has_to_wait

    monkeypatch.setattr(lease_module, "must_wait_for_lease", another_is_faster)
    with pytest.raises(CheckpointError):
        Lease(tmp_path).acquire()
    winner.check()
    winner.release()


LOST: dict[str, Callable[[Path], object]] = {
    "taken over": lambda run: write(run, other("another boot")),
    "being taken over": lambda run: (run / LEASE).write_text(""),
    "removed": lambda run: (run / LEASE).unlink(),
    "renamed": lambda run: run.rename(run.with_name("renamed")),
}


@pytest.mark.parametrize("fault", LOST)
def test_a_lease_that_was_lost_is_noticed_before_a_commit_and_left_alone(tmp_path: Path, fault: str) -> None:
    run = tmp_path / "run"
    with held(run) as lease:
        LOST[fault](run)
        with pytest.raises(CheckpointError) as raised:
            lease.check()
    assert raised.value.path == run and (fault in ("removed", "renamed") or (run / LEASE).exists())


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as refused:
        Lease(tmp_path / "file" / "run").acquire()
    assert refused.value.path == tmp_path / "file" / "run" and refused.value.settings == ("ckpt_save_path",)


def flipped_bits(content: bytes) -> Iterator[bytes]:
    """Yield the content with one flipped bit, in each byte in turn."""
    for at in range(len(content)):
        yield content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]


def test_a_flipped_bit_of_a_lease_changes_nothing_while_it_is_held_or_later(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "something").touch()
    path = tmp_path / LEASE
    clock.happens = lambda: os.utime(path)
    with held(tmp_path) as lease:
        flipped = list(flipped_bits(path.read_bytes()))
        for damaged in flipped:
            path.write_bytes(damaged)
            lease.check()
            with pytest.raises(CheckpointError):
                Lease(tmp_path).acquire()
    assert not path.exists()
    clock.happens = lambda: None
    for damaged in flipped:
        path.write_bytes(damaged)
        if lease_module._read_holder(path) is None:  # else the bit is in the key of the checksum
            with held(tmp_path):
                pass
