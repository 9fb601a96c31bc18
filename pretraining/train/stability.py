"""Guards of a run: log skipped updates, and stop the run if too many are skipped in a row or if replicas differ.

The device decides inside the step whether to skip an update. The host reads the decision one step later, so that it
never waits for the running step. All ranks read the same decisions at the same step, so they stop together.

`DivergenceError` stops a run that diverges; `run.py` may go back to an earlier checkpoint. `HardwareError` stops a
run whose replicas no longer hold the same weights.

A spike is a loss more than `threshold` standard deviations above the mean of the last `window` losses. This is the rule
of OLMo 2's training code (`SkipStepOptimizer` of OLMo-core: 128 losses, 6 standard deviations), with one difference:
only losses of applied updates enter the window. So neither a spike nor a NaN moves the threshold. Only the device
computes, from numbers that are the same on all ranks.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from pretraining.config.training import GuardConfig
from pretraining.data.loader import Loader
from pretraining.distributed.host_sync import wait_for_device
from pretraining.distributed.processes import Activity, gather_from_every_rank
from pretraining.distributed.replica_check import Replicas
from pretraining.errors import DivergenceError, HardwareError
from pretraining.observability.events import Events
from pretraining.observability.step_outcome import SpikeVerdict, StepOutcome
from pretraining.progress import Interval, TrainState

log = logging.getLogger(__name__)


_Pending = tuple[int, torch.Tensor, torch.cuda.Event | None]
"""Step; host tensor with skipped and, with a spike detector, is_spike, loss, mean, deviation; event that marks the end
of the copy to the host (None = there already)."""


class Guards:
    """Checks after every step that stop a run that goes wrong.

    Args:
        loader: knows the samples of each step.
        activity: progress marker for the watchdog.
        training_tokens: tokens of one pass over the datasets, for intervals in epochs.
        events: event log for skipped updates.
        is_resumed: whether the start point is a checkpoint of this run; another run's rollback is not repeated.
    """

    def __init__(
        self,
        config: GuardConfig,
        loader: Loader,
        replicas: Replicas,
        activity: Activity,
        training_tokens: int | None,
        events: Events,
        *,
        is_resumed: bool = True,
    ) -> None:
        self._events = events
        self._max_in_a_row, self._goes_back = config.max_skipped_steps, is_resumed and config.max_rollbacks > 0
        self._reads_outcomes = config.max_skipped_steps > 0 or config.spike_threshold is not None
        self._loader = loader
        self._replicas = replicas
        self._replica_check = Interval(config.replica_check_interval, training_tokens)
        self._equal_at = 0
        self._activity = activity
        self._pending: _Pending | None = None
        self._in_a_row = 0
        self._last_step = 0

    def after_step(self, state: TrainState, outcome: StepOutcome) -> None:
        """Read the outcome of the step before, and start to copy this one's.

        Raises:
            DivergenceError: too many updates in a row were skipped; the same on all ranks.
            HardwareError: replicas differ; the same on all ranks.
        """
        self._activity.end_step(state.step)
        self._read_pending()
        self._raise_if_diverged()  # before this step's outcome is read, which may reset the count
        self._pending = _copy_to_host(state.step, outcome) if self._reads_outcomes else None
        if state.stopping:
            self._read_pending()
            self._raise_if_diverged()
        if self._replica_check.is_due(state):
            self._compare_replicas(state.step)

    def check_restored(self, state: TrainState) -> None:
        """Raise the divergence that a restored checkpoint ends with: the rollback from it was interrupted.

        Raises:
            DivergenceError: the last updates before the checkpoint were skipped, as many as the limit.
        """
        self._last_step = state.step
        self._raise_if_diverged()

    def state_dict(self) -> dict[str, Any]:
        """Return the count of skipped updates, JSON-able; the host waits for the device."""
        self._read_pending()
        return {"skipped_in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the count of skipped updates in a row.

        Without rollbacks, a run that has diverged may resume with other settings, and so may a new run from its
        checkpoint: the limit applies from the next step on.
        """
        most = self._max_in_a_row - 1 if self._max_in_a_row and not self._goes_back else math.inf
        self._in_a_row = int(min(state["skipped_in_a_row"], most))

    def _read_pending(self) -> None:
        if self._pending is None:
            return
        (self._last_step, outcome, event), self._pending = self._pending, None
        if event is not None:
            wait_for_device(event)
        skipped, *numbers = outcome.tolist()
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if skipped:
            self._events.add("skip", self._last_step, reason=_reason(numbers), in_a_row=self._in_a_row)
        if self._in_a_row.bit_count() == 1:  # log 1, 2, 4, 8, ... in a row, so that they do not flood the log
            log.info("step %d  update skipped: %s, %d in a row", self._last_step, _reason(numbers), self._in_a_row)

    def _raise_if_diverged(self) -> None:
        if not self._max_in_a_row or self._in_a_row < self._max_in_a_row:
            return
        first, last = self._last_step - self._in_a_row + 1, self._last_step
        mixture = self._loader.reader.mixture
        begin, end = mixture.first_sample(first - 1), mixture.first_sample(last)
        text = (
            f"step {last}: the updates since step {first} were skipped, {self._in_a_row} in a row "
            "(--max_skipped_steps): loss or gradient was not finite, or the loss was a spike.\nStart from an earlier "
            "checkpoint (--ckpt_load_path, another --ckpt_save_path) with a smaller --learning_rate, or skip the "
            f"samples: --skip_samples={begin}-{end - 1}, or by a rollback (--max_rollbacks)."
        )
        raise DivergenceError(text, first, last, (begin, end))

    def _compare_replicas(self, step: int) -> None:
        odd = self._replicas.differing_ranks()
        if not odd:
            self._equal_at = step
            return
        hosts = gather_from_every_rank(socket.gethostname)
        lines = (
            f"  rank {rank} on {hosts[rank]} differs from rank {', '.join(map(str, others))}\n"
            for rank, others in odd.items()
        )
        raise HardwareError(
            f"step {step}: replicas differ (at step {self._equal_at} they were equal), so a device computes or stores "
            f"wrong values:\n{''.join(lines)}Remove the machine and the checkpoints since then, and start again"
        )


