"""The Python API: `Trainer`, a run in this process, and `load_model`, a trained model.

    TrainConfig, or recipes and settings -> Trainer -> train -> TrainResult
                                                    -> evaluate, generate, save: with the newest checkpoint

On the command line a run owns its process; here it is embedded in a script or notebook. After each call, also after an
error, the process group, signal handlers, logging, number of threads, determinism and environment are as before. torch
is imported only when needed.
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

from pretraining.checkpoint.run_folder import committed_checkpoints, newest_run_path
from pretraining.config.command_line import assign
from pretraining.config.read import check_config, read
from pretraining.config.training import TrainConfig
from pretraining.config.values import expand_home
from pretraining.errors import CheckpointError, ConfigError, Interrupted, LaunchError, Preempted
from pretraining.files import path_error
from pretraining.launch.cpu_threads import CpuThreads, set_threads
from pretraining.launch.layout import ProcessLayout, resolve_layout
from pretraining.launch.signals import ReceivedSignals, terminate_with_launcher
from pretraining.launch.terminal import logging_to_terminal
from pretraining.tools.command_settings import ExportConfig, SampleConfig
from pretraining.tools.translate.translate import translate

if TYPE_CHECKING:
    from typing import Self

    import torch
    from torch import Tensor

    from pretraining.data.batch import ModelInputs
    from pretraining.evaluation.evaluators import UserEvaluator
    from pretraining.model.llama import Llama
    from pretraining.observability.metrics import MetricsHook, Outputs
    from pretraining.train.preemption import StopRequests
    from pretraining.train.run import TrainResult

log = logging.getLogger(__name__)

Prompt = TypeVar("Prompt", str, Sequence[int])
_ACTIVE = threading.Lock()
"""Held while a Trainer trains or evaluates: a process has one process group, one environment and one terminal."""


class Trainer:
    """A run, as on the command line, in this process or in each process of a launcher.

    A subclass can add metrics with `extra_metrics`. Errors are the command line's, as `PretrainError`.

    Args:
        config: settings, equal in every process. Lengths may be written as in recipes: 1000, "5Btok".
        evaluators: called at evaluations, besides those of the settings (docs/extending.md); one of a class.

    Attributes:
        needs_hidden_states: whether `extra_metrics` gets the final hidden states.

    Raises:
        ConfigError: every problem of the settings.
    """

    needs_hidden_states: ClassVar[bool] = False

    def __init__(self, config: TrainConfig, evaluators: Sequence[UserEvaluator] = ()) -> None:
        self._evaluators = {
            f"{type(evaluator).__module__}:{type(evaluator).__qualname__}": evaluator for evaluator in evaluators
        }
        names = tuple(dict.fromkeys((*config.evaluation.evaluators, *self._evaluators)))
        self.config = check_config(replace(config, evaluation=replace(config.evaluation, evaluators=names)))
        self._run_path: str | None = None  # of the last run of this Trainer

    @classmethod
    def from_recipe(cls, *recipes: str | Path, **settings: Any) -> Self:
        """Make a Trainer from recipes, read left to right, and settings that override them like flags.

        `Trainer.from_recipe("my.yaml", num_steps=1000, learning_rate=3e-4)`; recipes are optional. The config.yaml in a
        run's folder continues that run.

        Raises:
            ConfigError: every problem of recipes and settings.
        """
        named = {"recipe": [str(recipe) for recipe in recipes], **settings} if recipes else settings
        translated = translate(TrainConfig, assign(named))
        return cls(read(TrainConfig, translated, continues_runs=True).config)

    def extra_metrics(self, outputs: Outputs, batch: ModelInputs) -> dict[str, tuple[Tensor, Tensor]]:
        """Override this to report user-defined metrics, as `custom/<name>` in training, and in evaluations.

        The method is called for every micro-batch, without gradients; in evaluations, once per set in the micro-batch.
        Sums and counts stay on the device and are added up over micro-batches, steps and ranks until a report. Do not
        read their values (`.item()`): every step would wait for the device.

        Args:
            outputs: results of the model: `loss_sum`, `valid_tokens`, `losses` and `hits` [B, S] per label, and with
                `needs_hidden_states` `hidden_states` [B, S, D].
            batch: `tokens_BS`, `labels_BS` (-100 = ignored, as in padding), `positions_BS`, `document_lengths` and
                `columns_S`, the place of each column in its row.

        Returns:
            (sum, count) by metric name, scalar tensors on the device, with the same names on each call. Reports show
            the sum divided by the count.
        """
        return {}

    def train(self) -> TrainResult:
        """Train to the end, from the newest checkpoint in the run folder if there is one; a collective call.

        Ctrl-C finishes the step, saves, and raises KeyboardInterrupt; a second Ctrl-C stops at once. SIGTERM,
        SIGUSR1 and SIGXCPU finish the step, save, and return with the status "preempted"; SIGHUP and SIGUSR2 stay the
        caller's.

        Raises:
            PretrainError: any user error; `Preempted` if a request stopped the run before its first step.
            KeyboardInterrupt: Ctrl-C.
        """
        if self.config.evaluation.eval_only:
            raise ConfigError("eval_only=True trains nothing: call evaluate()")
        if self.config.run.dry_run:
            raise ConfigError("dry_run=True is for the command line, `pretrain train --dry_run=true`: leave it out")
        with _embedded(self.config) as (layout, requests, threads):
            from pretraining.train.run import train

            is_interrupted = False
            try:
                result = train(
                    self.config,
                    layout,
                    requests,
                    threads,
                    hook=self._hook(),
                    evaluators=self._evaluators,
                    is_embedded=True,
                )
            except Preempted as stop:
                if stop.result is None:
                    raise
                result, is_interrupted = stop.result, isinstance(stop, Interrupted)
                log.info("%s", stop)
            self._run_path = None if result.run_path is None else str(result.run_path)
            # Ctrl-C in the last step is too late to stop the run, but stops the caller.
            if is_interrupted or requests.signals.first == signal.SIGINT:
                raise KeyboardInterrupt
        return result

    def evaluate(self, path: str | Path | None = None) -> dict[str, Any]:
        """Evaluate the newest checkpoint, as `--eval_only` does; a collective call that writes nothing.

        Args:
            path: checkpoint, run, or Hugging Face folder to evaluate instead.

        Returns:
            checkpoint, step, evaluation_loss and so on, scores of tasks by name, and under `sets` those of each set.

        Raises:
            PretrainError: any user error.
        """
        source = self._source(path)
        checkpoint = replace(
            self.config.checkpoint, ckpt_load_path=source, resume_from_checkpoint=None, init_from="auto"
        )
        evaluation = replace(self.config.evaluation, eval_only=True)
        config = replace(self.config, checkpoint=checkpoint, evaluation=evaluation)
        check_config(config)
        with _embedded(config) as (layout, requests, _):
            from pretraining.tools.evaluate import evaluate_checkpoint

            evaluated = evaluate_checkpoint(
                config, layout, requests, hook=self._hook(), evaluators=self._evaluators, is_embedded=True
            )
            for line in evaluated.lines():
                log.info("%s", line)
        return evaluated.as_json()

    def save(
        self, path: str | Path, format: Literal["hf", "full"] = "hf", dtype: Literal["bfloat16", "float32"] = "bfloat16"
    ) -> Path:
        """Export the newest checkpoint into a new folder, as `pretrain export` does; only rank 0 writes.

        For other programs, or for a copy: `train` saves the run itself.

        Args:
            path: folder to create.
            format: hf: for `AutoModelForCausalLM.from_pretrained`; full: four .pt files that training can resume from.
            dtype: type of the weights with hf.

        Raises:
            PretrainError: the checkpoint is missing or damaged, or the folder cannot be written.
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
        top_p: float = 1.0,
        seed: int = 0,
        path: str | Path | None = None,
    ) -> Prompt:
        """Continue a prompt with the newest checkpoint, as `pretrain sample` does, in this process alone.

        Each call loads the model; `load_model` returns a model to keep.

        Args:
            prompt: text (needs the run's tokenizer), or token ids.
            max_new_tokens: most tokens to generate; the end-of-text token stops earlier.
            temperature: divides the logits: higher values give more varied text; 0 = always the likeliest token.
            top_k: sample among this many of the likeliest tokens; 0 = all.
            top_p: sample among the likeliest tokens that have this share of the probability together.
            seed: the same seed gives the same tokens.
            path: checkpoint, run, or Hugging Face folder to use instead.

        Returns:
            The continuation without the prompt, as text or token ids like the prompt.

        Raises:
            PretrainError: there is no checkpoint, or the prompt or the tokenizer cannot be used.
        """
        text = prompt if isinstance(prompt, str) else None
        tokens = () if isinstance(prompt, str) else tuple(int(token) for token in prompt)
        if text is None and not tokens:
            raise ConfigError("generate needs a text, which may be empty, or at least one token id")
        config = SampleConfig(self._source(path), text, tokens, None, max_new_tokens, temperature, top_k, top_p, seed)
        check_config(config)
        import torch

        from pretraining.tools.sample import continue_prompt

        is_on_gpu = torch.cuda.is_available() and self.config.parallel.device != "cpu"
        continuation = continue_prompt(config, "cuda" if is_on_gpu else "cpu")
        if isinstance(prompt, str):
            return "".join(continuation.text())
        return list(continuation.new)

    def _source(self, path: str | Path | None) -> str:
        """Return the path of the weights: the caller's, else this run's, else those that this run would start from."""
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
            raise CheckpointError("ckpt_save_path=None saves no checkpoint: give it a folder, or pass a path")
        if source is None:
            raise CheckpointError("holds no checkpoint: call train() first, or pass a path", path=run)
        return source

    def _hook(self) -> MetricsHook | None:
        if hasattr(self, "_log_metrics"):
            log.warning(
                "_log_metrics of %s is never called: override extra_metrics (docs/python.md)", type(self).__name__
            )
        if getattr(self.extra_metrics, "__func__", None) is Trainer.extra_metrics:
            return None
        from pretraining.observability.metrics import MetricsHook

        return MetricsHook(self.extra_metrics, self.needs_hidden_states)


