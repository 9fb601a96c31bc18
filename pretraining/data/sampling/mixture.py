"""The mixture of datasets: the dataset of each sample is a function of the sample's number, in exact integers.

The integer weights are the leaves of a Huffman tree. A node whose children weigh l and r, with w = l + r, sends
floor((2nl + w) / 2w) of its first n samples to the left: n * l / w, rounded. So each dataset gets its weight times n up
to a few roundings: one per node on the way, and the shares below a node shrink its rounding. In a Huffman tree they
shrink at least as fast as Fibonacci numbers grow, so the sum stays below 2: at every prefix each dataset is within two
samples of its share. Consecutive samples reach each node consecutively, so a few array operations per node split any
batch.

If weights change during a run, each phase has its own tree, which counts from the first sample of the phase. A phase
stores the samples that each dataset gave before, and continues to number from there.

A phase is placed once, when it begins: at the first sample that the earlier phases neither train on nor skip, with the
counts of each dataset there. Samples that are skipped later do not move it. So a skipped sample counts in the phase
that would have trained on it: before the border if it was skipped when the phase began, in the phase itself otherwise.
A phase begun again after a rollback is placed as it was, and its samples have the same numbers.

A skip is a fact about samples of datasets. Global numbers name them in the phases of a run as it is; if a new phase
begins before a skipped sample, `locate` finds the new global number of the same sample.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

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

    def find(self, dataset: int, numbers: Iterable[int]) -> list[int]:
        """Return the samples with these numbers within a dataset of positive weight: the inverse of `assign`."""
        found = list(numbers)
        at = next(number for number, node in enumerate(self._nodes) if node.dataset == dataset)
        for number, node in enumerate(self._nodes[at:], at):  # a node comes after its children
            if at in (node.left, node.right):
                # The first m samples send floor((2ml + w) / 2w) to the left, and the others to the right. If m is the
                # smallest number that sends more than n samples to a side, its sample n is at m - 1.
                tie, twice = (1 if at == node.left else 0), 2 * self._nodes[at].weight
                found = [(node.weight * (2 * each + 1) - tie) // twice for each in found]
                at = number
        return found

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


@dataclass(frozen=True)
class Phase:
    """A part of the run with one mixture and one batch size, until the next phase.

    Attributes:
        first_sample: global index of its first sample, or of one before it that was skipped after the phase began.
        global_batch_size: samples per step.
        weights: by name, for the datasets of this phase.
        base_counts: by name, samples given or skipped before this phase, for the datasets of this and earlier phases.
    """

    first_step: int
    first_sample: int
    global_batch_size: int
    weights: dict[str, int]
    base_counts: dict[str, int]

    @staticmethod
    def first(global_batch_size: int, weights: Mapping[str, int]) -> Phase:
        """Return the first phase of a run."""
        return Phase(0, 0, global_batch_size, dict(weights), dict.fromkeys(sorted(weights), 0))

    def same_data(self, other: Phase) -> bool:
        """Return whether weights and batch sizes are equal."""
        return (self.weights, self.global_batch_size) == (other.weights, other.global_batch_size)


class Mixture:
    """The datasets of all samples over all phases, the first of which starts at sample 0.

    `names` are the sorted names of all datasets; results are positions in `names`.
    """

    def __init__(self, phases: Sequence[Phase], skipped: Skipped | None = None) -> None:
        self.phases = tuple(phases)
        self.skipped = skipped or Skipped()
        self.names = tuple(sorted(phases[-1].base_counts))
        self._trees = [WeightTree([phase.weights.get(name, 0) for name in self.names]) for phase in phases]
        self._bases = [np.array([phase.base_counts.get(name, 0) for name in self.names], np.int64) for phase in phases]

    def _phase_of_step(self, step: int) -> int:
        return max(number for number, phase in enumerate(self.phases) if phase.first_step <= step)

    def first_sample(self, step: int) -> int:
        """Return the global index of the first sample of a step."""
        phase = self.phases[self._phase_of_step(step)]
        return self.skipped.advance(phase.first_sample, (step - phase.first_step) * phase.global_batch_size)

    def step_of_sample(self, sample: int) -> int:
        """Return the step of a sample that is not skipped."""
        phase = [phase for phase in self.phases if phase.first_sample <= sample][-1]
        return phase.first_step + self.skipped.count(phase.first_sample, sample) // phase.global_batch_size

    def global_batch_size(self, step: int) -> int:
        """Return the number of samples in a step."""
        return self.phases[self._phase_of_step(step)].global_batch_size

    def assign_step(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a step's samples, ascending, their datasets and numbers within these, [global batch] int64 each."""
        number = self._phase_of_step(step)
        tree, bases, first_sample = self._trees[number], self._bases[number], self.phases[number].first_sample
        samples, datasets, numbers = [], [], []
        for begin, end in self._ranges(step, step + 1):
            owners, within = tree.assign(begin - first_sample, end - first_sample)
            samples.append(np.arange(begin, end))
            datasets.append(owners)
            numbers.append(within + bases[owners])
        return np.concatenate(samples), np.concatenate(datasets), np.concatenate(numbers)

    def taken(self, first_step: int, end_step: int) -> Iterator[tuple[Phase, dict[str, tuple[int, int]]]]:
        """Yield each phase of steps [first_step, end_step) with (first, end) of each dataset's samples in it.

        A phase with skipped samples comes several times.
        """
        ends = [*(phase.first_step for phase in self.phases[1:]), end_step]
        for number, (phase, phase_end) in enumerate(zip(self.phases, ends, strict=True)):
            for begin, end in self._ranges(max(first_step, phase.first_step), min(end_step, phase_end)):
                before, after = (self._counts(number, sample) for sample in (begin, end))
                yield phase, {name: (before[name], after[name]) for name in phase.base_counts}

    def counts_before_step(self, step: int) -> dict[str, int]:
        """Count the samples of each dataset, given or skipped, before a step."""
        return self._counts(self._phase_of_step(step), self.first_sample(step))

    def phase_from(self, step: int, wanted: Phase) -> Phase:
        """Return a phase from a step of the last phase on, with the weights and batch size of `wanted`.

        Every dataset continues at its position at that step.
        """
        return self._phase_at(self.first_sample(step), step, wanted)

    def can_precede(self, phase: Phase) -> bool:
        """Return whether a phase may follow this mixture.

        It begins between the last sample that an earlier step used and the next one that is not skipped. Samples in
        between count in the new phase if they were skipped after it began.
        """
        last = self.phases[-1]
        if phase.first_step < last.first_step:
            return False
        earliest = last.first_sample
        if phase.first_step > last.first_step:
            used = self.first_sample(phase.first_step - 1)
            earliest = self.skipped.advance(used, last.global_batch_size - 1) + 1
        is_between = earliest <= phase.first_sample <= self.first_sample(phase.first_step)
        return is_between and phase == self._phase_at(phase.first_sample, phase.first_step, phase)

    def numbers(self, ranges: Iterable[Range]) -> dict[str, list[Range]]:
        """Return the sample numbers within each dataset of ranges of global samples."""
        borders = [*(phase.first_sample for phase in self.phases[1:]), math.inf]
        found: dict[str, list[Range]] = {}
        for begin, end in ranges:
            for number, (phase, border) in enumerate(zip(self.phases, borders, strict=True)):
                low, high = max(begin, phase.first_sample), int(min(end, border))
                if low < high:
                    before, after = self._counts(number, low), self._counts(number, high)
                    for name in phase.weights:
                        if before[name] < after[name]:
                            found.setdefault(name, []).append((before[name], after[name]))
        return found

    def locate(self, numbers: Mapping[str, Iterable[Range]]) -> Skipped:
        """Return the global samples of the last phase that have these numbers within their datasets."""
        phase, found = self.phases[-1], list[Range]()
        for name in numbers.keys() & phase.weights.keys():
            base = phase.base_counts[name]
            wanted = (each for begin, end in numbers[name] for each in range(max(begin - base, 0), end - base))
            places = self._trees[-1].find(self.names.index(name), wanted)
            found += [(phase.first_sample + place, phase.first_sample + place + 1) for place in places]
        return Skipped(found)

    def _phase_at(self, sample: int, step: int, wanted: Phase) -> Phase:
        """Return a phase that begins at a sample of the last phase."""
        counts = dict.fromkeys(wanted.weights, 0) | self._counts(len(self.phases) - 1, sample)
        counts = {name: counts[name] for name in sorted(counts)}
        return Phase(step, sample, wanted.global_batch_size, dict(wanted.weights), counts)

    def _counts(self, number: int, sample: int) -> dict[str, int]:
        """Count the samples of each dataset before a sample of a phase."""
        given = self._trees[number].counts(sample - self.phases[number].first_sample)
        bases = self._bases[number].tolist()
        return {name: base + count for name, base, count in zip(self.names, bases, given, strict=True)}

    def _ranges(self, first_step: int, end_step: int) -> Iterator[tuple[int, int]]:
        """Yield the samples of steps [first_step, end_step) of one phase as ranges (first, end)."""
        if first_step < end_step:
            begin, last = self.first_sample(first_step), self.first_sample(end_step - 1)
            # The end follows from the last sample, because skipped samples after it belong to the next step.
            last = self.skipped.advance(last, self.global_batch_size(first_step) - 1)
            yield from self.skipped.taken(begin, last + 1)