def _copy_to_host(step: int, outcome: StepOutcome) -> _Pending:
    """Start the copy of a step's outcome to the host, without waiting."""
    verdict = outcome.verdict
    # An update that is skipped to lower the loss scale is no failure.
    skipped = outcome.skipped if outcome.rescaled is None else outcome.skipped & ~outcome.rescaled
    numbers = skipped.reshape(1)
    if verdict is not None:
        numbers = torch.stack(
            (skipped.float(), verdict.is_spike.float(), verdict.loss, verdict.mean, verdict.deviation)
        )
    if numbers.device.type == "cpu":
        return step, numbers, None
    event = torch.cuda.Event(blocking=True)
    copied = numbers.to("cpu", non_blocking=True)  # into pinned memory
    event.record()
    return step, copied, event


def _reason(numbers: list[float]) -> str:
    if numbers and numbers[0] and math.isfinite(numbers[1]):
        _, loss, mean, deviation = numbers
        return f"its loss of {loss:.4f} is a spike (before: {mean:.4f}, standard deviation {deviation:.4f})"
    return "loss or gradient is not finite"


class SpikeDetector:
    """Detector of steps whose loss is finite but far above the losses before.

    Args:
        threshold: standard deviations above the mean.
        window: losses in the window; no loss is a spike until the window is half full.
        conditions: JSON-able settings that shift the loss; a restored window with other conditions is dropped.
    """

    def __init__(self, threshold: float, window: int, device: torch.device, conditions: Mapping[str, Any]) -> None:
        self._threshold = threshold
        self._min_losses = window // 2
        self._conditions = dict(conditions)
        # The newest loss is last; NaN = an empty place.
        self._losses = torch.full((window,), torch.nan, dtype=torch.float32, device=device)

    def judge(self, loss_sum: torch.Tensor, valid_tokens: torch.Tensor) -> SpikeVerdict:
        """Return whether the loss of a step is a spike; a collective call that all-reduces one number.

        Args:
            loss_sum: summed loss of this rank's tokens.
            valid_tokens: valid tokens of the global batch.
        """
        total = loss_sum.clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        loss = total / valid_tokens.clamp(min=1)
        filled = ~self._losses.isnan()
        count = filled.sum()
        mean = self._losses.nanmean()
        squares = torch.where(filled, self._losses - mean, 0.0).square().sum()
        deviation = (squares / (count - 1).clamp(min=1)).sqrt()
        # A comparison with NaN is false: a non-finite loss is no spike, and its update is skipped anyway.
        is_spike = (count >= self._min_losses) & (loss - mean > self._threshold * deviation)
        return SpikeVerdict(is_spike, loss, mean, deviation)

    def remember(self, loss: torch.Tensor, skipped: torch.Tensor) -> None:
        """Add the loss of a step to the window, unless its update was skipped."""
        moved = torch.cat((self._losses[1:], loss.reshape(1)))
        self._losses = torch.where(skipped, self._losses, moved)

    def state_dict(self) -> dict[str, Any]:
        """Return the window, JSON-able; the host waits for the device."""
        losses = self._losses[~self._losses.isnan()].tolist()
        return {"losses": losses, "conditions": self._conditions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the window, with its newest losses if it is too long; ignore a window of other conditions."""
        if state["conditions"] != self._conditions:
            return
        kept = state["losses"][-len(self._losses) :]
        if kept:
            self._losses[-len(kept) :] = torch.tensor(kept, dtype=torch.float32)
