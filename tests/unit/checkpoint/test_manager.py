from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import PATIENCE_SECONDS
from unit.checkpoint.examples import load, manifest_of, tensors

from pretraining.best import Best, Measure
from pretraining.checkpoint import saver as saver_module
from pretraining.checkpoint.chunks import Chunk
from pretraining.checkpoint.manager import CheckpointManager
from pretraining.checkpoint.manifest import LOSS_STATE, Manifest, Stateful
from pretraining.checkpoint.run_folder import BEST, CHECKPOINTS, committed_checkpoints, read_document
from pretraining.checkpoint.saver import Saver, Staging
from pretraining.checkpoint.start_point import CheckpointRef
from pretraining.checkpoint.writer import SavePlan, WriteItem, plan_save
from pretraining.config.training import CheckpointConfig
from pretraining.durations import Duration
from pretraining.errors import CheckpointError
from pretraining.observability.events import Events
from pretraining.observability.throughput import Stopwatch
from pretraining.optim.optimizer import update
from pretraining.progress import Interval, Progress, TrainState

pytestmark = pytest.mark.usefixtures("single_process")

NEVER = Duration(0, "steps")


def every(steps: int) -> Duration:
    return Duration(steps, "steps")


def saving(interval: Duration, preempt_interval: Duration = NEVER, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(checkpoint_interval=interval, preempt_interval=preempt_interval, **more)


class Position:
    """Fake loader."""

    def state_dict(self) -> dict[str, Any]:
        return manifest_of(0).data

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("the run does this itself")


class Run:
    """Run that only saves; its tensors hold the number of the step."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig | None = None,
        asynchronous: bool = False,
        states: Mapping[str, Stateful] | None = None,
        restored: Manifest | None = None,
        own: CheckpointRef | None = None,
    ) -> None:
        self.folder = folder
        self.state = TrainState(total_steps=100, stop_step=100, tokens_per_step=10, progress=Progress(0, 0))
        settings = replace(config or saving(every(2)), ckpt_save_path=str(folder), async_save=asynchronous)
        self.parameters = {name: torch.nn.Parameter(value) for name, value in tensors(0.0).items()}
        self.saver = Saver(settings, self.parameters, torch.optim.SGD(self.parameters.values()))
        observer: Any = SimpleNamespace(stopwatch=Stopwatch(), events=Events(), last_loss=None)
        self.loss = Best(Measure("loss", "evaluation_loss", "sets"))
        parts = {LOSS_STATE: self.loss, **(states or {})}
        self.manager = CheckpointManager(
            settings, self.saver, manifest_of(0), Position(), parts, observer, self.loss, self.loss
        )
        start = CheckpointRef(folder, restored, is_own=False) if restored else own
        if start is not None:
            self.manager.restore(start)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Enter and leave the manager as the loop does."""
        with self.manager:
            yield
            self.manager.finish(self.state)

    def step(self, loss: float | None = None) -> None:
        self.state.advance(0.0)
        for parameter in self.parameters.values():
            parameter.data.fill_(self.state.step)
        self.save(loss)

    def save(self, loss: float | None = None) -> None:
        if loss is not None:
            self.loss.record(loss, self.state.step)
        self.manager.maybe_save(self.state, is_evaluated=loss is not None)

    def steps(self, count: int) -> None:
        self.state.stop_step = self.state.step + count
        for _ in range(count):
            self.step()

    @property
    def names(self) -> list[str]:
        return [each.path.name.removeprefix("step_").replace("_ckp", "") for each in committed_checkpoints(self.folder)]

    @property
    def best(self) -> str:
        return str((self.folder / CHECKPOINTS / BEST).readlink())

    def manifest(self, name: str) -> Manifest:
        return read_document(self.folder / CHECKPOINTS / name)


@pytest.fixture(autouse=True)
def all_messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pretraining")


@pytest.fixture(params=[False, True], ids=["in place", "in the background"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Run]:
    """Return a function that makes runs in one folder, which save in this thread or in the background."""
    return partial(Run, tmp_path, asynchronous=request.param)


def test_saves_come_on_the_interval_and_at_the_end_with_the_values_of_their_time(make: Callable[..., Run]) -> None:
    run = make(saving(every(3)))
    with run.training():
        run.steps(8)
    with make().training():
        pass  # no step
    assert run.names == ["3", "6", "8"] and run.manager.newest == run.folder / CHECKPOINTS / "step_8_ckp"
    for step in (3, 6, 8):
        restored = tensors(0.0)
        load(run.folder / CHECKPOINTS / f"step_{step}_ckp", restored)
        assert all(torch.equal(restored[name], value) for name, value in tensors(float(step)).items())


def test_kinds_say_why(make: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    run = make(saving(every(4), every(3)))
    run.state.total_steps = 10
    with run.training():
        for loss in (None, 3.0, None, None, 2.0, None, None, None, None, 2.5):
            run.step(loss)
    assert run.names == ["4", "5", "8", "10"] and run.best == "step_5_ckp"
    kinds = {name: run.manifest(f"step_{name}_ckp").kind for name in run.names}
    assert kinds == {"4": "interval", "5": "best", "8": "interval", "10": "final"}
    last = run.manifest("step_10_ckp")
    assert (last.best_evaluation_loss, last.evaluation_loss) == (2.0, 2.5)
    assert [line.split()[1] for line in caplog.messages] == ["2", "3", "4", "5", "6", "8", "9", "10"]


def test_the_best_loss_continues_after_a_resume(tmp_path: Path) -> None:
    first = Run(tmp_path, saving(NEVER))
    with first.training():
        first.step(2.0)
    second = Run(tmp_path, saving(NEVER), restored=first.manifest("step_1_ckp"))
    second.state.progress = first.state.progress
    with second.training():
        for loss in (2.5, math.nan, 1.5, 1.7):
            second.step(loss)
    assert second.best == "step_4_ckp" and second.names == ["4", "5"]  # step 1 was only saved as the best
    assert second.manifest("step_5_ckp").evaluation_loss == 1.7


@pytest.mark.parametrize(
    "settings", [saving(every(2)), saving(every(2), save_best=False), saving(NEVER, checkpoint_steps=(2, 4))]
)
def test_a_signal_or_a_pending_evaluation_changes_no_kind(tmp_path: Path, settings: CheckpointConfig) -> None:
    first = Run(tmp_path, settings)
    with first.training():
        first.step()
        first.state.request_stop(15)
        first.step()
    path = tmp_path / CHECKPOINTS / "step_2_ckp"
    assert read_document(path).kind == "interval"
    second = Run(tmp_path, settings, own=CheckpointRef(path, read_document(path)))
    second.state.progress = second.state.before = first.state.progress
    with second.training():
        second.save(2.0)  # as in the loop, before the first step
        found = second.manifest("step_2_ckp")
        assert (found.kind, found.evaluation_loss) == ("interval", 2.0) and second.best == "step_2_ckp"
        for loss in (None, 1.0):
            second.step(loss)
    assert second.names[:2] == ["2", "4"] and second.best == "step_4_ckp"


def test_a_user_defined_optimizer_is_saved_without_state_until_its_first_update(tmp_path: Path) -> None:
    """A skipped update is none; copies for saves in the background take the state in when it is there."""
    parameters = {"weight": torch.nn.Parameter(torch.ones(2, 2))}
    optimizer = torch.optim.Adam(parameters.values())  # without skips_on_device
    saver = Saver(saving(NEVER, ckpt_save_path=str(tmp_path)), parameters, optimizer)
    parameters["weight"].grad = torch.full((2, 2), torch.nan)
    update(optimizer, torch.tensor(True))
    staging = Staging(torch.device("cpu"))
    for is_skipped in (True, False):
        update(optimizer, torch.tensor(is_skipped))
        copied = staging.copy(plan_save(saver._tensors()))
        names = {piece.name for pieces in copied.files.values() for piece in pieces}
        assert ("optimizer.exp_avg.weight" in names) is not is_skipped


def test_save_best_can_be_turned_off(tmp_path: Path) -> None:
    run = Run(tmp_path, saving(every(2), save_best=False))
    with run.training():
        for loss in (1.0, 3.0, 2.0, None):
            run.step(loss)
    assert run.names == ["2", "4"] and run.best == "step_2_ckp"  # the only one that was evaluated itself


def test_names_that_tell_the_story_do_not_collide(tmp_path: Path) -> None:
    run = Run(tmp_path, saving(every(1), ckpt_name="tokens"))
    for step in (100_000, 100_001):
        run.state.progress = Progress(step - 1, (step - 1) * 10)
        run.step()
    names = [each.path.name for each in committed_checkpoints(tmp_path)]
    assert names == ["tokens(1.00e6)_ckpt", "tokens(1.00e6)_ckpt.step_100001"]
    again = Run(tmp_path, saving(every(1), ckpt_name="tokens"))
    again.state.progress = Progress(99_999, 999_990)
    again.step()
    assert [each.path.name for each in committed_checkpoints(tmp_path)] == names


class Counter:
    """Component with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = int(state["count"])


def test_states_of_components_are_restored_and_missing_or_unknown_ones_are_no_error(tmp_path: Path) -> None:
    counter = Counter()
    run = Run(tmp_path, states={"counter": counter})
    with run.training():
        counter.count = 7
        run.step()
    manifest = run.manifest("step_1_ckp")
    assert manifest.state == {"counter": {"count": 7}}
    restored, new = Counter(), Counter()
    more = replace(manifest, state={**manifest.state, "gone": {"a": 1}})
    Run(tmp_path, states={"counter": restored, "new": new}, restored=more)
    assert restored.count == 7 and new.count == 0


class Gate:
    """Gate that blocks saves until it is opened, and then lets them fail or finish."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> None:
        self._open, self.saves, self.failure = threading.Event(), 0, failure
        self._save = saver_module.save_checkpoint
        monkeypatch.setattr(saver_module, "save_checkpoint", self._wait)

    def open(self) -> None:
        self._open.set()

    def _wait(self, *args: Any, **more: Any) -> None:
        self.saves += 1
        assert self._open.wait(PATIENCE_SECONDS)
        if self.failure is not None:
            raise self.failure
        self._save(*args, **more)


def test_a_failure_in_the_background_is_raised_at_a_later_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, saving(every(1), keep_last=1), asynchronous=True)
    run.step()
    run.saver.wait()
    gate = Gate(monkeypatch, CheckpointError("the disk is full"))
    run.step()
    run.manager._interval = Interval(NEVER, None)
    run.state.total_steps = run.state.stop_step = 10**9
    gate.open()
    with pytest.raises(CheckpointError) as failed, run.training():
        for _ in range(10**6):  # the saving thread ends at some time while steps continue
            run.step()
    assert str(failed.value) == str(gate.failure)
    assert run.names == ["1"] and run.saver._running is None


@pytest.mark.parametrize("failure", [None, CheckpointError("the disk is full")])
def test_after_an_error_in_training_a_running_save_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception | None
) -> None:
    run, gate = Run(tmp_path, asynchronous=True), Gate(monkeypatch, failure)
    with pytest.raises(ZeroDivisionError), run.training():
        run.step()
        run.step()
        gate.open()
        raise ZeroDivisionError
    assert run.names == ([] if failure else ["2"]) and run.saver._running is None
    assert ("the disk is full" in caplog.text) == bool(failure)


@pytest.mark.parametrize("state", [{}, [1], "text", {"count": {"deep": []}}, None])
def test_a_state_of_another_form_is_one_error_that_names_its_part(tmp_path: Path, state: Any) -> None:
    restored = replace(manifest_of(6), state={"counter": state})
    with pytest.raises(CheckpointError) as refused:
        Run(tmp_path, states={"counter": Counter()}, restored=restored)
    assert "counter" in str(refused.value) and refused.value.path == tmp_path


def test_the_last_step_is_not_saved_with_weights_that_are_not_finite(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(CheckpointError) as refused, run.training():
        run.state.stop_step = 1
        run.parameters["lm_head.weight"].data.fill_(torch.nan)
        run.state.advance(0.0)
        run.save()
    assert run.names == [] and "learning_rate" in refused.value.settings


def test_training_continues_during_a_save_and_the_next_save_waits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, gate = Run(tmp_path, saving(every(10)), asynchronous=True), Gate(monkeypatch)
    with run.training():
        for _ in range(19):
            run.step()
        assert run.names == [] and caplog.messages == [] and run.manager.newest is None and gate.saves == 1
        gate.open()
        run.step()
        assert "10" in run.names and caplog.messages[0].startswith("step 10  checkpoint")
    assert run.names == ["10", "20"] and gate.saves == 2


def test_saves_in_the_background_have_the_timeout_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[timedelta] = []
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: asked.append(timeout))
    settings = saving(NEVER, ckpt_save_path=str(tmp_path), async_save=True)
    parameters = {"weight": torch.nn.Parameter(torch.ones(2, 2))}
    Saver(settings, parameters, torch.optim.SGD(parameters.values()), timeout=timedelta(seconds=7))
    assert asked == [timedelta(seconds=7)]


def share_of(*tensors: torch.Tensor) -> SavePlan:
    pieces = [
        WriteItem(str(number), Chunk((0,) * tensor.dim(), tuple(tensor.shape)), tensor)
        for number, tensor in enumerate(tensors)
    ]
    return SavePlan({"1": pieces[::2], "2": pieces[1::2]}, 0)


def test_a_copy_is_unchanged_until_the_next_copy_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "SLAB_BYTES", 256)
    tensors = [
        torch.randn(3, 5),
        torch.randn(1000),  # larger than a slab
        torch.tensor(3.0),
        torch.randn(4, 6).T,
        torch.arange(9, dtype=torch.uint8),
        torch.randn(2, 7).bfloat16(),
    ]
    before = [tensor.clone() for tensor in tensors]
    staging = Staging(torch.device("cpu"))
    copied = staging.copy(share_of(*tensors))
    for tensor in tensors:
        tensor.zero_()
    staging.hold_update()
    staging.wait()
    pieces = {int(piece.name): piece.values for file in copied.files.values() for piece in file}
    assert copied.files.keys() == {"1", "2"}
    for number, tensor in enumerate(before):
        assert torch.equal(pieces[number], tensor) and pieces[number].data_ptr() % pieces[number].element_size() == 0
    staging.copy(share_of(*tensors))
    assert not any(values.any() for values in pieces.values())


