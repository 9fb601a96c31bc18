"""Matrix products in float8 through torchao, with twice the speed and fewer digits than bfloat16.

A linear layer has three products: the output in forward, the gradients of input and weight in backward. Each scales
both factors by their largest value, rounds them to float8, and multiplies; sums and results have higher precision:

    tensorwise   one scale per tensor; e4m3 (3 mantissa bits), gradients e5m2 (2 bits, more range)
    rowwise      one scale per row or column that is summed over, a power of two; e4m3 throughout

Only the blocks' linear layers use float8: errors of embedding and head would go straight into the logits. Weights,
gradients and optimizer state do not change, so checkpoints do not depend on float8.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from pretraining.config.training import Float8Scaling
from pretraining.distributed.torch_private import round_compiled_like_eager
from pretraining.errors import ConfigError

_CAPABILITY = (8, 9)
"""The first GPUs with float8 hardware: Ada and Hopper."""


def check_float8(scaling: Float8Scaling, device: torch.device) -> None:
    """Check that this process's device and packages support float8.

    Raises:
        ConfigError: the device has no float8 hardware, or torchao is missing or does not fit this torch.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability < _CAPABILITY:
        raise ConfigError(
            f"--float8={scaling} needs a GPU with float8 hardware, compute capability 8.9 or higher (Ada, Hopper): "
            "use such a GPU, or leave --float8 out"
        )
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--float8={scaling} needs torchao, which cannot be imported ({error}): "
            "pip install 'pretraining[float8]', or leave --float8 out"
        ) from error


def multiply_in_float8(blocks: nn.ModuleList, scaling: Float8Scaling | None, *, emulate: bool = False) -> None:
    """Replace the blocks' linear layers, in place, by layers that multiply in float8; parameters stay the same.

    Blocks may be on any device, also meta; all dimensions of their matrices are multiples of 16. None changes nothing.
    `emulate` rounds to float8 and multiplies in float32 on any device, for tests.
    """
    if scaling is None:
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulate)
    convert_to_float8_training(blocks, config=recipe)
    if scaling == "rowwise":
        # A compiled backward pass that recomputes activations must round as forward did: other values in a row give
        # another scale, which led to NaN in attention (github.com/pytorch/pytorch/issues/150859).
        round_compiled_like_eager()
