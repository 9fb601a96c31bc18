"""A step on a GPU, with PyTorch's own watch on operations that make the host wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import TINY

from pretraining import Trainer
from pretraining.cli import main
from pretraining.config.plugins import OPTIMIZERS
from pretraining.data.batch import ModelInputs, StepBatch
from pretraining.observability.metrics import Outputs
from pretraining.observability.step_outcome import StepOutcome
from pretraining.train import loop
from pretraining.train.step import StepContext, train_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def waiting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From the third step on: the first ones choose kernels and make buffers."""

    def watched(context: StepContext, batch: StepBatch, step: int) -> StepOutcome:
        torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
        try:
            return train_step(context, batch, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(loop, "train_step", watched)
    yield


class WithMetrics(Trainer):
    needs_hidden_states = True

    def extra_metrics(self, outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        assert outputs.hidden_states is not None
        norms = outputs.hidden_states.float().norm(dim=-1)
        return {"hits": (outputs.hits.sum(), outputs.valid_tokens), "norm": (norms.sum(), norms.numel())}


@pytest.mark.usefixtures("waiting_is_an_error")
def test_metrics_of_the_users_own_make_it_wait_for_nothing_either(tmp_path: Path) -> None:
    settings = dict(flag.split("=") for flag in TINY if not flag.startswith(("mixed_precision", "report_interval")))
    more = {"use_dummy_dataset": True, "num_steps": 6, "report_interval": 6, "ckpt_save_path": tmp_path}
    metrics = WithMetrics.from_recipe(**settings, **more).train().metrics
    assert metrics["custom/hits"] == pytest.approx(metrics["token_accuracy"]) and metrics["custom/norm"] > 0


@pytest.mark.usefixtures("waiting_is_an_error")
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["mixed_precision=false"],
        ["mp_dtype=float16"],
        ["document_mask=true"],
        ["spike_threshold=6"],
        ["batch_size=2", "grad_accum_steps=3"],
        ["fsdp_activation_checkpointing=true", "selective_checkpointing=op"],
        ["use_torch_compile=true"],
        *(["optimizer=" + name] for name in OPTIMIZERS if name != "adamw"),
    ],
    ids=" ".join,
)
def test_the_host_waits_for_nothing_in_a_step(tmp_path: Path, flags: list[str]) -> None:
    common = [flag for flag in TINY if not flag.startswith("mixed_precision")]
    main(["train", *common, "use_dummy_dataset=true", "num_steps=6", f"ckpt_save_path={tmp_path}", *flags])
