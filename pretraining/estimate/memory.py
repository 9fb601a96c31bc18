"""The memory of a training run on one device, estimated before anything is allocated. Arithmetic, no torch.

Letters: D hidden, H query heads, K key/value heads, E head dim, F feed-forward, V vocabulary, L layers; P parameters.
N is the tokens of a micro-batch, n the tokens of a chunk of the loss, e the bytes per value in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.strategies import STRATEGIES
from pretraining.config.training import PER_OPERATION, OptimizerConfig, TrainConfig, checkpointed_blocks
from pretraining.config.variants import LlamaShape
from pretraining.estimate.costs import block_costs, parameter_count

MASTER_BYTES = 4
"""Bytes per parameter of the masters, and of the gradients: float32."""
STATE_BYTES = 4
"""Bytes per value of optimizer state: float32."""
UPDATE_BYTES = {"normalized_sgdm": 4, "nadam": 8, "rmsprop": 4}
"""Bytes of temporary tensors in an optimizer's update, per parameter of the larger parameter group."""
RUNTIME_BYTES = {"cpu": 2**29, "cuda": 2**30}
"""Memory of an idle process: code, and on a GPU the context, kernels and communication buffers."""
MOST_LOGITS = 2**28
"""Most logits in a chunk of the loss on a GPU."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank at the peak of a training step, by purpose.

    Attributes:
        parameters: float32 masters, this rank's shard.
        gradients: all float32 gradients, this rank's shard.
        optimizer_state: this rank's shard.
        gathered: whole parameters in the compute dtype, and their gradients before they are sharded; at the peak.
        activations: activations stored for backward, and temporary tensors; at the peak.
        loss: logits of a chunk, and gradient of the head; at the peak.
        runtime: memory of a process without a model.
        later_gradients: the part of `gradients` that does not exist yet at the peak.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    gathered: int
    activations: int
    loss: int
    runtime: int
    later_gradients: int = 0

    @property
    def state(self) -> int:
        """Bytes that stay from step to step."""
        return self.parameters + self.gradients + self.optimizer_state

    @property
    def total(self) -> int:
        """All bytes at the peak."""
        temporary = self.gathered + self.activations + self.loss
        return self.state - self.later_gradients + temporary + self.runtime


@dataclass(frozen=True)
class Rank:
    """A rank, with everything that its memory depends on besides settings and model.

    Attributes:
        shard_size: ranks per copy of the model.
        itemsize: e; 2 in bfloat16 and float16, 4 in float32.
        device_type: "cpu" or "cuda".
        state_bytes: bytes per parameter that a user-defined optimizer keeps; None = as many as AdamW.
    """

    shard_size: int
    itemsize: int
    device_type: str
    state_bytes: float | None = None


def estimate_memory(config: TrainConfig, shape: LlamaShape, rank: Rank) -> MemoryEstimate:
    """Estimate the memory of one rank at the peak of a training step.

    The state is exact. The rest follows from the shapes of the tensors at the point of the step with the most memory
    (`_usages`); on a CPU each part is taken at its own largest point. Reserves of allocators, workspaces of kernels and
    compilation are not included. docs/planner.md compares the estimate with simulated steps, docs/performance.md with
    runs.
    """
    step = _Step(config, shape, rank)
    usages = list(_usages(step))
    peak = _largest_parts(usages) if rank.device_type == "cpu" else max(usages, key=lambda usage: usage.total)
    return MemoryEstimate(
        parameters=step.local,
        gradients=step.local,
        optimizer_state=optimizer_state_bytes(config.optimizer, shape, rank.shard_size, rank.state_bytes),
        gathered=peak.gathered,
        activations=peak.activations,
        loss=peak.loss,
        runtime=RUNTIME_BYTES[rank.device_type],
        later_gradients=step.local - peak.gradients,
    )


def optimizer_state_bytes(
    optimizer: OptimizerConfig, shape: LlamaShape, shard_size: int = 1, state_bytes: float | None = None
) -> int:
    """Return the bytes of optimizer state on one of `shard_size` ranks, without the step counters (4 per tensor).

    Args:
        state_bytes: as in `Rank`.
    """
    if state_bytes is not None:
        return round(state_bytes * -(-parameter_count(shape) // shard_size))
    if optimizer.optimizer not in OPTIMIZERS:
        optimizer = OptimizerConfig()
    matrices, norms, root = _local_parameters(shape, shard_size)
    in_matrices, elsewhere = (len(optimizer.moments(in_matrix=in_matrix)) for in_matrix in (True, False))
    per_block = matrices * in_matrices + norms * elsewhere
    return STATE_BYTES * (shape.num_hidden_layers * per_block + root * elsewhere)


def _local_parameters(shape: LlamaShape, shard_size: int) -> tuple[int, int, int]:
    """Return the parameters on one rank: of a block's matrices, its norms and biases, and of embedding, norm and head.

    FSDP2 shards each parameter by rows, and every rank allocates as many rows as the rank with most.
    """

    def local(rows: int, columns: int = 1) -> int:
        return -(-rows // shard_size) * columns

    block, norm = block_costs(shape), local(shape.hidden_size)
    vocabulary = (1 if shape.tie_word_embeddings else 2) * local(shape.vocab_size, shape.hidden_size)
    return sum(local(*matrix) for matrix in block.matrices), sum(map(local, block.vectors)), vocabulary + norm


def kept_bytes_per_token(shape: LlamaShape, compute_bytes: int, device_type: str) -> int:
    """Return the bytes per token that a block's forward stores for backward.

    - in e bytes: inputs of q, k, v and of gate, up: 2·D, as many as the results of o and down, which are not stored
    - in e bytes: other results of matrix products and attention; gate's SiLU and its product with up: 2·F
    - norms on a GPU: two inputs in e bytes, 2·D, since the kernel recomputes the rest
    - norms on a CPU: inputs and normalized values in float32, 4·D
    - norms of queries and keys: likewise, for H·E and K·E
    - in float32: scales of the norms, 2, and attention's log-sum-exp, H
    """
    normalized = 2 * shape.hidden_size + (0 if shape.qk_norm == "off" else shape.query_width + shape.key_width)
    norms = normalized * (8 if device_type == "cpu" else compute_bytes)
    kept = shape.query_width + block_costs(shape).results + 2 * shape.intermediate_size
    return compute_bytes * kept + norms + 4 * (2 + shape.num_attention_heads)


def loss_chunk_tokens(device_type: str, vocab_size: int) -> int:
    """Return the default tokens per chunk of the loss.

    Each chunk costs memory traffic of V D for the head's gradient, so large chunks are faster on a GPU. There a chunk
    is as large as memory allows, at least 256, and a power of two, so that chunks are even. On a CPU small chunks are
    faster, since their logits stay in its caches (docs/model.md has measurements).
    """
    if device_type == "cpu":
        return 256
    return max(256, MOST_LOGITS >> (vocab_size - 1).bit_length())


@dataclass(frozen=True)
class _Usage:
    """Bytes in use at one point of a step, besides parameters and optimizer state."""

    gradients: int
    gathered: int = 0
    activations: int = 0
    loss: int = 0

    @property
    def total(self) -> int:
        return self.gradients + self.gathered + self.activations + self.loss


@dataclass(frozen=True)
class _Step:
    """A training step of one rank, and the sizes of its tensors; bytes unless elements are named."""

    config: TrainConfig
    shape: LlamaShape
    rank: Rank

    @cached_property
    def local_block(self) -> int:
        """This rank's shard of a block's float32 masters, or of their gradients."""
        matrices, norms, _ = _local_parameters(self.shape, self.rank.shard_size)
        return MASTER_BYTES * (matrices + norms)

    @cached_property
    def local_root(self) -> int:
        """This rank's shard of embedding, last norm and head in float32."""
        return MASTER_BYTES * _local_parameters(self.shape, self.rank.shard_size)[2]

    @property
    def local(self) -> int:
        """This rank's shard of the model in float32."""
        return self.shape.num_hidden_layers * self.local_block + self.local_root

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks share one copy of the model."""
        return self.rank.shard_size > 1

    @property
    def frees_blocks(self) -> bool:
        """Whether the strategy frees whole parameters of a block after the block has computed."""
        return STRATEGIES[self.config.parallel.sharding_strategy].shards_parameters

    @property
    def has_copies(self) -> bool:
        """Whether a model without sharding computes with copies of its masters."""
        return not self.is_sharded and self.rank.itemsize < MASTER_BYTES

    @property
    def accumulates(self) -> bool:
        """Whether a step may have several micro-batches, whose gradients are accumulated."""
        batch = self.config.batch
        return (batch.grad_accum_steps or 1) > 1 or batch.global_batch_size is not None

    @property
    def context(self) -> int:
        """Ranks that share their sequences, C."""
        return self.config.parallel.context_parallel_size

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch on this rank, N."""
        return self.config.batch.batch_size * self.config.data.seq_length // self.context

    @cached_property
    def vocabulary(self) -> int:
        """Elements of the embedding, V D."""
        return self.shape.vocab_size * self.shape.hidden_size

    @cached_property
    def block(self) -> int:
        """Elements of a block."""
        return block_costs(self.shape).parameters

    @cached_property
    def root(self) -> int:
        """Elements of embedding, last norm and head, which stay gathered during forward and backward."""
        return parameter_count(self.shape) - self.shape.num_hidden_layers * self.block

    @cached_property
    def kept(self) -> int:
        """Activations that a block without checkpointing stores."""
        kept = self.tokens * kept_bytes_per_token(self.shape, self.rank.itemsize, self.rank.device_type)
        if self.context == 1:
            return kept
        # Keys and values of whole rows in place of the rank's own. Besides, a GPU copies keys that both chunks see, and
        # a CPU joins the results of pieces (model/shared_rows.py).
        copied = self.gathered_keys // (2 * self.context)
        if self.rank.device_type == "cpu":
            copied = self.rank.itemsize * self.tokens * self.shape.query_width
        return kept + self.gathered_keys * (self.context - 1) // self.context + copied

    @property
    def gathered_keys(self) -> int:
        """Keys and values of a block that the ranks of a context group gather: 2·B·S·K·E elements."""
        return self.rank.itemsize * 2 * self.shape.key_width * self.tokens * self.context

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        """Activations of each block: stored in forward, and present in backward after recomputation."""
        parallel, shape = self.config.parallel, self.shape
        recomputed: list[int] = []
        if parallel.fsdp_activation_checkpointing:
            recomputed = checkpointed_blocks(parallel.selective_checkpointing, shape.num_hidden_layers)
        hidden = self.rank.itemsize * self.tokens * shape.hidden_size
        stored, full = hidden, self.kept
        if parallel.selective_checkpointing == PER_OPERATION:
            # Results of matrix products and attention, too, including the last one, which backward does not need.
            results = shape.query_width + block_costs(shape).results
            stored += self.tokens * (self.rank.itemsize * results + 4 * shape.num_attention_heads)
            full += hidden
        found = [(self.kept, self.kept)] * shape.num_hidden_layers
        for index in recomputed:
            found[index] = (stored, full)
        return found

    @property
    def rotation(self) -> int:
        """Cosines and sines of the rotary embeddings."""
        return 4 * self.config.data.seq_length // self.context * self.shape.head_dim


