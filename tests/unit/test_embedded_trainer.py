"""A `pretraining.Trainer` restores the state of its process, however a run ends."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiers import first_quick
from trainers import WithHits, trainer
from training_runs import losses_of, status_of

from pretraining import Trainer
from pretraining.data.batch import ModelInputs
from pretraining.errors import LaunchError, PathError, Preempted
from pretraining.model.llama import Llama
from pretraining.observability.metrics import Outputs
from pretraining.train import run as run_module
from pretraining.train.job import Job


class Calling(WithHits):
    """A Trainer that calls a function in `extra_metrics`, here once per step."""

    call: Callable[[int], object] = staticmethod(lambda step: None)
    calls = 0

    def extra_metrics(self, outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        self.calls += 1
        self.call(self.calls)
        return super().extra_metrics(outputs, batch)


OF_COMPILER = ("tqdm_monitor", "ThreadPoolExecutor-")  # pools of this project have names


def state_of_the_process() -> dict[str, Any]:
    """Return everything that a run changes in its process."""
    logger = logging.getLogger("pretraining")
    return {
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        # Threads of the compiler's progress bars and pool live as long as the process.
        "threads": sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith(OF_COMPILER)),
        "group": dist.is_initialized(),
        "logging": (list(logger.handlers), logger.level),
        "streams": (sys.stdout, sys.stderr),
        "environment": {name: os.environ[name] for name in os.environ if name != "PYTEST_CURRENT_TEST"},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "compute threads": torch.get_num_threads(),
        "collector": (gc.isenabled(), gc.get_freeze_count()),
        "gradients": torch.is_grad_enabled(),
    }


@pytest.fixture(autouse=True)
def same_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that each test restores the process."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # from an earlier test that ran a command
    gc.collect()
    before = state_of_the_process()
    yield
    assert state_of_the_process() == before


def test_a_run_leaves_no_model_behind_also_where_it_computes_with_copies(tmp_path: Path) -> None:
    trainer(WithHits, tmp_path, mixed_precision=True, num_steps=1).train()
    assert not [each for each in gc.get_objects() if issubclass(type(each), Llama)]


def test_a_run_leaves_the_switches_of_torch_and_the_environment_as_they_were(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    seen: list[tuple[bool, int, bool]] = []

    class Looking(WithHits):
        def extra_metrics(self, outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
            state = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
            seen.append((*state, "CUBLAS_WORKSPACE_CONFIG" in os.environ))
            return super().extra_metrics(outputs, batch)

    trainer(Looking, tmp_path / "first", num_steps=1, deterministic=True, cpu_threads=before + 1).train()
    trainer(Looking, tmp_path / "second", num_steps=1).train()
    assert (seen[0], seen[-1]) == ((True, before + 1, True), (False, before, False))


@pytest.mark.parametrize("number", first_quick(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
def test_a_signal_saves_the_running_step_and_the_next_run_resumes(tmp_path: Path, number: signal.Signals) -> None:
    few = {"num_steps": 6, "held_out_fraction": 0.0}
    trainer(Trainer, tmp_path / "whole", **few).train()
    stopped = trainer(Calling, tmp_path / "stopped", **few)
    stopped.call = lambda step: signal.raise_signal(number) if step == 2 else None
    if number == signal.SIGINT:  # Ctrl-C stops the script or cell, too
        with pytest.raises(KeyboardInterrupt):
            stopped.train()
    else:
        assert (result := stopped.train()).status == "preempted" and result.step == 3
    assert stopped._source(None) == str(tmp_path / "stopped")
    assert trainer(Trainer, tmp_path / "stopped", **few).train().status == "finished"
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "whole")


def test_an_interrupt_in_the_last_step_stops_the_code_after_the_run(tmp_path: Path) -> None:
    stopped = trainer(Calling, tmp_path, held_out_fraction=0.0, num_steps=1)
    stopped.call = lambda step: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert status_of(tmp_path)["status"] == "finished"


def test_a_run_that_is_asked_to_stop_before_its_first_step_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(plan: object, job: Job) -> None:
        signal.raise_signal(signal.SIGTERM)
        job.requests.raise_if_pending()

    monkeypatch.setattr(run_module, "build_run", build)
    with pytest.raises(Preempted):
        trainer(Trainer, tmp_path).train()


def test_a_second_trainer_at_the_same_time_is_refused_and_one_after_the_other_is_not(tmp_path: Path) -> None:
    refused: list[BaseException] = []
    results: list[Any] = []
    second = trainer(Trainer, tmp_path / "second", num_steps=1)

    def in_a_thread(call: Callable[[], object]) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    def start_another() -> None:
        with pytest.raises(LaunchError) as caught:
            second.train()
        refused.append(caught.value)

    first = trainer(Calling, tmp_path / "first", num_steps=1)
    first.call = lambda step: in_a_thread(start_another)
    assert first.train().status == "finished" and refused and not (tmp_path / "second").exists()
    in_a_thread(lambda: results.append(second.train()))  # another thread gets no signals, and trains
    assert results[0].status == "finished"


def test_an_error_of_the_file_system_names_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(filename: str | None) -> None:
        raise OSError(28, "No space left on device", filename)

    monkeypatch.setattr(run_module, "train_with_rollbacks", lambda *_: fail("/full/disk"))
    with pytest.raises(PathError) as refused:
        trainer(Trainer, tmp_path).train()
    assert refused.value.path == Path("/full/disk")
    monkeypatch.setattr(run_module, "train_with_rollbacks", lambda *_: fail(None))
    with pytest.raises(OSError):
        trainer(Trainer, tmp_path).train()


def test_after_a_run_that_fails_the_same_process_trains_the_next_one(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        raise ValueError("of mine")

    failing = trainer(Calling, tmp_path / "failing", deterministic=True)
    failing.call = fail
    with pytest.raises(ValueError, match="of mine"):
        failing.train()
    assert status_of(tmp_path / "failing")["reason"] == "ValueError: of mine"
    assert trainer(Trainer, tmp_path / "next", num_steps=1).train().status == "finished"