def _path_text(path: str | Path) -> str:
    """Return a path as text, with `~` expanded."""
    try:
        return expand_home(str(path))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def load_model(path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Llama:
    """Load a trained model onto one device, for evaluation.

    Args:
        path: run folder (its newest undamaged checkpoint), checkpoint, sharded or full, or Hugging Face Llama folder.
        device: device of the model.
        dtype: type of the parameters; None = float32.

    Returns:
        The model in evaluation mode; it takes token ids [B, S] and returns logits [B, S, V].

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or not a Llama.
    """
    import torch

    from pretraining.checkpoint import restore

    return restore.load_model(_path_text(path), torch.device(device), dtype or torch.float32)[1]


@contextmanager
def _embedded(config: TrainConfig) -> Iterator[tuple[ProcessLayout, StopRequests, CpuThreads]]:
    """Prepare this process for a run, and restore afterwards what the run changes.

    Raises:
        LaunchError: another Trainer is active in this process, or the process is in a process group already.
    """
    if not _ACTIVE.acquire(blocking=False):
        raise LaunchError("another Trainer is active in this process: wait for it, or use another process")
    variables = dict(os.environ)
    terminate_with_launcher()
    try:
        layout = resolve_layout(os.environ)
        threads = set_threads(None, layout)  # before torch is imported
        with (
            logging_to_terminal(layout.rank),
            ReceivedSignals().listening() as signals,
            _restoring_torch(config.run.cpu_threads, layout.world_size == 1),
        ):
            from pretraining.train.preemption import make_stop_requests

            threads = replace(threads, is_chosen=threads.is_chosen and config.run.cpu_threads is None)
            yield layout, make_stop_requests(signals, config.run.time_limit), threads
    except OSError as error:
        if error.filename is None:  # an error without a path, which a user cannot fix
            raise
        raise path_error(error) from error
    finally:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        gc.collect()  # parts of a model refer to each other
        _ACTIVE.release()


@contextmanager
def _restoring_torch(threads: int | None, is_alone: bool) -> Iterator[None]:
    """Restore process group, number of threads, determinism and glibc's allocator after a `with` block.

    Raises:
        LaunchError: there is a process group already.
    """
    import torch
    import torch.distributed as dist

    from pretraining.distributed.processes import return_freed_memory

    if dist.is_initialized():
        raise LaunchError(
            "this process is in a process group already, of the script or of a failed run; a run makes its own: call "
            "torch.distributed.destroy_process_group() first"
        )
    before = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        # With other processes, destroying the group after an error could wait for them forever.
        if is_alone and dist.is_initialized():
            dist.destroy_process_group()
        return_freed_memory()
        torch.set_num_threads(before)  # new threads start with this number, too
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
