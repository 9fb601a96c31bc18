"""Activation checkpointing, which trades arithmetic for memory.

Without checkpointing, forward stores the activations of every operation for backward. A checkpointed block stores only
its input, and backward recomputes the block. Stored per token and block, in elements of the compute dtype (D hidden,
Q = heads x head dim, K = key/value heads x head dim, F feed-forward):

    none            4 D + 2 Q + 2 K + 4 F   inputs of norms, matrix products, attention and SwiGLU
    per operation   3 D + 2 Q + 2 K + 2 F   input of the block, results of matrix products and attention
    full            D                       input of the block

A block that is being recomputed needs the memory of "none". "Per operation" adds hardly any time, since norms,
rotations and SwiGLU are bound by memory; compiled blocks store few of these activations, and gain little from it.
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
    """Wrap the blocks that the settings select, in place, so that backward recomputes their activations.

    Call it before compilation, which then compiles the recomputation, too. Blocks must draw no random numbers.
    """
    if not parallel.fsdp_activation_checkpointing:
        return
    is_selective = parallel.selective_checkpointing == PER_OPERATION
    contexts = partial(create_selective_checkpoint_contexts, _kept_operations()) if is_selective else None
    for index in checkpointed_blocks(parallel.selective_checkpointing, len(blocks)):
        blocks[index] = recompute_in_backward(blocks[index], contexts)


def _kept_operations() -> list[Any]:
    """Return the operations with most of the arithmetic: matrix products (also in float8) and attention kernels."""
    from torch.nn.attention import varlen  # noqa: F401  registers the last operation; the import takes a second

    return [
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.torch_attn._varlen_attn.default,
    ]
