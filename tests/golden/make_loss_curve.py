"""Write loss_curve.json: the losses of 30 steps on one process, which every layout has to repeat.

    python tests/golden/make_loss_curve.py

Run it again only when the model, its initial weights, the order of the data or the optimizer are meant to change, and
say why in the commit.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from training_runs import GOLDEN_RUN, losses_of, train_runs, write_two_datasets  # noqa: E402

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        data_path = write_two_datasets(Path(folder) / "data")
        run = Path(folder) / "run"
        train_runs(1, data_path, [[*GOLDEN_RUN, f"ckpt_save_path={run}"]])
        losses = losses_of(run)
    document = {"settings": GOLDEN_RUN, "losses": losses}
    (HERE / "loss_curve.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{len(losses)} losses, {losses[0]:.4f} to {losses[-1]:.4f}")
