"""Initial weights, which depend only on the seed, the parameter's name and the device type.

Each parameter has its own random stream, seeded by (seed, name). So one process, DDP, FSDP and HSDP start from the same
bits on any number of processes.

| parameter               | initial values                    | reason                                                |
|-------------------------|-----------------------------------|-------------------------------------------------------|
| embed_tokens, lm_head   | normal, std 0.02                  | GPT-2; the same, tied or not                          |
| q_proj, k_proj, v_proj, | normal, std 0.02                  | GPT-2, and Hugging Face's `initializer_range`         |
| gate_proj, up_proj      |                                   |                                                       |
| o_proj, down_proj       | normal, std 0.02 / sqrt(2 layers) | they add to the residual stream 2 x layers times;     |
|                         |                                   | its variance then does not grow with depth (Radford   |
|                         |                                   | et al. 2019, GPT-2, section 2.3)                      |
| every bias              | 0                                 | nothing is learned yet                                |
| every norm              | 1                                 | normalisation alone at first                          |
| of a user-defined block | what its `initial_values` returns | else as above, by name                                |

The device's generator draws the numbers: a CPU and a GPU draw different numbers from one seed, and two GPU models may.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from pretraining.config.plugins import plugin_errors
from pretraining.config.variants import LlamaShape
from pretraining.model.llama import Llama, block_class

BASE_STD = 0.02
_OF_BLOCK = re.compile(r"model\.layers\.\d+\.(.*)")
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def initialize_weights(model: Llama, shape: LlamaShape, seed: int, device: torch.device) -> None:
    """Fill every parameter of a model in place, and tie the head to the embedding if the shape says so.

    Args:
        model: model with materialised parameters (after `to_empty`).
        device: device whose generator draws the numbers.
    """
    model.tie_weights()
    initialize_parameters(dict(model.named_parameters()), shape, seed, device)


@torch.no_grad()
def initialize_parameters(parameters: Mapping[str, Tensor], shape: LlamaShape, seed: int, device: torch.device) -> None:
    """Fill parameters in place, as `initialize_weights`.

    Every rank draws one full tensor at a time and keeps its part, without communication. (In-place initialisation of a
    DTensor on a CPU mesh would fill every rank's shard with the same numbers.)

    Args:
        parameters: plain tensors or DTensors of any mesh, by name.
    """
    for wrapped_name, parameter in parameters.items():
        assert not parameter.is_meta, f"{wrapped_name} has no memory yet: call to_empty first"
        full = initial_values(parameter_name(wrapped_name), parameter.shape, shape, seed, device)
        if hasattr(parameter, "placements"):
            # Imported here: the import takes a second, and one process needs no DTensor.
            from torch.distributed.tensor import DTensor, distribute_tensor

            assert isinstance(parameter, DTensor)
            # src_data_rank=None: every rank has the values already.
            sharded = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(sharded.to_local())
        else:
            parameter.copy_(full)


def initial_values(name: str, size: torch.Size, shape: LlamaShape, seed: int, device: torch.device) -> Tensor:
    """Return the initial values of a parameter, a full float32 tensor; `name` is without wrappers."""
    full = torch.empty(size, dtype=torch.float32, device=device)
    generator = torch.Generator(device).manual_seed(stream_seed(seed, name))
    own = getattr(block_class(shape), "initial_values", None)
    if own is not None and (match := _OF_BLOCK.fullmatch(name)):
        found: Tensor | None
        with torch.no_grad(), plugin_errors("block", shape.block or ""):
            found = own(match[1], full, generator)
        if found is not None:
            return found
    if name.endswith((".bias", "norm.weight")):
        return full.fill_(0.0 if name.endswith(".bias") else 1.0)
    return full.normal_(0.0, standard_deviation(name, shape), generator=generator)


def standard_deviation(name: str, shape: LlamaShape) -> float:
    """Return the standard deviation of a matrix's initial values."""
    writes_to_residual_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
    return BASE_STD / math.sqrt(2 * shape.num_hidden_layers) if writes_to_residual_stream else BASE_STD


def stream_seed(seed: int, name: str) -> int:
    """Return the 64-bit seed of a parameter's random stream; unlike Python's `hash`, it is equal in every process."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")


def parameter_name(wrapped_name: str) -> str:
    """Return a parameter's name without the prefixes of activation checkpointing and compilation."""
    for wrapper in _WRAPPERS:
        wrapped_name = wrapped_name.replace(wrapper, "")
    return wrapped_name
