"""A run from its configuration to its end: join the processes, build, train, say what came of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pretraining.checkpoint.lease import hold_lease
from pretraining.checkpoint.origin import adopt_model
from pretraining.checkpoint.run_path import settle_run_path
from pretraining.config.training import TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.data.tokenizer import Tokenizer, load_tokenizer
from pretraining.errors import ConfigError
from pretraining.evaluation.generation import generate
from pretraining.launch.layout import ProcessLayout
from pretraining.parallel.processes import Processes, join_processes, on_rank_zero
from pretraining.train.build import build_run
from pretraining.train.loop import Run, train_loop
from pretraining.train.messages import conclude


def train(config: TrainConfig, layout: ProcessLayout) -> None:
    """Train as configured, in every process of a job.

    Args:
        config: the settings, the same in every process.
        layout: which of the processes this one is.

    Raises:
        PretrainError: any mistake of the user; the message says what to change.
    """
    with join_processes(
        layout.rank, layout.world_size, layout.local_rank, layout.local_world_size, layout.as_environment()
    ) as processes:
        config = adopt_model(config)
        prompt = on_rank_zero(lambda: _encode_prompt(config))  # before training: a bad path should not cost a run
        config = with_run_path(config, on_rank_zero(lambda: settle_run_path(config)))
        with hold_lease(Path(config.checkpoint.ckpt_save_path), processes) as lease:
            run = build_run(config, processes, lease)
            has_work = not run.state.stopping
            train_loop(run)
        _finish(config, processes, run, prompt, has_work)


def with_run_path(config: TrainConfig, path: str) -> TrainConfig:
    """The settings with the run's folder as it really is."""
    return replace(config, checkpoint=replace(config.checkpoint, ckpt_save_path=path))


def _encode_prompt(config: TrainConfig) -> list[int] | None:
    """Tokens of the prompt that the sample at the end continues, or None where no sample is to be made."""
    if config.data.tokenizer_path is None or config.evaluation.sample_tokens == 0:
        return None
    tokenizer = load_tokenizer(config.data.tokenizer_path)
    vocab_size = resolve_shape(config.model).vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"--tokenizer_path={config.data.tokenizer_path} has {tokenizer.vocab_size} entries, more than the model's "
            f"{vocab_size}: give --vocab_size={tokenizer.vocab_size} or more, or the tokenizer that made the data."
        )
    tokens = tokenizer.encode(config.evaluation.sample_prompt)
    return tokens or [tokenizer.end_of_text or 0]


def _finish(config: TrainConfig, processes: Processes, run: Run, prompt: list[int] | None, trained: bool) -> None:
    sample: list[int] = []
    if prompt is not None:
        count, context = config.evaluation.sample_tokens, config.data.seq_length
        sample = generate(run.context.model, prompt, count, context, processes.device, seed=config.run.seed)
    if not processes.is_main:
        return
    checkpoint = run.checkpoints.newest or run.restored_from
    print(conclude(config, run.state, checkpoint, run.stopwatch.elapsed, trained))
    if prompt is not None:
        assert config.data.tokenizer_path is not None
        tokenizer: Tokenizer = load_tokenizer(config.data.tokenizer_path)
        text = config.evaluation.sample_prompt + tokenizer.decode(sample)
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        print(f"  a sample of its text:\n{indented}")
