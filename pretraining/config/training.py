"""The settings of a training run: one dataclass a section, all under `TrainConfig`.

A field's name is unique over all sections, so a flag is flat: `--learning_rate=3e-4` and
`--optimizer.learning_rate=3e-4` mean the same. The text after each field is its help: `--help` and
docs/configurations.md are made from it. `None` (written `none`) means "decide for me", and the help says how that is
decided. Values are parsed in `flags.py`; rules that look at several fields live in `rules.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretraining.config.data import DataConfig
from pretraining.config.fields import INTERVAL, RUN_LENGTH, setting
from pretraining.config.guards import GuardConfig
from pretraining.config.loss import LossConfig
from pretraining.config.parallel import ParallelConfig
from pretraining.config.profiler import ProfilerConfig
from pretraining.progress import Duration


@dataclass(frozen=True)
class ModelConfig:
    """Which Llama: a named variant, any dimension of it changed under its Hugging Face name."""

    model_variant: str | None = setting(
        None,
        "named dimensions to start from, docs/configurations.md lists them; none = those of the checkpoint or Hugging "
        "Face folder that the run starts from, 7b without one",
    )
    hidden_size: int | None = setting(None, "width of the residual stream; none = the variant's", minimum=1)
    intermediate_size: int | None = setting(None, "width of the feed-forward layer; none = the variant's", minimum=1)
    num_hidden_layers: int | None = setting(None, "number of blocks; none = the variant's", minimum=1)
    num_attention_heads: int | None = setting(None, "query heads; none = the variant's", minimum=1)
    num_key_value_heads: int | None = setting(
        None,
        "key/value heads (grouped-query attention); none = the variant's, or num_attention_heads where it has as many",
        minimum=1,
    )
    vocab_size: int | None = setting(None, "rows of the embedding; none = the variant's", minimum=2)
    max_position_embeddings: int | None = setting(
        None,
        "context that exports say the model was made for (at least seq_length); none = the variant's. Nothing that is "
        "computed depends on it",
        minimum=1,
    )
    rope_theta: float | None = setting(None, "base of the rotary frequencies; none = the variant's", minimum=1)
    rope_scaling: tuple[float, ...] = setting(
        (),
        "llama3 rule for longer contexts: factor, low_freq_factor, high_freq_factor, "
        "original_max_position_embeddings, comma list, factor 1 = no scaling; empty = the variant's",
        minimum=0,
    )
    rms_norm_eps: float | None = setting(None, "epsilon of RMSNorm; none = the variant's", minimum=0)
    tie_word_embeddings: bool | None = setting(None, "share the embedding with the output head; none = the variant's")


@dataclass(frozen=True)
class BatchConfig:
    """How many sequences a step."""

    batch_size: int = setting(2, "sequences that one GPU takes at once", minimum=1)
    global_batch_size: int | None = setting(
        None,
        "sequences an optimizer step over all GPUs; none = batch_size x grad_accum_steps x GPUs, or the checkpoint's",
        minimum=1,
    )
    grad_accum_steps: int | None = setting(
        None, "micro-batches a step; none = derived from global_batch_size, or 1", minimum=1
    )


@dataclass(frozen=True)
class RunConfig:
    """How long, and from which seed."""

    num_steps: Duration = setting(
        Duration(1000, "steps"), "length of the run: steps, tokens (5Btok) or epochs (2ep)", units=RUN_LENGTH
    )
    run_steps: int | None = setting(
        None, "stop this invocation after so many steps; the schedule still ends at num_steps", minimum=1
    )
    time_limit: Duration | None = setting(
        None,
        "stop and save so long after the start of the job (23h30min), to be started again; 0s = never; "
        "none = 5 minutes ahead of the end of a SLURM job",
        units=("seconds",),
    )
    max_starts_without_progress: int = setting(
        5, "refuse to start once so many starts in a row have crashed before a new checkpoint; 0 = never", minimum=0
    )
    seed: int = setting(2023, "of the initial weights and of the order of the data", minimum=0)
    gc_interval: int = setting(
        50,
        "steps between two collections of Python's garbage, at the same steps in all processes; 0 = whenever Python "
        "wants, which stops one process at a time while the others wait",
        minimum=0,
    )
    deterministic: bool = setting(
        False, "only kernels that give the same bits each time (on CUDA slower; on CPU they always do)"
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW."""

    learning_rate: float = setting(3e-4, "the peak, reached after warm-up", minimum=0)
    weight_decay: float = setting(0.1, "decoupled; not applied to norms and embeddings", minimum=0)
    adam_beta1: float = setting(0.9, "decay of the first moment", minimum=0, below=1)
    adam_beta2: float = setting(0.95, "decay of the second moment", minimum=0, below=1)
    adam_epsilon: float = setting(1e-8, "added to the root of the second moment", minimum=0)
    grad_clip_thresh: float = setting(
        1.0, "largest norm of the gradient; 0 = no clipping (the norm is reported all the same)", minimum=0
    )


@dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up, then half a cosine down to a fraction of the peak."""

    warmup_steps: Duration | None = setting(
        None, "linear warm-up; none = a twentieth of the run, at most 2000 steps", units=RUN_LENGTH
    )
    min_lr_ratio: float = setting(0.1, "learning rate at the end, as a fraction of the peak", minimum=0, maximum=1)


@dataclass(frozen=True)
class CheckpointConfig:
    """Where runs are kept, and what of them."""

    ckpt_save_path: str = setting(
        "runs/default",
        "the run's folder: checkpoints, logs, resolved config. A run found there is continued. {timestamp} in it "
        "stands for the time of the first start: the same settings continue the newest unfinished run, others begin a "
        "new one",
    )
    ckpt_load_path: str | None = setting(
        None,
        "run folder, checkpoint, or folder of a Hugging Face Llama to start from when ckpt_save_path holds no "
        "checkpoint yet",
    )
    weights_only: bool = setting(
        False,
        "take only the weights from ckpt_load_path and begin a new run with them: step 0, and optimizer, learning rate "
        "and data from their beginning. From a Hugging Face folder it is always so",
    )
    ckpt_format: str = setting(
        "sharded",
        "sharded: each process writes its part, as safetensors; full: four unsharded .pt files, written by one process",
        choices=("sharded", "full"),
    )
    load_optimizer: bool = setting(
        True, "take the optimizer's state from ckpt_load_path, too; false = its moments start from zero"
    )
    checkpoint_interval: Duration = setting(
        Duration(1000, "steps"),
        "how often to save, 0 = only at the end; where an invocation ends is always saved",
        units=INTERVAL,
    )
    preempt_interval: Duration = setting(
        Duration(0, "steps"),
        "how often to save besides, in case the run is killed: the next checkpoint of any kind takes its place; 0 = "
        "never; one that a signal or a time limit asks for is always saved",
        units=INTERVAL,
    )
    keep_last: int | None = setting(
        None, "newest checkpoints to keep, besides the best and final ones; none = all", minimum=1
    )
    save_best: bool = setting(
        True, "save whenever an evaluation has the lowest loss so far; between intervals, the next best takes its place"
    )
    ckpt_name: str = setting(
        "step",
        "step: step_1000_ckp; tokens: a name with tokens and losses, tokens(3.07e3)_tloss(10.910)_vloss(10.924)_ckpt",
        choices=("step", "tokens"),
    )
    async_save: bool | None = setting(
        None,
        "write checkpoints beside the training, from a copy in the host's memory; none = on CUDA, where the copy takes "
        "milliseconds",
    )


@dataclass(frozen=True)
class EvaluationConfig:
    """Loss on documents that are never trained on, and a sample of text at the end."""

    eval_interval: Duration = setting(
        Duration(1000, "steps"),
        "how often to evaluate, where held_out_fraction > 0; 0 = only at the end",
        units=INTERVAL,
    )
    eval_batches: int = setting(16, "global batches an evaluation, the same ones each time", minimum=1)
    sample_prompt: str = setting("", "what the generated sample continues; empty = free choice")
    sample_tokens: int = setting(
        64, "tokens generated at the end of the run where tokenizer_path is given; 0 = none", minimum=0
    )


@dataclass(frozen=True)
class ReportConfig:
    """What is shown and logged, and when."""

    report_interval: Duration = setting(
        Duration(10, "steps"), "how often to report; 0 = only at the end", units=INTERVAL
    )
    tracker: tuple[str, ...] = setting(
        ("tensorboard",),
        "where reports go besides the terminal and metrics.jsonl, comma list; none = nowhere else",
        choices=("tensorboard",),
    )
    tracker_dir: str | None = setting(None, "folder of the tracker's files; none = <ckpt_save_path>/logs")
    progress: str = setting(
        "auto",
        "live: one line that is redrawn; plain: a line a report; auto: live on a terminal",
        choices=("auto", "live", "plain"),
    )


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run is made of."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    run: RunConfig = RunConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    report: ReportConfig = ReportConfig()
    guard: GuardConfig = GuardConfig()
    loss: LossConfig = LossConfig()
    profiler: ProfilerConfig = ProfilerConfig()