class FirstSamples(Mixture):
    """The first samples of each dataset, each once, one dataset after the other; the last step may have fewer.

    Args:
        counts: samples of each dataset.
    """

    def __init__(self, counts: Mapping[str, int], global_batch_size: int) -> None:
        super().__init__([Phase.first(global_batch_size, dict.fromkeys(counts, 1))])
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


class Skipped:
    """Ranges of samples that a run skips, for example batches that made the loss diverge.

    A skipped sample keeps its index and its dataset, and steps take the remaining indices in order, so earlier steps do
    not change. `ranges` are (first, end), ascending and merged; given ranges may overlap.
    """

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        merged: list[Range] = []
        for begin, end in sorted((begin, end) for begin, end in ranges if begin < end):
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((begin, end))
        self.ranges = tuple(merged)

    def advance(self, sample: int, count: int) -> int:
        """Return the sample `count` samples after the first unskipped one at or after `sample`."""
        for begin, end in self.ranges:
            if end <= sample:
                continue
            if sample + count < begin:
                break
            count -= max(begin - sample, 0)
            sample = end
        return sample + count

    def taken(self, begin: int, end: int) -> Iterator[Range]:
        """Yield the unskipped parts of [begin, end), ascending and not empty."""
        for skipped_begin, skipped_end in self.ranges:
            if begin < min(skipped_begin, end):
                yield begin, min(skipped_begin, end)
            begin = max(begin, skipped_end)
        if begin < end:
            yield begin, end

    def count(self, begin: int, end: int) -> int:
        """Count the unskipped samples of [begin, end)."""
        return sum(last - first for first, last in self.taken(begin, end))

    def without(self, other: Skipped) -> list[Range]:
        """Return the parts of the ranges that `other` does not skip."""
        return [part for begin, end in self.ranges for part in other.taken(begin, end)]
