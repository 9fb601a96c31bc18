"""metrics.jsonl as strangers leave it: what is there is read, what is damaged is counted."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.tools.report.run_folders import evaluation_report, training_report, write_lines

from pretraining.tools.report import reports
from pretraining.tools.report.reports import Lines, number_of, read_metrics, read_objects, seconds_of

WHOLE = b'{"step": 1, "loss": 2.0}\n'


def objects_in(path: Path, content: bytes) -> tuple[list[object], Lines]:
    path.write_bytes(content)
    lines = Lines()
    return list(read_objects(path, lines)), lines


@pytest.mark.parametrize(
    ("content", "found", "damaged", "is_cut"),
    [
        (b"", 0, 0, False),
        (WHOLE, 1, 0, False),
        (WHOLE.rstrip(), 1, 0, False),
        (WHOLE + b'{"step": 2, "lo', 1, 0, True),
        (WHOLE + b'{"step": 2, "lo\n' + WHOLE, 2, 1, False),
        (b"\n\n" + WHOLE + b" \n", 1, 0, False),
        (b"[1, 2]\n3\nnull\n" + WHOLE, 1, 3, False),
        (b"\x00\xff\n" + WHOLE, 1, 1, False),
        (b"[" * 100_000 + b"\n" + WHOLE, 1, 1, False),
        (b'{"name": "\\ud800"}\n' + WHOLE, 1, 1, False),
    ],
)
def test_damaged_lines_are_passed_over_and_counted(
    tmp_path: Path, content: bytes, found: int, damaged: int, is_cut: bool
) -> None:
    got, lines = objects_in(tmp_path / "file", content)
    assert (len(got), lines.damaged, lines.is_cut) == (found, damaged, is_cut)


def test_a_line_without_an_end_in_sight_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "LONGEST_LINE_BYTES", 64)
    got, lines = objects_in(tmp_path / "file", WHOLE + b'{"step": ' + b"1" * 1000 + b"}\n" + WHOLE)
    assert (len(got), lines.damaged) == (2, 1)


@given(content=st.binary(max_size=300))
def test_no_bytes_are_an_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "file"
    path.write_bytes(content)
    training, evaluations = read_metrics(path, Lines())
    assert len(training) + len(evaluations) <= content.count(b"\n") + 1


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a pipe"):
        list(read_objects(tmp_path / "pipe", Lines()))


def test_reports_of_training_and_of_evaluations_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [training_report(1), evaluation_report(1, 4.0), training_report(2, loss=None), {"loss": 3.0}])
    lines = Lines()
    training, evaluations = read_metrics(path, lines)
    assert (len(training), len(evaluations), lines.damaged) == (2, 1, 1)
    curves = training.curves()
    assert curves["loss"].rows.tolist() == [0] and curves["grad_norm"].rows.tolist() == [0, 1]
    assert "mfu" not in curves and evaluations.curves()["evaluation_loss"].values.tolist() == [4.0]
    assert training.position("step").tolist() == [1.0, 2.0] and training.position("tokens_seen").tolist() == [
        32.0,
        64.0,
    ]
    assert training.newest["step"] == 2


def test_reports_are_the_same_however_many_are_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [training_report(step, loss=math.sin(step)) for step in range(1, 400)])

    def read(at_once: int) -> tuple[object, ...]:
        monkeypatch.setattr(reports, "AT_ONCE", at_once)
        training, _ = read_metrics(path, Lines())
        means = [training.means.of(name) for name in training.MEANS]
        return training.curves()["loss"].values.tolist(), means, training.means.seconds, training.backwards

    assert read(7) == read(10_000)


def test_means_are_over_the_time_trained(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    slow = {"step_seconds": 3.0, "tokens_per_second_per_gpu": 10.0}
    fast = {"step_seconds": 1.0, "tokens_per_second_per_gpu": 30.0}
    write_lines(path, [training_report(10, **slow), training_report(40, **fast)])
    training, _ = read_metrics(path, Lines())
    assert training.means.seconds == 10 * 3.0 + 30 * 1.0
    assert training.means.of("tokens_per_second_per_gpu") == 20.0
    assert training.means.of("mfu") is None


def test_steps_that_go_back_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [training_report(step) for step in (1, 2, 3, 2, 3)])
    assert read_metrics(path, Lines())[0].backwards == 1


def test_more_different_numbers_than_any_run_has_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MOST_CURVES", 3)
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [{"step": 1, **{f"number_{n}": 1.0 for n in range(10)}}])
    training, _ = read_metrics(path, Lines())
    assert len(training.curves()) == 3 and len(training.left_out) == 7


@pytest.mark.parametrize("value", [None, "3", True, [1], {"a": 1}, 10**400, float("nan")])
def test_what_is_no_number_is_none(value: object) -> None:
    assert math.isnan(number_of(value))


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "yesterday",
        ["2026-01-01T00:00:00Z"],
        "9999-99-99T00:00:00Z",
        "9999-12-31T23:59:59-23:00",
        "0001-01-01T00:00:00Z",
    ],
)
def test_what_is_no_time_is_none(value: object) -> None:
    assert math.isnan(seconds_of(value))


def test_values_of_other_types_are_no_points(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": n, "loss": v}) + "\n" for n, v in enumerate([1, "2", True, [3.0], 4.0]))
    )
    assert read_metrics(path, Lines())[0].curves()["loss"].values.tolist() == [1.0, 4.0]
