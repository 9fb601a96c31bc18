"""Whole runs in this process with evaluations: several sets, choice of the best checkpoint, early stopping."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from training_runs import metrics_of, status_of, write_dataset, write_two_datasets
from unit.train import whole_runs
from unit.train.whole_runs import checkpoint, damage

from pretraining.checkpoint.manifest import Manifest
from pretraining.checkpoint.run_folder import read_manifest
from pretraining.cli import main
from pretraining.errors import CheckpointError, ConfigError, DataError, Preempted, PretrainError
from pretraining.train.plan import recorded_evaluation

SETS = ("first", "second", "books")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two training datasets, and the folder of a third one beside them."""
    folder = tmp_path_factory.mktemp("evaluation")
    write_dataset(folder / "books", documents=50, seed=2)
    return write_two_datasets(folder / "data")


def flags(data: Path, *more: str) -> list[str]:
    given = [f"data_path={data}", "sep_token=0", "logical_shards=8", "eval_interval=2", "eval_batches=2"]
    given += ["held_out_fraction=0.2", f"eval_datasets={data.parent}/books", "global_batch_size=4"]
    names = {flag.partition("=")[0] for flag in more}
    return [*(flag for flag in given if flag.partition("=")[0] not in names), *more]


def start(run: Path, data: Path, *more: str) -> None:
    whole_runs.start(run, *flags(data, *more))


def refusal(run: Path, data: Path, *more: str) -> PretrainError:
    return whole_runs.refusal(run, *flags(data, *more))


def evaluations(run: Path) -> list[dict[str, Any]]:
    return metrics_of(run, "evaluation_loss")


@pytest.fixture(scope="module")
def trained(data: Path) -> Path:
    """A run of 4 steps, evaluated and saved at steps 2 and 4."""
    start(data.parent / "trained", data, "checkpoint_interval=2")
    return data.parent / "trained"


