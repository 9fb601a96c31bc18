"""Whole runs with settings that trade memory for speed: they train the same, and resume each other's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulated_varlen import emulated_varlen
from torch._dynamo.utils import counters
from training_runs import losses_of, write_dataset
from unit.train import whole_runs
from unit.train.whole_runs import equal, manifest_of, refusal, write_tokenizer

PER_OPERATION = ["fsdp_activation_checkpointing=true", "selective_checkpointing=op"]
COMPILED = ["use_torch_compile=true"]


@pytest.fixture
def quick_compiler() -> Iterator[None]:
    """Compile with the eager backend, which needs no slow C++ compiler."""
    counters.clear()
    with torch.compiler.set_stance(force_backend="aot_eager"):
        yield
    torch.compiler.reset()


def start(run: Path, *flags: str) -> None:
    whole_runs.start(run, *(["num_steps=6"] if "num_steps=3" not in flags else []), *flags)


@pytest.mark.usefixtures("quick_compiler")
def test_a_compiled_run_evaluates_and_shows_a_sample_of_its_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    common = ["held_out_fraction=0.1", "eval_interval=2", "eval_batches=2", "sample_tokens=12", "vocab_size=300"]
    common += ["sample_at_evaluations=true", f"tokenizer_path={tmp_path / 'tokenizer'}"]
    start(tmp_path / "run", *common, *COMPILED, *PER_OPERATION)
    out = capsys.readouterr().out
    assert out.count("evaluation_loss") == out.count("generated text") == 3
    assert counters["stats"]["unique_graphs"] == 2  # with and without gradients
    assert not counters["graph_break"]


FLOAT16 = ["mixed_precision=true", "mp_dtype=float16"]


def test_a_float16_run_resumes_bit_for_bit_with_the_scale_of_its_loss(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    start(whole, *FLOAT16)
    start(stopped, *FLOAT16, "run_steps=3")
    start(stopped, *FLOAT16)
    assert losses_of(whole) == losses_of(stopped) and equal(whole, stopped)
    for run in (whole, stopped):
        assert manifest_of(run, 6)["state"]["loss_scale"] == {"scale": 2.0**16, "steps": 6}


@pytest.mark.parametrize("tied", ["false", "true"])
def test_a_model_made_whole_has_the_same_weights_as_one_made_in_shards(tied: str, tmp_path: Path) -> None:
    for whole in ("true", "false"):
        start(tmp_path / whole, f"tie_word_embeddings={tied}", f"low_cpu_fsdp={whole}", "num_steps=3")
    assert losses_of(tmp_path / "true") == losses_of(tmp_path / "false")


def test_blocks_are_not_recompiled_for_the_documents_of_each_step(tmp_path: Path) -> None:
    assert {"use_torch_compile", "document_mask"} <= set(refusal(tmp_path, *COMPILED, "document_mask=true").settings)


@pytest.mark.thorough
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("levers", [[], COMPILED, [*COMPILED, *PER_OPERATION]], ids=["plain", "compiled", "op"])
def test_one_kernel_for_all_documents_trains_as_a_call_a_document(levers: list[str], tmp_path: Path) -> None:
    write_dataset(tmp_path / "data" / "texts", documents=100)
    common = [f"data_path={tmp_path / 'data'}", "document_mask=true", "logical_shards=4"]
    common += ["sep_token=0", "batch_size=2", "held_out_fraction=0.1", "eval_batches=2"]
    start(tmp_path / "one_by_one", *common)
    with emulated_varlen() as calls:
        start(tmp_path / "at_once", *common, *levers)
    assert losses_of(tmp_path / "at_once") == pytest.approx(losses_of(tmp_path / "one_by_one"), rel=1e-5)
    assert (calls.count("forward"), calls.count("backward")) == (3 * (6 + 2), 3 * 6)  # blocks x (steps + evaluations)
    if levers:  # first batch and any documents, each with and without gradients
        assert 0 < counters["stats"]["unique_graphs"] <= 6 and not counters["graph_break"]
