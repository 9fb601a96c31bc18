"""One rank of test_initial_weights.py: a model on every mesh of this world starts and trains as a plain one.

Rank 0 prints a line a layout; a rank fails where the sharded parameters are not, bit for bit, those of the plain model,
or where training them is not training the plain model.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pretraining.config.variants import LlamaShape
from pretraining.launch.program import run_as_program
from pretraining.model.init import initialize_weights, parameter_name
from pretraining.model.llama import Llama

CPU = torch.device("cpu")
SEED = 11


def make_shape(tied: bool) -> LlamaShape:
    """Rows divide neither by 3 nor by 4, so shards are uneven, and those of the two rows of k_proj and v_proj empty."""
    return LlamaShape(
        hidden_size=10,
        intermediate_size=13,
        num_hidden_layers=2,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=2,
        vocab_size=17,
        max_position_embeddings=32,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_scaling=None,
    )


def plain_model(shape: LlamaShape) -> Llama:
    model = Llama(shape)
    initialize_weights(model, shape, SEED, CPU)
    return model


def sharded_model(shape: LlamaShape, mesh: DeviceMesh, checkpointed: bool) -> Llama:
    """The order of a run: build on the meta device, wrap, shard, give memory, initialise."""
    with torch.device("meta"):
        model = Llama(shape)
    if checkpointed:
        for index, block in enumerate(model.blocks):
            model.model.layers[index] = checkpoint_wrapper(block)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # what memory may hold
    initialize_weights(model, shape, SEED, CPU)
    return model


def assert_same_weights(model: Llama, plain: Llama) -> None:
    expected = dict(plain.named_parameters())
    names = [parameter_name(name) for name, _ in model.named_parameters()]
    assert names == list(expected), names
    for name, parameter in zip(names, model.parameters(), strict=True):
        assert isinstance(parameter, DTensor), name
        assert torch.equal(parameter.full_tensor(), expected[name]), name
    tied = model.shape.tie_word_embeddings
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def assert_same_training(model: Llama, plain: Llama) -> None:
    """Two steps of SGD: a tied head that was gathered or updated apart from the embedding would show in the second."""
    tokens = torch.randint(
        plain.shape.vocab_size, (dist.get_world_size(), 9), generator=torch.Generator().manual_seed(0)
    )
    mine = tokens[dist.get_rank()][None]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    for _ in range(2):
        for each, batch in ((model, mine), (plain, tokens)):
            loss_sum, valid_count, *_ = each(batch[:, :-1], batch[:, 1:])
            (loss_sum / valid_count).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), expected.detach(), atol=1e-6, rtol=1e-5)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    for shard in range(1, world_size + 1):
        if world_size % shard:
            continue
        mesh = init_device_mesh("cpu", (world_size // shard, shard), mesh_dim_names=("replicate", "shard"))
        for tied in (False, True):
            shape = make_shape(tied)
            model, plain = sharded_model(shape, mesh, checkpointed=tied), plain_model(shape)
            assert_same_weights(model, plain)
            assert_same_training(model, plain)
        if dist.get_rank() == 0:
            print(f"replicate={world_size // shard} shard={shard}: same")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_as_program(main)  # many process groups: their threads would be there at the interpreter's end
