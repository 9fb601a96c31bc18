"""Flags that documentation recommends exist."""

from __future__ import annotations

import re

import pytest
from helpers import ROOT

from pretraining.cli import COMMANDS
from pretraining.config.fields import settings_of

FLAG = re.compile(r"--(\w+)")
OTHER_PROGRAMS = {"no", "standalone", "nproc", "nodes", "ntasks", "json"}  # the first word of theirs: --nproc-per-node


@pytest.mark.parametrize("page", ["troubleshooting.md", "profiling.md"])
def test_every_flag_of_a_page_exists(page: str) -> None:
    known = {name for _, settings, _ in COMMANDS.values() for name in settings_of(settings)}
    named = set(FLAG.findall((ROOT / "docs" / page).read_text(encoding="utf-8")))
    assert named - known - OTHER_PROGRAMS == set() and len(named) > 5
