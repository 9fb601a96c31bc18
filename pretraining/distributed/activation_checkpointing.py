"""Activation checkpointing: less memory for activations, more arithmetic.

Without it, forward keeps what backward needs of every operation. A checkpointed block keeps its input alone, and
backward computes the block again from there. Kept for one token and block, in elements of the compute dtype (D hidden,
Q = heads x head dim, K = key/value heads x head dim, F feed-forward):

    none            4 D + 2 Q + 2 K + 4 F   the inputs of norms, matrix products, attention and SwiGLU
    per operation   3 D + 2 Q + 2 K + 2 F   the input of the block, results of matrix products and attention
    full            D                       the input of the block

The block that is being computed again takes what "none" does. Per operation adds hardly any arithmetic: norms,
rotations and SwiGLU are bound by memory. A compiled block keeps little of them anyway, so there it gains little.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from pretraining.config.training import PER_OPERATION, ParallelConfig, checkpointed_blocks
from pretraining.distributed.torch_private import recompute_in_backward


def checkpoint_activations(blocks: nn.ModuleList, parallel: ParallelConfig) -> None:
    """Exchange blocks, in place, for ones that compute their activations again; which ones is a setting.

    Comes before compilation, which then compiles the recomputation too. Blocks must draw no random numbers.
    """
    if not parallel.fsdp_activation_checkpointing:
        return
    keeps_some = parallel.selective_checkpointing == PER_OPERATION
    contexts = partial(create_selective_checkpoint_contexts, _kept_operations()) if keeps_some else None
    for index in checkpointed_blocks(parallel.selective_checkpointing, len(blocks)):
        blocks[index] = recompute_in_backward(blocks[index], contexts)


def _kept_operations() -> list[Any]:
    """Return the operations with most of the arithmetic: matrix products (also in float8), attention by any kernel."""
    from torch.nn.attention import varlen  # noqa: F401  it makes the last of these; here, since it takes a second

    return [
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.torch_attn._varlen_attn.default,
    ]
