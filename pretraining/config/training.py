"""The settings of a training run: one dataclass a section, all under `TrainConfig`.

A field's name is unique over all sections, so a flag is flat: `--learning_rate=3e-4` and
`--optimizer.learning_rate=3e-4` mean the same. The annotation says what may be given, the text is its help: `--help`
and docs/configurations.md are made from both. `None` (written `none`) means "decide for me", and the help says how that
is decided. Rules that look at several settings are in `rules.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt

from pretraining.config.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    OneOfOr,
    PartOfRun,
    PositiveInt,
    RunLength,
    Time,
    setting,
)
from pretraining.config.plugins import OPTIMIZERS, SCHEDULES, TOKEN_FORMATS, TRACKERS
from pretraining.config.values import parse_ranges
from pretraining.errors import ConfigError
from pretraining.progress import LARGEST_AMOUNT, Duration, parse_number

Packing = Literal["stream", "greedy", "first_fit", "best_fit"]
ShardingStrategy = Literal["ddp", "zero2", "fsdp", "hsdp", "hsdp_zero2"]
Float8Scaling = Literal["tensorwise", "rowwise"]
DecayFactor = Annotated[float, Ge(0), Lt(1)]

IGNORED_LABEL = -100
"""Label of a token that is not learned from, such as padding; the convention of PyTorch and Hugging Face."""

# Of `selective_checkpointing`: the forms that are no number of blocks, or all of them.
ALL_BLOCKS = "1"
PER_OPERATION = "op"


@dataclass(frozen=True)
class ModelConfig:
    """A named variant of Llama; any dimension may change, under its Hugging Face name."""

    model_variant: str | None = setting(
        None, "named dimensions (docs/configurations.md); none = those of the loaded weights, else 7b"
    )
    hidden_size: PositiveInt | None = setting(None, "width of the residual stream; none = the variant's")
    intermediate_size: PositiveInt | None = setting(None, "width of the feed-forward layer; none = the variant's")
    num_hidden_layers: PositiveInt | None = setting(None, "number of blocks; none = the variant's")
    num_attention_heads: PositiveInt | None = setting(None, "query heads; none = the variant's")
    num_key_value_heads: PositiveInt | None = setting(
        None, "key/value heads; none = the variant's, or num_attention_heads if those are equal there"
    )
    vocab_size: Annotated[int, Ge(2)] | None = setting(
        None,
        "rows of the embedding; none = from the weights, tokenizer_path (rounded up to a multiple of 128) or the "
        "variant",
    )
    max_position_embeddings: PositiveInt | None = setting(None, "context length in exports; none = the variant's")
    rope_theta: Annotated[float, Ge(1)] | None = setting(None, "base of the rotary frequencies; none = the variant's")
    rope_scaling: tuple[NonNegativeFloat, ...] = setting(
        (),
        "llama3 rule: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings; factor 1 = no "
        "scaling; empty = the variant's",
    )
    rms_norm_eps: NonNegativeFloat | None = setting(None, "epsilon of RMSNorm; none = the variant's")
    tie_word_embeddings: bool | None = setting(None, "share the embedding with the output head; none = the variant's")


@dataclass(frozen=True)
class DataConfig:
    """The sources of tokens, and how they are cut into samples."""

    data_path: str | None = setting(None, "root folder of the datasets", silent_change=True, per_node=True)
    datasets: tuple[str, ...] = setting(
        (),
        "sub-folders of data_path with token files, or such files; empty = every such sub-folder",
        silent_change=True,
    )
    weights: tuple[float, ...] = setting((), "proportions of the datasets; empty = their tokens", silent_change=True)
    seq_length: PositiveInt = setting(4096, "tokens per sequence")
    packing: Packing = setting(
        "stream",
        "stream: documents end to end, no padding; others: whole documents and padding, least with best_fit, most with "
        "greedy",
    )
    bos_token: NonNegativeInt | None = setting(None, "token id to put before every document that lacks it")
    sep_token: NonNegativeInt | None = setting(
        None, "token id to put after every document that lacks it; none = end_of_text of prepare.json, if any"
    )
    strip_tokens: tuple[NonNegativeInt, ...] = setting(
        (), "token ids to remove at both ends of every document, before bos_token and sep_token"
    )
    min_length: PositiveInt = setting(1, "leave out documents with fewer tokens, after strip_tokens")
    logical_shards: PositiveInt = setting(1024, "pieces of a dataset; the order of the data depends on it")
    document_mask: bool = setting(False, "keep attention and labels inside documents; positions restart at each")
    num_workers: NonNegativeInt = setting(
        1, "threads per process that read ahead; the data stays the same", silent_change=True, per_node=True
    )
    file_type: Annotated[str, OneOfOr(("auto", *TOKEN_FORMATS))] = setting(
        "auto", "auto (by suffix), arrow, npy, bin, or package.module:Class (docs/extending.md)", silent_change=True
    )
    token_dtype: Literal["uint16", "uint32"] | None = setting(None, "type of the tokens in .bin files without a header")
    col_name: str = setting("tokens", "column of the token files that holds the token ids")
    tokenizer_path: str | None = setting(
        None,
        "folder, tokenizer.json or name on the Hugging Face Hub; for samples as text and bits per byte",
        silent_change=True,
        per_node=True,
    )
    held_out_fraction: Annotated[float, Ge(0), Lt(1)] = setting(0.0, "fraction of documents kept for evaluation")
    index_path: str | None = setting(
        None,
        "folder for document indices; none = each dataset's, or the user's cache folder if read-only",
        silent_change=True,
        per_node=True,
    )
    skip_samples: tuple[str, ...] = setting(
        (),
        "samples to leave out: global numbers A-B, both included; those of a checkpoint stay skipped",
        silent_change=True,
    )
    bad_documents: Literal["stop", "quarantine"] = setting(
        "stop", "if a sample cannot be read: stop; or quarantine: ignore its labels"
    )
    use_dummy_dataset: bool = setting(False, "made-up tokens in place of data_path, for tests and benchmarks")

    @property
    def skipped_ranges(self) -> list[tuple[int, int]]:
        """`skip_samples` as (first, end); raises a ConfigError where they are no ranges of samples."""
        return [(first, last + 1) for first, last in parse_ranges("skip_samples", self.skip_samples, smallest=0)]


@dataclass(frozen=True)
class BatchConfig:
    """Sequences per step."""

    batch_size: PositiveInt = setting(2, "sequences per GPU and micro-batch")
    global_batch_size: PositiveInt | None = setting(
        None, "sequences per step over all GPUs; none = the checkpoint's, or batch_size x grad_accum_steps x GPUs"
    )
    grad_accum_steps: PositiveInt | None = setting(None, "micro-batches per step; none = from global_batch_size, or 1")


@dataclass(frozen=True)
class RunConfig:
    """Length, seed and limits of a run."""

    num_steps: RunLength = setting(Duration(1000, "steps"), "length of the run: steps, tokens (5Btok) or epochs (2ep)")
    run_steps: PositiveInt | None = setting(
        None, "stop after this many steps; the schedule still ends at num_steps", silent_change=True
    )
    time_limit: Time | None = setting(
        None,
        "save and stop this long after the start of the job (23h30min); 0s = never; none = 5 minutes before the end "
        "of a SLURM job",
    )
    max_starts_without_progress: NonNegativeInt = setting(
        5, "refuse to start after this many starts in a row without progress (docs/reliability.md); 0 = never"
    )
    seed: NonNegativeInt = setting(2023, "of the initial weights and of the order of the data")
    gc_interval: NonNegativeInt = setting(
        50,
        "steps between Python's garbage collections, at once in all processes; 0 = Python decides",
        silent_change=True,
    )
    cpu_threads: PositiveInt | None = setting(
        None,
        "CPU threads per process; they change the last bits of sums; none = OMP_NUM_THREADS, the checkpoint's, or the "
        "process's cores",
        per_node=True,
    )
    deterministic: bool = setting(False, "only kernels that give the same bits each time (slower on CUDA)")
    ignore_memory: bool = setting(False, "start even if the estimate exceeds the memory", silent_change=True)
    dry_run: bool = setting(
        False, "show settings with their sources, plan and first batch; write nothing", silent_change=True
    )


@dataclass(frozen=True)
class ParallelConfig:
    """Layout of parameters, gradients and optimizer state over GPUs, precision and recomputation."""

    device: Literal["auto", "cuda", "cpu"] = setting("auto", "auto: GPUs if there are any; cuda: refused without")
    backend: Literal["auto", "nccl", "gloo"] = setting(
        "auto", "library of communication; auto: nccl on GPUs, gloo on CPUs"
    )
    sharding_strategy: ShardingStrategy = setting(
        "fsdp",
        "ddp (zero0): nothing is sharded; zero2: gradients and optimizer state; fsdp (zero3): parameters too; hsdp, "
        "hsdp_zero2: the same inside groups that are replicas",
        aliases={"zero0": "ddp", "zero3": "fsdp"},
        silent_change=True,
    )
    hsdp_group_size: PositiveInt | None = setting(
        None, "GPUs per sharding group of hsdp; none = those of a node", silent_change=True
    )
    mixed_precision: bool | None = setting(
        None,
        "compute in mp_dtype, with master weights, optimizer and gradient reduction in float32; none = if the device "
        "has units for it",
    )
    mp_dtype: Literal["bfloat16", "float16"] = setting(
        "bfloat16", "of mixed_precision: bfloat16, or float16 with a dynamic loss scale"
    )
    float8: Float8Scaling | None = setting(
        None,
        "multiply matrices of the blocks in float8, with a scale per tensor (tensorwise) or row (rowwise); needs "
        "torchao and compute capability 8.9",
    )
    low_cpu_fsdp: bool = setting(True, "fill the model shard by shard; false = first whole on every GPU")
    fsdp_activation_checkpointing: bool = setting(
        False, "keep only the inputs of blocks; recompute the rest in the backward pass", silent_change=True
    )
    selective_checkpointing: str = setting(
        ALL_BLOCKS,
        "blocks of fsdp_activation_checkpointing. 1: all; k: every k-th; a fraction (1/3, 0.25): that share; op: all, "
        "but keep results of matrix products and attention",
        silent_change=True,
    )
    use_torch_compile: bool = setting(False, "compile the blocks; the first step then takes longer", silent_change=True)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its settings."""

    optimizer: Annotated[str, OneOfOr(tuple(OPTIMIZERS))] = setting(
        "adamw",
        "adamw, adam, nadam, rmsprop, sgd, sgdm (with momentum), normalized_sgdm, muon (hidden matrices; AdamW for "
        "the rest), or package.module:Class (docs/extending.md)",
    )
    optimizer_options: tuple[str, ...] = setting((), "arguments of a user-defined optimizer: key=value")
    learning_rate: NonNegativeFloat | None = setting(
        None, "the peak, after warm-up; none = 3e-4, muon 1e-3, sgd, sgdm and normalized_sgdm 0.1"
    )
    weight_decay: NonNegativeFloat | None = setting(
        None,
        "not of norms and embeddings; decoupled in adamw, nadam, muon, normalized_sgdm; none = 0.1 for adamw, nadam, "
        "muon, else 0",
    )
    adam_beta1: DecayFactor = setting(0.9, "of adamw, adam, nadam, muon: decay of the first moment")
    adam_beta2: DecayFactor = setting(0.95, "of adamw, adam, nadam, muon: decay of the second moment")
    adam_epsilon: NonNegativeFloat = setting(
        1e-8, "of adamw, adam, nadam, rmsprop, muon: added to the second moment's root"
    )
    momentum: DecayFactor | None = setting(
        None, "decay of sgdm, normalized_sgdm (none = 0.9), rmsprop (none = 0) and muon (none = 0.95)"
    )
    nesterov: bool | None = setting(None, "of sgdm (none = false) and muon (none = true): look one gradient ahead")
    rms_alpha: DecayFactor | None = setting(None, "of rmsprop: decay of the mean of squares; none = 0.99")
    muon_adam_learning_rate: NonNegativeFloat | None = setting(
        None, "of muon: the peak of AdamW's part; none = learning_rate"
    )
    muon_adam_weight_decay: NonNegativeFloat | None = setting(
        None, "of muon: weight decay of the head; none = weight_decay"
    )
    muon_ns_steps: PositiveInt | None = setting(None, "of muon: iterations that make an update orthogonal; none = 5")
    grad_clip_thresh: NonNegativeFloat = setting(1.0, "largest norm of the gradient; 0 = no clipping")

    def resolved(self) -> OptimizerConfig:
        """Return the same with the optimizer's own defaults in place of none, AdamW's for one of the user's own."""
        own = OPTIMIZERS.get(self.optimizer, OPTIMIZERS["adamw"]).defaults
        chosen = replace(self, **{name: value for name, value in own.items() if getattr(self, name) is None})
        of_adam = {"muon_adam_learning_rate": chosen.learning_rate, "muon_adam_weight_decay": chosen.weight_decay}
        unset: dict[str, Any] = {name: value for name, value in of_adam.items() if getattr(self, name) is None}
        return replace(chosen, **unset) if self.optimizer == "muon" else chosen

    @property
    def peak_learning_rate(self) -> float:
        """What `learning_rate` stands for."""
        rate = self.resolved().learning_rate
        assert rate is not None
        return rate

    @property
    def decay(self) -> float:
        """What `weight_decay` stands for."""
        decay = self.resolved().weight_decay
        assert decay is not None
        return decay

    def moments(self, *, in_matrix: bool) -> tuple[str, ...]:
        """Return the names of what an optimizer that ships keeps of a parameter's shape.

        Args:
            in_matrix: for the matrices of blocks; else for all other parameters.
        """
        entry = OPTIMIZERS[self.optimizer]
        names = entry.moments if entry.matrix_moments is None or not in_matrix else entry.matrix_moments
        return tuple(name for name in names if name != "momentum_buffer" or self.resolved().momentum)


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run."""

    schedule: Annotated[str, OneOfOr(tuple(SCHEDULES))] = setting(
        "cosine",
        "after a linear warm-up: cosine, linear, polynomial; constant; wsd, trapezoid (the peak, then a decay). Or "
        "piecewise_linear (schedule_points, no other warm-up), or package.module:function (docs/extending.md)",
        aliases={"warmup_stable_decay": "wsd"},
    )
    training_stage: Literal["initial", "annealing"] = setting(
        "initial", "annealing: a straight line from the peak to zero, instead of the schedule"
    )
    warmup_steps: PartOfRun | None = setting(None, "linear warm-up; none = a twentieth of the run, at most 2000 steps")
    stable_steps: PartOfRun | None = setting(None, "of wsd and trapezoid: length at the peak; the decay takes the rest")
    decay_steps: PartOfRun | None = setting(
        None, "of wsd and trapezoid: length of the decay; none = a fifth of the run"
    )
    decay_shape: Literal["linear", "cosine", "1-sqrt"] | None = setting(
        None, "of wsd: shape of the decay; none = 1-sqrt"
    )
    decay_power: NonNegativeFloat | None = setting(None, "of polynomial: its exponent; none = 1")
    schedule_points: tuple[str, ...] = setting(
        (), "of piecewise_linear: length:share of the peak, as in 0:0,2000:1,80%:1,100%:0.1"
    )
    min_lr_ratio: Annotated[float, Ge(0), Le(1)] = setting(0.1, "learning rate at the end, as a fraction of the peak")


def parse_point(text: str) -> tuple[Duration, float]:
    """Read a point of a piecewise linear schedule: `length:share of the peak`.

    Raises:
        ConfigError: it is none.
    """
    place, _, share = text.partition(":")
    number = parse_number(share)
    if number is None or not 0 <= number <= LARGEST_AMOUNT:
        raise ConfigError(
            f"--schedule_points: {text!r} is no point: write length:share of the peak, as in 2000:1 or 80%:0.5"
        )
    return Duration.parse(place), float(number)


@dataclass(frozen=True)
class CheckpointConfig:
    """The run's folder, and its checkpoints."""

    ckpt_save_path: str | None = setting(
        "runs/default",
        "the run's folder; a run in it is resumed. {timestamp} is the time of the first start: the same settings then "
        "resume the newest unfinished run. none (the default with use_dummy_dataset) = save nothing",
    )
    ckpt_load_path: str | None = setting(
        None,
        "where to start if ckpt_save_path holds no checkpoint: a run or checkpoint (folder or address in an object "
        "store), or a Hugging Face Llama (folder or name on the Hub)",
        may_be_address=True,
    )
    ckpt_mirror_path: str | None = setting(
        None,
        "address in an object store (s3://bucket/runs/mine, gs://, abfss://, file://) to copy checkpoints to; the "
        "run resumes from there if its newest copy is newer than what ckpt_save_path holds",
        silent_change=True,
        may_be_address=True,
    )
    init_from: Literal["auto", "resume", "scratch"] = setting(
        "auto",
        "auto: the newest checkpoint in ckpt_save_path, else ckpt_load_path, else initial weights; resume: as auto, "
        "but a checkpoint must exist; scratch: initial weights, refused if ckpt_save_path holds another run",
        silent_change=True,
    )
    resume_from_checkpoint: str | None = setting(
        None,
        "path, name or step of an older checkpoint of this run to return to, once; newer ones move to "
        "checkpoints/set_aside_<time>/. A checkpoint of another run: as ckpt_load_path",
        silent_change=True,
    )
    weights_only: bool = setting(
        False, "begin a new run with the weights of ckpt_load_path; always with a Hugging Face folder"
    )
    ckpt_format: Literal["sharded", "full"] = setting(
        "sharded", "sharded: each process writes its part, as safetensors; full: four unsharded .pt files"
    )
    load_optimizer: bool = setting(
        True, "resume the optimizer's state; false = discard it, until the first save with this setting"
    )
    checkpoint_interval: Duration = setting(Duration(1000, "steps"), "how often to save; 0 = only at the end")
    checkpoint_steps: tuple[PositiveInt, ...] = setting((), "further steps to save after")
    preempt_interval: Duration = setting(
        Duration(0, "steps"), "how often to save a checkpoint that the next replaces; 0 = never"
    )
    keep_last: PositiveInt | None = setting(None, "newest checkpoints to keep, besides best and final; none = all")
    save_best: bool = setting(True, "save whenever an evaluation has the lowest loss so far")
    ckpt_name: Literal["step", "tokens"] = setting(
        "step", "step: step_1000_ckp; tokens: tokens(3.07e3)_tloss(10.910)_vloss(10.924)_ckpt"
    )
    async_save: bool | None = setting(None, "save during training, from a copy in host memory; none = on CUDA")

    @property
    def folder(self) -> Path:
        """The run's folder, of a run that has one."""
        assert self.ckpt_save_path is not None
        return Path(self.ckpt_save_path)


