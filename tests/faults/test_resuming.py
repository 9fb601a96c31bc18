"""Starting again with other processes, threads or settings, or twice."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from faults.forked_job import kill, run_job, start_job, wait
from training_runs import assert_same_tensors, losses_of, write_two_datasets


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of data in two datasets."""
    root = write_two_datasets(tmp_path_factory.mktemp("data"))
    return [f"data_path={root}", "datasets=first,second", "weights=3,1", "sep_token=0", "logical_shards=8"]


def rows_of(notes: Path, worlds: Sequence[int]) -> dict[int, list[str]]:
    """What every step was trained on, over all ranks, in no order."""
    rows: dict[int, list[str]] = {}
    for rank in range(max(worlds)):
        for line in Path(f"{notes}.{rank}").read_text().splitlines():
            step, hashes = json.loads(line)
            rows.setdefault(step, []).extend(hashes)
    return {step: sorted(hashes) for step, hashes in rows.items()}


def test_4_then_2_then_1_then_3_processes_see_the_same_global_batches(data: list[str], tmp_path: Path) -> None:
    common = [*data, "num_steps=8", "batch_size=2", "document_mask=true"]
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    one = [*common, "global_batch_size=10", f"ckpt_save_path={whole}"]
    run_job([one], processes=1, fault=("keep_rows", str(tmp_path / "rows_whole")))
    worlds = (4, 2, 1, 3)
    for world in worlds:
        size = ["global_batch_size=10"] if world == 4 else []  # kept from the checkpoint after that
        flags = [*common, *size, "run_steps=2", f"ckpt_save_path={moved}"]
        run_job([flags], processes=world, fault=("keep_rows", str(tmp_path / "rows_moved")))
    expected, found = rows_of(tmp_path / "rows_whole", [1]), rows_of(tmp_path / "rows_moved", worlds)
    assert found == expected and len(found) == 8
    assert all(len(hashes) == len(set(hashes)) == 10 for hashes in found.values())
    assert losses_of(moved) == pytest.approx(losses_of(whole), rel=1e-4)


def test_any_number_of_workers_and_steps_in_flight_resumes_bit_for_bit(data: list[str], tmp_path: Path) -> None:
    common = [*data, "num_steps=8", "batch_size=2", "bad_documents=quarantine"]
    runs = [[*common, "num_workers=2", f"ckpt_save_path={tmp_path / 'whole'}"]]
    for workers in (3, 0, 1, 4):
        runs.append([*common, f"num_workers={workers}", "run_steps=2", f"ckpt_save_path={tmp_path / 'stopped'}"])
    run_job(runs)
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "whole")
    assert_same_tensors(*(tmp_path / name / "checkpoints" / "step_8_ckp" for name in ("stopped", "whole")))


@pytest.mark.thorough
def test_incompatible_settings_are_refused_with_the_difference_and_others_are_logged(
    data: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    common = [*data, "batch_size=2", f"ckpt_save_path={run}"]
    refused = ["vocab_size=80", "hidden_size=64", "seq_length=16", "seed=7", "sep_token=1"]
    allowed = ["num_steps=20", "learning_rate=0.002", "warmup_steps=3", "weight_decay=0", "batch_size=4"]
    runs = [[*common, "num_steps=10", "run_steps=2"]]
    runs += [[*common, "num_steps=10", change] for change in refused]
    runs += [[*common, *allowed, "run_steps=1", "sharding_strategy=ddp"], [*common, *allowed, "run_steps=1"]]
    output = run_job(runs)[0].output.split("--- [")[1:]
    for text, change in zip(output[1:], refused, strict=False):
        assert "--- status 1" in text and text.count("error:") == 1
        assert change.partition("=")[0] in text[text.index("error:") :]
    said = [line.strip() for line in output[-2].splitlines() if "changed from" in line]
    assert said == [
        "num_steps changed from 10 to 20",
        "learning_rate changed from 0.001 to 0.002",
        "weight_decay changed from 0.1 to 0.0",
        "warmup_steps changed from none to 3",
    ]
    assert "step 3/20" in output[-2] and "changed from" not in output[-1]


def test_a_second_run_on_the_folder_is_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    flags = ["num_steps=6", "batch_size=2", "checkpoint_interval=1", f"ckpt_save_path={tmp_path / 'run'}"]
    first = start_job([flags], fault=("wait_at_step", 3, str(gate)))
    try:
        gate.read_text()  # comes when the step is reached
        ended = run_job([flags], check=False)
        assert [each.status for each in ended] == [1, 1]
        output = ended[0].output + ended[1].output
        assert output.count("error:") == 1 and str(first[0].pid) in output
        gate.write_text("")
        assert [each.status for each in wait(first)] == [0, 0]
    finally:
        kill(first)
    assert (tmp_path / "run" / "checkpoints" / "step_6_ckp" / "manifest.json").is_file()


def test_a_killed_run_is_resumed_at_once_and_one_that_lost_its_lease_commits_nothing(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    lease = tmp_path / "run" / "lease.json"
    flags = ["num_steps=6", "batch_size=2", "checkpoint_interval=1", f"ckpt_save_path={tmp_path / 'run'}"]
    fault = ("wait_at_step", 3, str(gate))
    killed = start_job([flags], fault=fault)
    gate.read_text()
    kill(killed)
    assert lease.exists()
    slow = start_job([flags], fault=("wait_at_step", 4, str(gate)))
    try:
        gate.read_text()
        # Another machine's run takes over, as it does when this one was not heard of for a minute.
        taken = {**json.loads(lease.read_text()), "host": "node7", "token": "another"}
        del taken["checksum"]  # as of an earlier version, which wrote none
        lease.write_text(json.dumps(taken))
        gate.write_text("")
        ended = wait(slow)
    finally:
        kill(slow)
    assert [each.status for each in ended] == [1, 1]
    assert "step_3_ckp, step 3" in ended[0].output and "on node7" in ended[0].output
    committed = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert "step_4_ckp" in committed and "step_5_ckp" not in committed
    assert lease.exists()  # it is the other one's


def test_the_time_in_a_path_is_the_same_on_every_rank_and_the_same_again_for_a_restart(tmp_path: Path) -> None:
    pattern = f"ckpt_save_path={tmp_path}/try.{{timestamp}}"
    flags = ["num_steps=4", "batch_size=2", pattern]
    run_job([[*flags, "run_steps=2"], flags, flags, [*flags, "learning_rate=0.5"]])
    folders = sorted(tmp_path.glob("try.*"))
    assert [len(losses_of(folder)) for folder in folders] == [4, 4, 4]  # interrupted and gone on with, anew, changed
