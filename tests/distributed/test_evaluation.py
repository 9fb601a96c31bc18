"""Evaluations are the same on any number of processes, as a part of training and alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import run_forked
from helpers import free_ports
from task_files import write_tasks
from training_runs import TINY, VOCABULARY, events_of, metrics_of, train_runs, write_dataset, write_two_datasets

from pretraining.data.tokenizer import train_tokenizer

pytestmark = pytest.mark.thorough

SETS = ("first", "second", "books")
WORKER = Path(__file__).parent / "training_worker.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets to train on, and beside their folder another one."""
    root = tmp_path_factory.mktemp("evaluated")
    write_dataset(root / "books", documents=60, seed=2)
    return write_two_datasets(root / "data")


def flags(data: Path) -> list[str]:
    given = ["num_steps=4", "eval_interval=2", "eval_batches=2", "held_out_fraction=0.2", "global_batch_size=6"]
    return [*given, "batch_size=2", "weights=3,1", "datasets=first,second", f"eval_datasets={data.parent}/books"]


def evaluations(run: Path) -> dict[str, float]:
    return {
        f"{each['step']} {name}": each[name]
        for each in metrics_of(run)
        for name in each
        if name.startswith("evaluation_")
    }


def test_all_processes_stop_early_together_and_stay_stopped(data: Path, tmp_path: Path) -> None:
    more = ["early_stopping_evaluations=1", "best_by=books", "learning_rate=0", "num_steps=9", "run_steps=8"]
    train_runs(2, data, [[*flags(data), *more, f"ckpt_save_path={tmp_path}"]] * 2)
    status = json.loads((tmp_path / "run_status.json").read_text())
    assert (status["status"], status["step"], status["starts"]) == ("finished", 4, 2)
    assert status["reason"].startswith("4 of 9 steps are done: stopped early, no better loss than")
    assert "in the last evaluation, --early_stopping_evaluations=1" in status["reason"]


def samples(run: Path) -> list[tuple[int, str]]:
    return [(event["step"], event["text"]) for event in events_of(run) if event["event"] == "sample"]


def test_every_number_of_processes_finds_and_writes_the_same(data: Path, tmp_path: Path) -> None:
    train_tokenizer(["text of few words"] * 20, 270).save(tmp_path)
    texts = ["vocab_size=300", f"tokenizer_path={tmp_path}", "sample_tokens=6", "sample_at_evaluations=true"]
    texts += write_tasks(tmp_path / "tasks")
    for processes, strategy in ((1, "fsdp"), (2, "fsdp"), (4, "hsdp")):
        more = [*texts, f"sharding_strategy={strategy}", f"ckpt_save_path={tmp_path}/on_{processes}"]
        more += ["hsdp_group_size=2", "context_parallel_size=2"] if strategy == "hsdp" else []
        train_runs(processes, data, [[*flags(data), *more]])
    expected = evaluations(tmp_path / "on_1")
    assert len([name for name in expected if "_task/" not in name]) == 2 * 4 * (1 + len(SETS))
    assert len([name for name in expected if "_task/" in name]) == 2 * (4 + 3 + 3)  # with standard errors
    written = samples(tmp_path / "on_1")
    assert [step for step, _ in written] == [2, 4] and all(text for _, text in written)
    for processes in (2, 4):
        assert evaluations(tmp_path / f"on_{processes}") == pytest.approx(expected, rel=1e-4), processes
        assert samples(tmp_path / f"on_{processes}") == written
    tokens = []
    for processes, context in ((1, 1), (2, 1), (2, 2)):  # on other numbers than the run had, too
        common = [*TINY, f"data_path={data}", "sep_token=0", "logical_shards=8", *flags(data), "vocab_size=300"]
        common += ["eval_only=true", f"ckpt_load_path={tmp_path}/on_2", f"context_parallel_size={context}"]
        common += [f"tokenizer_path={tmp_path}", *write_tasks(tmp_path / "tasks")]
        out = run_forked(WORKER, processes, [json.dumps([(free_ports(1)[0], common)])]).stdout
        [found] = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
        tokens.append([each["tokens"] for each in found["sets"].values()])
        assert found["evaluation_loss"] == pytest.approx(expected["4 evaluation_loss"], rel=1e-4)
        of_tasks = {f"4 {name}": value for name, value in found.items() if name.startswith("evaluation_task/")}
        assert of_tasks == pytest.approx({name: expected[name] for name in of_tasks}, rel=1e-4) and len(of_tasks) == 10
        for name in SETS:
            assert found["sets"][name]["loss"] == pytest.approx(expected[f"4 evaluation_loss/{name}"], rel=1e-4)
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_resume_with_other_processes_and_batch_has_the_same_evaluation_loss(data: Path, tmp_path: Path) -> None:
    """Nothing is learnt, so the losses are those of the same weights; 15 sequences do not divide by 7."""
    still = [*flags(data), "learning_rate=0", "early_stopping_evaluations=9", f"ckpt_save_path={tmp_path}"]
    train_runs(1, data, [[*still, "num_steps=2", "eval_batches=3", "global_batch_size=5"]])
    train_runs(2, data, [[*still, "num_steps=4", "eval_batches=3", "global_batch_size=7", "weights=1,3"]])
    found = evaluations(tmp_path)
    for name in {each.partition(" ")[2] for each in found if "loss" in each}:
        assert found[f"4 {name}"] == pytest.approx(found[f"2 {name}"], rel=1e-6), name
    manifest = json.loads((tmp_path / "checkpoints/step_4_ckp/manifest.json").read_text())
    assert manifest["state"]["evaluation_sets"]["sequences"] == 15


def test_an_error_of_a_metric_is_the_loss_of_this_metric_alone_on_all_processes(data: Path, tmp_path: Path) -> None:
    train_tokenizer(["text of few words"] * 20, 270).save(tmp_path)
    given = write_tasks(tmp_path / "tasks")
    (tmp_path / "tasks/broken.py").write_text(
        "def process(doc, results):\n"
        "    if any(value for value, _ in results):\n"  # the model of the start knows nothing, and gives zeros
        "        raise RuntimeError('a bug of a task')\n"
        "    return {'acc': 0.0}\n"
    )
    task = json.loads((tmp_path / "tasks/small_choice.yaml").read_text())
    text = "\n".join(f"{name}: {json.dumps(value)}" for name, value in {**task, "task": "broken"}.items())
    (tmp_path / "tasks/broken.yaml").write_text(f"{text}\nprocess_results: !function broken.process\n")
    common = [*TINY, "use_dummy_dataset=true", "num_steps=2", "vocab_size=300", f"tokenizer_path={tmp_path}", given[1]]
    common = [flag for flag in common if flag != f"vocab_size={VOCABULARY}"]
    job = json.dumps([(free_ports(1)[0], [*common, "eval_tasks=broken", "ckpt_save_path=none"])])
    done = run_forked(WORKER, 2, [job], check=False)
    assert done.returncode == 0 and "step 2/2" in done.stdout, done.stdout + done.stderr
    assert "task broken: acc, acc_norm: not a number: RuntimeError: a bug of a task" in done.stderr
