"""One process of a job whose script runs several Trainers, one after the other, at one meeting place.

Each argument is a JSON object of settings, with `mode`: what the metrics do, or what is called.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretraining import PretrainError, Trainer
from pretraining.data.batch import ModelInputs
from pretraining.observability.metrics import Outputs

RANK = int(os.environ["RANK"])


class Measured(Trainer):
    """Metrics of losses, labels and hidden states."""

    needs_hidden_states = True

    def extra_metrics(self, outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        assert outputs.hidden_states is not None
        valid = batch.labels_BS != -100
        norms = outputs.hidden_states.float().norm(dim=-1)
        late = valid & (batch.columns_S >= 16)
        return {
            "late_loss": ((outputs.losses * late).sum(), late.sum()),
            "hits": (outputs.hits.sum(), outputs.valid_tokens),
            "norm": ((norms * valid).sum(), valid.sum()),
        }


class OtherNames(Trainer):
    """Names that differ from rank to rank."""

    def extra_metrics(self, outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        return {f"of_{RANK}": (outputs.loss_sum, outputs.valid_tokens)}


class Failing(Trainer):
    """A mistake on one rank."""

    def extra_metrics(self, outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        if RANK == 1:
            raise KeyError("a mistake of mine")
        return {}


KINDS = {"measured": Measured, "other names": OtherNames, "failing": Failing}


def leave_late(come: Path) -> None:
    """Has rank 0 leave its first run only when rank 1 has come for the second, which a file says."""
    connect, leave = dist.TCPStore, dist.destroy_process_group

    def connect_and_say(*arguments: Any, **options: Any) -> dist.TCPStore:
        store = connect(*arguments, **options)
        come.with_name(f"{come.name}_{sum(1 for _ in come.parent.glob(come.name + '_*'))}").touch()
        return store

    def leave_when_the_other_has_come(*arguments: Any) -> None:
        while not come.with_name(f"{come.name}_1").exists():
            time.sleep(0.01)
        leave(*arguments)

    if RANK == 1:
        setattr(dist, "TCPStore", connect_and_say)  # noqa: B010
    else:
        setattr(dist, "destroy_process_group", leave_when_the_other_has_come)  # noqa: B010


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "LEAVE_LATE" in os.environ:
        leave_late(Path(os.environ["LEAVE_LATE"]))
    found: list[Any] = []
    for argument in sys.argv[1:]:
        settings = json.loads(argument)
        made = KINDS[settings.pop("mode")].from_recipe(**settings)
        try:
            result = made.train()
            found.append([result.status, result.step, result.loss, result.metrics["custom/late_loss"]])
            found[-1].append(made.evaluate()["evaluation_custom/late_loss"])
        except (PretrainError, KeyError) as error:
            traceback.clear_frames(error.__traceback__)
            found.append(f"{type(error).__name__}: {error}")
        if dist.is_initialized():  # what failed on one rank alone has left the others in it
            break
    print("FOUND " + json.dumps({"rank": RANK, "found": found}), flush=True)
    os._exit(0)