@dataclass(frozen=True)
class EvaluationConfig:
    """Losses on documents that are never trained on, and samples of text."""

    eval_datasets: tuple[str, ...] = setting((), "more evaluation sets: folders with token files, or such files")
    eval_interval: Duration = setting(Duration(1000, "steps"), "how often to evaluate; 0 = only at the end")
    eval_batches: PositiveInt = setting(
        16,
        "global batches per evaluation of the held-out documents, and of each of eval_datasets (at most), always the "
        "same",
    )
    extra_scores: tuple[str, ...] = setting(
        (),
        "user-defined scores, in reports and evaluations: package.module:Class (docs/extending.md)",
        silent_change=True,
    )
    best_by: str | None = setting(
        None, "evaluation set that chooses the best checkpoint; none = the mean over all tokens"
    )
    early_stopping_evaluations: NonNegativeInt = setting(
        0, "finish the run after this many evaluations in a row without a lower loss; 0 = never", silent_change=True
    )
    eval_only: bool = setting(
        False,
        "evaluate ckpt_load_path, or the newest checkpoint of ckpt_save_path; print a table and JSON; write nothing",
        silent_change=True,
    )
    sample_prompt: str = setting("", "prompt of the generated sample; empty = none", silent_change=True)
    sample_tokens: NonNegativeInt = setting(
        64, "tokens generated at the end of the run, with tokenizer_path; 0 = none", silent_change=True
    )
    sample_at_evaluations: bool = setting(False, "also generate after each evaluation", silent_change=True)


