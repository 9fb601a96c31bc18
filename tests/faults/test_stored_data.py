"""Runs on data in an object store: kills, moves, machines without a shared disk, and commands that need no store."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_runs import train
from helpers import PATIENCE_SECONDS, ROOT, free_ports, plain_environment, run_command
from object_store import CREDENTIALS, ObjectStore, running_store
from training_runs import TINY, assert_same_tensors, losses_of, metrics_of

from pretraining.cli import main
from pretraining.tools.command_settings import PrepareConfig
from pretraining.tools.prepare.prepare import prepare

COMMON = ["num_steps=8", "checkpoint_interval=2", "vocab_size=400", "logical_shards=8", "held_out_fraction=0.4"]
COMMON += ["eval_interval=4", "eval_batches=2"]


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with running_store() as store:
        yield store


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, server: ObjectStore) -> Path:
    """Prepared text, `text`, and an evaluation set, `apart`; also in the store as `tokens`."""
    folder = tmp_path_factory.mktemp("prepared")
    documents = [path.read_text() for path in sorted((ROOT / "pretraining" / "data").rglob("*.py"))]
    for name, part in (("text", documents[6:]), ("apart", documents[:6])):
        (folder / name).mkdir()
        for number, document in enumerate(part):
            (folder / name / f"{number}.txt").write_text(document)
        prepare(
            PrepareConfig(
                input_path=(str(folder / name),),
                output_path=str(folder / "tokens"),
                dataset=name,
                vocab_size=None if name == "apart" else 400,
                tokens_per_file=20_000,
                num_workers=1,
            )
        )
    server.upload(folder / "tokens", "tokens")
    return folder / "tokens"


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the disk."""
    run = tmp_path_factory.mktemp("disk") / "run"
    train([*COMMON, f"data_path={data}", "datasets=text", f"eval_datasets={data}/apart", f"ckpt_save_path={run}"])
    return run


def in_store(server: ObjectStore, run: Path, *more: str) -> list[str]:
    sets = server.address("tokens/apart")
    places = [f"data_path={server.address('tokens')}", "datasets=text", f"eval_datasets={sets}"]
    return [*COMMON, *places, f"ckpt_save_path={run}", *more]


def train_on_two_machines(flags: list[str], folder: Path, status: int) -> list[str]:
    """Run a process on each of two machines with a cache folder of their own, `machine0` and `machine1`."""
    (port,) = free_ports(1)
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    processes = []
    for rank in range(2):
        own = {"RANK": str(rank), "MASTER_PORT": str(port), "XDG_CACHE_HOME": str(folder / f"machine{rank}")}
        line = [sys.executable, str(ROOT / "main_training.py"), *TINY, "batch_size=2", *flags, "bos_token=1"]
        environment = plain_environment({**common, **own})
        processes.append(
            subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [status, status], "".join(outputs)
    return outputs


def assert_same_run(run: Path, expected: Path) -> None:
    assert losses_of(run) == losses_of(expected)
    assert metrics_of(run, "evaluation_loss") or metrics_of(expected, "evaluation_loss") == []
    for name in ("evaluation_loss", "evaluation_loss/apart"):
        values = [[each.get(name) for each in metrics_of(each_run, "evaluation_loss")] for each_run in (run, expected)]
        assert values[0] == values[1]
    assert_same_tensors(run / "checkpoints" / "step_8_ckp", expected / "checkpoints" / "step_8_ckp")


@pytest.mark.thorough
@pytest.mark.parametrize("cache", ["folder", "memory"])
def test_a_run_killed_in_a_fetch_resumes_and_equals_one_on_a_disk(
    cache: str, tmp_path: Path, server: ObjectStore, data: Path, expected: Path
) -> None:
    more = [f"data_cache_path={tmp_path / 'cache'}"] if cache == "folder" else ["data_cache_size=100MB"]
    flags = in_store(server, tmp_path / "run", *more)
    train([*flags, "run_steps=2"])
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    ended = train(flags, (1, "in_fetch", 2, "SIGKILL"), status=None)
    assert -9 in [each.status for each in ended]
    train(flags)
    assert_same_run(tmp_path / "run", expected)
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").is_file()


@pytest.mark.thorough
def test_machines_without_a_shared_disk_get_the_index_from_the_first(
    tmp_path: Path, server: ObjectStore, data: Path, expected: Path
) -> None:
    outputs = train_on_two_machines(in_store(server, tmp_path / "run"), tmp_path, status=0)
    assert "indexing dataset 'text'" in outputs[0] and "indexing dataset" not in outputs[1]
    indices = [sorted((tmp_path / f"machine{rank}").rglob("*.index")) for rank in range(2)]
    assert [path.name for path in indices[0]] == [path.name for path in indices[1]] and len(indices[0]) == 2
    assert indices[0][0].read_bytes() == indices[1][0].read_bytes()


@pytest.mark.thorough
def test_a_machine_that_cannot_keep_the_index_is_one_error_on_both(
    tmp_path: Path, server: ObjectStore, data: Path
) -> None:
    (tmp_path / "machine1").touch()
    outputs = train_on_two_machines(in_store(server, tmp_path / "run"), tmp_path, status=1)
    problem = r"error: the index of dataset 'text' cannot be written: \S+/machine1/\S+ \(Not a directory\)"
    assert re.search(problem, "".join(outputs)), "".join(outputs)


@pytest.mark.thorough
def test_commands_after_a_run_need_no_store_and_others_take_its_address(
    tmp_path: Path, server: ObjectStore, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(in_store(server, run), processes=1)
    server.fault(b"GET /", "403", times=10**9)
    server.fault(b"HEAD /", "403", times=10**9)
    try:
        main(["export", str(run), str(tmp_path / "exported"), "--dtype=float32"])
        assert (tmp_path / "exported" / "tokenizer.json").read_bytes() == (data / "tokenizer.json").read_bytes()
        main(["sample", str(run), "--prompt=def", "--max_new_tokens=3"])
    finally:
        server.heal()
    address = server.address("tokens")
    main(["verify", f"--data_path={address}"])
    main(["inspect", str(run), "--step=3", "--text"])
    shown = capsys.readouterr().out
    assert "(all below 400; checksums as in prepare.json)" in shown
    assert re.search(r"^  s3://bucket/tokens/text/part_\S+.arrow  row \d+  tokens \d+-\d+$", shown, re.MULTILINE)
    sets = server.address("tokens/apart")
    flags = [f"--ckpt_load_path={run}", "--eval_only=true", f"--eval_datasets={sets}", "--ckpt_save_path=none"]
    done = run_command([sys.executable, ROOT / "main_training.py", *flags, "--tracker=none"], CREDENTIALS)
    assert "apart" in done.stdout
    dry = [*TINY, *in_store(server, tmp_path / "dry")]
    done = run_command([sys.executable, ROOT / "main_training.py", *dry, "dry_run=true"], CREDENTIALS)
    assert "s3://bucket/tokens/text" in done.stdout
    assert not (tmp_path / "dry").exists()