def evaluated(run: Path, data: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    """Return the JSON that `--eval_only` prints after the mean scores and those per set."""
    capsys.readouterr()
    start(run, data, "eval_only=true", *more)
    *_, last = lines = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(last)
    begin = next(number for number, line in enumerate(lines) if line.startswith("evaluation_loss "))
    sets = [line.split()[0] for line in lines[begin + 1 : -1]]
    assert sets == (list(found["sets"]) if len(found["sets"]) > 1 else [])
    return found


def test_eval_only_has_the_results_of_the_run_and_writes_nothing(
    trained: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last, manifest = evaluations(trained)[-1], read_manifest(checkpoint(trained, 4))
    for name in ("", *(f"/{each}" for each in SETS)):
        assert last[f"evaluation_perplexity{name}"] == pytest.approx(math.exp(last[f"evaluation_loss{name}"]))
    weights = manifest.data["phases"][0]["weights"]
    share = {name: weights[name] / sum(weights.values()) / 2 for name in weights} | {"books": 1 / 2}
    mean = sum(share[name] * last[f"evaluation_loss/{name}"] for name in SETS)
    assert last["evaluation_loss"] == manifest.evaluation_loss == pytest.approx(mean, rel=1e-6)
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    exported = tmp_path / "exported"
    main(["export", str(trained), f"output_path={exported}", "dtype=float32"])
    for place in (trained, trained / "checkpoints/best", checkpoint(trained, 4), exported):
        found = evaluated(tmp_path / "unused", data, capsys, f"ckpt_load_path={place}")
        assert found["evaluation_loss"] == pytest.approx(last["evaluation_loss"], rel=1e-6), place
        for name in SETS:
            assert found["sets"][name]["loss"] == pytest.approx(last[f"evaluation_loss/{name}"], rel=1e-6)
            assert found["sets"][name]["token_accuracy"] == last[f"evaluation_token_accuracy/{name}"]
            assert found["sets"][name]["tokens"] == 2 * 4 * 32 / (1 if name == "books" else 2)  # whatever their weights
    assert evaluated(trained, data, capsys)["step"] == 4
    # An export is evaluated without training data.
    alone = [f"eval_datasets={data.parent}/books,{data}/first", f"ckpt_load_path={exported}", "eval_only=true"]
    main(["train", *alone, "seq_length=32", "sep_token=0", "logical_shards=8", "mixed_precision=false"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["sets"].keys() == {"books", "first"} and found["step"] == 0
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before
    assert not (tmp_path / "unused").exists()


def test_an_average_is_evaluated_on_what_its_run_has_held_out(
    trained: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = checkpoint(trained, 4)
    main(["average", str(newest), str(checkpoint(trained, 2)), "--weights=1,0", f"--output_path={tmp_path / 'same'}"])
    place, wanted = f"ckpt_load_path={tmp_path / 'same'}", evaluations(trained)[-1]["evaluation_loss"]
    for more in ([], ["batch_size=1", "global_batch_size=8"]):  # the recorded number of sequences counts
        assert evaluated(tmp_path / "none", data, capsys, place, *more)["evaluation_loss"] == pytest.approx(
            wanted, rel=1e-6
        )
    error = refusal(tmp_path / "none", data, "eval_only=true", place, "held_out_fraction=0.5")
    assert "includes training documents of the run" in str(error)


def test_the_best_checkpoint_is_that_of_the_set_that_decides(data: Path, tmp_path: Path) -> None:
    start(tmp_path, data, "best_by=books")
    manifest = read_manifest(checkpoint(tmp_path, 4))
    assert manifest.evaluation_loss == evaluations(tmp_path)[-1]["evaluation_loss/books"]
    assert manifest.best_evaluation_loss is not None
    # Another set decides now, so the earlier best loss does not count.
    start(tmp_path, data, "best_by=first", "num_steps=6", "eval_interval=6", "learning_rate=1e-30")
    last = read_manifest(checkpoint(tmp_path, 6))
    assert last.evaluation_loss == last.best_evaluation_loss == evaluations(tmp_path)[-1]["evaluation_loss/first"]
    assert (tmp_path / "checkpoints" / "best").resolve() == checkpoint(tmp_path, 6)


def test_a_run_stops_early_with_a_message_and_resumes_with_a_larger_limit(data: Path, tmp_path: Path) -> None:
    still = ("num_steps=20", "learning_rate=0", "report_interval=4")  # so the first evaluation is the best
    stopping = "early_stopping_evaluations=2"
    start(tmp_path, data, *still, stopping, "run_steps=4")
    for _ in range(2):  # the second start trains nothing
        start(tmp_path, data, *still, stopping)
        status = status_of(tmp_path)
        assert (status["status"], status["step"]) == ("finished", 6) and "stopped early" in status["reason"]
    assert [line["step"] for line in metrics_of(tmp_path, "loss")] == [4, 6]  # the end is reported
    assert read_manifest(checkpoint(tmp_path, 6)).kind == "final"
    start(tmp_path, data, *still, "early_stopping_evaluations=0", "run_steps=2")
    assert status_of(tmp_path)["step"] == 8


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        (["best_by=boks"], ConfigError, "--best_by=boks is none of what evaluations find: first, second, books"),
        (["best_by=first", "eval_batches=1", "global_batch_size=1"], ConfigError, "--eval_batches"),
        (["eval_datasets=none/there"], DataError, "--eval_datasets"),
        (["eval_only=true", "ckpt_save_path=nothing/here"], CheckpointError, "--ckpt_load_path"),
        (["seq_length=4096", "held_out_fraction=0", "datasets=first", "eval_batches=1"], DataError, "one sample needs"),
        (["eval_only=true", "held_out_fraction=0.5"], ConfigError, "--held_out_fraction"),  # documents it trained on
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    trained: Path, data: Path, tmp_path: Path, more: list[str], kind: type[PretrainError], words: str
) -> None:
    error = refusal(trained if "eval_only=true" in more else tmp_path / "run", data, *more)
    assert isinstance(error, kind) and words in str(error)


def test_evaluating_alone_passes_over_a_damaged_checkpoint_and_stops_at_a_time_limit(
    trained: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(trained, tmp_path / "run", symlinks=True)
    damage(checkpoint(run, 4))
    assert evaluated(run, data, capsys)["step"] == 2
    assert isinstance(refusal(run, data, "eval_only=true", "time_limit=0.001s"), Preempted)
    assert "evaluation_loss" not in capsys.readouterr().out


def test_a_set_that_gets_no_sequence_has_no_numbers(data: Path, tmp_path: Path) -> None:
    start(tmp_path, data, "eval_batches=1", "global_batch_size=1", "num_steps=2")
    (line,) = evaluations(tmp_path)
    assert line["evaluation_loss/first"] is None and line["evaluation_loss"] > 0


@pytest.fixture(scope="module")
def unchanged(data: Path) -> Path:
    """A run of 2 steps that learns nothing, with weights 9:1 and 4 sequences per step."""
    start(data.parent / "unchanged", data, *STILL, "weights=9,1", "num_steps=2", "document_mask=true")
    return data.parent / "unchanged"


@pytest.fixture
def still(unchanged: Path, tmp_path: Path) -> Path:
    return shutil.copytree(unchanged, tmp_path / "run", symlinks=True)


STILL = ("learning_rate=0", "datasets=first,second", "early_stopping_evaluations=9")
AGAIN = "begins the search for the best checkpoint and the patience of early stopping again"


@pytest.mark.parametrize(
    ("changes", "begins_again"),
    [
        (["weights=1,9", "global_batch_size=7", "batch_size=3"], False),
        (["weights=9,1", "eval_batches=5"], False),
        (["weights=9,1", "document_mask=false"], True),
        (["weights=9,1", "eval_datasets="], True),
    ],
)
def test_row_56_the_sets_of_the_first_start_stay_and_losses_of_others_are_not_compared(
    changes: list[str], begins_again: bool, still: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    masked = [] if "document_mask=false" in changes else ["document_mask=true"]
    start(still, data, *STILL, *changes, *masked, "num_steps=4")
    assert (AGAIN in capsys.readouterr().out) == begins_again
    before, after = (read_manifest(checkpoint(still, step)) for step in (2, 4))
    first, last = evaluations(still)
    assert after.state["evaluation_sets"]["sequences"] == 8
    assert (before.decided_by == after.decided_by) != begins_again
    in_a_row = after.state["loss"]["in_a_row"]
    if begins_again:
        assert after.best_evaluation_loss == last["evaluation_loss"] and in_a_row == 0
        assert (still / "checkpoints" / "best").resolve() == checkpoint(still, 4)
    else:
        for name in ("", "/first", "/second", "/books"):
            assert last[f"evaluation_loss{name}"] == pytest.approx(first[f"evaluation_loss{name}"], rel=1e-6)


def test_an_evaluation_set_with_other_content_is_another_set(
    still: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with the size and the time of before; the first content is found again."""
    books = tmp_path / "books"
    flags = [*STILL, "weights=9,1", "document_mask=true", f"eval_datasets={books}"]
    definitions, said = [], []
    for steps, seed in ((3, 2), (4, 3), (5, 3), (6, 2)):
        shutil.rmtree(books, ignore_errors=True)
        write_dataset(books, documents=50, seed=2)
        (path,) = books.iterdir()
        if seed != 2:
            rows = pa.ipc.open_file(path).read_all()["tokens"].to_pylist()[::-1]
            with pa.ipc.new_file(path, pa.schema([("tokens", pa.list_(pa.uint16()))])) as writer:
                writer.write_table(pa.table({"tokens": pa.array(rows, pa.list_(pa.uint16()))}))
        capsys.readouterr()
        start(still, data, *flags, f"num_steps={steps}", f"index_path={tmp_path / 'index'}")
        said.append(capsys.readouterr().out)
        definitions.append(read_manifest(checkpoint(still, steps)).decided_by)
    assert definitions[0] == definitions[3] != definitions[1] == definitions[2]
    assert [AGAIN in text for text in said] == [False, True, False, True]
    assert "dataset 'books': files changed since it was indexed (changed in content: part-0.arrow)" in said[1]
    losses = [line["evaluation_loss/books"] for line in evaluations(still)[1:]]
    assert losses[0] == losses[3] != losses[1] == losses[2]


def test_an_evaluation_reads_each_sequence_of_a_set_at_most_once_for_any_batch(
    trained: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a set's own loss does not depend on the weights of training, nor on other sets."""
    found = [
        evaluated(trained, data, capsys, "eval_batches=1000", f"global_batch_size={size}", *more)
        for size, *more in ((2,), (64, "weights=3,1", "datasets=first,second"), (400, "batch_size=13"))
    ]
    for name in SETS:
        assert len({each["sets"][name]["tokens"] for each in found}) == 1
        losses = [each["sets"][name]["loss"] for each in found]
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-6), name
    assert 6_500 < sum(found[0]["sets"][name]["tokens"] for name in ("first", "second")) <= 6_872  # held out


def test_a_damaged_record_of_the_sets_is_refused(tmp_path: Path) -> None:
    for broken in ({"sequences": "8"}, {"sequences": 0}, {"sequences": 8, "weights": {"a": 1.5}}, {"weights": 3}):
        with pytest.raises(CheckpointError, match="damaged"):
            recorded_evaluation(Manifest(state={"evaluation_sets": broken}, torch_version=""))


def test_eval_only_reads_training_data_too_and_says_so(
    trained: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluated(
        trained, data, capsys, f"eval_datasets={data}/first", "datasets=first,second", "held_out_fraction=0"
    )
    assert list(found["sets"]) == ["data/first"]
    start(trained, data, "eval_only=true", f"eval_datasets={data}/first", "datasets=first,second")
    assert "overlaps the training dataset 'first'" in capsys.readouterr().out
