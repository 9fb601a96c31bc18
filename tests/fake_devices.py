"""Processes and devices that are not there, and what a step would take of their memory.

What PyTorch has of this under private names only is used here and nowhere else.

    a process group of any size, which sends nothing -> tensors without memory -> a tracker of what they would take

`FSDPMemTracker` and `MemTracker` of `torch.distributed._tools` follow every storage from the operation that makes it to
its end, and know what it is for. They keep a peak; here each moment of a step has its own, since only those grow with
the depth of a model along a line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.modules.module import register_module_forward_pre_hook

from pretraining.distributed.mesh import AXES
from pretraining.distributed.parallelize import ParallelModel
from pretraining.distributed.replicated import ReplicatedModel

PARTS = ("parameters", "gradients", "optimizer_state", "gathered", "activations")
"""What memory is for: those of `MemoryEstimate`, with the loss among activations."""

_PART_OF = {
    **{"Sharded Param": "parameters", "Other": "parameters"},  # Other: the masters of `ReplicatedModel`
    **{"Sharded Grad": "gradients", "Gradient": "gradients"},
    **{"OptState": "optimizer_state", "Optstate": "optimizer_state"},
    **{"Unsharded Param": "gathered", "All Gather": "gathered", "Parameter": "gathered"},  # Parameter: its copies
    **{"Unsharded Grad": "gathered", "Reduce Scatter": "gathered"},
}
"""The trackers' names; all others are activations and temporary tensors."""

Bytes = dict[str, int]
"""Of each of `PARTS`."""


@contextmanager
def fake_processes(shape: tuple[int, int]) -> Iterator[DeviceMesh]:
    """Makes this process rank 0 of many that are not there, for the time of a `with` block.

    Collectives return at once and change nothing. No other process group may be there.

    Args:
        shape: of the mesh, (replicate, shard).
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shape[0] * shape[1])
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    finally:
        dist.destroy_process_group()


@contextmanager
def without_memory() -> Iterator[None]:
    """Gives tensors that are made in a `with` block a shape, a dtype and a device, but neither values nor memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield


