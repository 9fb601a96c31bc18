"""Helpers for whole runs of a tiny model in this process: start, expect an error, read the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import TINY, status_of

from pretraining.checkpoint.reader import open_tensors, read_tensor
from pretraining.checkpoint.start_point import find_newest
from pretraining.cli import main
from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import PretrainError
from pretraining.model.loss import HeadLoss
from pretraining.train import run as run_module
from pretraining.train.loop import Run, train_loop


def start(run: Path, *flags: str, model: Sequence[str] = TINY) -> None:
    """Train 4 steps on dummy data unless the flags say otherwise."""
    names = {flag.partition("=")[0] for flag in flags}
    data = [] if "data_path" in names else ["use_dummy_dataset=true"]
    common = [*model, "num_steps=4", f"ckpt_save_path={run}", *data]
    main(["train", *(flag for flag in common if flag.partition("=")[0] not in names), *flags])


def resume(run: Path, *flags: str) -> None:
    """Resume the run of a folder with the settings that the folder holds."""
    main(["train", str(run), *flags])


def refusal(run: Path, *flags: str, model: Sequence[str] = TINY) -> PretrainError:
    """Return the error with which a start ends."""
    return error_of(lambda: start(run, *flags, model=model))


def error_of(command: Callable[[], object]) -> PretrainError:
    """Return the error with which a command ends."""
    with pytest.raises(SystemExit) as ending:
        command()
    error = ending.value.__context__
    assert isinstance(error, PretrainError) and ending.value.code == error.exit_code
    return error


def diverging_after(
    step: int, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object] = lambda: None, runs: int = 1
) -> None:
    """Make every loss of the next runs NaN after a step; call `then` once each of them has diverged."""
    seen: list[Run] = []

    def train(run: Run) -> None:
        seen.append(run)
        if len(seen) > runs:
            return train_loop(run)

        def lose(module: object, inputs: object, output: HeadLoss) -> HeadLoss:
            is_lost = run.state.step >= step
            return output._replace(objective_sum=output.objective_sum * torch.nan) if is_lost else output

        run.context.model.module.register_forward_hook(lose)
        try:
            train_loop(run)
        finally:
            then()

    monkeypatch.setattr(run_module, "train_loop", train)


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step}_ckp"


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def manifest_of(run: Path, step: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((checkpoint(run, step) / "manifest.json").read_text())
    return document


def numbers(run: Path, step: int) -> list[tuple[int, int]]:
    """Return number and begin of the branches up to a checkpoint."""
    return [(number, begin) for number, begin, *_ in manifest_of(run, step)["state"]["run"]["branches"]]


def started_at(run: Path) -> int:
    """Return the step from which the newest start resumed."""
    step: int = status_of(run)["started_at_step"]
    return step


def damage(folder: Path) -> None:
    """Change the last tensor of a checkpoint so much that its use would show."""
    shard = max(folder.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 0x40
    shard.write_bytes(content)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, or of a run's newest one."""
    found = find_newest(path)
    source = open_tensors(found.path, found.manifest.files)
    return {name: read_tensor(source, name) for name in source.chunks}


def equal(first: Path, second: Path) -> bool:
    """Return whether two checkpoints hold the same tensors, bit for bit."""
    ours, theirs = tensors_of(first), tensors_of(second)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def write_tokenizer(folder: Path, entries: int = 280) -> int:
    """Write a small tokenizer, and return its number of entries."""
    folder.mkdir()
    tokenizer = train_tokenizer(["def add(left, right):\n    return left + right\n"] * 50, entries)
    tokenizer.save(folder)
    return tokenizer.vocab_size
