"""The data state of a checkpoint: the next sample, and the settings that determine the order of samples.

The tokens of step N follow from the step and the settings, so the state is small and the same on every rank. `resume`
compares the saved settings with the current ones, and refuses to continue in another order.

Weights, datasets and global batch size may change at a resume. The state keeps them as phases; if the settings differ
from the last phase, `resume` adds one. A removed dataset stays in the state, and continues at its position if a later
run adds it again.

The state also keeps skipped samples, as ranges of numbers within their datasets, which no phase changes.
`--skip_samples` names samples by their global numbers, as this start plans the run without them. The state keeps these
words, too: at a later start they do nothing, since global numbers have moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pretraining.config.fields import settings_of
from pretraining.config.training import DataConfig
from pretraining.data.samples import Samples
from pretraining.data.sampling.mixture import Mixture, Phase, Range
from pretraining.errors import DamagedError, DataError
from pretraining.text import list_some

STATE_VERSION = 4
"""Version of the state and of the order of samples that it describes."""
CONVERTED = "skip_samples"
"""Key of the ranges of `--skip_samples` that were converted to numbers within datasets."""
_LARGEST_NUMBER = 1 << 62
_LARGEST_TOTAL = 1 << 41  # of weights; above any total that `integer_weights` returns


def describe_order(sources: Iterable[Samples], phase: Phase, config: DataConfig, seed: int) -> dict[str, Any]:
    """Return everything that determines the order of samples of a new run, as JSON values.

    Args:
        phase: first phase.
    """
    return {
        "version": STATE_VERSION,
        "split": "train",
        "seed": seed,
        "logical_shards": config.logical_shards,
        **({} if config.use_dummy_dataset else config.values_that_decide("documents", "samples")),
        "datasets": {source.name: dict(source.fingerprint) for source in sources},
        "phases": [asdict(phase)],
        "skipped": {},
        CONVERTED: [list(words) for words in config.skipped_ranges],
    }


def newly_skipped(requested: Iterable[Range], state: Mapping[str, Any]) -> list[Range]:
    """Return the ranges of `--skip_samples` that were not converted before the state of a run."""
    converted = {tuple(words) for words in state.get(CONVERTED, ())}
    return [(begin, end) for begin, end in requested if (begin, end) not in converted]


@dataclass(frozen=True)
class RunOrder:
    """The step from which a run continues, its mixture, its order, and one line per change for the user.

    Attributes:
        order: `describe_order`, with all phases and skipped samples of the run.
    """

    step: int
    mixture: Mixture
    order: dict[str, Any]
    changes: tuple[str, ...] = ()

    @staticmethod
    def first(order: Mapping[str, Any]) -> RunOrder:
        """Return the order of a new run from its `describe_order`."""
        mixture = Mixture([Phase(**phase) for phase in order["phases"]])
        return RunOrder(0, mixture, dict(order))._skip_samples(order[CONVERTED])

    def state(self, step: int) -> dict[str, Any]:
        """Return the state after all steps before `step`, as JSON values."""
        counts = self.mixture.counts_before_step(step)
        return {**self.order, "next_sample": self.mixture.first_sample(step), "counts": counts}

    def skip(self, numbers: Mapping[str, Iterable[Range]]) -> RunOrder:
        """Skip samples from the next step on by their numbers within datasets, also of datasets of a later phase."""
        skipped = {name: list(before.ranges) for name, before in self.mixture.skipped.items()}
        positions, lines = self.mixture.positions_before_step(self.step), []
        for name, ranges in sorted(numbers.items()):
            ahead = [(max(begin, positions.get(name, 0)), end) for begin, end in ranges]
            skipped[name] = [*skipped.get(name, ()), *ahead]
            lines += [f"{name} {begin}-{end - 1}" for begin, end in ahead if begin < end]
        mixture = Mixture(self.mixture.phases, skipped)
        as_lists = {name: [list(pair) for pair in after.ranges] for name, after in mixture.skipped.items()}
        changes = (*self.changes, f"skipped: samples {list_some(lines, 12)}") if lines else self.changes
        return RunOrder(self.step, mixture, {**self.order, "skipped": as_lists}, changes)

    def _skip_samples(self, ranges: Sequence[Range]) -> RunOrder:
        """Skip global samples; raise a DataError if the run has trained on one."""
        next_sample = self.mixture.first_sample(self.step)
        first = min((begin for begin, _ in ranges), default=next_sample)
        if first < next_sample:
            raise DataError(
                f"--skip_samples skips sample {first}, but the run has trained on all samples before {next_sample}: "
                "resume from an earlier checkpoint (--ckpt_load_path, with another --ckpt_save_path), or leave it out"
            )
        return self.skip(self.mixture.numbers(ranges))


def resume(state: Mapping[str, Any], order: Mapping[str, Any], changes: Mapping[str, str]) -> RunOrder:
    """Resume from a state of this run.

    Args:
        state: `RunOrder.state` of a checkpoint.
        order: `describe_order` of a new run with the current settings.
        changes: by dataset, the files that changed before it was last indexed; empty if unknown.

    Raises:
        DamagedError: the state is damaged.
        DataError: its order differs from the current settings.
    """
    if state.get("version") != STATE_VERSION:
        raise DataError(
            f"the data state has version {state.get('version')!r}, but this release reads version {STATE_VERSION}: "
            "take its weights alone into a new run (--weights_only=true, with another --ckpt_save_path)"
        )
    try:
        problems = _differences(state, order, changes)
        before = restored_mixture(state)
        step = before.step_of_sample(state["next_sample"])
        if before.first_sample(step) != state["next_sample"]:
            raise ValueError(f"sample {state['next_sample']} is not the first of a step")
        typed = newly_skipped(order[CONVERTED], state)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DamagedError(f"the data state is damaged: {type(error).__name__}: {error}") from error
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise DataError(
            f"the order of samples differs from the start of this run:\n{listed}\n"
            "Restore these settings or files, or start a new run in another --ckpt_save_path. Weights, the list of "
            "datasets and the global batch size may change"
        )
    phases = _continue_phases(before, Phase(**order["phases"][0]), step)
    mixture = Mixture(phases, state["skipped"])
    known = {**state["datasets"], **order["datasets"]}
    run_order = {
        **order,
        "datasets": {name: known[name] for name in mixture.names},
        "phases": [asdict(phase) for phase in phases],
        "skipped": state["skipped"],
        CONVERTED: [*state[CONVERTED], *map(list, typed)],
    }
    lines = (_describe_last_phase(phases),) if phases[-1].first_step == step > 0 else ()
    return RunOrder(step, mixture, run_order, lines)._skip_samples(typed)


def restored_mixture(state: Mapping[str, Any]) -> Mixture:
    """Return the mixture of a state; raise a ValueError, TypeError or KeyError if the state is damaged."""
    phases = [Phase(**phase) for phase in state["phases"]]
    skipped = {name: [(begin, end) for begin, end in ranges] for name, ranges in state["skipped"].items()}
    others = [number for ranges in (*skipped.values(), state[CONVERTED]) for pair in ranges for number in pair]
    _check_numbers(phases, [*others, state["next_sample"]])
    first = phases[0]
    if first != Phase.first(first.global_batch_size, first.seq_length, first.weights):
        raise ValueError("the first phase does not start at sample 0")
    for number, phase in enumerate(phases[1:], 1):
        before = Mixture(phases[:number], skipped)
        follows = phase.first_step > before.phases[-1].first_step and phase.seq_length == first.seq_length
        if not follows or phase != before.phase_from(phase.first_step, phase):
            raise ValueError(f"the phase from step {phase.first_step} does not follow from the previous phase")
    return Mixture(phases, skipped)


def _check_numbers(phases: Sequence[Phase], others: Iterable[int]) -> None:
    """Refuse numbers that no run writes, before computing with them."""
    sizes = [size for phase in phases for size in (phase.global_batch_size, phase.seq_length, *phase.weights.values())]
    places = [number for phase in phases for number in (phase.first_step, phase.first_sample)]
    for number in (*others, *places, *sizes):
        if type(number) is not int or not 0 <= number <= _LARGEST_NUMBER or min(sizes) < 1:
            raise ValueError(f"{number!r} is no number of a run")
    if max(sum(phase.weights.values()) for phase in phases) > _LARGEST_TOTAL:
        raise ValueError("weights are too large")


def _continue_phases(before: Mixture, requested: Phase, step: int) -> tuple[Phase, ...]:
    """Return the phases from a step on, with a new one if the requested one differs from the last.

    A phase without samples is dropped.
    """
    kept = [phase for phase in before.phases if phase.first_step < step]
    if not kept:
        return (requested,)
    if kept[-1].same_data(requested):
        return tuple(kept)
    skipped = {name: numbers.ranges for name, numbers in before.skipped.items()}
    return (*kept, Mixture(kept, skipped).phase_from(step, requested))


def _describe_last_phase(phases: Sequence[Phase]) -> str:
    """Return the changes of the last phase: "phase 2 from step 1200: weights web 0.6 -> 0.5, code none -> 0.1"."""
    before, after = phases[-2], phases[-1]
    then, now = _proportions(before.weights), _proportions(after.weights)
    changed = [
        f"{name} {_format_share(then.get(name))} -> {_format_share(now.get(name))}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]
    parts = [f"weights {list_some(changed, 12)}"] if changed else []
    if before.global_batch_size != after.global_batch_size:
        parts.append(f"global batch {before.global_batch_size} -> {after.global_batch_size} sequences")
    return f"phase {len(phases)} from step {after.first_step}: {'; '.join(parts)}"


def _proportions(weights: Mapping[str, int]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _format_share(share: float | None) -> str:
    return "none" if share is None else f"{share:.4g}"


def _differences(saved: Mapping[str, Any], order: Mapping[str, Any], changes: Mapping[str, str]) -> list[str]:
    """Return one line per difference that changes the order of samples."""
    before, now = saved["datasets"], order["datasets"]
    if _is_dummy(before) != _is_dummy(now):
        then, today = ("the dummy dataset" if _is_dummy(datasets) else "datasets" for datasets in (before, now))
        return [f"the run used {then} and would now use {today}: see --use_dummy_dataset"]
    lengths = [state["phases"][-1]["seq_length"] for state in (saved, order)]
    problems = [f"seq_length was {lengths[0]} and is {lengths[1]}"] if lengths[0] != lengths[1] else []
    settings = [name for name in ("split", "seed", "logical_shards") if saved[name] != order[name]]
    # Fingerprints only have a digest of these settings. Comparing the values names the setting, and covers datasets
    # that are new in this run.
    deciding = (name for name, setting in settings_of(DataConfig).items() if setting.decides)
    reading = [name for name in deciding if name in saved and saved[name] != order.get(name)]
    problems += [f"{name} was {saved[name]} and is {order.get(name)}" for name in settings + reading]
    for name in sorted(name for name in before.keys() & now.keys() if before[name] != now[name]):
        if before[name].get("files") != now[name].get("files") or not reading:
            problems.append(_describe_change(name, before[name], now[name], changes.get(name)))
    return problems


def _is_dummy(datasets: Mapping[str, Mapping[str, Any]]) -> bool:
    return any(fingerprint.get("dummy") for fingerprint in datasets.values())


def _describe_change(name: str, before: Mapping[str, Any], now: Mapping[str, Any], files: str | None) -> str:
    """Return how a dataset differs; `files` lists the changed files, if known."""
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    values = ", ".join(f"{key} was {before.get(key)} and is {now.get(key)}" for key in keys)
    if not {"files", "content"} & {*keys}:
        return f"dataset '{name}' is read differently (see --file_type): {values}"
    which = f" ({files})" if files else ""
    return f"dataset '{name}' has other files{which}: {values}. Put new files into a new dataset"
