"""Which dataset gives each sample: a function of the sample's number, in exact integers.

Weights are integers. They are the leaves of a Huffman tree; at a node whose children weigh l and r, the first n samples
that reach the node send floor((2nl + w) / 2w) to the left, w = l + r: n * l / w, rounded. So n samples of the mixture
give each dataset its weight times n up to a few roundings: one at each node on the way, those higher up shrunk by the
shares below. In a Huffman tree these shrink at least as Fibonacci numbers grow, so their sum stays below 2: at every
prefix each dataset is within two samples of its share. Consecutive samples reach each node as consecutive ones, so a
batch is split with a few array operations a node, wherever it begins.

Weights may change on the way: a run is a list of phases, each with its own tree, which begins at 0 where the phase
does. A phase knows how many samples each dataset gave before it, and numbers its own from there.
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


def integer_weights(weights: Mapping[str, float]) -> dict[str, int]:
    """Turn proportions, from 0 on and one of them positive, into integers with the same ratios.

    Decimal fractions are taken as they are written, 0.1 as 1/10. Ratios are exact where the total stays up to 2**40;
    otherwise they are rounded to that total, and no positive weight becomes zero.
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
    """A mixture of datasets with fixed integer weights, [datasets], one of them positive; weight 0 gives no samples."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._datasets = len(weights)
        self._nodes = [_Node(weight, dataset) for dataset, weight in enumerate(weights) if weight > 0]
        # Ties go by the node's number: datasets in their order, then inner nodes in the order in which they are made.
        queue = [(node.weight, number) for number, node in enumerate(self._nodes)]
        heapq.heapify(queue)
        while len(queue) > 1:
            (left_weight, left), (right_weight, right) = heapq.heappop(queue), heapq.heappop(queue)
            heapq.heappush(queue, (left_weight + right_weight, len(self._nodes)))
            self._nodes.append(_Node(left_weight + right_weight, left=left, right=right))

    def assign(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the datasets of samples [begin, end), and their numbers within these, both [end - begin] int64."""
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
                # left_before[i]: of the samples before first + i, how many more went left than of those before first
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
        """Count what each dataset gives of the first `samples` samples, [datasets]."""
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
    """A stretch of the run with one mixture and one batch size; it goes on until the next phase begins.

    Attributes:
        first_sample: global index of its first sample, or of one that is skipped before it.
        global_batch_size: samples a step.
        weights: by name, of the datasets that give samples.
        base_counts: samples that each dataset of the phases up to this one has given, or skipped, before it.
    """

    first_step: int
    first_sample: int
    global_batch_size: int
    weights: dict[str, int]
    base_counts: dict[str, int]

    @staticmethod
    def first(global_batch_size: int, weights: Mapping[str, int]) -> Phase:
        """Return the phase that a run begins with."""
        return Phase(0, 0, global_batch_size, dict(weights), dict.fromkeys(sorted(weights), 0))

    def same_data(self, other: Phase) -> bool:
        """Return whether two phases mix alike and take as much a step."""
        return (self.weights, self.global_batch_size) == (other.weights, other.global_batch_size)


class Mixture:
    """The datasets of all samples, over all phases; the first of these begins at sample 0.

    `names` are those of all datasets of all phases, sorted; results refer to their positions here.
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
        """Global index of the first sample of a step."""
        phase = self.phases[self._phase_of_step(step)]
        return self.skipped.advance(phase.first_sample, (step - phase.first_step) * phase.global_batch_size)

    def step_of_sample(self, sample: int) -> int:
        """Return the step that takes a sample, which is not skipped."""
        phase = [phase for phase in self.phases if phase.first_sample <= sample][-1]
        return phase.first_step + self.skipped.count(phase.first_sample, sample) // phase.global_batch_size

    def global_batch_size(self, step: int) -> int:
        """Return how many samples a step has."""
        return self.phases[self._phase_of_step(step)].global_batch_size

    def assign_step(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return samples of a step, ascending, their datasets, and numbers in these, [global batch] int64 each."""
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
        """Yield what steps [first_step, end_step) take: a phase, and (first, end) of each dataset's samples in it.

        A phase comes several times where samples are skipped in it.
        """
        ends = [*(phase.first_step for phase in self.phases[1:]), end_step]
        for number, (phase, phase_end) in enumerate(zip(self.phases, ends, strict=True)):
            for begin, end in self._ranges(max(first_step, phase.first_step), min(end_step, phase_end)):
                before, after = (self._counts(number, sample) for sample in (begin, end))
                yield phase, {name: (before[name], after[name]) for name in phase.base_counts}

    def counts_before_step(self, step: int) -> dict[str, int]:
        """Count samples that each dataset has given, or skipped, before a step."""
        return self._counts(self._phase_of_step(step), self.first_sample(step))

    def phase_from(self, step: int, wanted: Phase) -> Phase:
        """Return a phase that begins at a step of the last phase, with the weights and batch size of `wanted`.

        Every dataset goes on where this mixture leaves it at that step.
        """
        counts = dict.fromkeys(wanted.weights, 0) | self.counts_before_step(step)
        counts = {name: counts[name] for name in sorted(counts)}
        return Phase(step, self.first_sample(step), wanted.global_batch_size, dict(wanted.weights), counts)

    def _counts(self, number: int, sample: int) -> dict[str, int]:
        """Count what each dataset has given before a sample of a phase."""
        given = self._trees[number].counts(sample - self.phases[number].first_sample)
        bases = self._bases[number].tolist()
        return {name: base + count for name, base, count in zip(self.names, bases, given, strict=True)}

    def _ranges(self, first_step: int, end_step: int) -> Iterator[tuple[int, int]]:
        """Yield the samples that steps [first_step, end_step) of one phase take, as (first, end) of ranges."""
        if first_step < end_step:
            begin, last = self.first_sample(first_step), self.first_sample(end_step - 1)
            # The end is found from the last sample: where it is skipped on, that belongs to the next step.
            last = self.skipped.advance(last, self.global_batch_size(first_step) - 1)
            yield from self.skipped.taken(begin, last + 1)


class Skipped:
    """Ranges of samples that a run leaves out, such as those of batches that made the loss diverge.

    A skipped sample keeps its index and its dataset: steps take the indices that are left, in order, so nothing before
    them changes. `ranges` are (first, end), ascending and merged; those given may overlap.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        merged: list[tuple[int, int]] = []
        for begin, end in sorted((begin, end) for begin, end in ranges if begin < end):
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((begin, end))
        self.ranges = tuple(merged)

    def advance(self, sample: int, count: int) -> int:
        """Return the sample `count` samples after the first one that is taken at or after `sample`."""
        for begin, end in self.ranges:
            if end <= sample:
                continue
            if sample + count < begin:
                break
            count -= max(begin - sample, 0)
            sample = end
        return sample + count

    def taken(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of [begin, end) that are taken, ascending; none is empty."""
        for skipped_begin, skipped_end in self.ranges:
            if begin < min(skipped_begin, end):
                yield begin, min(skipped_begin, end)
            begin = max(begin, skipped_end)
        if begin < end:
            yield begin, end

    def count(self, begin: int, end: int) -> int:
        """Count the samples of [begin, end) that are taken."""
        return sum(last - first for first, last in self.taken(begin, end))

    def without(self, other: Skipped) -> list[tuple[int, int]]:
        """Return the ranges, or parts of them, that another one has not."""
        return [part for begin, end in self.ranges for part in other.taken(begin, end)]
