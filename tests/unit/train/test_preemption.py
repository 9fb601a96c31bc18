from __future__ import annotations

import signal

import pytest

from pretraining.durations import Duration
from pretraining.errors import Interrupted, Preempted
from pretraining.launch.signals import ReceivedSignals
from pretraining.train.preemption import StopRequests, make_stop_requests, preemption_error, stop_reason
from pretraining.train.run import _preemption_exits_as_terminated


def test_a_signal_is_a_request_and_so_is_a_deadline_that_has_come() -> None:
    now = [99.0]
    requests = StopRequests(ReceivedSignals(), deadline=100.0, clock=lambda: now[0])
    assert requests.pending() == 0
    now[0] = 100.0
    assert stop_reason(requests.pending()) == "the time limit is near"
    requests.signals.first = signal.SIGUSR1
    assert stop_reason(requests.pending()) == "SIGUSR1"


@pytest.mark.parametrize(
    ("number", "code", "is_out_of_time"),
    [(signal.SIGUSR1, 75, True), (signal.SIGTERM, 75, False), (signal.SIGINT, 130, False), (None, 75, True)],
    ids=["USR1", "TERM", "INT", "deadline"],
)
def test_a_request_before_training_has_its_own_exit_code_and_tells_whether_time_is_over(
    number: signal.Signals | None, code: int, is_out_of_time: bool
) -> None:
    requests = StopRequests(ReceivedSignals(), deadline=None if number else 0.0)
    requests.signals.first = number
    with pytest.raises(Preempted) as ended:
        requests.raise_if_pending()
    assert (ended.value.exit_code, ended.value.is_out_of_time) == (code, is_out_of_time)
    StopRequests(ReceivedSignals()).raise_if_pending()


@pytest.mark.parametrize(
    ("time_limit", "environ", "deadline"),
    [
        ("1h30min", {"PRETRAINING_STARTED_AT": "1000.5"}, 6400.5),
        ("0s", {"SLURM_JOB_END_TIME": "10000"}, None),
        (None, {}, None),
        (None, {"SLURM_JOB_END_TIME": "100000"}, 99_700),
        (None, {"SLURM_JOB_START_TIME": "13600", "SLURM_JOB_END_TIME": "100000"}, 99_700),
        (None, {"SLURM_JOB_START_TIME": "99400", "SLURM_JOB_END_TIME": "100000"}, 99_940),
        (None, {"SLURM_JOB_END_TIME": "Unknown"}, None),
        (None, {"SLURM_JOB_END_TIME": ""}, None),
        ("2h", {"PRETRAINING_STARTED_AT": "0", "SLURM_JOB_END_TIME": "1000"}, 7200),
    ],
    ids=["limit", "none wanted", "none", "slurm", "day", "ten minutes", "unlimited", "empty", "limit wins"],
)
def test_the_deadline_is_the_time_limit_or_ahead_of_the_end_of_a_slurm_job(
    time_limit: str | None, environ: dict[str, str], deadline: float | None
) -> None:
    limit = None if time_limit is None else Duration.parse(time_limit)
    assert make_stop_requests(ReceivedSignals(), limit, environ).deadline == deadline


def test_without_a_launchers_start_time_the_time_limit_counts_from_now() -> None:
    requests = make_stop_requests(ReceivedSignals(), Duration(3600, "seconds"), {})
    assert requests.deadline is not None and requests.pending() == 0
    assert requests.deadline - requests.clock() == pytest.approx(3600, abs=60)


def test_a_run_that_keeps_nothing_is_not_to_be_started_again_and_ctrl_c_stays_ctrl_c() -> None:
    for stop, exit_code in ((signal.SIGTERM, 143), (signal.SIGINT, Interrupted("").exit_code)):
        with pytest.raises(Preempted) as ended, _preemption_exits_as_terminated():
            raise preemption_error(stop, "")
        assert ended.value.exit_code == exit_code
