"""Float8 on devices without units for it: numbers are rounded to float8 and multiplied in float32."""

from __future__ import annotations

import importlib.util
from functools import partial

import pytest

from pretraining.distributed import parallelize
from pretraining.distributed.float8 import multiply_in_float8
from pretraining.train import opening

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install 'pretraining[float8]'"
)


def emulate_float8(patch: pytest.MonkeyPatch) -> None:
    """Has runs emulate the float8 that they are told to compute in."""
    patch.setattr(opening, "check_float8", lambda scaling, device: None)
    patch.setattr(parallelize, "multiply_in_float8", partial(multiply_in_float8, emulate=True))
