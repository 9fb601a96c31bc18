"""Matrix products in float8, through torchao: twice the arithmetic of bfloat16, for fewer digits.

A linear layer multiplies three times: its output in forward, the gradients of its input and of its weight in backward.
Each time both sides are scaled by the largest value in them, rounded to float8, and multiplied; sums and results have
higher precision:

    tensorwise   one scale for a tensor; e4m3 (3 bits behind the point), gradients e5m2 (2 bits, more range)
    rowwise      one scale for each row or column that is summed over, a power of two; e4m3 throughout

Only the blocks' linear layers use float8. Weights, gradients and optimizer state stay as they are, under the same
names, so checkpoints do not depend on it. Errors of embedding and head would go straight into the logits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from pretraining.config.training import Float8Scaling
from pretraining.distributed.torch_private import round_in_compiled_code_as_outside
from pretraining.errors import ConfigError

_CAPABILITY = (8, 9)
"""The first GPUs with units for float8: Ada and Hopper."""


def check_float8(scaling: Float8Scaling, device: torch.device) -> None:
    """Refuse float8 where it cannot be had; looks at this process's device and packages only.

    Raises:
        ConfigError: the device has no units for float8, or torchao is missing or does not fit this torch.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability < _CAPABILITY:
        raise ConfigError(
            f"--float8={scaling} needs a GPU with units for float8, of compute capability 8.9 or more (Ada, Hopper): "
            "train on such a one, or leave --float8 out"
        )
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--float8={scaling} needs torchao, which cannot be imported ({error}): "
            "pip install 'pretraining[float8]', or leave --float8 out"
        ) from error


def multiply_in_float8(blocks: nn.ModuleList, scaling: Float8Scaling | None, *, emulate: bool = False) -> None:
    """Exchange the blocks' linear layers, in place, for ones that multiply in float8; parameters stay the same.

    Blocks may be on any device, also meta; the sides of their matrices are multiples of 16. A scaling of None leaves
    them alone. `emulate` rounds to float8 but multiplies in float32, on any device: slow, for tests.
    """
    if scaling is None:
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulate)
    convert_to_float8_training(blocks, config=recipe)
    if scaling == "rowwise":
        # A compiled backward pass that computes activations again must round as forward did: a row of other numbers has
        # another scale, and attention has given NaN for it (github.com/pytorch/pytorch/issues/150859).
        round_in_compiled_code_as_outside()
