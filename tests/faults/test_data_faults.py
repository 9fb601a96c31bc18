"""Token files that are damaged, or change between two starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from faulty_runs import train
from tiers import first_quick
from training_runs import VOCABULARY, losses_of, metrics_of, write_dataset

FLAGS = ["datasets=first", "sep_token=0", "logical_shards=2", "checkpoint_interval=2"]
WHOLE_PASS = "num_steps=40"  # 4 samples a step: more than there are


def part(root: Path, number: int) -> Path:
    return root / "first" / f"part-{number}.arrow"


def write_part(root: Path, number: int, rows: list[np.ndarray]) -> None:
    table = pa.table({"tokens": pa.array(rows, pa.list_(pa.uint16()))})
    with pa.ipc.new_file(part(root, number), table.schema) as writer:
        writer.write_table(table)


def read_part(root: Path, number: int) -> list[np.ndarray]:
    with pa.memory_map(str(part(root, number))) as source:
        return [np.array(row, np.uint16) for row in pa.ipc.open_file(source).read_all()["tokens"].to_pylist()]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A dataset of two files of 20 documents."""
    root = tmp_path / "data"
    write_dataset(root / "first", documents=20)
    write_part(root, 1, [np.roll(row, 1) for row in read_part(root, 0)])
    return root


def beyond_vocabulary(root: Path) -> None:
    rows = read_part(root, 1)
    rows[7][3] = VOCABULARY
    write_part(root, 1, rows)


def foreign(root: Path) -> None:
    part(root, 1).write_text("tokens\n1 2 3\n")


def short(root: Path) -> None:
    os.truncate(part(root, 1), part(root, 1).stat().st_size // 2)


def negative(root: Path) -> None:
    table = pa.table({"tokens": pa.array([[1, 2, -100, 3] * 20] * 20, pa.list_(pa.int16()))})
    for number in range(2):
        with pa.ipc.new_file(part(root, number), table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize(
    ("inflict", "vocabulary", "said"),
    [
        (beyond_vocabulary, VOCABULARY, ["part-1.arrow, row 7", "token 3", "sample ", "--vocab_size"]),
        (negative, 66_000, ["of the document is -100, but", "sample "]),  # as 16 unsigned bits it is 65,436
        (foreign, VOCABULARY, ["part-1.arrow"]),
        (short, VOCABULARY, ["part-1.arrow"]),
    ],
)
def test_a_bad_token_file_is_named_with_row_and_sample(
    inflict: Callable[[Path], None], vocabulary: int, said: list[str], data: Path, tmp_path: Path
) -> None:
    inflict(data)
    flags = [f"data_path={data}", f"ckpt_save_path={tmp_path / 'run'}", f"vocab_size={vocabulary}"]
    ended = train([*FLAGS, WHOLE_PASS, *flags], status=1)
    assert any(all(text in process.output for text in said) for process in ended), ended


def test_with_quarantine_the_run_continues_without_the_labels(data: Path, tmp_path: Path) -> None:
    beyond_vocabulary(data)
    run = tmp_path / "run"
    flags = [*FLAGS, WHOLE_PASS, f"data_path={data}", f"ckpt_save_path={run}", "bad_documents=quarantine"]
    ended = train(flags)
    assert any("part-1.arrow, row 7" in process.output for process in ended)
    assert len(losses_of(run)) == 40


def test_a_sample_that_one_rank_of_a_context_group_cannot_read_is_lost_for_the_group(tmp_path: Path) -> None:
    """Otherwise its other ranks would attend to zeros in place of the keys of this rank, and say nothing."""
    flags = ["num_steps=6", "global_batch_size=4", "held_out_fraction=0.1", "eval_interval=3"]
    flags += ["bad_documents=quarantine"]
    cases = {"one rank": (2, [1]), "both ranks": (2, [0, 1]), "one process": (1, [0]), "all is read": (2, [])}
    losses = {}
    for name, (processes, ranks) in cases.items():
        run = tmp_path / name
        shared = [f"context_parallel_size={processes}", f"ckpt_save_path={run}"]
        faults = [(rank, "unreadable_samples") for rank in ranks]
        ended = train([*flags, *shared], *faults, processes=processes)
        assert ["quarantined" in process.output for process in ended] == [rank in ranks for rank in range(processes)]
        losses[name] = [line.get("loss", line.get("evaluation_loss")) for line in metrics_of(run)]
    assert losses["one rank"] == losses["both ranks"] != losses["all is read"]
    assert losses["one rank"] == pytest.approx(losses["one process"], rel=2e-5)


def rewritten(root: Path) -> None:
    write_part(root, 1, read_part(root, 1)[::-1][:19])


def exchanged(root: Path) -> None:
    """Rewrite a file with other documents, but its size and its time."""
    before = part(root, 1).stat()
    write_part(root, 1, read_part(root, 1)[::-1])
    os.utime(part(root, 1), ns=(before.st_atime_ns, before.st_mtime_ns))
    assert part(root, 1).stat().st_size == before.st_size


CHANGES: dict[str, Callable[[Path], object]] = {
    "other documents": exchanged,
    "a new file": lambda root: shutil.copy(part(root, 0), part(root, 2)),
    "a file less": lambda root: part(root, 1).unlink(),
    "a rewritten file": rewritten,
}


@pytest.mark.parametrize("change", first_quick(*CHANGES))
def test_a_changed_dataset_is_refused_with_the_difference_and_resumes_when_restored(
    change: str, data: Path, tmp_path: Path
) -> None:
    run, kept = tmp_path / "run", tmp_path / "kept"
    shutil.copytree(data, kept)
    flags = [*FLAGS, "num_steps=8", f"data_path={data}", f"ckpt_save_path={run}"]
    train([*flags, "run_steps=4"])
    CHANGES[change](data)
    ended = train(flags, status=1)
    assert "dataset 'first'" in ended[0].output and "part-" in ended[0].output
    shutil.rmtree(data)
    kept.rename(data)
    train(flags)
    assert len(losses_of(run)) == 8