@dataclass(frozen=True)
class ReportConfig:
    """Reports: their content, times and trackers."""

    report_interval: Duration = setting(Duration(10, "steps"), "how often to report; 0 = only at the end")
    tracker: tuple[Annotated[str, OneOfOr(tuple(TRACKERS))], ...] = setting(
        ("tensorboard",),
        "trackers besides logs/metrics.jsonl: tensorboard, wandb, mlflow, jsonl (in tracker_dir), or "
        "package.module:Class (docs/extending.md)",
    )
    tracker_dir: str | None = setting(None, "folder of the tracker's files; none = <ckpt_save_path>/logs")
    tracker_project_name: str | None = setting(None, "project of wandb, experiment of mlflow; none = pretraining")
    tracker_run_name: str | None = setting(None, "name of the run at wandb and mlflow; none = its folder's")
    tracker_run_id: str | None = setting(None, "run of wandb or mlflow to continue; none = the folder's, or a new one")
    progress: Literal["auto", "live", "plain"] = setting(
        "auto", "plain: a line per report; live: also a line for the current step; auto: live on a terminal"
    )


@dataclass(frozen=True)
class GuardConfig:
    """When updates are skipped, and when a run stops or rolls back."""

    max_skipped_steps: NonNegativeInt = setting(
        20, "skipped updates in a row before the run stops or rolls back (max_rollbacks); 0 = never"
    )
    spike_threshold: Annotated[float, Ge(1)] | None = setting(
        None,
        "skip an update if its loss is this many standard deviations (6 is common) above the mean of the last losses; "
        "none = only if loss or gradient is not finite",
    )
    spike_window: Annotated[int, Ge(4)] = setting(
        128, "losses that spike_threshold compares with; half of them suffice to begin"
    )
    max_rollbacks: NonNegativeInt = setting(
        0,
        "after max_skipped_steps, return to the checkpoint before them and leave out their samples, at most this many "
        "times without progress; 0 = stop",
    )
    replica_check_interval: Duration = setting(
        Duration(0, "steps"), "how often to compare replicas, and stop if they differ; 0 = never"
    )
    straggler_factor: Annotated[float, Ge(1.05)] | None = setting(
        1.5, "name a process whose own work takes this many times the others'; none = never"
    )
    hang_timeout: Time = setting(
        Duration(600, "seconds"), "stop the job with exit code 124 after this long without progress; 0s = never"
    )
    first_step_timeout: Time = setting(Duration(1800, "seconds"), "the same until the first step is done; 0s = never")