def track_step(
    model: ParallelModel, optimizer: torch.optim.Optimizer, blocks: Iterable[nn.Module], step: Callable[[], object]
) -> dict[str, Bytes]:
    """Takes a step and returns the peak of each of its moments, by what the memory is for.

    Moments are the forward pass, the loss, the backward passes of the last two blocks, of those between and of the
    first two, what follows, and the update.

    Args:
        model: has taken a step before: what is only worked out once does not count.
        optimizer: of its parameters.
        blocks: of the model, in their order.
        step: zeroes the gradients at its end.
    """
    if isinstance(model, ReplicatedModel):
        tracker = _replicated_tracker(model)
    else:
        tracker = _sharded_tracker(model.module, optimizer)
    handles = _mark_blocks(list(blocks), tracker)
    handles.append(optimizer.register_step_pre_hook(lambda *_: tracker.turn_to("update")))
    tracker.track_external(*model.parameters.values(), optimizer)
    with tracker:
        handles.append(_begin_with_forward(model.module, tracker))
        step()
    for handle in handles:
        handle.remove()
    state = sum(each.nbytes for each in optimizer_tensors(optimizer) if each.dim() > 0)
    return {moment: _by_part(kinds, state) for moment, kinds in tracker.peaks.items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns this rank's parts of what an optimizer keeps."""
    kept = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return [each.to_local() if hasattr(each, "to_local") else each for each in kept]


def _by_part(kinds: dict[str, int], optimizer_state: int) -> Bytes:
    parts = dict.fromkeys(PARTS, 0)
    for kind, size in kinds.items():
        if kind != "Total":
            parts[_PART_OF.get(kind, "activations")] += size
    # What an update makes on its way is called state, too.
    parts["activations"] += parts["optimizer_state"] - optimizer_state
    parts["optimizer_state"] = optimizer_state
    return parts


def _begin_with_forward(module: nn.Module, tracker: Any) -> Any:
    """Tells a tracker that a micro-batch begins, after its own hooks are there and before they are called."""

    def begin(called: nn.Module, arguments: Any) -> None:
        if called is module:
            tracker.reset_mod_stats()  # it knows each module once, and a step calls it for each micro-batch
            tracker.turn_to("forward")

    handle = register_module_forward_pre_hook(begin)
    hooks: Any = torch.nn.modules.module._global_forward_pre_hooks
    hooks.move_to_end(handle.id, last=False)
    return handle


def _mark_blocks(blocks: list[nn.Module], tracker: Any) -> list[Any]:
    """Tells a tracker where a step is; adds nothing to what autograd keeps."""
    last = len(blocks) - 1
    moments = ["backward, between"] * len(blocks)
    moments[:2] = ["backward, first", "backward, second"][: len(blocks)]
    moments[-2:] = ["backward, last but one", "backward, last"][-len(blocks) :]

    def mark(index: int, module: nn.Module, arguments: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: tracker.turn_to(moments[index]))
        if index == last:
            tracker.turn_to("loss")

    return [block.register_forward_hook(partial(mark, index)) for index, block in enumerate(blocks)]


def _sharded_tracker(module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.fsdp import FSDPModule

    class ShardedTracker(_ByMoment, FSDPMemTracker):
        """Follows a module that FSDP2 shards."""

        def turn_to(self, moment: str) -> None:
            """Begins another moment; gradients that replicas have not summed yet are no temporary tensors."""
            super().turn_to(moment)
            for each in module.modules():
                if not isinstance(each, FSDPModule):
                    continue
                group = getattr(each._get_fsdp_state(), "_fsdp_param_group", None)
                reduced = getattr(group, "_partial_reduce_output", None)
                if reduced is not None:
                    self.retag(reduced, "Sharded Grad")

    return ShardedTracker(module, optimizer)


def _replicated_tracker(model: ReplicatedModel) -> Any:
    from torch.distributed._tools.mem_tracker import MemTracker

    class ReplicatedTracker(_ByMoment, MemTracker):
        """Follows a module of copies, and their masters."""

        def _track_module_params_and_buffers(
            self, module: nn.Module, install_grad_hooks: bool = True
        ) -> tuple[int, int]:
            # Its hooks look for gradients, which the layout has taken from the copies.
            return super()._track_module_params_and_buffers(module, install_grad_hooks=False)

    tracker = ReplicatedTracker()
    masters = model.parameters.values()
    for copy, master in zip(model.module.parameters(), masters, strict=True):

        def retag(copy: Tensor, master: Tensor = master) -> None:
            if master.grad is not None:
                tracker.retag(master.grad, "Gradient")

        copy.register_post_accumulate_grad_hook(retag)
    return tracker


class _ByMoment:
    """What both trackers do besides: keep the peak of each moment. A class to be put before one of them."""

    _curr_mem_snap: dict[torch.device, dict[Any, int]]
    _ref_class: Any
    _update_and_maybe_create_winfos: Any

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.moment = "forward"
        self.peaks: dict[str, dict[str, int]] = {}

    def turn_to(self, moment: str) -> None:
        """Begins another moment."""
        self.moment = moment

    def retag(self, tensor: Tensor, kind: str) -> None:
        """Says what a tensor is for."""
        self._update_and_maybe_create_winfos(tensor, self._ref_class(kind))

    def _update_peak_stats(self, peak_state: Any) -> None:
        """Is called after each operation; the trackers' own would look at every module."""
        kinds: dict[str, int] = defaultdict(int)
        for of_device in self._curr_mem_snap.values():
            for kind, size in of_device.items():
                kinds[getattr(kind, "value", kind)] += size
        if kinds["Total"] > self.peaks.get(self.moment, {}).get("Total", 0):
            self.peaks[self.moment] = dict(kinds)
