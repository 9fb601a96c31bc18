"""Initial weights that depend on the seed and a parameter's name, and on nothing else.

Each parameter has its own random stream, seeded by (seed, name), whatever the number of processes, the sharding and the
parameters before it: one process, DDP, FSDP and HSDP start from the same bits.

| parameter               | initial values                    | reason                                                |
|-------------------------|-----------------------------------|-------------------------------------------------------|
| embed_tokens, lm_head   | normal, std 0.02                  | GPT-2; the same whether they are tied or not          |
| q_proj, k_proj, v_proj, | normal, std 0.02                  | GPT-2, and Hugging Face's `initializer_range`         |
| gate_proj, up_proj      |                                   |                                                       |
| o_proj, down_proj       | normal, std 0.02 / sqrt(2 layers) | they add to the residual stream 2 x layers times;     |
|                         |                                   | its variance then does not grow with depth (Radford   |
|                         |                                   | et al. 2019, GPT-2, section 2.3)                      |
| every norm              | 1                                 | normalisation alone, to begin with                    |

The generator is the device's: a CPU and a GPU draw different numbers from one seed, and so may two models of GPU.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pretraining.config.variants import LlamaShape
from pretraining.model.llama import Llama

BASE_STD = 0.02
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def initialize_weights(model: Llama, shape: LlamaShape, seed: int, device: torch.device) -> None:
    """Fill every parameter of a model in place, and ties the head to the embedding where the shape says so.

    Args:
        model: with materialised parameters (after `to_empty`).
        shape: of the model.
        seed: of the run.
        device: where numbers are drawn; its generator is part of the result.
    """
    model.tie_weights()
    initialize_parameters(dict(model.named_parameters()), shape, seed, device)


@torch.no_grad()
def initialize_parameters(parameters: Mapping[str, Tensor], shape: LlamaShape, seed: int, device: torch.device) -> None:
    """Fill parameters in place, as `initialize_weights`.

    Every rank draws each full tensor, one at a time, and keeps its part: no communication, and the same on any layout.
    (A sharded tensor's own initialisation on a CPU mesh would fill every rank's shard with the same numbers.)

    Args:
        parameters: by name, plain tensors or DTensors of any mesh.
    """
    for wrapped_name, parameter in parameters.items():
        assert not parameter.is_meta, f"{wrapped_name} has no memory yet: call to_empty first"
        full = initial_values(parameter_name(wrapped_name), parameter.shape, shape, seed, device)
        if hasattr(parameter, "placements"):
            # A DTensor; here, since it takes a second to import, and one process needs none.
            from torch.distributed.tensor import DTensor, distribute_tensor

            assert isinstance(parameter, DTensor)
            # src_data_rank=None: every rank has the values already, nothing is sent.
            sharded = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(sharded.to_local())
        else:
            parameter.copy_(full)


def initial_values(name: str, size: torch.Size, shape: LlamaShape, seed: int, device: torch.device) -> Tensor:
    """Return the full float32 tensor that a parameter starts from; `name` is without wrappers."""
    full = torch.empty(size, dtype=torch.float32, device=device)
    if name.endswith("norm.weight"):
        return full.fill_(1.0)
    generator = torch.Generator(device).manual_seed(stream_seed(seed, name))
    return full.normal_(0.0, standard_deviation(name, shape), generator=generator)


def standard_deviation(name: str, shape: LlamaShape) -> float:
    """Return that of the normal distribution that a matrix is drawn from."""
    writes_to_residual_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
    return BASE_STD / math.sqrt(2 * shape.num_hidden_layers) if writes_to_residual_stream else BASE_STD


def stream_seed(seed: int, name: str) -> int:
    """Return the 64-bit seed of a parameter's random stream, the same in every process (`hash` of a text is not)."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")


def parameter_name(wrapped_name: str) -> str:
    """Return a parameter's name without the prefixes of activation checkpointing and compilation."""
    for wrapper in _WRAPPERS:
        wrapped_name = wrapped_name.replace(wrapper, "")
    return wrapped_name
