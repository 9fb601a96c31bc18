"""What a training run takes of a device's memory, worked out before anything is allocated. Arithmetic, no torch.

Letters: D hidden, H query heads, K key/value heads, E head dim, F feed-forward, V vocabulary, L layers; P parameters,
N tokens of a micro-batch, n tokens of a chunk of the loss, e bytes of a value in the precision that blocks compute in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from pretraining.config.plugins import OPTIMIZERS
from pretraining.config.strategies import STRATEGIES
from pretraining.config.training import PER_OPERATION, OptimizerConfig, TrainConfig, checkpointed_blocks
from pretraining.config.variants import LlamaShape, block_parameters, parameter_count
from pretraining.estimate.flops import block_costs

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
        gradients: float32, this rank's part, when all are there.
        optimizer_state: this rank's part.
        gathered: whole parameters in the precision that blocks compute in, and their gradients on the way to the ranks
            that keep them; at the peak, as the following.
        activations: what the forward pass keeps for the backward pass, and temporary tensors.
        loss: a chunk's logits, and the gradient of the head.
        runtime: what a process holds without a model.
        later_gradients: of the gradients, those that are not there yet at the peak.
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
        """What stays from step to step."""
        return self.parameters + self.gradients + self.optimizer_state

    @property
    def total(self) -> int:
        """All that is there at the peak."""
        there = self.gathered + self.activations + self.loss + self.runtime
        return self.state - self.later_gradients + there


def estimate_memory(
    config: TrainConfig, shape: LlamaShape, *, shard_size: int, compute_bytes: int, device_type: str
) -> MemoryEstimate:
    """Estimate the memory of one rank at the peak of a training step.

    The state is exact. The rest is that of the moment of a step which takes most (`_moments`), by the shapes of the
    tensors that are there; on a CPU each part is that of its own largest moment. It leaves out reserves of allocators
    and workspaces of kernels, and is of blocks that are not compiled; docs/planner.md has it beside simulated steps,
    docs/performance.md beside runs.

    Args:
        config: the settings.
        shape: dimensions of the model.
        shard_size: ranks that share one copy of the model.
        compute_bytes: e; 2 in bfloat16 and float16, 4 in float32.
        device_type: "cpu" or "cuda".
    """
    step = _Step(config, shape, shard_size, compute_bytes, device_type)
    moments = list(_moments(step))
    peak = _largest_parts(moments) if device_type == "cpu" else max(moments, key=lambda moment: moment.total)
    return MemoryEstimate(
        parameters=step.own,
        gradients=step.own,
        optimizer_state=optimizer_state_bytes(config.optimizer, shape, shard_size),
        gathered=peak.gathered,
        activations=peak.activations,
        loss=peak.loss,
        runtime=RUNTIME_BYTES[device_type],
        later_gradients=step.own - peak.gradients,
    )


def optimizer_state_bytes(optimizer: OptimizerConfig, shape: LlamaShape, shard_size: int = 1) -> int:
    """Return the bytes that an optimizer keeps on one of `shard_size` ranks, without 4 per parameter tensor to count.

    One of the user's own is taken to keep as much as AdamW.
    """
    if optimizer.optimizer not in OPTIMIZERS:
        optimizer = OptimizerConfig()
    matrices, norms, root = _own_parameters(shape, shard_size)
    of_matrices, of_rest = (len(optimizer.moments(in_matrix=in_matrix)) for in_matrix in (True, False))
    of_block = matrices * of_matrices + norms * of_rest
    return STATE_BYTES * (shape.num_hidden_layers * of_block + root * of_rest)


def _own_parameters(shape: LlamaShape, shard_size: int) -> tuple[int, int, int]:
    """Return the parameters on one rank: of a block's matrices, of its norms, and of embedding, last norm and head.

    FSDP2 cuts each parameter by its rows, and every rank has memory for as many as the one with most.
    """

    def own(rows: int, columns: int = 1) -> int:
        return -(-rows // shard_size) * columns

    norm = own(shape.hidden_size)
    of_vocabulary = (1 if shape.tie_word_embeddings else 2) * own(shape.vocab_size, shape.hidden_size)
    return sum(own(*each) for each in block_costs(shape).matrices), 2 * norm, of_vocabulary + norm


def kept_bytes_per_token(shape: LlamaShape, compute_bytes: int, device_type: str) -> int:
    """Return the bytes that a block's forward pass keeps for each token, for its backward pass.

    in e bytes   the inputs of q, k, v and of gate, up: 2·D, as many as the results of o and down, which are not kept;
                 the other results of matrix products and attention; gate's SiLU and its product with up: 2·F
    norms        two inputs: 2·D in e bytes on a GPU, whose kernel computes the rest again; on a CPU inputs and
                 normed values in float32: 4·D
    float32      the norms' scales, 2, and attention's log-sum-exp, H
    """
    norms = shape.hidden_size * (16 if device_type == "cpu" else 2 * compute_bytes)
    kept = block_costs(shape).results + 2 * shape.intermediate_size
    return compute_bytes * kept + norms + 4 * (2 + shape.num_attention_heads)


def loss_chunk_tokens(device_type: str, vocab_size: int) -> int:
    """Return the tokens of a chunk of the loss where the setting leaves them to the device.

    On a CPU small chunks are faster, since their logits are still in its caches (docs/model.md has the numbers). Each
    chunk also costs memory traffic of V D for the head's gradient, which is all that counts with a GPU's small caches:
    there chunks are as large as memory allows, a power of two so that they come out even, and at least 256.
    """
    if device_type == "cpu":
        return 256
    return max(256, LOGITS_AT_ONCE >> (vocab_size - 1).bit_length())


@dataclass(frozen=True)
class _Moment:
    """Bytes at a moment of a step, besides parameters and optimizer state, which are always there."""

    gradients: int
    gathered: int = 0
    activations: int = 0
    loss: int = 0

    @property
    def total(self) -> int:
        return self.gradients + self.gathered + self.activations + self.loss


@dataclass(frozen=True)
class _Step:
    """A training step of one rank, and the sizes that its moments are made of, in bytes."""

    config: TrainConfig
    shape: LlamaShape
    shard_size: int
    itemsize: int
    device_type: str

    @cached_property
    def own_block(self) -> int:
        """Of a block's gradients, and parameters, in float32: this rank's part."""
        matrices, norms, _ = _own_parameters(self.shape, self.shard_size)
        return MASTER_BYTES * (matrices + norms)

    @cached_property
    def own_root(self) -> int:
        """The same of embedding, last norm and head."""
        return MASTER_BYTES * _own_parameters(self.shape, self.shard_size)[2]

    @property
    def own(self) -> int:
        """The same of the model."""
        return self.shape.num_hidden_layers * self.own_block + self.own_root

    @property
    def is_sharded(self) -> bool:
        """Whether blocks are gathered for the time that they are needed."""
        return self.shard_size > 1

    @property
    def frees_blocks(self) -> bool:
        """Whether the strategy keeps whole parameters of no block longer than it computes."""
        return STRATEGIES[self.config.parallel.sharding_strategy].shards_parameters

    @property
    def has_copies(self) -> bool:
        """Whether a model that is not sharded computes with other parameters than its masters."""
        return not self.is_sharded and self.itemsize < MASTER_BYTES

    @property
    def accumulates(self) -> bool:
        """Whether a step may have several micro-batches, so that later ones find the gradients of earlier ones."""
        batch = self.config.batch
        return (batch.grad_accum_steps or 1) > 1 or batch.global_batch_size is not None

    @property
    def tokens(self) -> int:
        """N."""
        return self.config.batch.batch_size * self.config.data.seq_length

    @cached_property
    def vocabulary(self) -> int:
        """V D, elements of the embedding."""
        return self.shape.vocab_size * self.shape.hidden_size

    @cached_property
    def block(self) -> int:
        """Elements of a block."""
        return block_parameters(self.shape)

    @cached_property
    def root(self) -> int:
        """Elements of embedding, last norm and head, which stay gathered through forward and backward."""
        return parameter_count(self.shape) - self.shape.num_hidden_layers * self.block

    @cached_property
    def kept(self) -> int:
        """Bytes that a block keeps which is not computed again."""
        return self.tokens * kept_bytes_per_token(self.shape, self.itemsize, self.device_type)

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        """Of each block, what it keeps in the forward pass, and what is there once it has been computed again."""
        parallel, shape = self.config.parallel, self.shape
        again: list[int] = []
        if parallel.fsdp_activation_checkpointing:
            again = checkpointed_blocks(parallel.selective_checkpointing, shape.num_hidden_layers)
        hidden = self.itemsize * self.tokens * shape.hidden_size
        reduced, full = hidden, self.kept
        if parallel.selective_checkpointing == PER_OPERATION:
            # Results of matrix products and attention as well; the last one is not needed, but kept.
            reduced += self.tokens * (self.itemsize * block_costs(shape).results + 4 * shape.num_attention_heads)
            full += hidden
        found = [(self.kept, self.kept)] * shape.num_hidden_layers
        for index in again:
            found[index] = (reduced, full)
        return found

    @property
    def rotation(self) -> int:
        """Bytes of the cosines and sines."""
        return 4 * self.config.data.seq_length * self.shape.head_dim


def _moments(step: _Step) -> Iterator[_Moment]:
    """Yield the moments of a step that may take most: the loss, the backward of each block, the end, the update."""
    yield _at_loss(step)
    before = sum(stored for stored, _ in step.blocks)
    for index in reversed(range(len(step.blocks))):
        stored, full = step.blocks[index]
        before -= stored
        yield _in_block(step, index, before + full)
    yield from _after_blocks(step)
    yield _Moment(step.own, activations=_update_bytes(step))


def _largest_parts(moments: Sequence[_Moment]) -> _Moment:
    """Return each part at its largest: a CPU's heap keeps what is freed, in pieces into which few later tensors fit."""
    return _Moment(*(max(getattr(moment, part.name) for moment in moments) for part in fields(_Moment)))


