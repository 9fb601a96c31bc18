"""Run folders of release 0.3.0 are resumed bit for bit, on one process and on two.

tests/golden/run is never made again. Where one of these tests fails, people's runs do not go on: the code has to read
the old names, not the folder to get new ones.

What is compared exactly, on any machine: what is restored (tensors, states of the collaborators, place in the data),
because nothing is computed with it; which tokens come next; and a resumed run with one that was not stopped, because
the same machine computes both. Losses are compared with stored ones to 1e-5 (float16: 1e-3), because kernels for other
instruction sets add in another order; bit for bit only where a small network comes to the same bits as on the machine
that stored them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from golden_runs import (
    NEXT_BATCHES,
    NEXT_STEPS,
    RUN,
    STARTS,
    STEPS,
    WITHOUT_UPDATES,
    arithmetic,
    checkpoint_at,
    continuation,
    copy_of_golden,
    digests,
    inspected,
    inspection,
    manifest_at,
    manifests,
    next_steps_runs,
    tensors_in,
    train_on,
)
from tiers import first_quick
from training_runs import losses_of

from pretraining.cli import main

NEWEST = {"sharded": 10, "full": 6}
"""Step of each run's newest checkpoint: a preemption checkpoint, and a final one."""


@dataclass(frozen=True)
class Continued:
    """What a number of processes has made of the golden folder.

    Attributes:
        processes: how many.
        golden: a copy; both runs in it went on for a step, in which no update was made.
        into: folder of the runs that went on elsewhere: `sharded` and `full` for `STEPS` steps without a stop,
            `stopped_sharded` and `stopped_full` from the middle of these, `phases` from step 4 to step 8.
        index: content and times of the index files, before and after.
        printed: by all runs.
    """

    processes: int
    golden: Path
    into: Path
    index: tuple[dict[str, Any], dict[str, Any]]
    printed: str


