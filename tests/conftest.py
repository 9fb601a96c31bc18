"""Shared fixtures. Nothing here imports torch, so that tests of torch-free packages stay fast."""

from __future__ import annotations

import os

# Before any test imports torch: tests are small, and threads of several processes only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