@dataclass(frozen=True)
class LossConfig:
    """Logits in memory, and z-loss."""

    loss_chunk_tokens: NonNegativeInt | None = setting(
        None,
        "tokens whose logits are in memory at once; 0 = all of a micro-batch; none = 256 on a CPU, else 2^28 logits "
        "(1 GiB in float32)",
    )
    z_loss_weight: NonNegativeFloat = setting(
        0.0, "add this many times ln(Z)^2 to a token's loss, with Z its softmax's denominator; 1e-4 is common"
    )


@dataclass(frozen=True)
class ProfilerConfig:
    """Traces of the time and the memory of some steps."""

    use_profiler: bool = setting(
        False, "trace some steps into <ckpt_save_path>/profile_traces; print where their time went"
    )
    profile_steps: tuple[str, ...] = setting(
        (),
        "steps to profile, A-B, counted from 1; empty = steps 4 to 6 of each start, unless profile_interval is given",
    )
    profile_interval: Duration = setting(Duration(0, "steps"), "how often to profile three steps; 0 = never")
    profiler_rank0_only: bool = setting(True, "trace rank 0 only; false = all ranks, a file each")
    memory_snapshot: bool = setting(
        False, "on CUDA, record the code line of each allocation, per profile and when memory runs out"
    )

    @property
    def step_ranges(self) -> list[tuple[int, int]]:
        """`profile_steps` as (first, last); raises a ConfigError where they are no ranges of steps."""
        return parse_ranges("profile_steps", self.profile_steps, smallest=1)


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run is made of."""

    model: ModelConfig = setting(ModelConfig(), silent_change=True)  # a checkpoint's model cannot change
    data: DataConfig = DataConfig()
    batch: BatchConfig = setting(BatchConfig(), silent_change=True)
    run: RunConfig = RunConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), silent_change=True)
    evaluation: EvaluationConfig = EvaluationConfig()
    report: ReportConfig = setting(ReportConfig(), silent_change=True)
    guard: GuardConfig = GuardConfig()
    loss: LossConfig = LossConfig()
    profiler: ProfilerConfig = setting(ProfilerConfig(), silent_change=True)


def checkpointed_blocks(selective: str, num_hidden_layers: int) -> list[int]:
    """Return the blocks whose activations are not kept, numbered from 0, by the setting `selective_checkpointing`.

    Every k-th block is k-1, 2k-1, ... A fraction p takes block i where p x (i + 1), rounded half up, is one more than
    p x i: of the first n blocks, for any n, it takes p x n, rounded.

    Raises:
        ConfigError: it is none of the forms, or takes no block at all.
    """
    if selective == PER_OPERATION:
        return list(range(num_hidden_layers))
    share = share_of_blocks(selective)
    if share >= 1:
        blocks = list(range(int(share) - 1, num_hidden_layers, int(share)))
    else:
        taken = [floor(share * count + Fraction(1, 2)) for count in range(num_hidden_layers + 1)]
        blocks = [block for block in range(num_hidden_layers) if taken[block + 1] > taken[block]]
    if not blocks:
        raise ConfigError(
            f"--selective_checkpointing={selective} takes none of {num_hidden_layers} blocks: give 1 to "
            f"{num_hidden_layers}, a larger fraction, or --fsdp_activation_checkpointing=false"
        )
    return blocks


def share_of_blocks(selective: str) -> Fraction:
    """Return the number that `selective_checkpointing` holds where it is not "op": k, or a fraction below 1.

    Raises:
        ConfigError: it is none of the forms.
    """
    top, slash, bottom = selective.partition("/")
    numerator, denominator = parse_number(top), parse_number(bottom) if slash else Fraction(1)
    number = numerator / denominator if numerator and denominator else Fraction(0)
    if number <= 0 or (number > 1 and number.denominator > 1):
        raise ConfigError(
            f"--selective_checkpointing={selective}: write 1 for all blocks, k for every k-th (2, 3, ...), a fraction "
            "of them below 1 (1/3, 0.25), or op"
        )
    return number
