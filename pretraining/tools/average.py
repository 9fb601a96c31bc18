"""`pretrain average`: one checkpoint of weights that are the weighted mean of those of several.

    a run and --last or --steps, or checkpoints by name -> the same model in all, weights of the sum
    tensor by tensor: float64 sum, in the order of the steps -> float32 -> <output>/checkpoints/step_<newest>_ckp

The output is a run's folder with this checkpoint alone, without a position in the data: `--ckpt_load_path` starts a new
run from it. Its manifest names the sources, and what an evaluation must know of their runs.
"""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from pretraining.checkpoint.branches import own
from pretraining.checkpoint.completeness import check_finite
from pretraining.checkpoint.headers import StoredTensors
from pretraining.checkpoint.hf_import import origin_file
from pretraining.checkpoint.manifest import AVERAGE, EVALUATION_SETS_STATE, Manifest, check_same_model, shape_of
from pretraining.checkpoint.reader import open_whole_model, read_tensor
from pretraining.checkpoint.run_folder import (
    Checkpoint,
    checkpoint_path,
    checkpoints_of_run,
    run_of,
)
from pretraining.checkpoint.start_point import CheckpointRef, checkpoints_at, find_newest, newest_good
from pretraining.config.recipe_files import RUN_CONFIG_FILE, dump_config
from pretraining.config.run_recipe import comment_of_start
from pretraining.config.training import CheckpointConfig
from pretraining.config.values import parse_ranges
from pretraining.errors import CheckpointError, ConfigError
from pretraining.files import atomic_folder, flush_folder, is_address, write_flushed
from pretraining.launch.terminal import print_text
from pretraining.model.hf import ORIGIN_FILE, parameter_shapes
from pretraining.optim.schedules import DECAYS
from pretraining.text import count_of, format_bytes, list_some
from pretraining.tools.command_settings import LARGEST_STEP, AverageConfig
from pretraining.tools.import_weights import write_weights
from pretraining.train.complete import tokenizer_of_weights
from pretraining.train.plan import recorded_evaluation

ENDS = ("sep_token", "bos_token")


def average(config: AverageConfig) -> None:
    """Write the average of checkpoints as a new run's folder.

    Raises:
        ConfigError: the settings do not choose at least two checkpoints, or a weight for each.
        CheckpointError: too few, damaged or unlike checkpoints, or an output folder that cannot be written.
    """
    with ExitStack() as stack:
        chosen = _chosen_checkpoints(config, stack)
        weights = _weights(config, [source.manifest.step for source in chosen])
        # In one order, so that the order of arguments does not change the last bits of a sum.
        places = range(len(chosen))
        order = sorted(places, key=lambda place: (chosen[place].manifest.step, config.paths[place : place + 1]))
        _write(Path(config.output_path), [chosen[place] for place in order], [weights[place] for place in order])


def decay_weights(steps: Sequence[int], shape: str) -> list[float]:
    """Return the weights of checkpoints whose sum is what a decay over their steps would have made of their updates.

    The decay scales the updates u_k between the checkpoints c_(k-1) and c_k by f_k, the mean of its factors over their
    steps. The sum c_0 + f_1 u_1 + … + f_n u_n is (1 - f_1) c_0 + (f_1 - f_2) c_1 + … + f_n c_n, the average of Tian et
    al. (2025, WSM, section 3).

    Args:
        steps: of the checkpoints, ascending.
        shape: name in `DECAYS`.
    """
    length = steps[-1] - steps[0]
    factors = [1.0]
    for begin, end in pairwise(steps):
        shares = [DECAYS[shape]((step - steps[0]) / length, 1.0) for step in range(begin, end)]
        factors.append(sum(shares) / len(shares))
    return [now - then for now, then in zip(factors, [*factors[1:], 0.0], strict=True)]


def _chosen_checkpoints(config: AverageConfig, stack: ExitStack) -> list[CheckpointRef]:
    """Return the checkpoints of the settings, in the order of the words or of their steps."""
    if len(config.paths) > 1:
        return [find_newest(_local(path, stack), flag="--paths") for path in config.paths]
    (source,) = config.paths
    run = _local(source, stack, with_files=False)
    if checkpoints_at(run) == [run]:
        raise ConfigError(f"{source} is one checkpoint: name several, or a run with --last or --steps")
    saved = _saved_checkpoints(run)
    if config.last is not None:
        chosen, needed, flag = saved[-config.last :], config.last, f"--last={config.last}"
    else:
        ((first, last),) = parse_ranges("steps", [config.steps or ""], 0, LARGEST_STEP)
        chosen = [checkpoint for checkpoint in saved if first <= checkpoint.step <= last]
        needed, flag = 2, f"--steps={config.steps}"
    if len(chosen) < needed:
        steps = list_some([str(checkpoint.step) for checkpoint in saved], 8) or "none"
        raise CheckpointError(f"{source} holds too few checkpoints (steps {steps}): {flag} needs {needed}")
    if is_address(source):
        run = _local(source, stack, names=[checkpoint.path.name for checkpoint in chosen])
        chosen = _saved_checkpoints(run)
    return [find_newest(checkpoint.path, flag="--paths") for checkpoint in chosen]