def _at_loss(step: _Step) -> _Moment:
    """All activations are there, and the logits of a chunk."""
    itemsize, layers, hidden = step.itemsize, step.shape.num_hidden_layers, step.tokens * step.shape.hidden_size
    if step.is_sharded:
        # The buffer that the last block was gathered into, which was copied out, is there until the next one comes.
        whole = step.root + step.block * (1 if step.frees_blocks else layers + 1)
        gathered = itemsize * whole + (MASTER_BYTES * step.root if step.accumulates else 0)
    else:
        gathered = itemsize * (step.root + layers * step.block) if step.has_copies else 0
    # The last norm's input and result, on a CPU in float32, and the gradient of the result.
    norm = (8 if step.device_type == "cpu" else itemsize) + 2 * itemsize
    activations = sum(stored for stored, _ in step.blocks) + norm * hidden + step.rotation
    return _Moment(step.own if step.accumulates else 0, gathered, activations, _loss_bytes(step))


def _in_block(step: _Step, index: int, kept: int) -> _Moment:
    """Estimate the backward pass in a block, behind its last matrix product: with three gradients of activations."""
    shape, itemsize, done = step.shape, step.itemsize, step.shape.num_hidden_layers - 1 - index
    width, feed_forward = shape.hidden_size, shape.intermediate_size
    temporary = itemsize * step.tokens * (width + 2 * feed_forward)  # of its result; of gate and up, for their product
    head = step.vocabulary if step.is_sharded or shape.tie_word_embeddings else 0  # waits for the embedding's
    gradients = done * step.own_block
    if step.is_sharded:
        temporary += itemsize * width * feed_forward
        # The next block is gathered, and the gradients of the one before are being reduced.
        blocks = min(2, index + 1) if step.frees_blocks else index + 1
        gathered = itemsize * (step.root + blocks * step.block)
        gathered += MASTER_BYTES * (step.block if done else step.root if step.accumulates else 0)
    else:
        finished = step.vocabulary - head + done * step.block + width * feed_forward
        gradients = MASTER_BYTES * finished
        gathered = itemsize * (parameter_count(shape) - finished) if step.has_copies else 0
    if step.accumulates:
        gradients = step.own
    return _Moment(gradients, gathered, kept + temporary + step.rotation, itemsize * head)


