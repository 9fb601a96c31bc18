"""Fixtures of the tests of scripts."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import run_command
from stand_in import StandIn

STAMP = ".pretraining-setup"


@pytest.fixture(scope="session")
def stamp(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what setup.sh writes into an environment that is ready, with {root} for the repository."""
    made = StandIn(tmp_path_factory.mktemp("set_up"))
    run_command(["bash", made.root / "scripts" / "setup.sh"], made.variables())
    return (made.environment / STAMP).read_text().replace(str(made.root), "{root}")


@pytest.fixture
def stand_in(tmp_path: Path, stamp: str) -> StandIn:
    """Make a repository whose environment is ready, so that its scripts install nothing."""
    made = StandIn(tmp_path)
    (made.environment / STAMP).write_text(stamp.replace("{root}", str(made.root)))
    return made
