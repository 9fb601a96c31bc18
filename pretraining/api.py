"""What `from pretraining import …` gives besides settings: a run, and a trained model, in this process.

    TrainConfig, or recipes and settings -> Trainer -> train -> TrainResult
                                                    -> evaluate, generate, save: of the newest checkpoint

A run of the command line has a process for itself; here it is embedded in a script or a notebook. It puts back the
process group, signal handlers, logging, the number of threads, determinism and the environment, also after an error, so
that the next run finds the same. Nothing here imports torch before it is needed.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from pretraining.checkpoint import start_point
from pretraining.checkpoint.run_folder import committed_checkpoints
from pretraining.checkpoint.run_path import newest_run_path
from pretraining.config.command_line import load_train_config
from pretraining.config.commands import ExportConfig, SampleConfig
from pretraining.config.fields import build, settings_of, values_of
from pretraining.config.rules import check_config, resolve_run_folder
from pretraining.config.training import TrainConfig
from pretraining.config.values import expand_home
from pretraining.errors import CheckpointError, ConfigError, Interrupted, LaunchError, Preempted
from pretraining.files import path_error
from pretraining.launch.cpu_threads import CpuThreads, set_threads
from pretraining.launch.layout import ProcessLayout, resolve_layout
from pretraining.launch.signals import ReceivedSignals, terminate_with_launcher
from pretraining.launch.terminal import logging_to_terminal
from pretraining.progress import Duration
from pretraining.tools.translate.hook import translate_when_needed

if TYPE_CHECKING:
    from typing import Self

    import torch
    from torch import Tensor

    from pretraining.data.batch import ModelInputs
    from pretraining.model.llama import Llama
    from pretraining.observability.custom_metrics import MetricsHook, Outputs
    from pretraining.train.preemption import StopRequests
    from pretraining.train.run import TrainResult

log = logging.getLogger(__name__)

Prompt = TypeVar("Prompt", str, Sequence[int])
_AT_WORK = threading.Lock()
"""Held while a Trainer trains or evaluates: a process has one process group, one environment and one terminal."""


class Trainer:
    """Training as the command line does it: in this process, or in each process that a launcher has started.

    A subclass adds metrics of its own with `extra_metrics`. Errors are those of the command line, as `PretrainError`.

    Args:
        config: the settings, the same in every process. Lengths may be given as recipes have them: 1000, "5Btok".

    Attributes:
        needs_hidden_states: whether `extra_metrics` gets the final hidden states.

    Raises:
        ConfigError: carries every problem of the settings.
    """

    needs_hidden_states: ClassVar[bool] = False

    def __init__(self, config: TrainConfig) -> None:
        config = _as_settings(config)
        changed = [name for name, each in settings_of(TrainConfig).items() if values_of(config)[name] != each.default]
        config = resolve_run_folder(config, changed)
        check_config(config)
        self.config = config
        self._run_path: str | None = None  # of the last run; before it is known, that of the settings

    @classmethod
    def from_recipe(cls, *recipes: str | Path, **settings: Any) -> Self:
        """Make a Trainer from recipes, read left to right, and settings on top, as flags of the command line are.

        `Trainer.from_recipe("my.yaml", num_steps=1000, learning_rate=3e-4)`; without a recipe, of settings alone.

        Raises:
            ConfigError: carries every problem of recipes and settings.
        """
        flags: dict[str, Any] = {name: "none" if value is None else value for name, value in settings.items()}
        if recipes:
            flags["recipe"] = [str(recipe) for recipe in recipes]
        return cls(load_train_config(flags=flags, translate=translate_when_needed))

    def extra_metrics(self, outputs: Outputs, batch: ModelInputs) -> dict[str, tuple[Tensor, Tensor]]:
        """Override this to report metrics of your own, in training as `custom/<name>`, and in evaluations.

        It is called for every micro-batch, without gradients; in evaluations, once for each set in it. Sums and counts
        stay on the device and are added up until a report, over micro-batches, steps and ranks: ask them for no number
        (`.item()`), which would make every step wait.

        Args:
            outputs: what the model has found: `loss_sum`, `valid_tokens`, `losses` and `hits` [B, S] of each label, and
                with `needs_hidden_states` `hidden_states` [B, S, D].
            batch: `tokens_BS`, `labels_BS` (-100 = ignored, as in padding), `positions_BS` and `document_lengths`.

        Returns:
            Of each metric, by its name, sum and count, scalar tensors on the device; the same names each time. What is
            reported is the sum over the count.
        """
        return {}

    def train(self) -> TrainResult:
        """Train to the end, or from the newest checkpoint of the run's folder on; a collective call.

        Ctrl-C finishes the step, saves, and raises KeyboardInterrupt; a second one stops at once. SIGTERM and SIGUSR1
        finish the step, save and return, with "preempted" as the status.

        Raises:
            PretrainError: any mistake of the user; `Preempted` where the run was told to end before its first step.
            KeyboardInterrupt: the user wants no more.
        """
        if self.config.evaluation.eval_only:
            raise ConfigError("eval_only=True trains nothing: call evaluate()")
        if self.config.run.dry_run:
            raise ConfigError("dry_run=True is of the command line, `pretrain train --dry_run=true`: leave it out")
        with _embedded(self.config) as (layout, requests, threads):
            from pretraining.train.run import train

            is_interrupted = False
            try:
                result = train(self.config, layout, requests, threads, hook=self._hook(), is_guest=True)
                assert result is not None  # there is one unless it only evaluates
            except Preempted as ending:
                if ending.result is None:
                    raise
                result, is_interrupted = ending.result, isinstance(ending, Interrupted)
                log.info("%s", ending)
            self._run_path = None if result.run_path is None else str(result.run_path)
            # An interrupt in the last step ends no run, but what comes next.
            if is_interrupted or requests.signals.first == signal.SIGINT:
                raise KeyboardInterrupt
        return result

    def evaluate(self, path: str | Path | None = None) -> dict[str, Any]:
        """Evaluate the newest checkpoint, as `--eval_only` does; a collective call that writes nothing.

        Args:
            path: evaluate this in its place: a checkpoint, a run, or a Hugging Face folder.

        Returns:
            checkpoint, step, evaluation_loss and the like, and under `sets` the same of each set.

        Raises:
            PretrainError: any mistake of the user.
        """
        source = self._source(path)
        checkpoint = replace(
            self.config.checkpoint, ckpt_load_path=source, resume_from_checkpoint=None, init_from="auto"
        )
        evaluation = replace(self.config.evaluation, eval_only=True)
        config = replace(self.config, checkpoint=checkpoint, evaluation=evaluation)
        check_config(config)
        with _embedded(config) as (layout, requests, _):
            from pretraining.train.run import evaluate

            found = evaluate(config, layout, requests, hook=self._hook(), is_guest=True)
            for line in found.evaluation.lines():
                log.info("%s", line)
        return found.document()

    def save(
        self, path: str | Path, format: Literal["hf", "full"] = "hf", dtype: Literal["bfloat16", "float32"] = "bfloat16"
    ) -> Path:
        """Write the weights of the newest checkpoint into a new folder, as `pretrain export` does; rank 0 alone.

        `train` has saved the run itself: this is for other programs, or for another place.

        Args:
            path: the folder to make.
            format: hf: for `AutoModelForCausalLM.from_pretrained`; full: four .pt files, from which training goes on.
            dtype: of the weights in the hf form.

        Raises:
            PretrainError: there is no checkpoint, it is damaged, or the folder cannot be written.
        """
        folder = _path_text(path)
        config = ExportConfig(self._source(None), folder, format=format, dtype=dtype)
        check_config(config)
        layout = resolve_layout(os.environ)
        if layout.rank == 0:
            from pretraining.tools.export import export

            with logging_to_terminal():
                export(config)
        return Path(folder)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.8,
        top_k: int = 50,
        seed: int = 0,
        path: str | Path | None = None,
    ) -> Prompt:
        """Continue a prompt with the model of the newest checkpoint, as `pretrain sample` does, in this process alone.

        Each call loads the model; `load_model` gives one to keep.

        Args:
            prompt: text, which needs the tokenizer of the data, or token ids.
            max_new_tokens: how many to add, unless the text ends before.
            temperature: above 1 bolder, below 1 tamer; 0 takes the likeliest token each time.
            top_k: draws among this many of the likeliest tokens.
            seed: the same seed gives the same tokens.
            path: continue with this model in its place: a checkpoint, a run, or a Hugging Face folder.

        Returns:
            What follows the prompt: text, or token ids where the prompt is of these.

        Raises:
            PretrainError: there is no checkpoint, or the prompt or the tokenizer cannot be used.
        """
        text = prompt if isinstance(prompt, str) else None
        tokens = () if isinstance(prompt, str) else tuple(int(token) for token in prompt)
        if text is None and not tokens:
            raise ConfigError("generate needs a token id to begin with, or a text, which may be empty")
        config = SampleConfig(self._source(path), text, tokens, None, max_new_tokens, temperature, top_k, seed)
        check_config(config)
        import torch

        from pretraining.tools.sample import continue_prompt

        is_on_gpu = torch.cuda.is_available() and self.config.parallel.device != "cpu"
        found = continue_prompt(config, "cuda" if is_on_gpu else "cpu")
        if isinstance(prompt, str):
            return "".join(found.text())
        return list(found.new)

    def _source(self, path: str | Path | None) -> str:
        """Return where the weights are: what the caller names, else this run, else what it would begin from."""
        if path is not None:
            return _path_text(path)
        checkpoint = self.config.checkpoint
        run = self._run_path
        if run is None and checkpoint.ckpt_save_path is not None:
            run = newest_run_path(checkpoint.ckpt_save_path)
        if run is not None and committed_checkpoints(Path(run)):
            return run
        source = checkpoint.ckpt_load_path or checkpoint.resume_from_checkpoint
        if source is None and run is None:
            raise CheckpointError("ckpt_save_path=None keeps no checkpoint: give it a folder, or name a path")
        if source is None:
            raise CheckpointError("holds no checkpoint: call train() first, or name a path", path=run)
        return source

    def _hook(self) -> MetricsHook | None:
        if hasattr(self, "_log_metrics"):
            log.warning(
                "_log_metrics of %s is never called: override extra_metrics (docs/python.md)", type(self).__name__
            )
        if getattr(self.extra_metrics, "__func__", None) is Trainer.extra_metrics:
            return None
        from pretraining.observability.custom_metrics import MetricsHook

        return MetricsHook(self.extra_metrics, self.needs_hidden_states)


def _as_settings(config: TrainConfig) -> TrainConfig:
    """Return settings as the command line makes them, if Python gives a path, a number of steps or a text."""
    values, settings = values_of(config), settings_of(type(config))
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if settings[name].base is Duration and isinstance(value, int | str):
            parsed[name] = Duration.parse(value)
        elif settings[name].is_path and value:
            parsed[name] = tuple(map(_path_text, value)) if isinstance(value, tuple) else _path_text(value)
    return build(type(config), values | parsed)


def _path_text(path: str | Path) -> str:
    """Return a path given in Python as a setting has it, with the home folder in place of `~`."""
    try:
        return expand_home(str(path))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def load_model(path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Llama:
    """Load a trained model into this process, on one device, for evaluation.

    Args:
        path: a run's folder (its newest sound checkpoint is taken), a checkpoint, sharded or full, or a Hugging Face
            folder of a Llama.
        device: where to put it.
        dtype: of its parameters; None = float32.

    Returns:
        The model in evaluation mode; it takes token ids [B, S] and returns logits [B, S, V].

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it is of no Llama.
    """
    import torch

    return start_point.load_model(_path_text(path), torch.device(device), dtype or torch.float32)[1]


@contextmanager
def _embedded(config: TrainConfig) -> Iterator[tuple[ProcessLayout, StopRequests, CpuThreads]]:
    """Prepare this process for a run, and put back what the run changes in it.

    Raises:
        LaunchError: another Trainer is at work in this process, or it is in a process group already.
    """
    if not _AT_WORK.acquire(blocking=False):
        raise LaunchError("another Trainer is at work in this process: wait for it, or give each a process of its own")
    variables = dict(os.environ)
    terminate_with_launcher()
    try:
        layout = resolve_layout(os.environ)
        threads = set_threads(None, layout)  # before torch is imported
        with (
            logging_to_terminal(layout.rank),
            ReceivedSignals().listening() as signals,
            _same_torch(config.run.cpu_threads, layout.world_size == 1),
        ):
            from pretraining.train.preemption import stop_requests

            threads = replace(threads, is_chosen=threads.is_chosen and config.run.cpu_threads is None)
            yield layout, stop_requests(signals, config.run.time_limit), threads
    except OSError as error:
        if error.filename is None:  # of no path that a user could mend
            raise
        raise path_error(error) from error
    finally:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        gc.collect()  # parts of a model refer to each other
        _AT_WORK.release()


@contextmanager
def _same_torch(threads: int | None, is_alone: bool) -> Iterator[None]:
    """Put back the process group, the number of threads, determinism and glibc's allocator after a `with` block.

    Raises:
        LaunchError: there is a process group already.
    """
    import torch
    import torch.distributed as dist

    from pretraining.distributed.processes import return_freed_memory

    if dist.is_initialized():
        raise LaunchError(
            "this process is in a process group already, of a run that another process has left with an error, or of "
            "the script itself: a run makes its own. Call torch.distributed.destroy_process_group() first"
        )
    before = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        # With other processes, leaving them after an error might wait for them for ever.
        if is_alone and dist.is_initialized():
            dist.destroy_process_group()
        return_freed_memory()
        torch.set_num_threads(before)  # also what new threads begin with
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
