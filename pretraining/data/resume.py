"""The data state of a checkpoint: the next sample, and the settings that determine the order of samples.

The tokens of step N follow from the step and the settings, so the state is small and the same on every rank. `resume`
compares the saved settings with the current ones, and refuses to continue in another order.

Weights, datasets and global batch size may change at a resume. The state keeps them as phases; if the settings differ
from the last phase, `resume` adds one. A removed dataset stays in the state, and continues at its position if a later
run adds it again.

A state records the version of the order of samples within datasets (token_stream.py). Version 2 of the state, which
earlier releases wrote, has no record: its order has version 1. Such a run keeps both versions.

The state also keeps skipped samples, as ranges of global numbers in its phases. `--skip_samples` means the numbers of
the run as this start plans it, with the phase that begins at this start, if one does. Samples that an earlier start or
a rollback skipped stay skipped when a new phase gives them other global numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pretraining.config.fields import settings_of
from pretraining.config.training import DataConfig
from pretraining.data.samples import Samples
from pretraining.data.sampling.mixture import Mixture, Phase, Range, Skipped
from pretraining.data.sampling.token_stream import ORDER_VERSIONS
from pretraining.errors import DamagedError, DataError
from pretraining.text import list_some

STATE_VERSIONS = (2, 3)
ORDER_VERSION = ORDER_VERSIONS[-1]
"""Version of the order of samples in new runs."""
SKIPPED_LATER = "skipped_later"
"""Key of skipped samples of datasets that the last phase does not read: by dataset, ranges of numbers within it."""
CONTENTS = "contents"
"""Key of the records of content, by dataset. It is compared where both sides have one."""
RENUMBERED = "renumbered"
"""Key of skipped ranges in the numbers of earlier phases, which a start may repeat as `--skip_samples`."""
_MOST_RENUMBERED = 1 << 20
_LARGEST_NUMBER = 1 << 62
_LARGEST_TOTAL = 1 << 41  # of weights; above any total that `integer_weights` returns


def describe_order(
    sources: Iterable[Samples], phase: Phase, config: DataConfig, seed: int, split: str
) -> dict[str, Any]:
    """Return everything that determines the order of samples, as JSON values.

    Args:
        phase: first phase of a new run.
        split: "train" or "held_out"; skipped ranges apply to "train" only.
    """
    return {
        "version": STATE_VERSIONS[-1],
        "order_version": ORDER_VERSION,
        "split": split,
        "seed": seed,
        "seq_length": config.seq_length,
        "logical_shards": config.logical_shards,
        **({} if config.use_dummy_dataset else _reading_settings(config)),
        "datasets": {source.name: dict(source.fingerprint) for source in sources},
        **_contents({source.name: source.content for source in sources if source.content}),
        "phases": [asdict(phase)],
        "skipped": [list(each) for each in config.skipped_ranges] if split == "train" else [],
    }


def _contents(records: Mapping[str, str]) -> dict[str, Any]:
    return {CONTENTS: dict(records)} if records else {}


def _reading_settings(config: DataConfig) -> dict[str, Any]:
    """Return the settings of all datasets that must not change during a run, as JSON values."""
    values = config.values_that_decide("documents", "samples")
    if config.token_dtype is None:  # older states lack this setting
        del values["token_dtype"]
    return values


def order_version(state: Mapping[str, Any]) -> int:
    """Return the version of the order of a state or of `describe_order`."""
    version: int = state.get("order_version", 1)
    return version


def state_at(order: Mapping[str, Any], mixture: Mixture, step: int) -> dict[str, Any]:
    """Return the state after all steps before `step`."""
    return {**order, "next_sample": mixture.first_sample(step), "counts": mixture.counts_before_step(step)}


@dataclass(frozen=True)
class Resumption:
    """The position, mixture and order with which a run continues, and one line per change for the user."""

    step: int
    mixture: Mixture
    order: dict[str, Any]
    changes: tuple[str, ...]

    def skip(self, ranges: Iterable[Range]) -> Resumption:
        """Skip global samples from the next step on."""
        before, first = self.mixture.skipped, self.mixture.first_sample(self.step)
        skipped = Skipped([*before.ranges, *((max(begin, first), end) for begin, end in ranges)])
        lines = (f"skipped: samples {begin}-{end - 1}" for begin, end in skipped.without(before))
        mixture = Mixture(self.mixture.phases, skipped)
        return Resumption(self.step, mixture, self.order | {"skipped": _lists(skipped)}, (*self.changes, *lines))

    def skip_numbers(self, numbers: Mapping[str, Iterable[Range]]) -> Resumption:
        """Skip samples by their numbers within datasets, also within those that only a later phase reads."""
        later = dict(self.order.get(SKIPPED_LATER, {}))
        for name in sorted(numbers.keys() - self.mixture.phases[-1].weights.keys()):
            later[name] = _lists(Skipped([*later.get(name, ()), *numbers[name]]))
        order = self.order | ({SKIPPED_LATER: later} if later else {})
        return replace(self, order=order).skip(self.mixture.locate(numbers).ranges)


def _lists(skipped: Skipped) -> list[list[int]]:
    return [list(each) for each in skipped.ranges]


def resume(state: Mapping[str, Any], order: Mapping[str, Any], changes: Mapping[str, str]) -> Resumption:
    """Resume from a state of this run.

    Args:
        state: `state_at` of a checkpoint.
        order: `describe_order` of a new run with the current settings.
        changes: by dataset, the files that changed before it was last indexed; empty if unknown.

    Raises:
        DamagedError: the state is damaged.
        DataError: its order differs from the current settings.
    """
    if state.get("version") not in STATE_VERSIONS or order_version(state) not in ORDER_VERSIONS:
        raise DataError(
            f"the data state has version {state.get('version')!r} and order {order_version(state)!r}, but this release "
            f"reads versions {STATE_VERSIONS} and orders {ORDER_VERSIONS}"
        )
    try:
        problems = _differences(state, order, changes)
        before, next_sample = restored_mixture(state), state["next_sample"]
        step = _step_at(before, next_sample)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DamagedError(f"the data state is damaged: {type(error).__name__}: {error}") from error
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise DataError(
            f"the order of samples differs from the start of this run:\n{listed}\n"
            "Restore these settings or files, or start a new run in another --ckpt_save_path. Weights, the list of "
            "datasets and the global batch size may change"
        )
    run = _continue_run(before, step, state, order)
    known = Skipped([*before.skipped.ranges, *state.get(RENUMBERED, ())])
    return run.skip(_newly_skipped(order["skipped"], known, next_sample))


def _continue_run(before: Mixture, step: int, state: Mapping[str, Any], order: Mapping[str, Any]) -> Resumption:
    """Return the run from a step on, with a new phase if the settings differ, and with what was skipped before."""
    phases = _continue_phases(before, Phase(**order["phases"][0]), step)
    mixture = Mixture(phases, before.skipped)
    known = {**state["datasets"], **order["datasets"]}
    order = {
        **{key: value for key, value in order.items() if key != "order_version"},
        "datasets": {name: known[name] for name in mixture.names},
        **_contents(state.get(CONTENTS, {}) | order.get(CONTENTS, {})),
        "phases": [asdict(phase) for phase in phases],
        "skipped": _lists(before.skipped),
        **{key: state[key] for key in ("version", "order_version", SKIPPED_LATER, RENUMBERED) if key in state},
    }
    lines = [_describe_last_phase(phases)] if phases[-1].first_step == step > 0 else []
    run = Resumption(step, mixture, order, tuple(lines))
    return run if mixture.phases == before.phases else _renumber(run, before)


def _renumber(run: Resumption, before: Mixture) -> Resumption:
    """Skip in a new phase the samples that were skipped ahead of it, under their new global numbers."""
    first, order = run.mixture.first_sample(run.step), dict(run.order)
    ahead = Skipped((max(begin, first), end) for begin, end in before.skipped.ranges)
    if not ahead.ranges and SKIPPED_LATER not in order:
        return run
    numbers = before.numbers(ahead.ranges)
    for name, ranges in order.pop(SKIPPED_LATER, {}).items():
        numbers[name] = [*numbers.get(name, ()), *ranges]
    count = sum(end - begin for ranges in numbers.values() for begin, end in ranges)
    if count > _MOST_RENUMBERED:
        raise DataError(
            f"{count:,} samples from {first} on are skipped, too many to skip again in a new phase: keep the weights, "
            "the datasets and the global batch size until the run is past them"
        )
    if ahead.ranges:
        order[RENUMBERED] = _lists(Skipped([*order.get(RENUMBERED, ()), *ahead.ranges]))
    past = Skipped((begin, min(end, first)) for begin, end in before.skipped.ranges)
    placed = Resumption(run.step, Mixture(run.mixture.phases, past), order, ()).skip_numbers(numbers)
    lines = [f"skipped before: {count:,} samples, also in this phase"] if count else []
    return replace(placed, changes=(*run.changes, *lines))


def _newly_skipped(requested: Iterable[Range], known: Skipped, next_sample: int) -> list[Range]:
    """Return requested ranges that were not skipped before; raise a DataError if the run has trained on one."""
    new = Skipped((begin, end) for begin, end in requested).without(known)
    if new and new[0][0] < next_sample:
        raise DataError(
            f"--skip_samples skips sample {new[0][0]}, but the run has trained on all samples before {next_sample}: "
            "resume from an earlier checkpoint (--ckpt_load_path, with another --ckpt_save_path), or leave it out"
        )
    return new


def restored_mixture(state: Mapping[str, Any]) -> Mixture:
    """Return the mixture of a state; raise a ValueError or TypeError if the state is damaged."""
    phases = [Phase(**phase) for phase in state["phases"]]
    skipped = Skipped((begin, end) for begin, end in state["skipped"])
    other = [*state.get(SKIPPED_LATER, {}).values(), state.get(RENUMBERED, ())]
    elsewhere = Skipped((begin, end) for ranges in other for begin, end in ranges)
    _check_numbers(phases, (*skipped.ranges, *elsewhere.ranges), state["next_sample"])
    for number, phase in enumerate(phases[1:], 1):
        if not Mixture(phases[:number], skipped).can_precede(phase):
            raise ValueError(f"the phase from step {phase.first_step} does not follow from the previous phase")
    return Mixture(phases, skipped)


def _check_numbers(phases: Sequence[Phase], ranges: Iterable[Range], next_sample: int) -> None:
    """Refuse numbers that no run writes, before computing with them."""
    if phases[0] != Phase.first(phases[0].global_batch_size, phases[0].weights):
        raise ValueError("the first phase does not start at sample 0")
    places = [place for phase in phases for place in (phase.first_step, phase.first_sample)]
    places += [end for each in ranges for end in each]
    sizes = [size for phase in phases for size in (phase.global_batch_size, *phase.weights.values())]
    if not all(type(number) is int for number in (*places, *sizes, next_sample)):
        raise TypeError("a number is not an integer")
    if min(places) < 0 or min(sizes) < 1 or max(*places, *sizes, next_sample) > _LARGEST_NUMBER:
        raise ValueError("a number is too small or too large")
    if max(sum(phase.weights.values()) for phase in phases) > _LARGEST_TOTAL:
        raise ValueError("weights are too large")


def _step_at(mixture: Mixture, sample: int) -> int:
    """Return the step of the last phase whose first sample is `sample`; raise a ValueError if there is none."""
    if sample >= mixture.phases[-1].first_sample:
        step = mixture.step_of_sample(sample)
        if mixture.first_sample(step) == sample:
            return step
    raise ValueError(f"sample {sample} is not the first of a step")


def _continue_phases(before: Mixture, requested: Phase, step: int) -> tuple[Phase, ...]:
    """Return the phases from a step on, with a new one if the requested one differs from the last.

    It begins at the next sample of the run so far, so samples that this start skips do not move it. A phase with
    samples stays, also if all of them were skipped; a phase without samples is dropped.
    """
    next_sample = before.first_sample(step)
    kept = [phase for phase in before.phases if phase.first_sample < next_sample]
    if not kept:
        return (requested,)
    if kept[-1].same_data(requested):
        return tuple(kept)
    return (*kept, Mixture(kept, before.skipped).phase_from(step, requested))


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
    settings = [name for name in ("split", "seed", "seq_length", "logical_shards") if saved[name] != order[name]]
    # Fingerprints only have a digest of these settings. Comparing the values names the setting, and covers datasets
    # that are new in this run.
    deciding = (name for name, each in settings_of(DataConfig).items() if each.decides)
    reading = [name for name in deciding if name in saved and saved[name] != order.get(name)]
    problems = [f"{name} was {saved[name]} and is {order.get(name)}" for name in settings + reading]
    recorded = saved.get(CONTENTS, {}).keys() & order.get(CONTENTS, {}).keys()
    before, now = (
        {name: {**each, "content": state[CONTENTS][name] if name in recorded else ""} for name, each in found.items()}
        for state, found in ((saved, before), (order, now))
    )
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
