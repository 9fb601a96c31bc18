"""The mixture of datasets: the dataset of each sample is a function of the sample's number, in exact integers.

The integer weights are the leaves of a Huffman tree. A node whose children weigh l and r, with w = l + r, sends
floor((2nl + w) / 2w) of its first n samples to the left: n * l / w, rounded. So each dataset gets its weight times n up
to a few roundings: one per node on the way, and the shares below a node shrink its rounding. In a Huffman tree they
shrink at least as fast as Fibonacci numbers grow, so the sum stays below 2: at every prefix each dataset is within two
samples of its share. Consecutive samples reach each node consecutively, so a few array operations per node split any
batch.

If weights change during a run, each phase has its own tree, which counts from the first sample of the phase. A phase
stores how far each dataset was before, and continues to number from there.

The mixture counts the samples that are used. A dataset's used samples leave out its skipped numbers, so a skip changes
neither steps nor shares: the dataset gives its next number in place of a skipped one. A dataset's position is its last
used number plus one. Skipped numbers that follow this number are behind the position, so later skips never move it.

    sample g of phase --WeightTree--> dataset, its n-th sample in the phase --position, `SkippedNumbers`--> number
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType

import numpy as np

_LARGEST_TOTAL = 1 << 40
_LARGEST_RANGE = 1 << 20  # 2 * range * total stays below 2**63

Range = tuple[int, int]
"""Samples [begin, end)."""


def integer_weights(weights: Mapping[str, float]) -> dict[str, int]:
    """Turn non-negative proportions, at least one positive, into integers with the same ratios.

    Decimal fractions are exact: 0.1 is 1/10. If the integers would total more than 2**40, they are rounded to this
    total, and positive weights stay positive.
    """
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    total = sum(exact.values(), Fraction(0))
    scale = Fraction(math.lcm(*(weight.denominator for weight in exact.values())))
    scale /= math.gcd(*(int(weight * scale) for weight in exact.values()))
    if total * scale > _LARGEST_TOTAL:
        scale = _LARGEST_TOTAL / total
    return {name: max(1, round(weight * scale)) if weight else 0 for name, weight in exact.items()}


@dataclass(frozen=True)
class _Node:
    """A node of the tree: a leaf names its dataset, an inner node its children."""

    weight: int
    dataset: int = -1
    left: int = -1
    right: int = -1


class WeightTree:
    """A mixture with fixed integer weights, [datasets], at least one positive. Weight 0 gives no samples."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._datasets = len(weights)
        self._nodes = [_Node(weight, dataset) for dataset, weight in enumerate(weights) if weight > 0]
        # Ties are broken by the node's number: datasets first, then inner nodes in order of creation.
        queue = [(node.weight, number) for number, node in enumerate(self._nodes)]
        heapq.heapify(queue)
        while len(queue) > 1:
            (left_weight, left), (right_weight, right) = heapq.heappop(queue), heapq.heappop(queue)
            heapq.heappush(queue, (left_weight + right_weight, len(self._nodes)))
            self._nodes.append(_Node(left_weight + right_weight, left=left, right=right))

    def assign(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the datasets of samples [begin, end), and their numbers within them, both [end - begin] int64."""
        datasets, numbers = np.empty(end - begin, dtype=np.int64), np.empty(end - begin, dtype=np.int64)
        for low in range(begin, end, _LARGEST_RANGE):
            high = min(low + _LARGEST_RANGE, end)
            waiting = [(len(self._nodes) - 1, low, high, np.arange(low - begin, high - begin))]
            while waiting:
                number, first, last, places = waiting.pop()
                node = self._nodes[number]
                if node.dataset >= 0:
                    datasets[places] = node.dataset
                    numbers[places] = np.arange(first, last)
                    continue
                # left_before[i]: samples in [first, first + i) that went left
                twice, left_weight = 2 * node.weight, self._nodes[node.left].weight
                left_first, remainder = divmod(2 * first * left_weight + node.weight, twice)
                left_before = (2 * left_weight * np.arange(last - first + 1) + remainder) // twice
                goes_left = np.diff(left_before) > 0
                left_last = left_first + int(left_before[-1])
                if left_last > left_first:
                    waiting.append((node.left, left_first, left_last, places[goes_left]))
                if last - left_last > first - left_first:
                    waiting.append((node.right, first - left_first, last - left_last, places[~goes_left]))
        return datasets, numbers

    def counts(self, samples: int) -> list[int]:
        """Count the samples of each dataset among the first `samples`, [datasets]."""
        counts = [0] * self._datasets
        waiting = [(len(self._nodes) - 1, samples)]
        while waiting:
            number, count = waiting.pop()
            node = self._nodes[number]
            if node.dataset >= 0:
                counts[node.dataset] = count
                continue
            left = (2 * count * self._nodes[node.left].weight + node.weight) // (2 * node.weight)
            waiting += [(node.left, left), (node.right, count - left)]
        return counts


LengthCounts = list[list[int]]
"""Pairs [sequence length, samples] of a dataset."""


@dataclass(frozen=True)
class Phase:
    """A part of the run with one mixture, batch size and sequence length, until the next phase.

    Attributes:
        first_sample: global index of its first sample.
        global_batch_size: samples per step.
        weights: by name, for the datasets of this phase.
        base_counts: by name, positions at the start of the phase, for the datasets of this and earlier phases.
    """

    first_step: int
    first_sample: int
    global_batch_size: int
    seq_length: int
    weights: dict[str, int]
    base_counts: dict[str, LengthCounts]

    @staticmethod
    def first(global_batch_size: int, seq_length: int, weights: Mapping[str, int]) -> Phase:
        """Return the first phase of a run."""
        counts = {name: [[seq_length, 0]] for name in sorted(weights)}
        return Phase(0, 0, global_batch_size, seq_length, dict(weights), counts)

    def same_data(self, other: Phase) -> bool:
        """Return whether weights and batch sizes are equal."""
        return (self.weights, self.global_batch_size) == (other.weights, other.global_batch_size)

    def base(self, name: str) -> int:
        """Return the position of a dataset at the start of the phase; 0 for a dataset of a later phase."""
        return self.base_counts[name][-1][1] if name in self.base_counts else 0


class Mixture:
    """The datasets of all samples over all phases, the first of which starts at sample 0.

    `names` are the sorted names of all datasets; results are positions in `names`.

    Args:
        skipped: by dataset, ranges of its numbers; also of datasets that no phase has yet.
    """

    def __init__(self, phases: Sequence[Phase], skipped: Mapping[str, Iterable[Range]] = MappingProxyType({})) -> None:
        self.phases = tuple(phases)
        self.skipped = {name: SkippedNumbers(ranges) for name, ranges in sorted(skipped.items())}
        self.names = tuple(sorted(phases[-1].base_counts))
        self._trees = [WeightTree([phase.weights.get(name, 0) for name in self.names]) for phase in phases]
        self._base_ranks = [
            np.array([self._skipped_of(name).rank(phase.base(name)) for name in self.names], np.int64)
            for phase in phases
        ]

    def _skipped_of(self, name: str) -> SkippedNumbers:
        return self.skipped.get(name, _NOTHING_SKIPPED)

    def _phase_of_step(self, step: int) -> int:
        return max(number for number, phase in enumerate(self.phases) if phase.first_step <= step)

    def first_sample(self, step: int) -> int:
        """Return the global index of the first sample of a step."""
        phase = self.phases[self._phase_of_step(step)]
        return phase.first_sample + (step - phase.first_step) * phase.global_batch_size

    def step_of_sample(self, sample: int) -> int:
        """Return the step of a sample."""
        phase = [phase for phase in self.phases if phase.first_sample <= sample][-1]
        return phase.first_step + (sample - phase.first_sample) // phase.global_batch_size

    def global_batch_size(self, step: int) -> int:
        """Return the number of samples in a step."""
        return self.phases[self._phase_of_step(step)].global_batch_size

    def assign_step(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a step's samples, ascending, their datasets and numbers within these, [global batch] int64 each."""
        index = self._phase_of_step(step)
        phase, first = self.phases[index], self.first_sample(step)
        samples = np.arange(first, first + phase.global_batch_size)
        begin = first - phase.first_sample
        datasets, numbers = self._trees[index].assign(begin, begin + phase.global_batch_size)
        numbers += self._base_ranks[index][datasets]
        for name in self.skipped.keys() & {*self.names}:
            of_dataset = datasets == self.names.index(name)
            numbers[of_dataset] = self.skipped[name].number(numbers[of_dataset])
        return samples, datasets, numbers

    def taken(self, first_step: int, end_step: int) -> Iterator[tuple[Phase, dict[str, list[Range]]]]:
        """Yield each phase of steps [first_step, end_step) with the ranges of each dataset's numbers used in it."""
        ends = [*(phase.first_step for phase in self.phases[1:]), end_step]
        for index, (phase, phase_end) in enumerate(zip(self.phases, ends, strict=True)):
            first, end = max(first_step, phase.first_step), min(end_step, phase_end)
            if first < end:
                last = self.first_sample(end - 1) + phase.global_batch_size
                before, after = self._positions(index, self.first_sample(first)), self._positions(index, last)
                yield phase, {name: list(self._skipped_of(name).used(before[name], after[name])) for name in self.names}

    def positions_before_step(self, step: int) -> dict[str, int]:
        """Return the position of each dataset before a step."""
        return self._positions(self._phase_of_step(step), self.first_sample(step))

    def counts_before_step(self, step: int) -> dict[str, LengthCounts]:
        """Return the position of each dataset before a step, with the sequence length of its samples."""
        seq_length = self.phases[self._phase_of_step(step)].seq_length
        return {name: [[seq_length, position]] for name, position in self.positions_before_step(step).items()}

    def phase_from(self, step: int, wanted: Phase) -> Phase:
        """Return a phase from a step of the last phase on, with the weights and batch size of `wanted`.

        Every dataset continues at its position at that step.
        """
        counts = {name: [[wanted.seq_length, 0]] for name in wanted.weights} | self.counts_before_step(step)
        counts = {name: counts[name] for name in sorted(counts)}
        return replace(wanted, first_step=step, first_sample=self.first_sample(step), base_counts=counts)

    def numbers(self, ranges: Iterable[Range]) -> dict[str, list[Range]]:
        """Return the numbers within each dataset of ranges of global samples."""
        borders = [*(phase.first_sample for phase in self.phases[1:]), math.inf]
        numbers: dict[str, list[Range]] = {}
        for begin, end in ranges:
            for index, (phase, border) in enumerate(zip(self.phases, borders, strict=True)):
                low, high = max(begin, phase.first_sample), int(min(end, border))
                if low < high:
                    before, after = self._positions(index, low), self._positions(index, high)
                    for name in phase.weights:
                        if before[name] < after[name]:
                            numbers.setdefault(name, []).append((before[name], after[name]))
        return numbers

    def _positions(self, index: int, sample: int) -> dict[str, int]:
        """Return the position of each dataset before a sample of a phase."""
        phase = self.phases[index]
        counts = self._trees[index].counts(sample - phase.first_sample)
        pairs = zip(self.names, counts, strict=True)
        return {name: self._skipped_of(name).position_after(phase.base(name), count) for name, count in pairs}


class FirstSamples(Mixture):
    """The first samples of each dataset, each once, one dataset after the other; the last step may have fewer.

    Args:
        counts: samples of each dataset.
    """

    def __init__(self, counts: Mapping[str, int], global_batch_size: int, seq_length: int) -> None:
        super().__init__([Phase.first(global_batch_size, seq_length, dict.fromkeys(counts, 1))])
        self._counts_of_names = np.array([counts[name] for name in self.names], np.int64)
        self._ends = np.cumsum(self._counts_of_names)

    @property
    def steps(self) -> int:
        """Steps until all samples are given."""
        return -(-int(self._ends[-1]) // self.phases[0].global_batch_size)

    def assign_step(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a step's samples, their datasets and numbers within these, int64 each; none after the last step."""
        samples = np.arange(self.first_sample(step), min(self.first_sample(step + 1), int(self._ends[-1])))
        datasets = np.searchsorted(self._ends, samples, side="right")
        return samples, datasets, samples - (self._ends - self._counts_of_names)[datasets]


def count_numbers(*ranges: Iterable[Range]) -> int:
    """Count the numbers in ranges that do not overlap."""
    return sum(end - begin for of_dataset in ranges for begin, end in of_dataset)


class SkippedNumbers:
    """The numbers of a dataset that a run skips, for example because they made the loss diverge.

    `ranges` are (first, end), ascending and merged; given ranges may overlap.
    """

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        merged: list[Range] = []
        for begin, end in sorted((begin, end) for begin, end in ranges if begin < end):
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((begin, end))
        self.ranges = tuple(merged)
        sizes = [end - begin for begin, end in merged]
        self._begins = np.array([begin for begin, _ in merged], dtype=np.int64)
        self._skipped_before = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))  # each range, then all

    def rank(self, position: int) -> int:
        """Count the used numbers before a position, which is not inside a range."""
        return position - int(self._skipped_before[self._begins.searchsorted(position)])

    def number(self, ranks: np.ndarray) -> np.ndarray:
        """Return the used numbers with these ranks, [n] int64."""
        ranges_before = (self._begins - self._skipped_before[:-1]).searchsorted(ranks, "right")
        numbers: np.ndarray = ranks + self._skipped_before[ranges_before]
        return numbers

    def position_after(self, position: int, count: int) -> int:
        """Return a dataset's position after `count` used numbers from a position on."""
        last = np.array([self.rank(position) + count - 1])
        return position if count == 0 else int(self.number(last)[0]) + 1

    def used(self, begin: int, end: int) -> Iterator[Range]:
        """Yield the parts of [begin, end) that are not skipped, ascending and not empty."""
        for skipped_begin, skipped_end in self.ranges:
            if begin < min(skipped_begin, end):
                yield begin, min(skipped_begin, end)
            begin = max(begin, skipped_end)
        if begin < end:
            yield begin, end


_NOTHING_SKIPPED = SkippedNumbers()
