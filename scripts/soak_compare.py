"""What is different between two runs that should have ended alike.

    checkpoints    as many are kept, the same one is the best; of each step, manifests and tensors are equal
    metrics.jsonl  every report and every evaluation is there once, with the same numbers

What the clock or the machine decides (seconds, rates, memory) may differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pretraining.checkpoint.manifest import BEST, CHECKPOINTS, committed_checkpoints, read_document, step_of
from pretraining.checkpoint.start_point import CheckpointRef, open_tensors
from pretraining.observability.trackers import METRICS_FILE

IN_MANIFESTS = ("step", "tokens_seen", "loss", "evaluation_loss", "best_evaluation_loss", "data", "state")
IN_METRICS = ("tokens_seen", "loss", "learning_rate", "grad_norm", "skipped_updates", "evaluation_loss")

# Where the layout changes on the way, sums are taken in another order: a few 1e-7 after 40 steps in float32.
LOSS_TOLERANCE = 1e-5
TENSOR_TOLERANCE = 1e-4

Lines = dict[tuple[int, str], list[dict[str, Any]]]


def differences(reference: Path, run: Path, exact: bool = True) -> list[str]:
    """What is different at the end of two runs, a line each.

    Args:
        reference: folder of a run.
        run: that of the other.
        exact: tensors and losses have to be equal bit for bit; otherwise to rounding, and all the rest exactly.
    """
    faults = _metric_differences(_read_metrics(reference), _read_metrics(run), exact)
    expected, found = ({step_of(path): path for path in committed_checkpoints(each)} for each in (reference, run))
    last = max(expected)
    if last not in found:
        return [*faults, f"there is no checkpoint of the last step, {last}"]
    if len(found) > len(expected):
        faults.append(f"checkpoints of steps {sorted(found)} are kept in place of {sorted(expected)}")
    best, own_best = ((each / CHECKPOINTS / BEST).resolve().name for each in (reference, run))
    if exact and own_best != best:
        faults.append(f"the best checkpoint is {own_best} in place of {best}")
    for step in sorted(expected.keys() & found.keys()):
        faults += [f"{found[step].name}: {fault}" for fault in _inner_differences(expected[step], found[step], exact)]
    return faults


def _inner_differences(reference: Path, checkpoint: Path, exact: bool) -> list[str]:
    """Of two checkpoints of a step."""
    faults = []
    expected, found = read_document(reference), read_document(checkpoint)
    for name in IN_MANIFESTS:
        value, other = getattr(expected, name), getattr(found, name)
        if not _is_same(name, value, other, exact):
            faults.append(f"{name} is {other} in place of {value}")
    theirs, ours = open_tensors(CheckpointRef(reference, expected)), open_tensors(CheckpointRef(checkpoint, found))
    if ours.shapes() != theirs.shapes():
        return [*faults, f"it holds other tensors: {sorted(ours.shapes())} in place of {sorted(theirs.shapes())}"]
    for name in theirs.shapes():
        value, other = theirs.read(name), ours.read(name)
        off = float((value.double() - other.double()).norm() / value.double().norm().clamp(min=1e-6))
        if other.dtype != value.dtype or (_bytes(other) != _bytes(value) if exact else not off <= TENSOR_TOLERANCE):
            count = int((other != value).sum())
            faults.append(f"{name} differs in {count} of {value.numel()} elements, by {off:.1e} of its norm")
    return faults


def _metric_differences(expected: Lines, found: Lines, exact: bool) -> list[str]:
    faults = []
    for step, kind in sorted(expected.keys() | found.keys()):
        what = f"{METRICS_FILE}, {kind} of step {step}"
        theirs, ours = expected.get((step, kind), []), found.get((step, kind), [])
        if len(theirs) != 1 or len(ours) != 1:
            faults.append(f"{what}: {len(ours)} lines in place of {len(theirs)}")
            continue
        faults += [
            f"{what}: {name} is {ours[0].get(name)} in place of {theirs[0].get(name)}"
            for name in IN_METRICS
            if not _is_same(name, theirs[0].get(name), ours[0].get(name), exact)
        ]
    return faults


def _is_same(name: str, value: Any, other: Any, exact: bool) -> bool:
    if exact or value is None or other is None or not ("loss" in name or name == "grad_norm"):
        return bool(value == other)
    return bool(abs(other - value) <= LOSS_TOLERANCE * abs(value))


def _read_metrics(run: Path) -> Lines:
    """The lines of a run by step and kind."""
    lines: Lines = {}
    for text in (run / "logs" / METRICS_FILE).read_text(encoding="utf-8").splitlines():
        line: Mapping[str, Any] = json.loads(text)
        kind = "evaluation" if "evaluation_loss" in line else "report"
        lines.setdefault((line["step"], kind), []).append(dict(line))
    return lines


def _bytes(tensor: torch.Tensor) -> bytes:
    """As they lie in memory: NaN equals itself, zeros of both signs differ."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
