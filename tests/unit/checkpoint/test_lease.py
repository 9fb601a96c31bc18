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
    with join_processes(0, 1, 0, 1, {}) as processes, hold_lease(tmp_path / "run", processes) as lease:
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
    assert f"process {os.getpid()} on" in str(raised.value)  # whom to ask or to end


def ended_process(collected: bool) -> int:
    process = subprocess.Popen(["true"])
    if collected:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process.pid


@pytest.mark.parametrize("how", ["gone", "zombie", "its number belongs to a later one"])
def test_the_lease_of_a_process_that_ended_on_this_machine_is_taken_over_at_once(tmp_path: Path, how: str) -> None:
    pid = os.getpid() if how.startswith("its") else ended_process(collected=how == "gone")
    write(tmp_path, replace(Holder.this_process(), pid=pid, process_start="1"))
    with held(tmp_path, never) as lease:
        lease.check()


def test_a_lease_from_elsewhere_is_waited_for_until_it_is_stale(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, elsewhere())

    def a_minute_passes(seconds: float) -> None:
        assert path.exists()
        os.utime(path, (time.time() - STALE_SECONDS - 1,) * 2)

    with pytest.raises(CheckpointError):  # its time has changed: so it looks as if it were renewed
        Lease(tmp_path, a_minute_passes).acquire()
    assert len(caplog.messages) == 1  # that it waits, and for whom
    with held(tmp_path) as lease:  # long stale: nothing to wait for
        lease.check()


def here(machine: str) -> Holder:
    """This process number with the same start time, on a machine that this one may not be."""
    own = Holder.this_process()
    boot, space = own.machine.split(" ")
    return replace(own, machine=machine.format(boot=boot, space=space))


@pytest.mark.parametrize(
    ("holder", "seconds_ago", "waited"),
    [
        (elsewhere(), 5, 55),
        (elsewhere(), -3 * 3600, STALE_SECONDS),  # of another boot, of a clock that was set
        (elsewhere(), -1e9, STALE_SECONDS),
        (here("{boot} pid:[1]"), 5, 55),  # of another container
        (here("an-earlier-boot {space}"), 5, 55),
    ],
)
def test_a_lease_is_stale_once_it_was_unchanged_for_a_minute_of_our_own_clock(
    tmp_path: Path, holder: Holder, seconds_ago: float, waited: float
) -> None:
    write(tmp_path, holder, seconds_ago)
    now = [1000.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    lease = Lease(tmp_path, pause, clock=lambda: now[0])
    lease.acquire()
    lease.check()
    lease.release()
    assert now[0] - 1000 == pytest.approx(waited, abs=2)


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


LOST: dict[str, Callable[[Path], object]] = {
    "taken over": lambda run: write(run, elsewhere()),
    "damaged": lambda run: (write(run, elsewhere()), (run / LEASE).write_text("{")),
    "removed": lambda run: (run / LEASE).unlink(),
    "renamed": lambda run: run.rename(run.with_name("renamed")),
}


@pytest.mark.parametrize("fault", LOST)
def test_a_lease_that_was_lost_is_noticed_before_a_commit_and_left_alone(tmp_path: Path, fault: str) -> None:
    run = tmp_path / "run"
    with held(run) as lease:
        LOST[fault](run)
        if fault == "damaged":
            lease._own = elsewhere()
        with pytest.raises(CheckpointError) as raised:
            lease.check()
    assert raised.value.path == run and (fault in ("removed", "renamed") or (run / LEASE).exists())


def test_of_two_starts_that_find_it_stale_one_gets_it(tmp_path: Path) -> None:
    stale = elsewhere()
    write(tmp_path, stale, seconds_ago=3600)
    with held(tmp_path) as winner:
        Lease(tmp_path, never)._remove_stale(stale)  # the other one has looked before, and acts now
        winner.check()
    assert list(tmp_path.parent.glob(f"{tmp_path.name}/*")) == []


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as refused:
        Lease(tmp_path / "file" / "run").acquire()
    assert refused.value.path == tmp_path / "file" / "run" and refused.value.settings == ("ckpt_save_path",)


def flipped(content: bytes) -> Iterator[bytes]:
    """The content with one flipped bit, of each byte in turn."""
    for at in range(len(content)):
        yield content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]


def test_any_flipped_bit_of_a_lease_that_is_held_is_mended_by_its_holder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / LEASE
    with held(tmp_path) as lease:
        content = path.read_bytes()
        for damaged in flipped(content):
            path.write_bytes(damaged)
            lease.check()
            assert json.loads(path.read_bytes())["token"] == json.loads(content)["token"]
        assert set(caplog.messages) == {f"{path} is damaged: written again"}
        path.write_bytes(damaged)
    assert not path.exists()


def test_any_flipped_bit_of_a_lease_whose_holder_is_gone_refuses_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "something").touch()
    with held(tmp_path):
        content = (tmp_path / LEASE).read_bytes()
    for damaged in flipped(content):
        path = tmp_path / LEASE
        path.write_bytes(damaged)
        os.utime(path, (time.time() - STALE_SECONDS - 1,) * 2)
        if lease_module._read(path) is not None:
            continue  # in the name of the checksum: the rest is whole, and says who it is
        with held(tmp_path) as lease:
            lease.check()
        assert caplog.messages[-1] == f"{path} is damaged, and old: taken over"
