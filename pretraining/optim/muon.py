"""Muon (Jordan et al., 2024), which orthogonalizes updates of hidden matrices; AdamW updates the rest.

    gradients -> momentum -> rows of each matrix to its owner -> Newton-Schulz -> rows back -> update

Momentum is sharded like the parameters. Orthogonalization needs all rows, so each matrix has an owner among the
processes. Owners are chosen to balance the work: each of W processes does about 1/W of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pretraining.config.training import OptimizerConfig
from pretraining.distributed.dims import group_along
from pretraining.distributed.host_sync import wait_for
from pretraining.distributed.parallelize import has_units
from pretraining.optim.adaptive import FusedAdamW
from pretraining.optim.optimizer import Groups, is_hidden_matrix, parameter_groups
from pretraining.optim.selecting import SelectingOptimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the iteration x <- a x + b (x xT) x + c (x xT)² x, as in `torch.optim.Muon`."""
RMS_OF_ADAMW = 0.2
"""Root mean square of AdamW's updates. Muon's updates are scaled to it, so learning rates of AdamW fit (Liu et al.,
2025, arXiv:2502.16982)."""
EPSILON = 1e-7
BATCH_ELEMENTS = 2**26
"""Maximum elements of a batch of matrices."""

Matrices = list[torch.Tensor]


