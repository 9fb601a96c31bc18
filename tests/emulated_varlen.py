"""The flash kernel for sequences of various lengths on a CPU, which has none: a plain call a document.

It stands below PyTorch's own operation, with its gradient, its shapes for the compiler and its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import _scoped_library

from pretraining.model import llama
from pretraining.model.kernels import document_bounds
from pretraining.model.shared_rows import PartialRows, attend_to_prefix, kernel_inputs, shifted_mask
from pretraining.train import opening


@contextmanager
def emulated_varlen() -> Iterator[list[str]]:
    """Has models take all documents at once, as on a GPU; gives "forward" and "backward" as they are called."""
    calls: list[str] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, *options: Any, **more: Any) -> tuple[Tensor, ...]:
        calls.append("forward")
        mixed = _attention(q, k, v, _lengths(options, more)).contiguous()
        state = torch.zeros(2, dtype=torch.uint64)
        return mixed, q.new_zeros(q.size(1), q.size(0), dtype=torch.float32), state, q.new_zeros(0), q.new_zeros(0)

    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any, **more: Any
    ) -> tuple[Tensor, ...]:
        calls.append("backward")
        with ThreadPoolExecutor(1) as another_thread:  # autograd is off inside of an operation, but there
            return another_thread.submit(_gradients, gradient, (q, k, v), _lengths(options, more)).result()

    with _scoped_library("aten", "IMPL") as library, pytest.MonkeyPatch.context() as patch:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        patch.setattr(opening, "has_kernel_for_documents", lambda *_: True)
        patch.setattr(
            llama, "locate_documents", lambda lengths, *_: None if lengths is None else document_bounds(lengths)
        )
        patch.setattr(llama, "locate_rows", lambda rows, *_: PartialRows(rows, kernel_inputs(rows)))
        yield calls


def _attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[tuple[int, ...]]) -> Tensor:
    """Causal attention of each document, whose last queries and keys belong to the same token."""
    of_queries, of_keys = lengths
    mask = shifted_mask(max(of_keys), q)
    pieces = zip(q.split(of_queries), k.split(of_keys), v.split(of_keys), strict=True)
    return torch.cat([attend_to_prefix(*piece, mask, None) for piece in pieces])


def _gradients(gradient: Tensor, inputs: tuple[Tensor, ...], lengths: list[tuple[int, ...]]) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        q, k, v = (each.detach().requires_grad_() for each in inputs)
        mixed = _attention(q, k, v, lengths)
    return torch.autograd.grad(mixed, (q, k, v), gradient)


def _lengths(options: tuple[Any, ...], more: dict[str, Any]) -> list[tuple[int, ...]]:
    """The lengths of the documents in queries and keys."""
    *bounds, longest_of_queries, longest_of_keys, dropout, is_causal = options[:6]
    assert dropout == 0 and is_causal and (more["window_size_left"], more["window_size_right"]) == (-1, 0)
    lengths = [tuple(each.diff().tolist()) for each in bounds]
    assert max(lengths[0]) <= longest_of_queries and max(lengths[1]) <= longest_of_keys
    return lengths
