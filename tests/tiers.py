"""The tiers of tests; CONTRIBUTING.md says what belongs in which."""

from __future__ import annotations

from typing import Any

import pytest


def first_quick(*cases: Any, quick: int = 1) -> list[Any]:
    """Return cases of a parametrized test: the first of them run in the first tier, the others are thorough."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.thorough] * (number >= quick))
        for number, case in enumerate(cases)
    ]
