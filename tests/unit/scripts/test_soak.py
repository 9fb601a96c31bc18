"""soak.py: what is different at the end of two runs, what a kill has hit, and which promises are looked at after it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.checkpoint.examples import manifest_of, save, tensors

from pretraining.checkpoint.manifest import BEST, CHECKPOINTS, checkpoint_path
from pretraining.checkpoint.writer import plan_save, remove_checkpoint, save_checkpoint
from scripts import soak, soak_compare, soak_job

pytestmark = pytest.mark.usefixtures("single_process")


def write_run(
    run: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda _: None, loss: float = 3.0, **more: Any
) -> Path:
    """A run of two steps, as far as it is compared; `change` is made to what its last checkpoint holds."""
    save(run, 1)
    saved = tensors(2.0)
    change(saved)
    save_checkpoint(checkpoint_path(run, 2), plan_save(saved), manifest_of(2, **more))
    (run / CHECKPOINTS / BEST).symlink_to("step_2_ckp")
    lines: list[dict[str, Any]] = [
        {"step": 1, "loss": 4.0},
        {"step": 2, "loss": loss, "step_seconds": 0.1},
        {"step": 2, "evaluation_loss": 5},
    ]
    (run / "logs").mkdir()
    write_lines(run, lines)
    return run


def write_lines(run: Path, lines: list[dict[str, Any]]) -> None:
    (run / "logs" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def smallest_change(saved: dict[str, torch.Tensor]) -> None:
    saved["lm_head.weight"][3] = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))


def test_runs_that_ended_alike_differ_in_nothing(tmp_path: Path) -> None:
    assert soak_compare.differences(write_run(tmp_path / "a"), write_run(tmp_path / "b")) == []


def test_a_single_bit_of_the_last_checkpoint_is_named_and_is_rounding_where_layouts_change(tmp_path: Path) -> None:
    reference, run = write_run(tmp_path / "a"), write_run(tmp_path / "b", smallest_change)
    (fault,) = soak_compare.differences(reference, run)
    assert fault.startswith("step_2_ckp: lm_head.weight differs in 1 of 4 elements")
    assert soak_compare.differences(reference, run, exact=False) == []


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda saved: saved.update({"lm_head.weight": -saved["lm_head.weight"]}), "lm_head.weight differs in 4 of 4"),
        (lambda saved: saved["lm_head.weight"].fill_(float("nan")), "lm_head.weight differs in 4 of 4 elements"),
        (lambda saved: saved.pop("lm_head.weight"), "it holds other tensors"),
        (lambda saved: saved.update({"lm_head.weight": torch.ones(5)}), "it holds other tensors"),
        (lambda saved: saved.update({"lm_head.weight": torch.full((4,), 2).bfloat16()}), "lm_head.weight differs"),
    ],
    ids=["values", "nan", "missing", "shape", "type"],
)
def test_other_tensors_are_named(
    change: Callable[[dict[str, torch.Tensor]], object],
    fault: str,
    exact: bool,
    tmp_path: Path,
) -> None:
    faults = soak_compare.differences(write_run(tmp_path / "a"), write_run(tmp_path / "b", change), exact)
    assert len(faults) == 1 and fault in faults[0]


def test_other_metrics_are_named_and_lines_that_are_missing_or_there_twice(tmp_path: Path) -> None:
    reference, run = write_run(tmp_path / "a"), write_run(tmp_path / "b", loss=3.0000000001)
    differences = soak_compare.differences
    assert differences(reference, run) == ["metrics.jsonl, report of step 2: loss is 3.0000000001 in place of 3.0"]
    assert differences(reference, run, exact=False) == []
    write_lines(run, [{"step": 1, "loss": 4.0}, {"step": 1, "loss": 4.0}, {"step": 2, "loss": 3.0}])
    assert differences(reference, run, exact=False) == [
        "metrics.jsonl, report of step 1: 2 lines in place of 1",
        "metrics.jsonl, evaluation of step 2: 0 lines in place of 1",
    ]


def test_other_manifests_another_best_and_checkpoints_that_are_missing_or_too_many_are_named(tmp_path: Path) -> None:
    reference, run = write_run(tmp_path / "a"), write_run(tmp_path / "b", evaluation_loss=2.5)
    differences = soak_compare.differences
    assert differences(reference, run) == ["step_2_ckp: evaluation_loss is 2.5 in place of None"]
    more = write_run(tmp_path / "c")
    save(more, 0)
    (more / CHECKPOINTS / BEST).unlink()
    (more / CHECKPOINTS / BEST).symlink_to("step_1_ckp")
    assert differences(reference, more) == [
        "checkpoints of steps [0, 1, 2] are kept in place of [1, 2]",
        "the best checkpoint is step_1_ckp in place of step_2_ckp",
    ]
    less = tmp_path / "d"
    write_run(less)
    remove_checkpoint(checkpoint_path(less, 2))
    assert differences(reference, less) == ["there is no checkpoint of the last step, 2"]


def test_after_a_kill_every_checkpoint_must_be_sound_best_lead_to_one_and_the_newest_be_no_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "faults_of", lambda path, threads: [])
    run = write_run(tmp_path / "run")
    soak.check_checkpoints(run, before=2)
    with pytest.raises(soak.Broken, match="was of step 3, and is now of 2"):
        soak.check_checkpoints(run, before=3)
    remove_checkpoint(checkpoint_path(run, 2))
    with pytest.raises(soak.Broken, match="best leads to step_2_ckp, which is no checkpoint"):
        soak.check_checkpoints(run, before=1)
    monkeypatch.setattr(soak, "faults_of", lambda path, threads: [f"{path.name} is damaged"])
    with pytest.raises(soak.Broken, match="step_1_ckp is damaged"):
        soak.check_checkpoints(run, before=1)


@pytest.mark.parametrize(
    ("committed", "unfinished", "steps", "place"),
    [
        ((), (), (), "in start-up"),
        ((3,), ("step_6_ckp.old.tmp",), (), "in start-up"),
        ((3,), ("step_6_ckp.old.tmp",), (4,), "between saves"),
        ((3,), ("step_6_ckp.old.tmp", "step_6_ckp.new.tmp"), (4, 5, 6), "during a save"),
        ((3,), ("step_4_ckp.preempt.new.tmp",), (4,), "during a save"),
        ((3, 6), ("step_3_ckp.new.tmp",), (4, 5, 6), "while old checkpoints are removed"),
        ((6, 9), (), (7, 8, 9), "after the last save"),
        ((6, 9), (), (), "in start-up"),
    ],
)
def test_what_a_kill_hits_shows_in_the_runs_folder(
    committed: tuple[int, ...],
    unfinished: tuple[str, ...],
    steps: tuple[int, ...],
    place: str,
    tmp_path: Path,
) -> None:
    begun = soak_job.View(frozenset({"step_3_ckp"}), frozenset({"step_6_ckp.old.tmp"}), ())
    for name in (*(f"step_{step}_ckp" for step in committed), *unfinished, BEST):
        (tmp_path / CHECKPOINTS / name).mkdir(parents=True)
    log = tmp_path / "log"
    log.write_text("start       at step 3\n" + "".join(f"step {step}/9  loss 1\n" for step in steps))
    view = soak_job.View.of(tmp_path, log)
    assert view.steps == steps and view.place(begun, last_step=9) == place


def test_a_shot_waits_for_its_event() -> None:
    job = soak_job
    begun = job.View(frozenset({"step_3_ckp"}), frozenset({"step_6_ckp.old.tmp"}), ())
    view = job.View(frozenset({"step_3_ckp", "step_6_ckp"}), frozenset({"step_8_ckp.new.tmp"}), (4, 5, 6, 7))

    def happened(event: str, count: int, last_step: int = 40) -> bool:
        result: bool = view.has_happened(job.Shot("all", 0, event, count, 0.0), begun, last_step)
        return result

    assert happened("start-up", 1)
    assert happened("step", 4) and not happened("step", 5)
    assert happened("save", 2) and not happened("save", 3)
    assert happened("commit", 1) and not happened("commit", 2)
    assert happened("save", 3, last_step=8)  # there will be no third
