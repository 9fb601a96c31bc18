"""What the loss costs in time and memory: the project's chunks against all logits at once, and PyTorch's own.

    python -m scripts.benchmark.measure.loss
    OMP_NUM_THREADS=1 python -m scripts.benchmark.measure.loss --rounds=10

Forward and backward of head and cross-entropy, from hidden states to the gradients of these and of the head. In each
round every contender computes once, and ratios are taken within rounds, so that a machine that is slow for a while is
slow for all. Memory is the peak above the inputs, of a process that does nothing else.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pretraining.config.training import IGNORED_LABEL
from pretraining.model.loss import choose_chunk_tokens, head_loss
from scripts.benchmark.common import Number, Table, announce, device, flag_parser, in_turn, synchronize
from scripts.benchmark.job import memory_peak, reset_memory_peak

MIB = 1024.0**2
CASES_ON_CPU = (  # N, D, V
    ((512, 256, 4096), torch.float32),
    ((512, 256, 4096), torch.bfloat16),
    ((2048, 256, 32000), torch.float32),
    ((2048, 768, 32000), torch.bfloat16),
    ((2048, 256, 128256), torch.bfloat16),
)
CASES_ON_GPU = tuple(
    (size, torch.bfloat16)
    for size in ((16384, 768, 32000), (8192, 4096, 32000), (8192, 2048, 128256), (8192, 4096, 128256))
)
CHUNKS = (64, 1024, 0)
LossOf = Callable[[Tensor, Tensor, Tensor], Tensor]
Size = tuple[int, int, int]


def all_at_once(hidden_ND: Tensor, head_VD: Tensor, labels_N: Tensor) -> Tensor:
    logits_NV = F.linear(hidden_ND, head_VD).float()
    return F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED_LABEL, reduction="sum")


def of_pytorch(hidden_ND: Tensor, head_VD: Tensor, labels_N: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(
        hidden_ND, head_VD, labels_N, ignore_index=IGNORED_LABEL, reduction="sum", options=options
    )


def in_chunks(hidden_ND: Tensor, head_VD: Tensor, labels_N: Tensor, chunk_tokens: int | None = None) -> Tensor:
    return head_loss(hidden_ND[None], head_VD, labels_N[None], chunk_tokens)[0]


def contenders() -> dict[str, LossOf]:
    """By name, the project's first."""
    found: dict[str, LossOf] = {"chosen": in_chunks, "plain": all_at_once}
    if hasattr(F, "linear_cross_entropy"):  # since PyTorch 2.13
        found["of PyTorch"] = of_pytorch
    return found | {f"chunks of {n}" if n else "one chunk": partial(in_chunks, chunk_tokens=n) for n in CHUNKS}


def draw(size: Size, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Hidden states and head that ask for gradients, and labels, one in ten of them ignored."""
    tokens, hidden_size, vocab_size = size
    hidden_ND = torch.randn(tokens, hidden_size, device=device()).to(dtype).requires_grad_()
    head_VD = (torch.randn(vocab_size, hidden_size, device=device()) / hidden_size**0.5).to(dtype).requires_grad_()
    labels_N = torch.randint(vocab_size, (tokens,), device=device())
    labels_N[::10] = IGNORED_LABEL
    return [hidden_ND, head_VD], labels_N


def gradients_of(loss_of: LossOf, inputs: list[Tensor], labels_N: Tensor) -> tuple[Tensor, ...]:
    hidden_ND, head_VD = inputs
    loss_sum = loss_of(hidden_ND, head_VD, labels_N)
    return torch.autograd.grad(loss_sum / labels_N.numel(), inputs)


def seconds_of(loss_of: LossOf, inputs: list[Tensor], labels_N: Tensor) -> float:
    """Forward and backward once; on a CPU, where one thread computes, what it was given of it."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    synchronize()
    began = clock()
    gradients_of(loss_of, inputs, labels_N)
    synchronize()
    return clock() - began


def peak_mib(name: str, size: Size, dtype: torch.dtype, threads: int) -> float:
    """What forward and backward take at most, gradients included, beside their inputs."""
    torch.set_num_threads(threads)
    gradients_of(contenders()[name], *draw((8, 16, 32), dtype))  # what libraries set up once
    inputs, labels_N = draw(size, dtype)
    _reset_peak()  # what is drawn is larger for a moment than what stays of it
    before = _most_so_far()
    gradients_of(contenders()[name], inputs, labels_N)
    return (_most_so_far() - before) / MIB


def _most_so_far() -> float:
    return float(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else memory_peak()


def _reset_peak() -> None:
    """Let `_most_so_far` begin with what is in use now."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_memory_peak()


def in_new_process(name: str, size: Size, dtype: torch.dtype) -> float:
    """`peak_mib` where nothing has had memory before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(peak_mib, name, size, dtype, torch.get_num_threads()).result()


def measure(size: Size, dtype: torch.dtype, rounds: int) -> tuple[str, ...]:
    """A line of the table: milliseconds and MiB of the project's way, and how they compare for the others."""
    ways = contenders()
    inputs, labels_N = draw(size, dtype)
    turns = [[seconds_of(loss_of, inputs, labels_N) for loss_of in ways.values()] for _ in range(rounds + 1)][1:]
    seconds = [statistics.median(turn[way] for turn in turns) for way in range(len(ways))]
    ratios = [statistics.median(turn[way] / turn[0] for turn in turns) for way in range(len(ways))]
    peaks = [in_new_process(name, size, dtype) for name in ways]
    tokens, hidden_size, vocab_size = size
    chunk = min(tokens, choose_chunk_tokens(device(), vocab_size))
    own = f"{1000 * seconds[0]:,.0f} ms, {peaks[0]:,.0f} MiB"
    others = (f"{ratio:.2f}x, {peak:,.0f}" for ratio, peak in zip(ratios[1:], peaks[1:], strict=True))
    where = f"N {tokens}, D {hidden_size}, V {vocab_size}, {str(dtype).removeprefix('torch.')}"
    return (where, str(chunk), own, *others)


def main() -> None:
    parser = flag_parser("Head and cross-entropy in chunks of tokens.", rounds=Number(5, "rounds that count"))
    flags = parser.parse_args()
    announce(flags)
    cases = CASES_ON_GPU if torch.cuda.is_available() else CASES_ON_CPU
    table = Table("tokens, hidden, vocabulary", "chunk", *contenders())
    for case in in_turn(cases):
        table.add(*measure(*case, flags.rounds))
    table.print()


if __name__ == "__main__":
    main()