def _usages(step: _Step) -> Iterator[_Usage]:
    """Yield the usage at each point that may be the peak: loss, backward of each block, end of backward, update."""
    yield _at_loss(step)
    before = sum(stored for stored, _ in step.blocks)
    for index in reversed(range(len(step.blocks))):
        stored, full = step.blocks[index]
        before -= stored
        yield _in_block(step, index, before + full)
    yield from _after_blocks(step)
    yield _Usage(step.local, activations=_update_bytes(step))


def _largest_parts(usages: Sequence[_Usage]) -> _Usage:
    """Return each part at its largest: a CPU's heap keeps freed memory in pieces that few later tensors fit into."""
    return _Usage(*(max(getattr(usage, part.name) for usage in usages) for part in fields(_Usage)))


def _at_loss(step: _Step) -> _Usage:
    """Estimate the usage in the loss, with all activations, and the logits of a chunk."""
    itemsize, layers, hidden = step.rank.itemsize, step.shape.num_hidden_layers, step.tokens * step.shape.hidden_size
    if step.is_sharded:
        # The buffer of the last all-gather, already copied out, stays until the next all-gather.
        whole = step.root + step.block * (1 if step.frees_blocks else layers + 1)
        gathered = itemsize * whole + (MASTER_BYTES * step.root if step.accumulates else 0)
    else:
        gathered = itemsize * (step.root + layers * step.block) if step.has_copies else 0
    # Input and result of the last norm (float32 on a CPU), and the gradient of the result.
    norm = (8 if step.rank.device_type == "cpu" else itemsize) + 2 * itemsize
    activations = sum(stored for stored, _ in step.blocks) + norm * hidden + step.rotation
    return _Usage(step.local if step.accumulates else 0, gathered, activations, _loss_bytes(step))


