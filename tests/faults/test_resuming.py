"""Starting again with other processes, threads or settings, or twice."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from faulty_runs import ALL, batches_of, start, train, train_each, wait
from training_runs import assert_same_tensors, losses_of, write_two_datasets

from pretraining.files import with_checksum


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of data in two datasets."""
    root = write_two_datasets(tmp_path_factory.mktemp("data"))
    return [f"data_path={root}", "datasets=first,second", "weights=3,1", "sep_token=0", "logical_shards=8"]


def test_4_then_2_then_1_then_3_processes_see_the_same_global_batches(data: list[str], tmp_path: Path) -> None:
    common = [*data, "num_steps=8", "document_mask=true"]
    paths = {name: tmp_path / name for name in ("whole", "moved", "rows of whole", "rows of moved")}
    for path in paths.values():
        path.mkdir()
    flags = [*common, "global_batch_size=10", f"ckpt_save_path={paths['whole']}"]
    train(flags, (ALL, "note_batches", str(paths["rows of whole"])), processes=1)
    for world in (4, 2, 1, 3):
        size = ["global_batch_size=10"] if world == 4 else []  # kept from the checkpoint after that
        flags = [*common, *size, "run_steps=2", f"ckpt_save_path={paths['moved']}"]
        train(flags, (ALL, "note_batches", str(paths["rows of moved"])), processes=world)
    expected, found = (
        {step: sorted(rows) for step, rows in batches_of(paths[f"rows of {name}"]).items()}
        for name in ("whole", "moved")
    )
    assert found == expected and len(found) == 8
    assert all(len(rows) == len(set(rows)) == 10 for rows in found.values())
    assert losses_of(paths["moved"]) == pytest.approx(losses_of(paths["whole"]), rel=1e-4)


def test_any_number_of_workers_and_steps_in_flight_resumes_bit_for_bit(data: list[str], tmp_path: Path) -> None:
    common = [*data, "num_steps=8", "bad_documents=quarantine"]
    runs = [[*common, "num_workers=2", f"ckpt_save_path={tmp_path / 'whole'}"]]
    for workers in (3, 0, 1, 4):
        runs.append([*common, f"num_workers={workers}", "run_steps=2", f"ckpt_save_path={tmp_path / 'stopped'}"])
    train_each([(run, []) for run in runs])
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "whole")
    assert_same_tensors(*(tmp_path / name / "checkpoints" / "step_8_ckp" for name in ("stopped", "whole")))


@pytest.mark.thorough
def test_incompatible_settings_are_refused_with_the_difference_and_others_are_logged(
    data: list[str], tmp_path: Path
) -> None:
    common = [*data, f"ckpt_save_path={tmp_path / 'run'}"]
    refused = ["vocab_size=80", "hidden_size=64", "seq_length=16", "seed=7", "sep_token=1"]
    allowed = ["num_steps=20", "learning_rate=0.002", "warmup_steps=3", "weight_decay=0", "batch_size=4"]
    runs = [[*common, "num_steps=10", "run_steps=2"]]
    runs += [[*common, "num_steps=10", change] for change in refused]
    runs += [[*common, *allowed, "run_steps=1", "sharding_strategy=ddp"], [*common, *allowed, "run_steps=1"]]
    ended = [first for first, _ in train_each([(run, []) for run in runs])]
    for each, change in zip(ended[1:], refused, strict=False):
        assert each.status == 1 and each.stderr.count("error:") == 1
        assert change.partition("=")[0] in each.stderr
    said, last = (
        [line.strip() for line in start.output.splitlines() if "changed from" in line] for start in ended[-2:]
    )
    assert said == [
        "num_steps changed from 10 to 20",
        "sharding_strategy changed from fsdp to ddp",
        "learning_rate changed from 0.001 to 0.002",
        "weight_decay changed from 0.1 to 0.0",
        "warmup_steps changed from none to 3",
    ]
    assert "step 3/20" in ended[-2].output and last == ["sharding_strategy changed from ddp to fsdp"]


