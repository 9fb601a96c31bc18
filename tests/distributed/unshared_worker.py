"""One process of a job whose relative paths lead to another folder on each rank, as on nodes without a shared disk."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pretraining import cli
from pretraining.checkpoint import lease

if __name__ == "__main__":
    cli.HEAD_START, lease.SHARED_SECONDS = 0.0, 0
    place = Path(sys.argv[1], f"node{os.environ['RANK']}")
    place.mkdir(exist_ok=True)
    os.chdir(place)
    cli.main(["train", *sys.argv[2:]])
