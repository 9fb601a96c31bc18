"""What a training run takes of a device's memory, worked out before anything is allocated. Arithmetic, no torch.

Letters: D hidden, H query heads, K key/value heads, E head dim, F feed-forward, V vocabulary, L layers; P parameters,
N tokens of a micro-batch, n tokens of a chunk of the loss, e bytes of a value in the precision that blocks compute in.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.training import PER_OPERATION, OptimizerConfig, TrainConfig, checkpointed_blocks
from pretraining.config.variants import LlamaShape, block_parameters, parameter_count

MASTER_BYTES = 4
"""Bytes of a parameter as the optimizer sees it, and of its gradient: float32."""
STATE_BYTES = 4
"""Bytes of what an optimizer keeps for a parameter, each time: float32."""
RUNTIME_BYTES = {"cpu": 2**29, "cuda": 2**30}
"""Programs, and on a GPU the context, kernels and the buffers of communication; about what an idle process holds."""
LOGITS_AT_ONCE = 2**28
"""Logits of a chunk of the loss on a GPU, at most, where it is taken in chunks."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one rank needs at the peak of a training step, by what they are for.

    Attributes:
        parameters: float32 masters, this rank's part.
        gradients: float32, this rank's part.
        optimizer_state: this rank's part.
        gathered: whole parameters in the precision that blocks compute in, and their gradients, while they are needed.
        activations: what the forward pass keeps for the backward pass, and one block's temporary tensors.
        loss: a chunk's logits, and the gradient of the head.
        runtime: what a process holds without a model.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    gathered: int
    activations: int
    loss: int
    runtime: int

    @property
    def state(self) -> int:
        """What stays from step to step."""
        return self.parameters + self.gradients + self.optimizer_state

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def estimate_memory(
    config: TrainConfig, shape: LlamaShape, *, shard_size: int, compute_bytes: int, device_type: str
) -> MemoryEstimate:
    """Estimates the memory of one rank at the peak of a training step.

    The state is exact. The rest leaves out reserves of allocators and workspaces of kernels; on a CPU the whole
    is within a fifth of the peak (docs/performance.md).

    Args:
        config: the settings.
        shape: dimensions of the model.
        shard_size: ranks that share one copy of the model.
        compute_bytes: e; 2 in bfloat16 and float16, 4 in float32.
        device_type: "cpu" or "cuda".
    """
    own = -(-parameter_count(shape) // shard_size)
    return MemoryEstimate(
        parameters=MASTER_BYTES * own,
        gradients=MASTER_BYTES * own,
        optimizer_state=-(-optimizer_state_bytes(config.optimizer, shape) // shard_size),
        gathered=_gathered_bytes(config, shape, shard_size, compute_bytes),
        activations=_activation_bytes(config, shape, compute_bytes, device_type),
        loss=_loss_bytes(config, shape, compute_bytes, device_type),
        runtime=RUNTIME_BYTES[device_type],
    )


def optimizer_state_bytes(optimizer: OptimizerConfig, shape: LlamaShape) -> int:
    """Bytes that an optimizer keeps for a whole model; for one of the user's own, as many as AdamW."""
    if optimizer.optimizer not in OPTIMIZERS:
        optimizer = OptimizerConfig()
    matrices = shape.num_hidden_layers * (block_parameters(shape) - 2 * shape.hidden_size)  # without the norms
    rest = parameter_count(shape) - matrices
    of_matrices, of_rest = (len(optimizer.moments(in_matrix=in_matrix)) for in_matrix in (True, False))
    return STATE_BYTES * (matrices * of_matrices + rest * of_rest)


def kept_bytes_per_token(shape: LlamaShape, compute_bytes: int, device_type: str) -> int:
    """Bytes that a block's forward pass keeps for each token, for its backward pass.

    in e bytes   the inputs of q, k, v and of gate, up: 2·D; queries and what attention gives: 2·H·E; keys and
                 values: 2·K·E; gate, its SiLU, up, and their product: 4·F
    norms        two inputs: 2·D in e bytes on a GPU, whose kernel computes the rest again; on a CPU inputs and
                 normed values in float32: 4·D
    float32      the norms' scales, 2, and attention's log-sum-exp, H
    """
    width, feed_forward = shape.hidden_size, shape.intermediate_size
    heads = (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
    norms = 16 * width if device_type == "cpu" else 2 * width * compute_bytes
    return compute_bytes * (2 * width + 2 * heads + 4 * feed_forward) + norms + 4 * (2 + shape.num_attention_heads)


def loss_chunk_tokens(device_type: str, vocab_size: int) -> int:
    """Returns the tokens of a chunk of the loss where the setting leaves them to the device; see `model/loss.py`."""
    if device_type == "cpu":
        return 256
    return max(256, LOGITS_AT_ONCE >> (vocab_size - 1).bit_length())


def _gathered_bytes(config: TrainConfig, shape: LlamaShape, shard_size: int, compute_bytes: int) -> int:
    """Whole parameters to compute with, and whole gradients before they are reduced, besides what is counted as own."""
    block = block_parameters(shape)
    everything = parameter_count(shape)
    root = everything - shape.num_hidden_layers * block  # embedding, norm and head: gathered all the time
    if shard_size == 1:  # copies in the compute dtype, if that is another, and the gradient of one at a time
        embedding = shape.vocab_size * shape.hidden_size
        return compute_bytes * (everything + embedding) if compute_bytes < MASTER_BYTES else 0
    frees_blocks = config.parallel.sharding_strategy in ("fsdp", "hsdp")
    gathered = root + 2 * block if frees_blocks else everything  # the next block is gathered while one computes
    # The gradients of one group at a time, as computed and in float32 for the reduction; the root's is the largest.
    return compute_bytes * gathered + (compute_bytes + MASTER_BYTES) * max(root, block)


def _activation_bytes(config: TrainConfig, shape: LlamaShape, compute_bytes: int, device_type: str) -> int:
    parallel, layers = config.parallel, shape.num_hidden_layers
    whole = kept_bytes_per_token(shape, compute_bytes, device_type)
    reduced = compute_bytes * shape.hidden_size  # a block's input
    count = 0
    if parallel.fsdp_activation_checkpointing:
        count = len(checkpointed_blocks(parallel.selective_checkpointing, layers))
        if parallel.selective_checkpointing == PER_OPERATION:  # results of matrix products and attention, too
            heads = (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
            reduced += compute_bytes * (2 * heads + 2 * shape.hidden_size + 2 * shape.intermediate_size)
    # The gradients of one block's values; where blocks are computed again, that one's values, too.
    per_token = count * reduced + (layers - count) * whole + (2 if count else 1) * whole
    return config.batch.batch_size * config.data.seq_length * per_token


def _loss_bytes(config: TrainConfig, shape: LlamaShape, compute_bytes: int, device_type: str) -> int:
    """A chunk's logits, as computed and in float32; the gradients by hidden states, and by the head in float32."""
    tokens = config.batch.batch_size * config.data.seq_length
    chunk = config.loss.loss_chunk_tokens
    if chunk is None:
        chunk = loss_chunk_tokens(device_type, shape.vocab_size)
    chunk = min(tokens, chunk or tokens)
    head_bytes = MASTER_BYTES if chunk < tokens else compute_bytes
    return (
        chunk * shape.vocab_size * (compute_bytes + 4)
        + tokens * shape.hidden_size * compute_bytes
        + shape.vocab_size * shape.hidden_size * head_bytes
    )
