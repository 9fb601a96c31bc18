"""An object store that fails, and machines that are lost with their disks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_runs import ALL, train
from object_store import CREDENTIALS, ObjectStore, running_store
from tiers import first_quick
from training_runs import assert_same_tensors, checkpoints_of, losses_of

from pretraining.cli import main

COMMON = ["num_steps=6", "checkpoint_interval=2"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    train([*COMMON, f"ckpt_save_path={folder / 'run'}"])
    return folder / "run"


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with running_store() as store:
        yield store


@pytest.fixture
def store(server: ObjectStore) -> Iterator[ObjectStore]:
    yield server
    server.heal()


def flags_for(store: ObjectStore, folder: Path) -> list[str]:
    return [*COMMON, f"ckpt_save_path={folder / 'run'}", f"ckpt_mirror_path={store.address(folder.name)}"]


@pytest.mark.parametrize("killed", first_quick([0, 1], [1]))
def test_a_run_killed_in_an_upload_resumes_on_an_empty_disk(
    killed: list[int], tmp_path: Path, store: ObjectStore, expected: Path
) -> None:
    flags = flags_for(store, tmp_path)
    train([*flags, "run_steps=2"])
    ended = train(flags, *((rank, "in_upload", "step_4_ckp", "SIGKILL") for rank in killed), status=None)
    statuses = [each.status for each in ended]
    assert -9 in statuses and set(statuses) <= {-9, 1}
    assert "checkpoints/step_4_ckp/manifest.json" not in store.names(tmp_path.name)
    shutil.rmtree(tmp_path / "run")
    resumed = train(flags)[0].output
    assert f"from {tmp_path}/run/checkpoints/step_2_ckp, step 2" in resumed
    assert_same_tensors(tmp_path / "run" / "checkpoints" / "step_6_ckp", expected / "checkpoints" / "step_6_ckp")
    assert losses_of(tmp_path / "run") == losses_of(expected)
    assert "checkpoints/step_6_ckp/manifest.json" in store.names(tmp_path.name)


# The library itself tries three times, unless it is refused: one of the two processes fails.
@pytest.mark.parametrize(("action", "times"), first_quick(("cut", 6), ("away", 6), ("503", 6), ("403", 2)))
def test_a_failing_store_is_a_warning_and_the_copy_is_made_later(
    action: str, times: int, tmp_path: Path, store: ObjectStore, expected: Path
) -> None:
    before = store.met
    store.fault(b"safetensors", action, times)
    ended = train(flags_for(store, tmp_path))
    assert store.met == before + times and "trying again" in "".join(each.output for each in ended)
    assert losses_of(tmp_path / "run") == losses_of(expected)
    names = store.names(tmp_path.name)
    assert {name for name in names if "step_6_ckp" in name} == {
        f"checkpoints/step_6_ckp/{path.name}" for path in (tmp_path / "run" / "checkpoints" / "step_6_ckp").iterdir()
    }


def test_a_run_without_its_last_copy_fails_and_push_makes_it(
    tmp_path: Path, store: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.fault(b"safetensors", "403", times=10**6)
    ended = train([*flags_for(store, tmp_path), "hang_timeout=6s"], status=1)
    assert "pretrain push" in ended[0].output and CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in ended[0].output
    assert checkpoints_of(tmp_path / "run") == {"step_2_ckp", "step_4_ckp", "step_6_ckp"}
    store.heal()
    main(["push", str(tmp_path / "run")])
    assert "3 checkpoints copied, 3 are in" in capsys.readouterr().out
    for path in (path for path in (tmp_path / "run").rglob("*") if path.is_file()):
        assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode() not in path.read_bytes()


def test_an_unusable_store_is_an_error_before_anything_is_written(tmp_path: Path, store: ObjectStore) -> None:
    store.fault(b"PUT ", "403", times=10**6)
    store.fault(b"POST ", "403", times=10**6)
    ended = train(flags_for(store, tmp_path), status=1)
    assert "s3://" in ended[0].output and "parameters" not in ended[0].output
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.thorough
def test_a_preempted_run_waits_for_its_copy_only_within_the_grace_time(tmp_path: Path, store: ObjectStore) -> None:
    store.fault(b"safetensors", "away", times=10**6)
    faults = (ALL, "in_step", 4, "SIGTERM"), (ALL, "wait_for_copies_at_most", 2.0)
    ended = train(flags_for(store, tmp_path), *faults, status=75)
    assert "pretrain push" in ended[0].output
    assert any(name.endswith(".preempt") for name in checkpoints_of(tmp_path / "run"))


def test_another_start_that_takes_over_the_mirror_stops_the_run(tmp_path: Path, store: ObjectStore) -> None:
    flags = flags_for(store, tmp_path)
    train([*flags, "run_steps=2"])
    ended = train(flags, (ALL, "lose_mirror"), status=1)
    assert "belongs to another start" in ended[0].output
    assert [name for name in store.names(tmp_path.name) if "manifest" in name] == [
        "checkpoints/step_2_ckp/manifest.json"
    ]
    with store.files.open_input_stream(f"bucket/{tmp_path.name}/mirror.json") as stream:
        assert json.loads(stream.read())["writer"] == "another"
