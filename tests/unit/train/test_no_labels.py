"""A run without a label in its batches says so and stops: only weight decay would change its weights."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from training_runs import reports_of
from unit.train.whole_runs import checkpoint, refusal, start

from pretraining.checkpoint.run_folder import read_manifest
from pretraining.errors import DataError

FLAGS = ("num_steps=20", "report_interval=2", "document_mask=true", "checkpoint_interval=2")


def write_documents(root: Path, length: int, token: int = 1) -> str:
    """Write a dataset whose documents all have this many tokens."""
    folder = root / "data" / "a"
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({"tokens": pa.array([[token] * length] * 4000, pa.list_(pa.uint16()))})
    with pa.ipc.new_file(folder / "part.arrow", table.schema) as writer:
        writer.write_table(table)
    return f"data_path={root / 'data'}"


def test_three_reports_in_a_row_without_a_label_are_an_error_also_over_a_stop_and_each_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pretraining")
    data, run = write_documents(tmp_path, 1), tmp_path / "run"
    start(run, data, *FLAGS, "run_steps=2")
    error = refusal(run, data, *FLAGS)
    assert isinstance(error, DataError) and "step 6: 3 reports in a row have no label" in str(error)
    assert "document_mask" in error.settings and "sep_token" in error.settings
    lines = [message for message in caplog.messages if "no label in this report" in message]
    assert [line.partition("  ")[0] for line in lines] == ["step 2", "step 4", "step 6"]
    assert [report["loss"] for report in reports_of(run)] == [None] * 3


@pytest.mark.parametrize(("length", "mask"), [(2, "true"), (1, "false")])
def test_documents_of_two_tokens_or_no_mask_have_labels(length: int, mask: str, tmp_path: Path) -> None:
    data = write_documents(tmp_path, length)
    start(tmp_path / "run", data, *FLAGS, "num_steps=8", f"document_mask={mask}")
    assert all(report["loss"] is not None for report in reports_of(tmp_path / "run"))
    assert "reports_without_labels" not in read_manifest(checkpoint(tmp_path / "run", 8)).state.get("report", {})


def test_skipped_updates_and_quarantined_samples_have_rules_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pretraining")
    monkeypatch.setattr("pretraining.train.step.gradient_norm", lambda *given: torch.tensor(torch.nan))
    start(tmp_path / "skips", "num_steps=8", "report_interval=1", "max_skipped_steps=0", "grad_clip_thresh=0")
    monkeypatch.undo()
    data = write_documents(tmp_path, 5, token=60_000)
    start(tmp_path / "run", data, *FLAGS, "num_steps=8", "report_interval=1", "bad_documents=quarantine")
    assert "quarantined" in caplog.text and "no label" not in caplog.text
    assert [report["loss"] for report in reports_of(tmp_path / "run")] == [None] * 8
