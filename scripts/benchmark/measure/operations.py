"""What attention inside documents, the loss and an optimizer's update cost, beside other ways, each alone.

    python -m scripts.benchmark.measure.operations
    OMP_NUM_THREADS=1 python -m scripts.benchmark.measure.operations --rounds=10

In each round every way computes once. A ratio is the median over rounds of a way's time by that of the first way in the
same round. Attention and loss are measured forward and backward. Memory is the peak above the inputs, on a GPU alone
that of the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pretraining.config.command_line import load_train_config
from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.training import IGNORED_LABEL
from pretraining.distributed.processes import return_freed_memory
from pretraining.model.attention import causal_attention, document_attention, locate_documents
from pretraining.model.loss import head_loss
from pretraining.optim.optimizer import update
from pretraining.optim.registry import build_optimizer
from scripts.benchmark.common import (
    Number,
    announce,
    device,
    flag_parser,
    initial_model,
    print_table,
    spread,
    synchronize,
)

ROWS_ON_CPU, ROWS_ON_GPU = ((1, 4096), (8, 256)), ((8, 4096), (2, 16384))  # B, S
MEAN_LENGTHS = (60, 600)
HEADS, HEAD_DIM = 4, 64
LOSSES_ON_CPU = ((2048, 256, 32000), (2048, 256, 128256))  # N, D, V
LOSSES_ON_GPU = ((16384, 768, 32000), (8192, 4096, 128256))
MODEL_OF_UPDATES = ("model_variant=small", "use_dummy_dataset=true")
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
Work = Callable[[], object]


def measure(what: str, ways: Mapping[str, Work], rounds: int) -> None:
    """Print the milliseconds, the ratio and the memory of each way; the first round warms up."""
    turns: dict[str, list[float]] = {name: [] for name in ways}
    peaks_mib = {}
    for number in range(rounds + 1):
        for name, work in ways.items():
            if number == 0:
                peaks_mib[name] = _peak_mib(work)
                continue
            synchronize()
            began = time.perf_counter()
            work()
            synchronize()
            turns[name].append(time.perf_counter() - began)
    first = next(iter(turns.values()))
    rows = []
    for name, seconds in turns.items():
        milliseconds, _ = spread([1000 * each for each in seconds], ".1f")
        ratio, quartiles = spread([each / base for each, base in zip(seconds, first, strict=True)], ".2f")
        rows.append((name, milliseconds, ratio, quartiles, f"{peaks_mib[name]:,.0f}"))
    print_table((what, "ms", "of the first", "quartiles", "peak MiB"), rows)


def _peak_mib(work: Work) -> float:
    """Return the memory that a piece of work takes beyond what the process has, at most."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    return_freed_memory()
    CLEAR_REFS.write_text("5")  # the peak begins with what is in use now: proc(5)
    before = _high_water_kib()
    work()
    return (_high_water_kib() - before) / 1024


def _high_water_kib() -> int:
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))


def attention(rows: int, length: int, mean: int, dtype: torch.dtype) -> dict[str, Work]:
    """Return the ways to attend inside documents, whose lengths are log-normal; the last of a row is cut."""
    generator = np.random.default_rng(0)
    lengths: list[int] = []
    for _ in range(rows):
        left = length
        while left:
            lengths.append(min(left, max(1, int(generator.lognormal(np.log(mean) - 0.5, 1.0)))))
            left -= lengths[-1]
    *inputs, gradient = (torch.randn(rows, length, HEADS, HEAD_DIM, device=device(), dtype=dtype) for _ in range(4))
    inputs = [each.requires_grad_() for each in inputs]
    documents = locate_documents(tuple(lengths), inputs[0], HEAD_DIM)
    assert documents is not None
    numbers_BS = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).view(rows, -1)
    same_BSS = numbers_BS[:, :, None] == numbers_BS[:, None, :]
    mask_B1SS = (same_BSS & torch.ones_like(same_BSS[0]).tril())[:, None].to(device())

    def dense(q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BSHE, k_BSHE, v_BSHE))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1SS).transpose(1, 2)

    ways: dict[str, Callable[..., Tensor]] = {
        "project": partial(document_attention, documents=documents),
        "whole rows": causal_attention,
        "dense mask": dense,
    }
    torch.testing.assert_close(ways["project"](*inputs), dense(*inputs), atol=3e-2, rtol=1e-2)
    return {name: partial(_gradients, way, inputs, gradient) for name, way in ways.items()}


def _gradients(way: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor | None = None) -> object:
    return torch.autograd.grad(way(*inputs), inputs, gradient)


def loss(tokens: int, hidden_size: int, vocab_size: int, dtype: torch.dtype) -> dict[str, Work]:
    """Return the ways to compute head and cross-entropy; one label in ten is ignored."""
    hidden_ND = torch.randn(tokens, hidden_size, device=device()).to(dtype).requires_grad_()
    head_VD = (torch.randn(vocab_size, hidden_size, device=device()) / hidden_size**0.5).to(dtype).requires_grad_()
    labels_N = torch.randint(vocab_size, (tokens,), device=device())
    labels_N[::10] = IGNORED_LABEL

    def in_chunks(hidden_ND: Tensor, head_VD: Tensor) -> Tensor:
        return head_loss(hidden_ND[None], head_VD, labels_N[None])[0]

    def plain(hidden_ND: Tensor, head_VD: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden_ND, head_VD).float(), labels_N, ignore_index=IGNORED_LABEL)

    def of_pytorch(hidden_ND: Tensor, head_VD: Tensor) -> Tensor:
        options = torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(hidden_ND, head_VD, labels_N, ignore_index=IGNORED_LABEL, options=options)

    ways = {"project": in_chunks, "plain": plain}
    if hasattr(F, "linear_cross_entropy"):  # since PyTorch 2.13
        ways["linear_cross_entropy"] = of_pytorch
    return {name: partial(_gradients, way, (hidden_ND, head_VD)) for name, way in ways.items()}


def updates() -> dict[str, Work]:
    """Return the updates of a model by every optimizer, AdamW's first, all with the same gradients."""
    skipped = torch.zeros((), dtype=torch.bool, device=device())
    parameters = dict(initial_model(load_train_config(MODEL_OF_UPDATES)).named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    names = ["adamw", *(name for name in OPTIMIZERS if name != "adamw")]
    configs = {name: load_train_config([*MODEL_OF_UPDATES, f"optimizer={name}"]) for name in names}
    return {
        name: partial(update, build_optimizer(parameters, each.optimizer), skipped) for name, each in configs.items()
    }


def main() -> None:
    flags = flag_parser("Operations of a step, each alone.", rounds=Number(10, "rounds that count")).parse_args()
    announce(flags)
    on_gpu = torch.cuda.is_available()
    for dtype in (torch.bfloat16,) if on_gpu else (torch.float32, torch.bfloat16):
        for rows, length in ROWS_ON_GPU if on_gpu else ROWS_ON_CPU:
            for mean in MEAN_LENGTHS:
                what = f"attention, {rows} x {length}, documents of {mean}, {dtype}"
                measure(what, attention(rows, length, mean, dtype), flags.rounds)
        for size in LOSSES_ON_GPU if on_gpu else LOSSES_ON_CPU:
            measure(f"loss, N D V = {size}, {dtype}", loss(*size, dtype), flags.rounds)
    measure("update", updates(), flags.rounds)


if __name__ == "__main__":
    main()