@pytest.fixture(scope="module", params=first_quick(2, 1))
def continued(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Continued:
    """All runs of this module on a number of processes, in one job."""
    processes, into = request.param, tmp_path_factory.mktemp("runs")
    golden = copy_of_golden(tmp_path_factory.mktemp("copy"))
    before = index_files(golden)
    whole = next_steps_runs(golden, into)
    runs = [*whole.values()]
    for name, start in STARTS.items():
        middle = into / name / "checkpoints" / f"step_{start + STEPS // 2}_ckp"
        runs.append(
            [
                *whole[name],
                f"ckpt_load_path={middle}",
                f"ckpt_save_path={into / f'stopped_{name}'}",
                f"run_steps={STEPS // 2}",
            ]
        )
    phases = [f"ckpt_load_path={checkpoint_at(golden / 'sharded', 4)}", f"ckpt_save_path={into / 'phases'}"]
    runs.append(continuation(golden, "sharded", *phases, "run_steps=4", "eval_interval=0"))
    runs += [continuation(golden, name, *WITHOUT_UPDATES, "run_steps=1") for name in NEWEST]
    printed = train_on(processes, runs)
    return Continued(processes, golden, into, (before, index_files(golden)), printed)


def index_files(golden: Path) -> dict[str, Any]:
    """Bytes, file and time of change of everything beside the token files."""
    found = [path for path in golden.glob("data/*/.index/*") if path.suffix != ".times"]  # of the copied files
    return {
        str(path.relative_to(golden)): (path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns)
        for path in found
    }


def shown_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command of `pretrain` prints."""
    main(arguments)
    return capsys.readouterr().out


def names_of(document: Any, place: str = "") -> Iterator[str]:
    """Every name in nested objects and lists, behind those that it is under."""
    entries = document.items() if isinstance(document, dict) else [("", each) for each in document]
    for name, value in entries:
        yield f"{place}/{name}"
        if isinstance(value, dict | list):
            yield from names_of(value, f"{place}/{name}")


def names_in(run: Path, step: int) -> set[str]:
    """The names that a run persists: in the checkpoint of a step, its status, its settings and the last metrics."""
    metrics = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    documents = {
        "manifest": manifest_at(run, step),
        "status": json.loads((run / "run_status.json").read_text()),
        "settings": yaml.safe_load((run / "config.yaml").read_text()),
        **{name: [line for line in metrics if name in line][-1] for name in ("loss", "evaluation_loss")},
        **{path.name: torch.load(path, weights_only=True) for path in checkpoint_at(run, step).glob("*.pt")},
    }
    return set(names_of(documents))


@pytest.mark.parametrize("name", NEWEST)
def test_the_present_code_writes_the_same_names(continued: Continued, name: str) -> None:
    """Names may be added, none is lost or changed.

    Where one changes on purpose, the code goes on reading the old one, as the other tests ask, and this one says which.
    """
    before, now = (names_in(folder / name, NEWEST[name] + more) for folder, more in ((RUN, 0), (continued.golden, 1)))
    lost = {each for each in before - now if continued.processes == 2 or "shard-00002" not in each}
    assert len(before) > 150 and not lost


def test_list_and_verify_find_every_checkpoint_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = copy_of_golden(tmp_path)
    listed = {}
    for name in NEWEST:
        rows = [json.loads(line) for line in shown_by(capsys, "list", str(golden / name), "--json").splitlines()]
        listed[name] = [(row["step"], row["kind"], row["state"], row["best"], row["tokens_seen"]) for row in rows]
        assert shown_by(capsys, "verify", str(golden / name)).count("no faults") == len(rows)
    assert listed == {
        "sharded": [
            (4, "interval", "complete", False, 384),
            (8, "interval", "complete", True, 768),
            (10, "preempt", "complete", False, 960),
        ],
        "full": [(4, "interval", "complete", False, 384), (6, "final", "complete", True, 576)],
    }


def test_inspect_shows_the_tokens_that_come_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files, rows and tokens of the step after each checkpoint are integers: the same on any machine."""
    golden, stored = copy_of_golden(tmp_path), json.loads(NEXT_BATCHES.read_text())
    steps = [(name, json.loads(path.read_text())["step"]) for name in NEWEST for path in manifests(golden / name)]
    assert {f"{name} after {step}" for name, step in steps} == stored.keys()
    for name, step in steps:
        shown = shown_by(capsys, *inspection(golden, name, step))
        assert inspected(shown, golden) == stored[f"{name} after {step}"], (name, step)


@pytest.mark.parametrize("name", NEWEST)
def test_every_tensor_is_restored_bit_for_bit(continued: Continued, name: str) -> None:
    """The loss of the one step is not finite, so its update is left out: what is saved then is what was restored."""
    before = tensors_in(checkpoint_at(RUN / name, NEWEST[name]))
    after = tensors_in(checkpoint_at(continued.golden / name, NEWEST[name] + 1))
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        assert value.dtype == after[tensor].dtype and torch.equal(value, after[tensor]), tensor


def test_every_state_is_restored(continued: Continued) -> None:
    """One step without an update is counted; the window of losses stays, and the scale of the loss is halved."""
    before = {name: manifest_at(RUN / name, step) for name, step in NEWEST.items()}
    after = {name: manifest_at(continued.golden / name, step + 1) for name, step in NEWEST.items()}
    for name in NEWEST:
        assert after[name]["state"]["spikes"] == before[name]["state"]["spikes"] and before[name]["state"]["spikes"]
        for key in ("evaluation_loss", "best_evaluation_loss", "global_batch_size", "model"):
            assert after[name][key] == before[name][key] is not None, (name, key)
        assert after[name]["tokens_seen"] == before[name]["tokens_seen"] + 6 * 16
        assert after[name]["seconds"] >= before[name]["seconds"]
    assert before["sharded"]["state"]["guards"] == {"skipped_in_a_row": 2}
    assert after["sharded"]["state"]["guards"] == {"skipped_in_a_row": 3}
    assert before["full"]["state"]["loss_scale"] == {"scale": 2.0**15, "steps": 5}
    assert after["full"]["state"]["loss_scale"] == {"scale": 2.0**14, "steps": 0}
    for name, start in STARTS.items():
        kept, went_on = (
            manifest_at(folder / name, step)["state"]
            for folder, step in ((RUN, start), (continued.into, start + STEPS))
        )
        if name == "full":
            assert went_on["loss_scale"] == {"scale": 2.0**15, "steps": kept["loss_scale"]["steps"] + STEPS}
        else:  # with the same phases as before, the window goes on
            assert went_on["spikes"]["losses"][: len(kept["spikes"]["losses"])] == kept["spikes"]["losses"]
            assert len(went_on["spikes"]["losses"]) == len(kept["spikes"]["losses"]) + STEPS


def test_a_pending_evaluation_comes_first(continued: Continued) -> None:
    """The preempted run had no time for the evaluation of step 10; the lines that it wrote stay as they are."""
    assert manifest_at(RUN / "sharded", 10)["state"]["evaluation"] == {"owed": True}
    before, after = (folder / "sharded/logs/metrics.jsonl" for folder in (RUN, continued.golden))
    assert after.read_text().startswith(before.read_text())
    added = [json.loads(line) for line in after.read_text()[len(before.read_text()) :].splitlines()]
    assert [(line["step"], "evaluation_loss" in line) for line in added] == [(10, True), (11, False), (11, True)]
    assert manifest_at(continued.golden / "sharded", 11)["state"]["evaluation"] == {"owed": False}


def test_the_place_in_the_data_is_restored(continued: Continued) -> None:
    """The step in between takes 6 samples, and in one of the runs leaves out the 3 that are skipped.

    From step 4, with the settings that the golden run had from there on, the data stands at step 8 as it did.
    """
    for name, step in NEWEST.items():
        before, after = manifest_at(RUN / name, step)["data"], manifest_at(continued.golden / name, step + 1)["data"]
        changing = {"next_sample", "counts"}
        assert {key: before[key] for key in before.keys() - changing} == {
            key: after[key] for key in before.keys() - changing
        }
        assert len(after["phases"]) == 2 and after["skip_samples"] == [[40, 43]]
        positions = [sum(count for ((_, count),) in data["counts"].values()) for data in (before, after)]
        assert positions[0] == before["next_sample"] + {"sharded": 3, "full": 0}[name]
        assert positions[1] == after["next_sample"] + 3 == {"sharded": 69, "full": 45}[name]
    then, now = manifest_at(RUN / "sharded", 8), manifest_at(continued.into / "phases", 8)
    assert len(manifest_at(RUN / "sharded", 4)["data"]["phases"]) == 1
    for key in ("data", "step", "tokens_seen", "global_batch_size"):
        assert now[key] == then[key], key
    assert losses_of(continued.into / "phases") == pytest.approx(losses_of(RUN / "sharded")[4:8], rel=1e-5)


def test_counts_of_the_status_checkpoints_and_index_are_continued(continued: Continued) -> None:
    """A preemption checkpoint goes, the best one stays, and nothing is indexed again."""
    for name, step in NEWEST.items():
        before, after = (
            json.loads((folder / name / "run_status.json").read_text()) for folder in (RUN, continued.golden)
        )
        assert after["starts"] == before["starts"] + 1 == 4
        assert (after["status"], after["step"], after["started_at_step"]) == ("finished", step + 1, step)
    checkpoints = continued.golden / "sharded" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best", "step_11_ckp", "step_4_ckp", "step_8_ckp"]
    assert (checkpoints / "best").resolve().name == "step_8_ckp"
    index_before, index_after = continued.index
    assert len(index_before) == 4 and index_after == index_before
    assert "indexing" not in continued.printed and "packing dataset" not in continued.printed


@pytest.mark.parametrize("name", STARTS)
def test_a_resumed_run_is_the_one_that_was_not_stopped(continued: Continued, name: str) -> None:
    """Both go on from the same golden checkpoint, on the same machine in the same layout: bit for bit, everywhere."""
    end, stopped = STARTS[name] + STEPS, f"stopped_{name}"
    whole, resumed = (checkpoint_at(continued.into / run, end) for run in (name, stopped))
    assert digests(tensors_in(whole)) == digests(tensors_in(resumed))
    assert losses_of(continued.into / name)[STEPS // 2 :] == losses_of(continued.into / stopped)
    of_whole, of_resumed = (manifest_at(continued.into / run, end) for run in (name, stopped))
    del of_whole["state"]["run"], of_resumed["state"]["run"]  # with the run's random ids
    for key in ("data", "state", "tokens_seen", "loss"):
        assert of_whole[key] == of_resumed[key], key


@pytest.mark.parametrize("name", STARTS)
def test_the_next_steps_are_those_of_the_code_that_wrote_it(continued: Continued, name: str) -> None:
    """To rounding on any machine; bit for bit on one that calculates as the one did that stored them."""
    document = json.loads(NEXT_STEPS.read_text())
    stored = document["next"][f"{name} on {continued.processes}"]
    losses = losses_of(continued.into / name)
    expected = [float.fromhex(loss) for loss in stored["losses"]]
    assert losses == pytest.approx(expected, rel=1e-3 if name == "full" else 1e-5)
    if arithmetic() == document["arithmetic"]:
        assert losses == expected
        assert digests(tensors_in(checkpoint_at(continued.into / name, STARTS[name] + STEPS))) == stored["tensors"]
