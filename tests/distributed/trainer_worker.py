"""One process of a job whose script runs several Trainers, one after the other, at one meeting place.

Each argument is a JSON object of settings, with `mode`: what the metrics do, or what is called.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist

from pretraining import PretrainError, Trainer
from pretraining.data.batch import ModelInputs
from pretraining.observability.custom_metrics import Outputs

RANK = int(os.environ["RANK"])


class Measured(Trainer):
    """Metrics of losses, labels and hidden states."""

    needs_hidden_states = True

    def extra_metrics(self, outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        assert outputs.hidden_states is not None
        valid = batch.labels_BS != -100
        norms = outputs.hidden_states.float().norm(dim=-1)
        return {
            "late_loss": (outputs.losses[:, 16:].sum(), valid[:, 16:].sum()),
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

if __name__ == "__main__":
    torch.set_num_threads(1)
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
