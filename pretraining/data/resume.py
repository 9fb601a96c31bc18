"""The state of the data: a few integers for the whole job, and what they are true of.

Which tokens step N trains on follows from the step and the settings. So the state is the number of the next sample and
a record of the settings, by which `resume` refuses to go on in another order. It is the same on every rank.

Weights, datasets and global batch size may change at a resume. The state keeps them as phases; where a run asks for
others than the last one's, `resume` adds a phase. A dataset that is left out stays in the state, and goes on where it
was if it comes back. Ranges of samples that are skipped are kept, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pretraining.config.training import DataConfig
from pretraining.data.sampling.mixture import Mixture, Phase, Skipped
from pretraining.errors import DataError
from pretraining.text import list_some

STATE_VERSION = 2
READING_SETTINGS = (
    "col_name",
    "strip_tokens",
    "min_length",
    "bos_token",
    "sep_token",
    "held_out_fraction",
    "packing",
    "token_dtype",
)
"""How documents are read and make samples: the same for all datasets, throughout a run."""
_LARGEST_NUMBER = 1 << 62
_LARGEST_TOTAL = 1 << 41  # of weights; those that the mixture makes stay below


def describe_order(
    sources: Mapping[str, Mapping[str, Any]], phase: Phase, config: DataConfig, seed: int, split: str
) -> dict[str, Any]:
    """Return everything that the order of the data depends on, JSON-able.

    `sources` are fingerprints by dataset, `phase` is the mixture of a run that begins now. Samples are skipped in the
    split "train" only.
    """
    return {
        "version": STATE_VERSION,
        "split": split,
        "seed": seed,
        "seq_length": config.seq_length,
        "logical_shards": config.logical_shards,
        **({} if config.use_dummy_dataset else _reading_settings(config)),
        "datasets": {name: dict(fingerprint) for name, fingerprint in sources.items()},
        "phases": [asdict(phase)],
        "skipped": [list(each) for each in config.skipped_ranges] if split == "train" else [],
    }


def _reading_settings(config: DataConfig) -> dict[str, Any]:
    """Return how documents are read and make samples, as JSON gives it back."""
    values = {name: getattr(config, name) for name in READING_SETTINGS}
    if config.token_dtype is None:  # left out, as in states that are older than this setting
        del values["token_dtype"]
    return {**values, "strip_tokens": sorted(set(config.strip_tokens))}


def state_at(order: Mapping[str, Any], mixture: Mixture, step: int) -> dict[str, Any]:
    """Return the state once all steps before `step` are done."""
    return {**order, "next_sample": mixture.first_sample(step), "counts": mixture.counts_before_step(step)}


@dataclass(frozen=True)
class Resumption:
    """How a run goes on from a state; `changes` says what differs from before, a line each for the user."""

    step: int
    mixture: Mixture
    order: dict[str, Any]
    changes: tuple[str, ...]


def resume(state: Mapping[str, Any], order: Mapping[str, Any], changes: Mapping[str, str]) -> Resumption:
    """Resume from a state that `state_at` gave in this run or an earlier one.

    Args:
        order: what the order would depend on in a run with the same settings that begins now.
        changes: which files changed when a dataset was last indexed, by dataset; empty text where that is not known.

    Raises:
        DataError: the state is damaged, or of another order; names all that differs and what to do.
    """
    if state.get("version") != STATE_VERSION:
        raise DataError(
            f"the data state has version {state.get('version')!r}, but this release reads version {STATE_VERSION}"
        )
    try:
        problems = _differences(state, order, changes)
        before, next_sample = restored_mixture(state), state["next_sample"]
        step = _step_from(before, next_sample)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(f"the data state is damaged: {type(error).__name__}: {error}") from error
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise DataError(
            f"the data is not in the order that this run began with:\n{listed}\n"
            "Restore what differs, or start a new run in another --ckpt_save_path (weights, the list of datasets and "
            "the global batch size may change)"
        )
    skipped = Skipped([*before.skipped.ranges, *_newly_skipped(order["skipped"], before.skipped, next_sample)])
    mixture = _with_wanted(before.phases, Phase(**order["phases"][0]), step, skipped)
    known = {**state["datasets"], **order["datasets"]}
    order = {
        **order,
        "datasets": {name: known[name] for name in mixture.names},
        "phases": [asdict(phase) for phase in mixture.phases],
        "skipped": [list(each) for each in skipped.ranges],
    }
    news = [_describe_last(mixture.phases)] if mixture.phases[-1].first_step == step > 0 else []
    news += [f"skipped: samples {begin}-{end - 1}" for begin, end in skipped.without(before.skipped)]
    return Resumption(step, mixture, order, tuple(news))


def _newly_skipped(wanted: Iterable[Sequence[int]], before: Skipped, next_sample: int) -> list[tuple[int, int]]:
    """Return what is to be skipped and was not yet; a DataError where it was trained on."""
    new = Skipped((begin, end) for begin, end in wanted).without(before)
    if new and new[0][0] < next_sample:
        raise DataError(
            f"--skip_samples asks to skip sample {new[0][0]}, but the run has trained on all before {next_sample}: "
            "go on from an earlier checkpoint (--ckpt_load_path, with another --ckpt_save_path), or leave it out"
        )
    return new


def restored_mixture(state: Mapping[str, Any]) -> Mixture:
    """Return the mixture of a state; a ValueError or TypeError where no run writes such a one."""
    phases = [Phase(**phase) for phase in state["phases"]]
    skipped = Skipped((begin, end) for begin, end in state["skipped"])
    _check_numbers(phases, skipped, state["next_sample"])
    for number, phase in enumerate(phases[1:], 1):
        follows = phase.first_step >= phases[number - 1].first_step
        if not follows or phase != Mixture(phases[:number], skipped).phase_from(phase.first_step, phase):
            raise ValueError(f"the phase from step {phase.first_step} does not follow from the one before")
    return Mixture(phases, skipped)


def _check_numbers(phases: Sequence[Phase], skipped: Skipped, next_sample: int) -> None:
    """Refuse numbers that no run writes, before anything is computed with them."""
    if phases[0] != Phase.first(phases[0].global_batch_size, phases[0].weights):
        raise ValueError("the first phase does not begin with the first sample")
    places = [*(phase.first_step for phase in phases), *(end for each in skipped.ranges for end in each)]
    sizes = [size for phase in phases for size in (phase.global_batch_size, *phase.weights.values())]
    if not all(type(number) is int for number in (*places, *sizes, next_sample)):
        raise TypeError("a number is none")
    if min(places) < 0 or min(sizes) < 1 or max(*places, *sizes, next_sample) > _LARGEST_NUMBER:
        raise ValueError("a number is too small or too large")
    if max(sum(phase.weights.values()) for phase in phases) > _LARGEST_TOTAL:
        raise ValueError("weights are too large")


def _step_from(mixture: Mixture, sample: int) -> int:
    """Return the step of the last phase that begins with a sample; a ValueError where none does."""
    if sample >= mixture.phases[-1].first_sample:
        step = mixture.step_of_sample(sample)
        if mixture.first_sample(step) == sample:
            return step
    raise ValueError(f"sample {sample} is not the first of a step")


def _with_wanted(phases: Sequence[Phase], wanted: Phase, step: int, skipped: Skipped) -> Mixture:
    """Return the mixture of a run that goes on at a step as wanted, with a new phase if that differs."""
    phases = [phase for phase in phases if phase.first_step < step]  # one that gave no sample yet is as if it never was
    if not phases:
        return Mixture([wanted], skipped)
    mixture = Mixture(phases, skipped)
    if phases[-1].same_data(wanted):
        return mixture
    return Mixture([*phases, mixture.phase_from(step, wanted)], skipped)


def _describe_last(phases: Sequence[Phase]) -> str:
    """Return what the last phase changes: "phase 2 from step 1200: weights web 0.6 -> 0.5, code none -> 0.1"."""
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
    """Return how the order would become another, a line for each difference."""
    before, now = saved["datasets"], order["datasets"]
    if _made_up(before) != _made_up(now):
        then, today = ("made-up data" if _made_up(datasets) else "datasets" for datasets in (before, now))
        return [f"the run read {then} and is to read {today}: see --use_dummy_dataset"]
    settings = [name for name in ("split", "seed", "seq_length", "logical_shards") if saved[name] != order[name]]
    # Fingerprints hold digests of these, also where an older state lacks one; here they have values, and hold for
    # datasets that were not there before.
    reading = [name for name in READING_SETTINGS if name in saved and saved[name] != order.get(name)]
    problems = [f"{name} was {saved[name]} and is {order.get(name)}" for name in settings + reading]
    for name in sorted(name for name in before.keys() & now.keys() if before[name] != now[name]):
        if before[name].get("files") != now[name].get("files") or not reading:
            problems.append(_describe_change(name, before[name], now[name], changes.get(name)))
    return problems


def _made_up(datasets: Mapping[str, Mapping[str, Any]]) -> bool:
    return any(fingerprint.get("dummy") for fingerprint in datasets.values())


def _describe_change(name: str, before: Mapping[str, Any], now: Mapping[str, Any], files: str | None) -> str:
    """Return how a dataset differs; `files` are those that changed, where that is known."""
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    values = ", ".join(f"{key} was {before.get(key)} and is {now.get(key)}" for key in keys)
    if "files" not in keys:
        return f"dataset '{name}' is read otherwise (see --file_type): {values}"
    which = f" ({files})" if files else ""
    return f"dataset '{name}' has other files{which}: {values}. New files belong in a dataset of their own"