def _after_blocks(step: _Step) -> Iterator[_Moment]:
    """Activations are gone; the gradients of embedding and head are made, and go to those that keep them."""
    itemsize = step.itemsize
    if not step.has_copies and not step.is_sharded:
        return
    if not step.is_sharded:
        copies = parameter_count(step.shape) if step.accumulates else step.vocabulary
        yield _Moment(step.own, itemsize * (copies + step.vocabulary))
        return
    # A tied one has the gradients of both, and their sum. Those of the first block are on their way, too.
    gradients = itemsize * step.vocabulary * (3 if step.shape.tie_word_embeddings else 2)
    there = step.own if step.accumulates else step.own - step.own_root
    yield _Moment(there, itemsize * step.root + MASTER_BYTES * step.block + gradients)
    yield _Moment(step.own, (2 * itemsize + MASTER_BYTES) * step.root)


def _update_bytes(step: _Step) -> int:
    """Return what an update takes on its way, which is done group by group: matrices, then embedding and norms."""
    entry = OPTIMIZERS.get(step.config.optimizer.optimizer)
    if entry is None:
        return 0
    of_block, norms, root = _own_parameters(step.shape, step.shard_size)
    matrices, rest = step.shape.num_hidden_layers * of_block, step.shape.num_hidden_layers * norms + root
    if entry.matrix_update_bytes is not None:
        return matrices * entry.matrix_update_bytes[step.is_sharded]
    rows = 0 if step.shape.tie_word_embeddings else -(-step.shape.vocab_size // step.shard_size)
    head = rows * step.shape.hidden_size
    return entry.update_bytes * max(matrices + head, rest - head)


def _loss_bytes(step: _Step) -> int:
    """Return what the loss takes besides hidden states and their gradient: most for a chunk or the head's gradient.

    A chunk has its logits, as computed and in float32, and the logarithms of their softmax. The gradient of the head is
    in float32 from the second chunk on.
    """
    itemsize, vocabulary = step.itemsize, step.vocabulary
    chunk = step.config.loss.loss_chunk_tokens
    if chunk is None:
        chunk = loss_chunk_tokens(step.device_type, step.shape.vocab_size)
    chunk = min(step.tokens, chunk or step.tokens)
    chunks = -(-step.tokens // chunk)
    is_narrow = itemsize < MASTER_BYTES
    logits = chunk * step.shape.vocab_size
    of_head = (0, 0, itemsize, MASTER_BYTES)[min(chunks, 3)] * vocabulary
    in_chunk = logits * (itemsize + (8 if is_narrow else 4)) + of_head
    adding = 0
    if chunks > 1 and is_narrow:
        adding = logits * itemsize + vocabulary * (MASTER_BYTES + itemsize * (2 if chunks == 2 else 1))
    scaling = vocabulary * (itemsize + (itemsize if chunks == 1 else MASTER_BYTES))
    is_taken = step.has_copies and not step.accumulates and not step.shape.tie_word_embeddings
    return max(in_chunk, adding, scaling, vocabulary * (itemsize + MASTER_BYTES) if is_taken else 0)