def _in_block(step: _Step, index: int, kept: int) -> _Usage:
    """Estimate the usage in the backward of a block, after its last matrix product: three gradients of activations."""
    shape, itemsize, done = step.shape, step.rank.itemsize, step.shape.num_hidden_layers - 1 - index
    width, feed_forward = shape.hidden_size, shape.intermediate_size
    temporary = itemsize * step.tokens * (width + 2 * feed_forward)  # gradients of the result, of gate and of up
    if step.context > 1:
        # Later, with the activations of the feed-forward layer freed: gradients of the copied keys and values, of those
        # in order, and of those as they were gathered, whose sums over ranks arrive beside them.
        freed = itemsize * step.tokens * (width + 4 * feed_forward)
        temporary = max(temporary, 4 * step.gathered_keys - freed)
    head = step.vocabulary if step.is_sharded or shape.tie_word_embeddings else 0  # kept until the embedding's gradient
    gradients = done * step.local_block
    if step.is_sharded:
        temporary += itemsize * width * feed_forward
        # The next block is being gathered, and the gradients of the previous block are being reduced.
        blocks = min(2, index + 1) if step.frees_blocks else index + 1
        gathered = itemsize * (step.root + blocks * step.block)
        gathered += MASTER_BYTES * (step.block if done else step.root if step.accumulates else 0)
    else:
        finished = step.vocabulary - head + done * step.block + width * feed_forward
        gradients = MASTER_BYTES * finished
        gathered = itemsize * (parameter_count(shape) - finished) if step.has_copies else 0
    if step.accumulates:
        gradients = step.local
    return _Usage(gradients, gathered, kept + temporary + step.rotation, itemsize * head)


