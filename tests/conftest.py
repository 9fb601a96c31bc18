"""Shared fixtures. Nothing here imports torch, so that tests of torch-free packages stay fast."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from slurm_cluster import SlurmCluster, reason_to_skip
from xdist.scheduler import LoadFileScheduling

TESTS = Path(__file__).parent
USING_SLURM = ("faults/test_slurm.py", "distributed/test_launchers.py")

# No test says how fast it is: a machine may stand still for seconds. What passes once passes again: property tests draw
# the same examples each time, and new ones with --hypothesis-profile=exploring.
EXPLORING = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("exploring", EXPLORING)
settings.register_profile("repeatable", EXPLORING, derandomize=True)
settings.load_profile("repeatable")

# Before any test imports torch: tests are small, and threads of several processes only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Commands under nohup or in the background ignore these signals, and so would all processes that tests start. Processes
# do not inherit a handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Where there is a GPU, only the tests of `gpu/` use it: the others count on a CPU, and start many processes."""
    if Path(__file__).with_name("gpu") in item.path.parents:
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # for processes that a test starts
        if "torch" in sys.modules:
            patch.setattr("torch.cuda.is_available", lambda: False)
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes or train come first: one of their files at the end would leave workers idle."""
    items.sort(key=lambda item: not item.path.is_relative_to(TESTS / "unit") or "train" in item.nodeid, reverse=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling:
    """Where tests run on several workers: those of a file together, and all that need the one SLURM."""
    return SlurmTogether(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_report_to_serializable() -> Generator[None, object, object]:
    """A worker sends its reports as UTF-8, and a test of names that are not may quote them or log them."""
    report = yield
    return utf8(report)


def utf8(value: object) -> object:
    """The same, with half surrogates in its strings written out."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {utf8(key): utf8(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(utf8(entry) for entry in value)
    return value


class SlurmTogether(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Files in order, each on one worker; those whose tests use SLURM count as one file."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "slurm" if file.endswith(USING_SLURM) else file


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """A command shows messages, listens to signals and keeps its process group until its process ends; here its test.

    What a fixture of a whole file has left of messages is taken away, too.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    _silence()
    yield
    _silence()
    for number, handler in before.items():
        signal.signal(number, handler)
    if "torch.distributed" in sys.modules:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()


def _silence() -> None:
    logger = logging.getLogger("pretraining")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small datasets, `first` and `second`, for all tests that only read them."""
    from training_runs import write_two_datasets

    return write_two_datasets(tmp_path_factory.mktemp("data") / "data")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A SLURM of one node, started for this session and ended with it."""
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