def test_the_copies_take_little_more_memory_than_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "SLAB_BYTES", 2**16)
    tensors = [torch.empty(size) for size in (1, 12_000, 10_000, 37, *[1000] * 40)]
    buffers = Staging(torch.device("cpu")).copy(share_of(*tensors)).files
    slabs = {
        piece.values.untyped_storage().data_ptr(): piece.values.untyped_storage().nbytes()
        for file in buffers.values()
        for piece in file
    }
    assert sum(slabs.values()) < 1.03 * sum(tensor.nbytes for tensor in tensors)


@pytest.mark.usefixtures("single_process")
def test_no_file_is_written_and_no_update_made_before_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(Staging, "wait", lambda staging: calls.append("copied"))
    monkeypatch.setattr(Staging, "hold_update", lambda staging: calls.append("update"))
    monkeypatch.setattr(saver_module, "save_checkpoint", lambda *args, **more: calls.append("written"))
    monkeypatch.setattr(Saver, "apply_retention", lambda *args: None)
    parameters = {"weight": torch.nn.Parameter(torch.ones(2, 2))}
    optimizer = torch.optim.SGD(parameters.values())
    saver = Saver(CheckpointConfig(ckpt_save_path=str(tmp_path), async_save=True), parameters, optimizer)
    assert saver.save(manifest_of(3), wait=False) is None
    saved = saver.wait()
    assert saved is not None and saved.step == 3 and calls[-2:] == ["copied", "written"]
    optimizer.step()
    assert calls[-1] == "update"
    saver.close()


class CopyStream:
    """Fake GPU staging, whose copies are done at once."""

    def wait_stream(self, other: object) -> None: ...
    def record_event(self) -> CopyStream:
        return self

    def synchronize(self) -> None: ...


def test_a_save_that_is_waited_for_uses_pinned_memory_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, staging = share_of(torch.randn(3)), Staging(torch.device("cpu"))
    staging.copy(plan)
    assert staging.copy_if_pinned(plan) is plan  # on a CPU, a copy would gain nothing
    staging = Staging(torch.device("cpu"))
    for name, stand_in in (("current_stream", lambda device: None), ("stream", lambda stream: nullcontext())):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(saver_module, "_allocate", lambda tensors, pinned: [torch.empty_like(each) for each in tensors])
    monkeypatch.setattr(staging, "_stream", CopyStream())
    assert staging.copy_if_pinned(plan) is plan  # the first save of a run allocates no memory for it
    background = staging.copy(plan)
    waited = staging.copy_if_pinned(plan)
    assert waited.files["1"][0].values is background.files["1"][0].values is not plan.files["1"][0].values
    assert torch.equal(waited.files["1"][0].values, plan.files["1"][0].values)