@pytest.mark.parametrize(
    ("recipes", "named"),
    [
        # Two that would train on, one that would hang, and a path: it may differ, but not whether there is one.
        (
            [
                {"adam_beta2": 0.95, "skip_samples": [], "sharding_strategy": "fsdp", "tokenizer_path": None},
                {"adam_beta2": 0.9, "skip_samples": ["0-3"], "sharding_strategy": "ddp", "tokenizer_path": "a.json"},
            ],
            True,
        ),
        ([{"index_path": "1", "cpu_threads": 1}, {"index_path": "2", "cpu_threads": 2}], False),
    ],
    ids=["settings", "paths and threads"],
)
def test_recipes_of_nodes_may_differ_in_paths_and_threads_alone(
    recipes: list[dict[str, object]], named: bool, tmp_path: Path
) -> None:
    for rank, recipe in enumerate(recipes):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "recipe.yaml").write_text(json.dumps(recipe))
    flags = ["recipe=recipe.yaml", "num_steps=2", "checkpoint_interval=0", f"ckpt_save_path={tmp_path / 'run'}"]
    ended = train(flags, (ALL, "work_in_own_folder", str(tmp_path)), status=int(named))
    errors = [line for each in ended for line in each.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == named == (not (tmp_path / "run").exists())
    for error in errors:
        assert all(name in error for name in recipes[0]) and "ranks [0]" in error and "ranks [1]" in error
        assert "learning_rate" not in error


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A pipe that a run opens for writing at a step, and then for reading."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


SAVED_EACH_STEP = ["num_steps=6", "checkpoint_interval=1"]


@pytest.mark.parametrize(("run", "status"), [("run", 1), ("../run", 0)])
def test_nodes_without_a_shared_run_folder_are_refused_at_the_start(run: str, status: int, tmp_path: Path) -> None:
    for rank in "01":
        (tmp_path / rank).mkdir()
    ended = train(["num_steps=2", f"ckpt_save_path={run}"], (ALL, "work_in_own_folder", str(tmp_path)), status=status)
    errors = [line for each in ended for line in each.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == status and list((tmp_path / "0").iterdir()) == list((tmp_path / "1").iterdir()) == []
    for error in errors:
        assert f"{tmp_path}/1/run" in error and "on a disk that all nodes share" in error
    assert status == 1 or (tmp_path / "run" / "checkpoints" / "step_2_ckp").is_dir()


def test_a_second_run_on_the_folder_is_refused_while_the_first_one_lives(tmp_path: Path, gate: Path) -> None:
    flags = [*SAVED_EACH_STEP, f"ckpt_save_path={tmp_path / 'run'}"]
    first = start(flags, (0, "wait_at_step", 4, str(gate)))
    try:
        gate.read_text()  # comes when the step is reached
        errors = "".join(each.stderr for each in train(flags, status=1))
        assert errors.count("error:") == 1 and str(first[0].pid) in errors
        gate.write_text("")
    finally:
        statuses = [each.status for each in wait(first)]
    assert statuses == [0, 0]
    assert (tmp_path / "run" / "checkpoints" / "step_6_ckp" / "manifest.json").is_file()


def test_a_killed_run_is_resumed_at_once_and_one_that_lost_its_lease_commits_nothing(
    tmp_path: Path, gate: Path
) -> None:
    lease = tmp_path / "run" / "lease.json"
    flags = [*SAVED_EACH_STEP, f"ckpt_save_path={tmp_path / 'run'}"]
    train(flags, (ALL, "in_step", 4, "SIGKILL"), status=-9)
    assert lease.exists()
    slow = start(flags, (0, "wait_at_step", 5, str(gate)))
    gate.read_text()
    # Another machine's run takes over, as it does when this one was not heard of for a minute.
    taken = {**json.loads(lease.read_text()), "host": "node7", "token": "another"}
    del taken["checksum"]
    lease.write_text(json.dumps(with_checksum(taken)))
    gate.write_text("")
    ended = wait(slow)
    assert [each.status for each in ended] == [1, 1]
    assert "step_3_ckp, step 3" in ended[0].output and "on node7" in ended[0].output
    committed = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert "step_4_ckp" in committed and "step_5_ckp" not in committed
    assert lease.exists()  # it is the other one's


def test_the_time_in_a_path_is_the_same_on_every_rank_and_the_same_again_for_a_restart(tmp_path: Path) -> None:
    pattern = f"ckpt_save_path={tmp_path}/try.{{timestamp}}"
    flags = ["num_steps=4", pattern]
    train_each([([*flags, *more], []) for more in (["run_steps=2"], [], [], ["learning_rate=0.5"])])
    folders = sorted(tmp_path.glob("try.*"))
    assert [len(losses_of(folder)) for folder in folders] == [4, 4, 4]  # interrupted and gone on with, anew, changed
