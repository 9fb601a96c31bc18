"""The state of the data: a few integers for the whole job, and what they are true of.

Which tokens step N trains on follows from the step and the settings, so the state is the number of the next sample and
a record of the settings: enough to go on, and to refuse to go on where the order would silently become another. It is
the same on every rank and for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pretraining.data.mixture import Mixture, Phase
from pretraining.errors import DataError

STATE_VERSION = 1


def describe_order(
    sources: Mapping[str, Mapping[str, Any]],
    phases: Sequence[Phase],
    *,
    seed: int,
    seq_length: int,
    logical_shards: int,
    split: str,
) -> dict[str, Any]:
    """Everything that the order of the data depends on, JSON-able.

    Args:
        sources: fingerprint of each dataset by name.
        phases: of the mixture.
        seed: of all orders.
        seq_length: tokens a sample.
        logical_shards: pieces of a dataset.
        split: "train" or "held_out".
    """
    return {
        "version": STATE_VERSION,
        "split": split,
        "seed": seed,
        "seq_length": seq_length,
        "logical_shards": logical_shards,
        "datasets": {name: dict(fingerprint) for name, fingerprint in sources.items()},
        "phases": [asdict(phase) for phase in phases],
    }


def state_at(order: Mapping[str, Any], mixture: Mixture, step: int) -> dict[str, Any]:
    """The state once all steps before `step` are done."""
    return {**order, "next_sample": mixture.samples_of_step(step)[0], "counts": mixture.counts_before_step(step)}


def step_of_state(state: Mapping[str, Any], order: Mapping[str, Any], changes: Mapping[str, str]) -> int:
    """The step that a state goes on with.

    Args:
        state: what `state_at` gave in this run or an earlier one.
        order: what this run's order depends on.
        changes: which files changed when a dataset was last indexed, by dataset; empty text where that is not known.

    Raises:
        DataError: the state is none, or of another order; names all that differs and what to do.
    """
    if state.get("version") != STATE_VERSION:
        raise DataError(
            f"the data state has version {state.get('version')!r}, but this release reads version {STATE_VERSION}"
        )
    try:
        problems = _differences(state, order, changes)
        phase = max(
            (phase for phase in state["phases"] if phase["first_sample"] <= state["next_sample"]),
            key=lambda phase: phase["first_sample"],
        )
        steps, rest = divmod(state["next_sample"] - phase["first_sample"], phase["global_batch_size"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"the data state is damaged: {type(error).__name__}: {error}") from error
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise DataError(
            f"the data is not in the order that this run began with:\n{listed}\n"
            "Restore what differs, or start a new run in another --ckpt_save_path"
        )
    if rest:
        raise DataError(f"the data state is damaged: sample {state['next_sample']} is not the first of a step")
    return int(phase["first_step"] + steps)


def _differences(saved: Mapping[str, Any], order: Mapping[str, Any], changes: Mapping[str, str]) -> list[str]:
    problems = []
    for name, note in (
        ("split", ""),
        ("seed", ""),
        ("seq_length", " (other lengths cut other samples)"),
        ("logical_shards", " (other pieces, another order)"),
    ):
        if saved[name] != order[name]:
            problems.append(f"{name} was {saved[name]} and is {order[name]}{note}")
    before, now = saved["datasets"], order["datasets"]
    if before.keys() - now.keys():
        problems.append(f"datasets are gone: {', '.join(sorted(before.keys() - now.keys()))}")
    if now.keys() - before.keys():
        problems.append(f"datasets were added: {', '.join(sorted(now.keys() - before.keys()))}")
    problems += [
        _changed(name, before[name], now[name], changes)
        for name in sorted(before.keys() & now.keys())
        if before[name] != now[name]
    ]
    problems += _phase_differences(saved["phases"], order["phases"])
    return problems


def _changed(name: str, before: Mapping[str, Any], now: Mapping[str, Any], changes: Mapping[str, str]) -> str:
    """Say how a dataset differs."""
    if before.get("files") != now.get("files"):
        text = (
            f"dataset '{name}' has other files: {before.get('file_count')} with {before.get('tokens'):,} tokens then, "
        )
        text += f"{now.get('file_count')} with {now.get('tokens'):,} now"
        if changes.get(name):
            text += f" ({changes[name]})"
        return f"{text}; new files belong in a new dataset of their own"
    if before.get("settings") != now.get("settings"):
        return f"dataset '{name}' is read otherwise: col_name, sep_token or held_out_fraction differ"
    fields = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return f"dataset '{name}' differs: " + ", ".join(
        f"{key} was {before.get(key)} and is {now.get(key)}" for key in fields
    )


def _phase_differences(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say how the last phases differ."""
    problems = []
    then, current = before[-1], now[-1]
    if then["global_batch_size"] != current["global_batch_size"]:
        problems.append(f"global_batch_size was {then['global_batch_size']} and is {current['global_batch_size']}")
    if then["weights"].keys() == current["weights"].keys() and then["weights"] != current["weights"]:
        problems.append(f"weights were {_proportions(then['weights'])} and are {_proportions(current['weights'])}")
    if not problems and len(before) != len(now):
        problems.append(f"the state has {len(before)} phases of the mixture, this run has {len(now)}")
    return problems


def _proportions(weights: Mapping[str, int]) -> str:
    total = sum(weights.values())
    return ", ".join(f"{name} {weight / total:.4g}" for name, weight in sorted(weights.items()))