def _after_blocks(step: _Step) -> Iterator[_Usage]:
    """Yield the usage after the blocks' backward, without activations: root gradients before and after reduction."""
    itemsize = step.rank.itemsize
    if not step.has_copies and not step.is_sharded:
        return
    if not step.is_sharded:
        copies = parameter_count(step.shape) if step.accumulates else step.vocabulary
        yield _Usage(step.local, itemsize * (copies + step.vocabulary))
        return
    # Tied weights have two gradients and their sum. The gradients of the first block are still being reduced.
    gradients = itemsize * step.vocabulary * (3 if step.shape.tie_word_embeddings else 2)
    reduced = step.local if step.accumulates else step.local - step.local_root
    yield _Usage(reduced, itemsize * step.root + MASTER_BYTES * step.block + gradients)
    yield _Usage(step.local, (2 * itemsize + MASTER_BYTES) * step.root)


def _update_bytes(step: _Step) -> int:
    """Return the temporary bytes of an update, which runs group by group: matrices, then embedding and norms."""
    optimizer = step.config.optimizer.optimizer
    per_block, norms, root = _local_parameters(step.shape, step.rank.shard_size)
    matrices, rest = step.shape.num_hidden_layers * per_block, step.shape.num_hidden_layers * norms + root
    if optimizer == "muon":  # as simulated; shards are sent to their owners and back
        return matrices * (10 if step.is_sharded else 5)
    rows = 0 if step.shape.tie_word_embeddings else -(-step.shape.vocab_size // step.rank.shard_size)
    head = rows * step.shape.hidden_size
    return UPDATE_BYTES.get(optimizer, 0) * max(matrices + head, rest - head)


def _loss_bytes(step: _Step) -> int:
    """Return the bytes of the loss besides hidden states and their gradient, mostly a chunk or the head's gradient.

    A chunk needs its logits, in the compute dtype and in float32, and their log-softmax. The head's gradient is in
    float32 from the second chunk on.
    """
    itemsize, vocabulary = step.rank.itemsize, step.vocabulary
    chunk = step.config.loss.loss_chunk_tokens
    if chunk is None:
        chunk = loss_chunk_tokens(step.rank.device_type, step.shape.vocab_size)
    chunk = min(step.tokens, chunk or step.tokens)
    chunks = -(-step.tokens // chunk)
    is_narrow = itemsize < MASTER_BYTES
    logits = chunk * step.shape.vocab_size
    head_gradient = (0, 0, itemsize, MASTER_BYTES)[min(chunks, 3)] * vocabulary
    in_chunk = logits * (itemsize + (8 if is_narrow else 4)) + head_gradient
    adding = 0
    if chunks > 1 and is_narrow:
        adding = logits * itemsize + vocabulary * (MASTER_BYTES + itemsize * (2 if chunks == 2 else 1))
    scaling = vocabulary * (itemsize + (itemsize if chunks == 1 else MASTER_BYTES))
    is_moved = step.has_copies and not step.accumulates and not step.shape.tie_word_embeddings  # to its master
    return max(in_chunk, adding, scaling, vocabulary * (itemsize + MASTER_BYTES) if is_moved else 0)