def orthogonalize(matrices: Sequence[torch.Tensor], steps: int) -> Matrices:
    """Return matrices with about the same singular vectors, and singular values near 1.

    Newton-Schulz iterations run on batches of equal shapes. After five steps, singular values lie between 0.7 and 1.2.

    Args:
        matrices: two dims each, of one dtype, which the results have too.
        steps: iterations.
    """
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        by_shape[matrix.shape].append(index)
    found = list(matrices)
    for shape, indices in by_shape.items():
        at_once = max(1, BATCH_ELEMENTS // max(1, shape.numel()))
        for begin in range(0, len(indices), at_once):
            batch = indices[begin : begin + at_once]
            for index, matrix in zip(batch, _orthogonalize_batch([found[i] for i in batch], steps), strict=True):
                found[index] = matrix
    return found


def _orthogonalize_batch(matrices: Matrices, steps: int) -> torch.Tensor:
    a, b, c = COEFFICIENTS
    x = torch.stack(matrices)
    is_tall = x.size(1) > x.size(2)
    if is_tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class MatrixOwners:
    """The owner of each matrix among the processes, and the exchange of rows with the owners.

    Processes form a grid, replicas by shards. The owner gathers the rows from its replica; the other replicas get the
    result.

    Args:
        parameters: matrices, all sharded by rows over one mesh, or all whole in every process.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._shard_group = group_along(parameters[0], "shard")
        self._replica_group = group_along(parameters[0], "replicate")
        self._shards, self._shard = _size_and_rank(self._shard_group)
        self._replicas, replica = _size_and_rank(self._replica_group)
        self._sizes = [(int(parameter.size(0)), int(parameter.size(1))) for parameter in parameters]
        work = [min(size) ** 2 * max(size) for size in self._sizes]
        owners = [divmod(owner, self._shards) for owner in balance(work, self._replicas * self._shards)]
        self._of_replica: list[list[int]] = [[] for _ in range(self._replicas)]
        self._of_shard: list[list[int]] = [[] for _ in range(self._shards)]  # of this process's replica
        for index, (owning_replica, shard) in enumerate(owners):
            self._of_replica[owning_replica].append(index)
            if owning_replica == replica:
                self._of_shard[shard].append(index)

    def map(self, parts: Sequence[torch.Tensor], function: Callable[[Matrices], Matrices]) -> Matrices:
        """Apply a function to whole matrices, each in its owner's process; a collective call.

        Args:
            parts: this process's rows of each matrix, all of one dtype.
            function: maps whole matrices to matrices of the same sizes and dtype.

        Returns:
            This process's rows of each result.
        """
        owned, shards = self._of_shard[self._shard], range(self._shards)
        send = [[parts[index] for index in indices] for indices in self._of_shard]
        sizes = [[self._size_at(index, shard) for index in owned] for shard in shards]
        received = _exchange(send, sizes, parts[0], self._shard_group)
        whole = [pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in zip(*received, strict=True)]
        rows = [
            matrix.split([self._size_at(index, shard)[0] for shard in shards])
            for index, matrix in zip(owned, function(whole), strict=True)
        ]
        back = [[pieces[shard] for pieces in rows] for shard in shards]
        sizes = [[self._size_at(index, self._shard) for index in indices] for indices in self._of_shard]
        results: dict[int, torch.Tensor] = {}
        for indices, pieces in zip(self._of_shard, _exchange(back, sizes, parts[0], self._shard_group), strict=True):
            results.update(zip(indices, pieces, strict=True))
        if self._replicas > 1:
            results = self._gather_replicas(results, parts)
        return [results[index] for index in range(len(parts))]

    def _size_at(self, index: int, shard: int) -> tuple[int, int]:
        """Return the size of a shard's part of a matrix: blocks of equal rows, the last ones shorter."""
        rows, columns = self._sizes[index]
        block = -(-rows // self._shards)
        return min(block, max(0, rows - shard * block)), columns

    def _gather_replicas(
        self, results: dict[int, torch.Tensor], parts: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Return the results of all replicas."""
        numbers = [[parts[index].numel() for index in indices] for indices in self._of_replica]
        longest = max(map(sum, numbers))
        own = torch.cat([results[index].flatten() for index in sorted(results)] or [parts[0].new_empty(0)])
        padded = torch.cat([own, own.new_zeros(longest - own.numel())])
        gathered = [padded.new_empty(longest) for _ in range(self._replicas)]
        wait_for(dist.all_gather(gathered, padded, group=self._replica_group, async_op=True))
        found = {}
        for each, indices, counts in zip(gathered, self._of_replica, numbers, strict=True):
            pieces = each[: sum(counts)].split(counts)
            found.update({index: piece.view_as(parts[index]) for index, piece in zip(indices, pieces, strict=True)})
        return found


def balance(work: Sequence[int], workers: int) -> list[int]:
    """Return a worker for each piece of work: the largest piece first, each to the worker with the least work."""
    loads, found = [0] * workers, [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: (-work[index], index)):
        worker = loads.index(min(loads))
        loads[worker] += work[index]
        found[index] = worker
    return found


def _size_and_rank(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (1, 0) if group is None else (group.size(), group.rank())


def _exchange(
    send: Sequence[Sequence[torch.Tensor]],
    sizes: Sequence[Sequence[tuple[int, ...]]],
    like: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> list[Matrices]:
    """Send matrices to each process, and receive matrices of `sizes` from each, with device and dtype of `like`."""
    if group is None:
        return [list(pieces) for pieces in send]
    sent = [sum(piece.numel() for piece in pieces) for pieces in send]
    expected = [sum(map(math.prod, size)) for size in sizes]
    outbox = torch.cat([like.new_empty(0), *(piece.flatten() for pieces in send for piece in pieces)])
    inbox = like.new_empty(sum(expected))
    wait_for(dist.all_to_all_single(inbox, outbox, expected, sent, group=group, async_op=True))
    received = []
    for part, each in zip(inbox.split(expected), sizes, strict=True):
        pieces = part.split(list(map(math.prod, each)))
        received.append([piece.view(size) for piece, size in zip(pieces, each, strict=True)])
    return received


class Muon(SelectingOptimizer):
    """Muon for matrices, as in `torch.optim.Muon` with `match_rms_adamw`.

    Updates are scaled by 0.2 * sqrt(the longer side); weight decay is decoupled. Iterations run in bfloat16 if the
    device has units for it, else in float32.
    """

    _owners: MatrixOwners | None = None

    def update_group(self, group: dict[str, Any], members: list[nn.Parameter]) -> None:
        """Update the parameters of a group that have gradients; collective with several processes."""
        gradients, momentum = self.gradients(members), group["momentum"]
        moments = self.state_of(members, "momentum_buffer")
        self.accumulate(moments, momentum, gradients, 1.0 - momentum)
        if group["nesterov"]:
            torch._foreach_mul_(gradients, 1.0 - momentum)
            torch._foreach_add_(gradients, moments, alpha=momentum)
        else:
            torch._foreach_copy_(gradients, moments)
        device = gradients[0].device
        dtype = torch.bfloat16 if has_units(device, torch.bfloat16) else torch.float32
        if self._owners is None:  # the same matrices in each update
            self._owners = MatrixOwners(members)
        directions = self._owners.map(
            [gradient.to(dtype) for gradient in gradients], lambda whole: orthogonalize(whole, group["ns_steps"])
        )
        scales = [RMS_OF_ADAMW * math.sqrt(max(parameter.shape)) for parameter in members]
        torch._foreach_copy_(gradients, directions)
        torch._foreach_mul_(gradients, scales)
        self.apply(group, members, gradients, group["weight_decay"])


class OptimizerPair(torch.optim.Optimizer):
    """Two optimizers over different parameters behind one interface: one list of groups, one state, one update."""

    skips_on_device = True

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        super().__init__([*first.param_groups, *second.param_groups], {})
        self._parts = first, second
        for part in self._parts:
            part.state = self.state
        self.found_inf: torch.Tensor | None = None

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not supported
        """Update the parameters of both optimizers."""
        for part in self._parts:
            part.found_inf = self.found_inf  # type: ignore[attr-defined]
            part.step()


def muon(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make Muon for the matrices of blocks, and AdamW with its own settings for embedding, head and norms."""
    hidden = {name: each for name, each in parameters.items() if is_hidden_matrix(name, each.dim())}
    rest = {name: each for name, each in parameters.items() if name not in hidden}
    groups: Groups = [{"params": list(hidden.values()), "weight_decay": config.weight_decay}]
    for_matrices = {"momentum": config.momentum, "nesterov": config.nesterov, "ns_steps": config.muon_ns_steps}
    for_rest = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
    return OptimizerPair(
        Muon(groups, lr=config.learning_rate, **for_matrices),
        FusedAdamW(
            parameter_groups(rest, config.muon_adam_weight_decay or 0.0), lr=config.muon_adam_learning_rate, **for_rest
        ),
    )
