"""Log-likelihoods of a model in training: rank 0 asks, all ranks compute.

    rank 0   ask -> rows of tokens --broadcast--> all ranks: a share of the forwards
             ask <- log-likelihoods  <--sum-----  float64 table of all rows

Batches are cut before they are shared, so each row is computed in the same batch whatever the number of ranks. All
ranks run equally many forwards; one without a batch left computes an empty row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from pretraining.config.training import IGNORED_LABEL
from pretraining.distributed.compile import without_compiling
from pretraining.distributed.dims import Dims
from pretraining.distributed.fsdp import reshard_model
from pretraining.distributed.processes import Processes, on_rank_zero
from pretraining.observability.collector import sum_over_ranks

log = logging.getLogger(__name__)

T = TypeVar("T")

WIDTH = 16
"""Rows are padded to a multiple of this many tokens, which kernels need for float8."""
SECONDS_BETWEEN_LINES = 30.0


class ScoredRow(NamedTuple):
    """Tokens of a request; it asks for the log-likelihood of the last `scored` of them."""

    tokens: list[int]
    scored: int


Score = Callable[[Sequence[ScoredRow]], list[tuple[float, bool]]]
"""Function that returns the log-likelihood of each row in nats, and whether all its scored tokens are the likeliest."""


class _Request(NamedTuple):
    """Rows that rank 0 asks for."""

    rows: Sequence[ScoredRow]


class _Stopped(Exception):
    """A stop was requested."""


@dataclass(frozen=True)
class Scorer:
    """A job's ranks as they score rows.

    Attributes:
        tokens_per_forward: most tokens of a forward, padding included, unless one row has more.
    """

    processes: Processes
    dims: Dims
    tokens_per_forward: int

    def serve(self, model: nn.Module, ask: Callable[[Score], T], should_stop: Callable[[], bool]) -> T | None:
        """Return what `ask` returns on rank 0, picklable, or raise its error on all ranks; a collective call.

        Args:
            model: returns the `HeadLoss` of tokens and labels; possibly sharded and compiled.
            ask: gets the function that scores rows.
            should_stop: called between forwards by all ranks, with the same result on all; then the result is None.
        """
        failures: list[BaseException] = []  # of a forward on rank 0, for which the other ranks do not wait

        def score(rows: Sequence[ScoredRow]) -> list[tuple[float, bool]]:
            on_rank_zero(lambda: _Request(rows))
            try:
                return self._compute(model, rows, should_stop)
            except BaseException as error:
                failures.append(error)
                raise

        try:
            with torch.no_grad(), without_compiling():  # the length changes with every batch
                if self.processes.is_main:
                    return _ask(ask, score, failures)
                message: Any = on_rank_zero(lambda: None)
                while isinstance(message, _Request):
                    self._compute(model, message.rows, should_stop)
                    message = on_rank_zero(lambda: None)
                return message  # type: ignore[no-any-return]
        except _Stopped:
            return None
        finally:
            reshard_model(model)

    def _compute(
        self, model: nn.Module, rows: Sequence[ScoredRow], should_stop: Callable[[], bool]
    ) -> list[tuple[float, bool]]:
        """Compute this rank's share of rows, and return those of all ranks; raise `_Stopped` if a stop is requested."""
        device, ranks, group = self.processes.device, self.dims.data, self.dims.context_group
        batches = cut(rows, self.tokens_per_forward)
        table_N2 = torch.zeros(len(rows), 2, dtype=torch.float64, device=device)
        reported, done = time.monotonic(), 0
        for first in self.processes.activity.watch(range(0, len(batches), ranks)):
            if should_stop():
                raise _Stopped
            numbers = next(iter(batches[first + self.dims.data_rank :][:1]), [])
            tokens_BS, labels_BS = (each.to(device) for each in pad([rows[number] for number in numbers]))
            found_BS2 = model(tokens_BS, labels_BS).tokens_BS2.double()
            if numbers and (group is None or group.rank == 0):  # the ranks of a group compute the same rows
                table_N2[numbers] = found_BS2.sum(1)
            done += sum(map(len, batches[first : first + ranks]))
            if time.monotonic() - reported >= SECONDS_BETWEEN_LINES:
                log.info("tasks: %s of %s requests", f"{done:,}", f"{len(rows):,}")
                reported = time.monotonic()
        found = sum_over_ranks({"rows": table_N2})["rows"]
        return [(-loss, round(hits) == row.scored) for row, (loss, hits) in zip(rows, found, strict=True)]


def _ask(ask: Callable[[Score], T], score: Score, failures: list[BaseException]) -> T:
    """Return what `ask` returns, on rank 0, and send it, or its error, to the other ranks."""
    try:
        found = ask(score)
    except Exception as error:
        if failures:
            raise failures[0] from None
        return on_rank_zero(partial(_raise, error))
    return on_rank_zero(lambda: found)


def _raise(error: Exception) -> NoReturn:
    raise error


def cut(rows: Sequence[ScoredRow], tokens: int) -> list[list[int]]:
    """Return batches of row numbers, the longest rows first; each has at most this many padded tokens, or one row."""
    batches: list[list[int]] = []
    for number in sorted(range(len(rows)), key=lambda number: -len(rows[number].tokens)):
        if not batches or (len(batches[-1]) + 1) * _width(rows[batches[-1][0]]) > tokens:
            batches.append([])
        batches[-1].append(number)
    return batches


def _width(row: ScoredRow) -> int:
    return -(-max(1, len(row.tokens) - 1) // WIDTH) * WIDTH


def pad(rows: Sequence[ScoredRow]) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of rows, int64 [B, S], with only scored labels; of no rows, an empty one."""
    width = max(map(_width, rows), default=WIDTH)
    tokens_BS = torch.zeros(max(1, len(rows)), width, dtype=torch.int64)
    labels_BS = torch.full_like(tokens_BS, IGNORED_LABEL)
    for index, row in enumerate(rows):
        end = len(row.tokens) - 1
        tokens_BS[index, :end] = torch.tensor(row.tokens[:-1])
        labels_BS[index, end - row.scored : end] = torch.tensor(row.tokens[-row.scored :])
    return tokens_BS, labels_BS
