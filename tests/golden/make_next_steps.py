"""Write next_steps.json: losses and digests of the tensors of a few steps after the checkpoints of run/.

    python tests/golden/make_next_steps.py

Make it again only where the numbers of a step are meant to change, and say why in the commit. Losses in it that move by
more than rounding are a bug.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from golden_runs import (
    NEXT_STEPS,
    STARTS,
    STEPS,
    arithmetic,
    checkpoint_at,
    copy_of_golden,
    digests,
    next_steps_runs,
    tensors_in,
    train_on,
)
from training_runs import losses_of

if __name__ == "__main__":
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as temporary:
        golden = copy_of_golden(Path(temporary))
        for processes in (1, 2):
            into = Path(temporary) / str(processes)
            train_on(processes, list(next_steps_runs(golden, into).values()))
            for name, start in STARTS.items():
                losses = losses_of(into / name)
                tensors = digests(tensors_in(checkpoint_at(into / name, start + STEPS)))
                found[f"{name} on {processes}"] = {"losses": [loss.hex() for loss in losses], "tensors": tensors}
    document = {"arithmetic": arithmetic(), "next": found}
    NEXT_STEPS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
