"""Float8 by the units of a GPU: losses stay near bfloat16's, compiled and with every kind of checkpointing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from training_runs import losses_of

from pretraining.cli import main
from pretraining.config.training import Float8Scaling
from pretraining.config.variants import VARIANTS
from pretraining.distributed.float8 import check_float8, multiply_in_float8
from pretraining.model.llama import Llama

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="needs a GPU with float8 hardware, compute capability 8.9 or higher",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install 'pretraining[float8]'"
    ),
]

STEPS = 100
TOLERANCE = 0.05
"""Of a loss, relative; with two blocks, emulated on a CPU, the largest difference was 0.013."""
MODEL = [
    *("model_variant=tiny", "hidden_size=512", "intermediate_size=1408", "num_hidden_layers=4", "vocab_size=1024"),
    *("num_attention_heads=8", "num_key_value_heads=4", "seq_length=512", "batch_size=8", "use_dummy_dataset=true"),
    # A low rate: the made-up data are learned so quickly that losses would be too small to be compared.
    *("learning_rate=1e-4", f"num_steps={STEPS}", "report_interval=1", "tracker=none", "progress=plain"),
]
SCALINGS = ["tensorwise", "rowwise"]


@pytest.fixture(scope="module")
def in_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("bfloat16"))


def train(run: Path, *flags: str) -> list[float]:
    main(["train", *MODEL, f"ckpt_save_path={run}", *flags])
    return losses_of(run)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_hundred_losses_are_near_those_of_bfloat16(
    scaling: str, compiled: str, in_bfloat16: list[float], tmp_path: Path
) -> None:
    losses = train(tmp_path, f"float8={scaling}", f"use_torch_compile={compiled}")
    assert len(losses) == STEPS and losses != in_bfloat16
    assert losses == pytest.approx(in_bfloat16, rel=TOLERANCE)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("selective", ["1", "op"])
def test_compiled_blocks_that_are_computed_again_give_no_nan(
    scaling: str, selective: str, in_bfloat16: list[float], tmp_path: Path
) -> None:
    checkpointed = ["fsdp_activation_checkpointing=true", f"selective_checkpointing={selective}"]
    losses = train(tmp_path, f"float8={scaling}", "use_torch_compile=true", *checkpointed)
    assert losses == pytest.approx(in_bfloat16, rel=TOLERANCE)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_forward_alone_takes_any_number_of_tokens(scaling: Float8Scaling) -> None:
    """As when text is generated: only the gradient of a weight is a sum over tokens."""
    device = torch.device("cuda", 0)
    check_float8(scaling, device)
    with device:
        model = Llama(VARIANTS["tiny"]).to(torch.bfloat16)
    multiply_in_float8(model.model.layers, scaling)
    with torch.no_grad():
        for length in (1, 5, 17, 33):
            logits = model(torch.zeros(1, length, dtype=torch.int64, device=device))
            assert isinstance(logits, torch.Tensor) and torch.isfinite(logits).all()
