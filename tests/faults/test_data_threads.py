"""A data thread dies. The run stops and names the place."""

from __future__ import annotations

from pathlib import Path

import pytest
from guarded_runs import start_without_launcher
from helpers import PATIENCE_SECONDS


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("die_while_reading", ["DataError: a data-reading thread has exited", "step 3"]),
        ("fail_while_reading", ["ZeroDivisionError: division by zero", "on rank 1, reading the batch of step 3"]),
    ],
)
def test_a_dead_data_thread_stops_the_run_and_is_named(
    fault: str, said: list[str], data_path: Path, tmp_path: Path
) -> None:
    run = ["num_steps=100000", "report_interval=0", f"ckpt_save_path={tmp_path / 'run'}"]
    processes = start_without_launcher(2, data_path, fault, run)
    outputs = [process.communicate(timeout=PATIENCE_SECONDS) for process in processes]
    for part in said:
        assert part in "".join(outputs[1]), outputs[1]
    assert "another process of the job exited" in "".join(outputs[0]), outputs[0]
