"""What only a GPU can show of checkpointing, compilation and float16: memory that falls, and Triton's kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from training_runs import TINY, losses_of, write_dataset

from pretraining.cli import main
from pretraining.model import kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Activations weigh more than parameters here, so that modes can be told apart. The rate is low: the made-up data are
# learned so quickly that losses would soon be too small for relative differences to mean anything.
MODEL = [
    *("model_variant=tiny", "hidden_size=512", "intermediate_size=1408", "num_hidden_layers=8", "vocab_size=1024"),
    *("num_attention_heads=8", "num_key_value_heads=4", "seq_length=1024", "batch_size=8", "use_dummy_dataset=true"),
    *("learning_rate=1e-4", "num_steps=20", "report_interval=1", "tracker=none", "progress=plain"),
]
CHECKPOINTED = "fsdp_activation_checkpointing=true"


def train(run: Path, *flags: str) -> tuple[list[float], float]:
    """Losses of a run, and the GiB that it had at its peak."""
    torch.cuda.reset_peak_memory_stats()
    main(["train", *MODEL, f"ckpt_save_path={run}", *flags])
    last = json.loads((run / "logs" / "metrics.jsonl").read_text().splitlines()[-1])
    return losses_of(run), last["memory_gib"]


def test_each_checkpointing_mode_saves_its_memory_and_keeps_the_losses(tmp_path: Path) -> None:
    modes = {"none": [], "op": ["selective_checkpointing=op"], "2": ["selective_checkpointing=2"], "1": []}
    found = {
        mode: train(tmp_path / mode, *flags, *([] if mode == "none" else [CHECKPOINTED]))
        for mode, flags in modes.items()
    }
    for losses, _ in found.values():
        assert losses == pytest.approx(found["none"][0], rel=1e-2)
    peaks = {mode: peak for mode, (_, peak) in found.items()}
    assert peaks["none"] > peaks["op"] > peaks["1"] and peaks["none"] > peaks["2"] > peaks["1"]


@pytest.mark.parametrize("selective", [None, "1", "2", "op"])
def test_compiled_blocks_train_the_same_with_every_kind_of_checkpointing(selective: str | None, tmp_path: Path) -> None:
    flags = [] if selective is None else [CHECKPOINTED, f"selective_checkpointing={selective}"]
    plain, _ = train(tmp_path / "plain", *flags)
    compiled, _ = train(tmp_path / "compiled", *flags, "use_torch_compile=true")
    assert compiled == pytest.approx(plain, rel=1e-2)


COMPILED = "use_torch_compile=true"


@pytest.mark.parametrize("levers", [[], [COMPILED], [COMPILED, CHECKPOINTED, "selective_checkpointing=op"]], ids=len)
def test_one_kernel_for_all_documents_trains_as_a_call_a_document(
    levers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(tmp_path / "data" / "texts")
    common = [flag for flag in TINY if not flag.startswith("mixed_precision")]
    common += [f"data_path={tmp_path / 'data'}", "sep_token=0", "logical_shards=8", "batch_size=8", "num_steps=20"]

    def losses(run: Path, *flags: str) -> list[float]:
        main(["train", *common, "document_mask=true", f"ckpt_save_path={run}", *flags])
        return losses_of(run)

    at_once = losses(tmp_path / "at_once", *levers)
    monkeypatch.setattr(kernels, "has_kernel_for_documents", lambda *_: False)
    assert at_once == pytest.approx(losses(tmp_path / "one_by_one"), rel=1e-2)


def test_float16_trains_as_bfloat16_does(tmp_path: Path) -> None:
    expected, _ = train(tmp_path / "bfloat16")
    losses, _ = train(tmp_path / "float16", "mp_dtype=float16")
    assert losses[0] == pytest.approx(expected[0], rel=1e-2)
    assert losses[-1] == pytest.approx(expected[-1], rel=0.1)  # where the scale overflows, first updates are left out