def _local(source: str, stack: ExitStack, *, with_files: bool = True, names: Sequence[str] | None = None) -> Path:
    """Return a path to read: that of the source, or of the `local_view` of a store."""
    if not is_address(source):
        return Path(source)
    from pretraining.checkpoint.copies import local_view  # imports pyarrow

    return stack.enter_context(local_view(source, with_files=with_files, names=names))


def _saved_checkpoints(run: Path) -> list[Checkpoint]:
    """Return one checkpoint per step of a run, by step, without those for the case of a stop."""
    by_step: dict[int, Checkpoint] = {}
    saved = checkpoints_of_run(run_of(run))
    newest, _ = newest_good(saved)
    for checkpoint in own(newest.manifest, saved) if newest is not None else saved:
        if checkpoint.kind != "preempt":
            by_step[checkpoint.step] = checkpoint  # a user's copy comes before its original
    return list(by_step.values())


def _weights(config: AverageConfig, steps: Sequence[int]) -> list[float]:
    """Return the weight of each checkpoint; the sum is 1."""
    if config.decay_shape is not None:
        if sorted(set(steps)) != list(steps):
            raise ConfigError(f"--decay_shape={config.decay_shape}: name the checkpoints by ascending steps, each once")
        return decay_weights(steps, config.decay_shape)
    given = list(config.weights) or [1.0] * len(steps)
    if len(given) != len(steps) or not 0 < sum(given) < math.inf:
        given_here = f"{count_of(len(given), 'number')} for {len(steps)} checkpoints"
        raise ConfigError(f"--weights has {given_here}: give one for each, not all 0, and of a finite sum")
    return [weight / sum(given) for weight in given]


def _write(output: Path, sources: Sequence[CheckpointRef], weights: Sequence[float]) -> None:
    first, newest, origin = sources[0], sources[-1], origin_file(sources[-1].path)
    shape, stored = shape_of(first.manifest), list[StoredTensors]()
    for source in sources:
        _check_alike(source, first)
        stored.append(open_whole_model(source.path, source.manifest))
    sizes = parameter_shapes(shape)
    described = [
        {"checkpoint": source.path.name, "step": source.manifest.step, "weight": weight}
        for source, weight in zip(sources, weights, strict=True)
    ]
    facts = {
        "data": _facts_of_data(newest.manifest),
        EVALUATION_SETS_STATE: recorded_evaluation(newest.manifest).state_dict(),
    }
    settings = dump_config(replace(newest.config, checkpoint=CheckpointConfig(ckpt_save_path=str(output))))
    manifest = Manifest(
        step=newest.manifest.step,
        tokens_seen=newest.manifest.tokens_seen,
        state={AVERAGE: {"of": described, **facts}},
        global_batch_size=newest.manifest.global_batch_size,
        model=newest.manifest.model,
        config=settings,
    )

    def summed(name: str) -> torch.Tensor:
        total = torch.zeros(sizes[name], dtype=torch.float64)
        for source, tensors, weight in zip(sources, stored, weights, strict=True):
            total.add_(check_finite(source.path, name, read_tensor(tensors, name).float()), alpha=weight)
        return total.float()

    total_bytes = sum(4 * size.numel() for size in sizes.values())
    path = checkpoint_path(output, newest.manifest.step)
    with atomic_folder(output, "--output_path", total_bytes) as temporary:
        folder = temporary / path.relative_to(output)
        folder.mkdir(parents=True)
        write_weights(folder, sizes, summed, manifest)
        if origin is not None:
            shutil.copyfile(origin, temporary / ORIGIN_FILE)
        write_flushed(temporary / RUN_CONFIG_FILE, comment_of_start(output) + settings)
        flush_folder(folder.parent)
    print_text(f"{path}: the average of {count_of(len(sources), 'checkpoint')}, {format_bytes(total_bytes)}")
    for source, weight in zip(sources, weights, strict=True):
        print_text(f"  {weight:9.6f}  {source.path}")
    print_text(f"  train      pretrain train {shlex.quote(f'--ckpt_load_path={output}')} --ckpt_save_path=…")


def _check_alike(source: CheckpointRef, first: CheckpointRef) -> None:
    """Raise a CheckpointError if two checkpoints differ in the model, the held-out documents or the tokenizer."""
    shape, remedy = shape_of(first.manifest), "Name checkpoints of one model"
    check_same_model(source.manifest, shape, source.path, other=str(first.path), remedy=remedy)
    its_facts, facts = _facts_of_data(source.manifest), _facts_of_data(first.manifest)
    if its_facts != facts:
        raise CheckpointError(
            f"and {first.path} have different data: {its_facts} and {facts}. An evaluation of their average would not "
            "know which documents are held out",
            path=source.path,
        )
    known = (tokenizer_of_weights(source), tokenizer_of_weights(first))
    tokenizer, other = (each and each.tokenizer for each in known)
    if tokenizer is not None and other is not None and (difference := tokenizer.difference(other)) is not None:
        raise CheckpointError(
            f"and {first.path} have different tokenizers: {difference}. Name checkpoints of one tokenizer",
            path=source.path,
        )


def _facts_of_data(manifest: Manifest) -> dict[str, Any]:
    """Return what an evaluation must know of a run's data; empty if it is unknown."""
    data = manifest.facts_of_data
    return {name: data.get(name) for name in ("held_out_fraction", *ENDS)} if data else {}
