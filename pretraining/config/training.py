"""The settings of a training run: one dataclass per section, all under `TrainConfig`.

Field names are unique over all sections, so `--learning_rate=3e-4` and `--optimizer.learning_rate=3e-4` mean the same.
`--help` and docs/configurations.md are made from each field's annotation (allowed values) and text (help). If a setting
is `None` (written `none`), the program decides, and the help says how. Rules over several settings are in `rules.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt

from pretraining.config.fields import (
    ByteSize,
    NonNegativeFloat,
    NonNegativeInt,
    OneOfOr,
    PartOfRun,
    PositiveFloat,
    PositiveInt,
    RunLength,
    Time,
    setting,
    settings_of,
)
from pretraining.config.plugins import OPTIMIZERS, SCHEDULES, TOKEN_FORMATS, TRACKERS
from pretraining.config.values import parse_ranges
from pretraining.durations import LARGEST_AMOUNT, Duration, parse_number
from pretraining.errors import ConfigError

Packing = Literal["stream", "greedy", "first_fit", "best_fit"]
ShardingStrategy = Literal["ddp", "zero2", "fsdp", "hsdp", "hsdp_zero2"]
AttentionBias = Literal["false", "true", "qkv"]
QkNorm = Literal["off", "head", "whole"]
NormPosition = Literal["pre", "post"]
ModelFamily = Literal["llama", "mistral", "qwen2", "qwen3", "olmo2", "smollm3", "granite"]
Float8Scaling = Literal["tensorwise", "rowwise"]
Width = Annotated[int, Ge(1), Le(10**7)]
Share = Annotated[float, Ge(0), Lt(1)]

NO_TOKEN = -1
"""Value of `bos_token` or `sep_token` for no such token, whatever prepare.json says."""
IGNORED_LABEL = -100
"""Label of a token without a loss, such as padding; the convention of PyTorch and Hugging Face."""

# Values of `selective_checkpointing`.
ALL_BLOCKS = "1"
PER_OPERATION = "op"


@dataclass(frozen=True)
class ModelConfig:
    """A variant of the Llama family, and values in place of its own, under Hugging Face names; none = the variant's.

    The upper limits are far beyond any trained model: larger sizes are mistakes, and could take forever to build.
    """

    model_variant: str | None = setting(
        None, "named set of dimensions (docs/configurations.md); none = the loaded weights' dimensions, else 7b"
    )
    hidden_size: Width | None = setting(None, "width of the residual stream")
    intermediate_size: Width | None = setting(None, "width of the feed-forward layer")
    num_hidden_layers: Annotated[int, Ge(1), Le(4096)] | None = setting(None, "number of blocks")
    num_attention_heads: Width | None = setting(None, "query heads")
    num_key_value_heads: Width | None = setting(
        None, "key/value heads; none = the variant's, or num_attention_heads if both are equal in the variant"
    )
    head_dim: Width | None = setting(
        None, "size of a head; none = the variant's, or hidden_size / num_attention_heads if both are equal in it"
    )
    vocab_size: Annotated[int, Ge(2), Le(10**9)] | None = setting(
        None, "rows of the embedding; none = the weights', else the tokenizer's in multiples of 128, else the variant's"
    )
    max_position_embeddings: PositiveInt | None = setting(None, "context length in exports")
    rope_theta: Annotated[float, Ge(1)] | None = setting(None, "base of the rotary frequencies")
    rope_scaling: tuple[str, ...] = setting(
        (),
        "rotary scaling: linear:4 (factor), yarn:4,8192 (factor, original context), or the four numbers of llama3: "
        "factor, low_freq_factor, high_freq_factor, original_max_position_embeddings; factor 1 = no scaling; empty = "
        "the variant's",
    )
    no_rope_interval: NonNegativeInt | None = setting(
        None, "the last of each group of this many blocks has no rotary embedding (SmolLM 3: 4); 0 = all have it"
    )
    rms_norm_eps: NonNegativeFloat | None = setting(None, "epsilon of RMSNorm")
    tie_word_embeddings: bool | None = setting(None, "share the embedding with the output head")
    attention_bias: AttentionBias | None = setting(None, "true: biases of q, k, v and o; qkv: without o (Qwen 2)")
    mlp_bias: bool | None = setting(None, "biases of the feed-forward layer")
    qk_norm: QkNorm | None = setting(
        None, "norm of queries and keys: over each head (head, Qwen 3), or over all heads (whole, OLMo 2)"
    )
    norm_position: NormPosition | None = setting(None, "norms before attention and feed-forward, or after (OLMo 2)")
    embedding_multiplier: PositiveFloat | None = setting(None, "factor of embeddings (Granite)")
    residual_multiplier: PositiveFloat | None = setting(None, "factor of what a block adds (Granite)")
    attention_multiplier: PositiveFloat | None = setting(
        None, "factor of attention scores (Granite); none = the variant's, else 1 / sqrt(head_dim)"
    )
    logits_scaling: PositiveFloat | None = setting(None, "divisor of logits (Granite)")
    sliding_window: NonNegativeInt | None = setting(
        None, "tokens that attention sees, in exports; training sequences must fit in it, so it has no effect; 0 = all"
    )
    block: str | None = setting(
        None, "user-defined decoder block, as package.module:Class (docs/extending.md); none = the project's"
    )
    model_family: ModelFamily | None = setting(None, "family whose form exports have, if it can hold the model")


@dataclass(frozen=True)
class DataConfig:
    """Token sources, and how documents become samples."""

    data_path: str | None = setting(
        None,
        "root folder of the datasets, or its address in an object store (s3://, gs://, abfss://)",
        per_node=True,
        may_be_address=True,
    )
    datasets: tuple[str, ...] = setting(
        (), "sub-folders of data_path with token files, or token files; empty = all", silent_change=True
    )
    weights: tuple[float, ...] = setting((), "proportions of the datasets; empty = their tokens", silent_change=True)
    seq_length: PositiveInt = setting(4096, "tokens per sequence")
    packing: Packing = setting(
        "stream",
        "stream: documents end to end, no padding; greedy, first_fit, best_fit: whole documents with padding, most "
        "with greedy, least with best_fit",
        decides="samples",
    )
    bos_token: Annotated[int, Ge(NO_TOKEN)] | None = setting(
        None,
        "token id before documents that lack it; not given = begin_of_text of prepare.json; none or -1 = no token",
        typed_none=NO_TOKEN,
        decides="documents",
    )
    sep_token: Annotated[int, Ge(NO_TOKEN)] | None = setting(
        None,
        "token id after documents that lack it; not given = end_of_text of prepare.json; none or -1 = no token",
        typed_none=NO_TOKEN,
        decides="documents",
    )
    strip_tokens: tuple[NonNegativeInt, ...] = setting(
        (), "token ids to remove at both ends of documents, before bos and sep are added", decides="documents"
    )
    min_length: PositiveInt = setting(1, "skip documents with fewer tokens after strip_tokens", decides="documents")
    logical_shards: PositiveInt = setting(1024, "pieces per dataset; the order of the data depends on this number")
    document_mask: bool = setting(False, "limit attention and labels to each document; positions restart at each")
    num_workers: NonNegativeInt = setting(
        1, "threads per process that read ahead; no effect on the data", per_node=True
    )
    file_type: Annotated[str, OneOfOr(("auto", *TOKEN_FORMATS))] = setting(
        "auto", "format of the token files (docs/extending.md); auto: by suffix and content"
    )
    token_dtype: Literal["uint16", "uint32", "uint64"] | None = setting(
        None, "type of the tokens in .bin and .npy files without a header", decides="samples"
    )
    col_name: str = setting("tokens", "column of the token files with the token ids", decides="documents")
    tokenizer_path: str | None = setting(
        None,
        "tokenizer for generated text and bits per byte: folder, tokenizer.json, address in an object store or name on "
        "the Hugging Face Hub; none = that of the prepared data, else that of the weights, if any",
        per_node=True,
        may_be_address=True,
    )
    accept_tokenizer: bool = setting(False, "start a new run although tokenizers differ or a token has no row")
    held_out_fraction: Share = setting(0.0, "fraction of documents kept for evaluation only", decides="documents")
    index_path: str | None = setting(
        None, "folder for document indices; none = each dataset's, or the user's cache folder", per_node=True
    )
    data_cache_path: str | None = setting(
        None, "local folder for the parts in use of data in an object store; none = in memory", per_node=True
    )
    data_cache_size: ByteSize = setting(
        "4GB", "most bytes in data_cache_path, else in the memory of a machine: 200GB, 64GiB", per_node=True
    )
    skip_samples: tuple[str, ...] = setting(
        (),
        "samples to skip, A-B, both included, as this start numbers them; those in the checkpoint stay skipped",
        silent_change=True,
    )
    bad_documents: Literal["stop", "quarantine"] = setting(
        "stop", "if a sample cannot be read: stop the run; or quarantine: ignore the sample's labels"
    )
    use_dummy_dataset: bool = setting(False, "generated tokens instead of data_path, for tests and benchmarks")

    @property
    def bos(self) -> int | None:
        """Token before every document; None = no token."""
        return None if self.bos_token == NO_TOKEN else self.bos_token

    @property
    def sep(self) -> int | None:
        """Token after every document; None = no token."""
        return None if self.sep_token == NO_TOKEN else self.sep_token

    def values_that_decide(self, *what: str) -> dict[str, Any]:
        """Return the settings whose `decides` is one of `what`, which includes "documents", as JSON values by name."""
        values = {name: getattr(self, name) for name, known in settings_of(DataConfig).items() if known.decides in what}
        as_used = {"bos_token": self.bos, "sep_token": self.sep, "strip_tokens": sorted(set(self.strip_tokens))}
        return {**values, **as_used, "held_out_fraction": float(self.held_out_fraction)}

    @property
    def skipped_ranges(self) -> list[tuple[int, int]]:
        """`skip_samples` as (first, end) ranges; raises a ConfigError if one is malformed."""
        return [(first, last + 1) for first, last in parse_ranges("skip_samples", self.skip_samples, smallest=0)]


@dataclass(frozen=True)
class BatchConfig:
    """Sequences per step."""

    batch_size: PositiveInt = setting(2, "sequences per GPU and micro-batch")
    global_batch_size: Annotated[int, Ge(1), Le(10**8)] | None = setting(
        None, "sequences per step over all GPUs; none = the checkpoint's, else batch_size x grad_accum_steps x GPUs"
    )
    grad_accum_steps: PositiveInt | None = setting(None, "micro-batches per step; none = from global_batch_size, or 1")


@dataclass(frozen=True)
class RunConfig:
    """Length, seed and limits of a run."""

    num_steps: RunLength = setting(Duration(1000, "steps"), "length of the run: steps, tokens (5Btok) or epochs (2ep)")
    run_steps: PositiveInt | None = setting(
        None, "stop after this many steps in this start; the schedule still ends at num_steps", silent_change=True
    )
    time_limit: Time | None = setting(
        None, "save and stop this long after the job began (23h30min); 0s = never; none = 5 min before SLURM ends it"
    )
    max_starts_without_progress: NonNegativeInt = setting(
        5, "refuse to start after this many starts in a row without progress (docs/reliability.md); 0 = never"
    )
    seed: NonNegativeInt = setting(2023, "seed of the initial weights and of the data order")
    gc_interval: NonNegativeInt = setting(
        50, "steps between Python's garbage collections, which all processes run at the same step; 0 = Python decides"
    )
    cpu_threads: PositiveInt | None = setting(
        None,
        "CPU threads per process; their number changes the last bits of sums; none = OMP_NUM_THREADS, else the "
        "checkpoint's, else one per core of the process",
        per_node=True,
    )
    deterministic: bool = setting(False, "use only kernels that return the same bits each time (slower on CUDA)")
    ignore_memory: bool = setting(False, "start even if the estimate exceeds the memory", silent_change=True)
    dry_run: bool = setting(False, "print settings, plan and first batch; write nothing", silent_change=True)


@dataclass(frozen=True)
class ParallelConfig:
    """Sharding over GPUs, precision and activation checkpointing."""

    device: Literal["auto", "cuda", "cpu"] = setting("auto", "auto: GPUs if there are any; cuda: an error without GPUs")
    backend: Literal["auto", "nccl", "gloo"] = setting("auto", "communication; auto: nccl on GPUs, gloo on CPUs")
    sharding_strategy: ShardingStrategy = setting(
        "fsdp",
        "ddp (zero0): shards nothing; zero2: gradients and optimizer state; fsdp (zero3): parameters, too; hsdp, "
        "hsdp_zero2: as fsdp, zero2, but inside groups that replicate each other",
        aliases={"zero0": "ddp", "zero3": "fsdp"},
    )
    hsdp_group_size: PositiveInt | None = setting(None, "GPUs per group of hsdp, hsdp_zero2; none = those of a node")
    context_parallel_size: PositiveInt = setting(
        1, "neighboring GPUs that share their sequences, each with a part of every sequence; 1 = whole sequences"
    )
    mixed_precision: bool | None = setting(
        None, "compute in mp_dtype; weights, optimizer and sums of gradients in float32; none = if the device can"
    )
    mp_dtype: Literal["bfloat16", "float16"] = setting(
        "bfloat16",
        "compute type of mixed_precision: bfloat16, or float16 with a dynamic loss scale",
        aliases={"bf16": "bfloat16", "fp16": "float16"},
    )
    float8: Float8Scaling | None = setting(
        None, "float8 for products in blocks (needs torchao), with a scale per tensor (tensorwise) or row (rowwise)"
    )
    low_cpu_fsdp: bool = setting(True, "initialize the model shard by shard; false = whole on every GPU, then shard")
    fsdp_activation_checkpointing: bool = setting(False, "recompute activations of blocks in the backward pass")
    selective_checkpointing: str = setting(
        ALL_BLOCKS,
        "blocks that fsdp_activation_checkpointing covers. 1: all; k: every k-th; a fraction (1/3, 0.25): that share; "
        "op: all, but the results of matrix products and attention are kept",
    )
    use_torch_compile: bool = setting(False, "compile the blocks; the first step takes longer")


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its settings."""

    optimizer: Annotated[str, OneOfOr(tuple(OPTIMIZERS))] = setting(
        "adamw", "muon: for hidden matrices, with AdamW for the other parameters (docs/extending.md: user-defined ones)"
    )
    optimizer_options: tuple[str, ...] = setting((), "arguments of a user-defined optimizer: key=value")
    learning_rate: NonNegativeFloat | None = setting(
        None, "peak learning rate, after warm-up; none = 3e-4, or 1e-3 for muon, 0.1 for sgd, sgdm, normalized_sgdm"
    )
    weight_decay: NonNegativeFloat | None = setting(
        None,
        "weight decay, except for norms and embeddings; decoupled in adamw, nadam, muon, normalized_sgdm; none = 0.1 "
        "for adamw, nadam, muon, else 0",
    )
    adam_beta1: Share = setting(0.9, "adamw, adam, nadam, muon: decay of the first moment")
    adam_beta2: Share = setting(0.95, "adamw, adam, nadam, muon: decay of the second moment")
    adam_epsilon: NonNegativeFloat = setting(
        1e-8, "adamw, adam, nadam, rmsprop, muon: added to the root of the second moment"
    )
    momentum: Share | None = setting(
        None, "momentum of sgdm, normalized_sgdm (none = 0.9), rmsprop (none = 0) and muon (none = 0.95)"
    )
    nesterov: bool | None = setting(None, "Nesterov momentum in sgdm (none = false) and muon (none = true)")
    rms_alpha: Share | None = setting(None, "rmsprop: decay of the mean square; none = 0.99")
    muon_adam_learning_rate: NonNegativeFloat | None = setting(None, "muon: peak rate of AdamW; none = learning_rate")
    muon_adam_weight_decay: NonNegativeFloat | None = setting(
        None, "muon: weight decay of the head; none = weight_decay"
    )
    muon_ns_steps: PositiveInt | None = setting(None, "muon: Newton-Schulz iterations per update; none = 5")
    grad_clip_thresh: NonNegativeFloat = setting(1.0, "clip the gradient to this norm; 0 = no clipping")

    def resolved(self) -> OptimizerConfig:
        """Return the settings with the optimizer's defaults in place of none; AdamW's for a user-defined optimizer."""
        defaults = OPTIMIZERS.get(self.optimizer, OPTIMIZERS["adamw"]).defaults
        chosen = replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})
        of_adam = {"muon_adam_learning_rate": chosen.learning_rate, "muon_adam_weight_decay": chosen.weight_decay}
        unset: dict[str, Any] = {name: value for name, value in of_adam.items() if getattr(self, name) is None}
        return replace(chosen, **unset) if self.optimizer == "muon" else chosen

    @property
    def peak_learning_rate(self) -> float:
        """The peak learning rate; if unset, the optimizer's default."""
        rate = self.resolved().learning_rate
        assert rate is not None
        return rate

    @property
    def decay(self) -> float:
        """The weight decay; if unset, the optimizer's default."""
        decay = self.resolved().weight_decay
        assert decay is not None
        return decay

    def moments(self, *, in_matrix: bool) -> tuple[str, ...]:
        """Return the names of the tensors that a built-in optimizer keeps per parameter, of the parameter's shape.

        Args:
            in_matrix: for the blocks' matrices; false = for all other parameters.
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
        "piecewise_linear (schedule_points, no separate warm-up), or package.module:function (docs/extending.md)",
        aliases={"warmup_stable_decay": "wsd"},
    )
    training_stage: Literal["initial", "annealing"] = setting(
        "initial", "annealing: instead of the schedule, a straight line from the peak, where this stage begins, to zero"
    )
    warmup_steps: PartOfRun | None = setting(None, "linear warm-up; none = a twentieth of the run, at most 2000 steps")
    stable_steps: PartOfRun | None = setting(None, "wsd, trapezoid: length at the peak; the decay takes the rest")
    decay_steps: PartOfRun | None = setting(None, "wsd, trapezoid: length of the decay; none = a fifth of the run")
    decay_shape: Literal["linear", "cosine", "1-sqrt"] | None = setting(None, "wsd: shape of the decay; none = 1-sqrt")
    decay_power: NonNegativeFloat | None = setting(None, "polynomial: exponent; none = 1")
    schedule_points: tuple[str, ...] = setting(
        (), "piecewise_linear: points length:fraction of the peak, as in 0:0,2000:1,80%:1,100%:0.1"
    )
    min_lr_ratio: Annotated[float, Ge(0), Le(1)] = setting(0.1, "learning rate at the end, as a fraction of the peak")


def parse_point(text: str) -> tuple[Duration, float]:
    """Read a point of a piecewise linear schedule: `length:fraction of the peak`.

    Raises:
        ConfigError: the text is malformed.
    """
    place, _, fraction = text.partition(":")
    number = parse_number(fraction)
    if number is None or not 0 <= number <= LARGEST_AMOUNT:
        raise ConfigError(
            f"--schedule_points: cannot read {text!r}: write length:fraction of the peak, as in 2000:1 or 80%:0.5"
        )
    return Duration.parse(place), float(number)


@dataclass(frozen=True)
class CheckpointConfig:
    """The run folder, and its checkpoints."""

    ckpt_save_path: str | None = setting(
        "runs/default",
        "the run folder; a run in it is resumed. {timestamp} becomes the time of the first start; the same settings "
        "then resume the newest unfinished run. none (the default with use_dummy_dataset) = save nothing",
    )
    ckpt_load_path: str | None = setting(
        None,
        "where a new run starts: a run or checkpoint (folder, address), or a Hugging Face Llama (folder, Hub name)",
        may_be_address=True,
    )
    ckpt_mirror_path: str | None = setting(
        None,
        "object store address to copy checkpoints to; a start resumes from there if its newest copy is newer",
        may_be_address=True,
    )
    init_from: Literal["auto", "resume", "scratch"] = setting(
        "auto",
        "auto: the newest checkpoint in ckpt_save_path, else ckpt_load_path, else initial weights; resume: as auto, "
        "but a checkpoint must exist; scratch: initial weights, refused if ckpt_save_path holds another run",
    )
    resume_from_checkpoint: str | None = setting(
        None,
        "path, name or step of an older checkpoint of this run to return to, once; newer checkpoints move to "
        "checkpoints/set_aside_<time>/. For a checkpoint of another run: the same as ckpt_load_path",
    )
    weights_only: bool = setting(False, "a new run from the weights in ckpt_load_path; always so for Hugging Face")
    ckpt_format: Literal["sharded", "full"] = setting(
        "sharded", "sharded: each process writes its shard as safetensors; full: four unsharded .pt files"
    )
    load_optimizer: bool = setting(
        True, "load the optimizer state; false = discard it at each start until the first save with this setting"
    )
    checkpoint_interval: Duration = setting(Duration(1000, "steps"), "how often to save; 0 = only at the end")
    checkpoint_steps: tuple[PositiveInt, ...] = setting((), "steps after which to save, besides checkpoint_interval")
    preempt_interval: Duration = setting(
        Duration(0, "steps"), "how often to save a checkpoint that the next checkpoint replaces; 0 = never"
    )
    keep_last: PositiveInt | None = setting(None, "newest checkpoints to keep, besides best and final; none = all")
    save_best: bool = setting(True, "save whenever an evaluation has the lowest loss so far")
    ckpt_name: Literal["step", "tokens"] = setting(
        "step", "step: step_1000_ckp; tokens: tokens(3.07e3)_tloss(10.910)_vloss(10.924)_ckpt"
    )
    async_save: bool | None = setting(None, "save while training continues, from a copy in host memory; none = on CUDA")

    @property
    def folder(self) -> Path:
        """The run folder; only for a run that saves."""
        assert self.ckpt_save_path is not None
        return Path(self.ckpt_save_path)


@dataclass(frozen=True)
class EvaluationConfig:
    """Losses on documents that are never trained on, and generated text."""

    eval_datasets: tuple[str, ...] = setting(
        (), "more evaluation sets: folders with token files, or token files; also their addresses", may_be_address=True
    )
    eval_interval: Duration = setting(Duration(1000, "steps"), "how often to evaluate; 0 = only at the end")
    eval_batches: PositiveInt = setting(
        16, "global batches per set and evaluation; a run keeps the number of sequences of its first start"
    )
    eval_tasks: tuple[str, ...] = setting((), "tasks, groups or tags of lm-eval (extra `tasks`) to evaluate on")
    eval_tasks_path: str | None = setting(None, "folder with YAML files of more tasks")
    eval_tasks_interval: Duration | None = setting(
        None, "how often to evaluate on the tasks; 0 = only at the end; none = eval_interval"
    )
    eval_tasks_limit: PositiveInt | None = setting(None, "questions per task, the first ones; none = all")
    eval_tasks_shots: NonNegativeInt | None = setting(
        None, "examples before each question, unless a task fixes 0; none = as the task says"
    )
    evaluators: tuple[str, ...] = setting((), "code to call with the model: package.module:Class (docs/extending.md)")
    extra_scores: tuple[str, ...] = setting((), "user-defined scores: package.module:Class (docs/extending.md)")
    best_by: str | None = setting(
        None,
        "decides the best checkpoint: evaluation set, <task>/<metric> or number of evaluators; none = mean of sets",
    )
    early_stopping_evaluations: NonNegativeInt = setting(
        0, "finish the run after this many evaluations in a row without a better value of best_by; 0 = never"
    )
    eval_only: bool = setting(
        False, "evaluate ckpt_load_path, else the newest checkpoint; print it, write nothing", silent_change=True
    )
    sample_prompt: str = setting("", "prompt for the generated text; empty = no prompt")
    sample_tokens: NonNegativeInt = setting(64, "tokens to generate at the end, if there is a tokenizer; 0 = none")
    sample_at_evaluations: bool = setting(False, "generate text after each evaluation, too")


@dataclass(frozen=True)
class ReportConfig:
    """Reports and trackers."""

    report_interval: Duration = setting(Duration(10, "steps"), "how often to report; 0 = only at the end")
    norms_interval: NonNegativeInt = setting(
        0, "steps between reports of norms by block (gradient, weight, update, output); 0 = never"
    )
    tracker: tuple[Annotated[str, OneOfOr(tuple(TRACKERS))], ...] = setting(
        ("tensorboard",), "trackers besides logs/metrics.jsonl (docs/extending.md: user-defined ones)"
    )
    tracker_dir: str | None = setting(None, "folder for the trackers' files; none = <ckpt_save_path>/logs")
    tracker_project_name: str | None = setting(
        None, "wandb project or mlflow experiment; none = the service's own setting, else pretraining"
    )
    tracker_run_name: str | None = setting(
        None, "run name in wandb and mlflow; none = WANDB_NAME, else the run folder's"
    )
    tracker_run_id: str | None = setting(None, "wandb or mlflow run to resume; none = the run folder's, or a new one")
    progress: Literal["auto", "live", "plain"] = setting(
        "auto", "plain: a line per report; live: also a line for the current step; auto: live on a terminal"
    )


@dataclass(frozen=True)
class GuardConfig:
    """When updates are skipped, and when a run stops or rolls back."""

    max_skipped_steps: NonNegativeInt = setting(
        20, "skipped updates in a row before the run stops, or rolls back (max_rollbacks); 0 = never"
    )
    spike_threshold: Annotated[float, Ge(1)] | None = setting(
        None,
        "skip an update if its loss is this many standard deviations (6 is common) above the mean of the last losses; "
        "none = only if loss or gradient is not finite",
    )
    spike_window: Annotated[int, Ge(4)] = setting(
        128, "last losses that spike_threshold compares with; the check begins once half of them are there"
    )
    max_rollbacks: NonNegativeInt = setting(
        0,
        "after max_skipped_steps, return to the checkpoint before them and skip their samples, at most this many "
        "times without progress; 0 = stop",
    )
    replica_check_interval: Duration = setting(
        Duration(0, "steps"), "how often to compare the replicas' weights, and stop if they differ; 0 = never"
    )
    straggler_factor: Annotated[float, Ge(1.05)] | None = setting(
        1.5, "report a process whose own work takes this many times as long as the others'; none = never"
    )
    hang_timeout: Time = setting(
        Duration(600, "seconds"), "stop the job with exit code 124 after this long without progress; 0s = never"
    )
    first_step_timeout: Time = setting(Duration(1800, "seconds"), "hang_timeout until the first step ends; 0s = never")


@dataclass(frozen=True)
class LossConfig:
    """Memory for logits, and z-loss."""

    loss_chunk_tokens: NonNegativeInt | None = setting(
        None, "tokens whose logits are in memory at once; 0 = all; none = 256 on a CPU, else 2^28 logits (1 GiB)"
    )
    z_loss_weight: NonNegativeFloat = setting(
        0.0, "weight of z-loss, ln(Z)^2 per token with Z the denominator of the softmax; 1e-4 is common"
    )


@dataclass(frozen=True)
class ProfilerConfig:
    """Time and memory traces of some steps."""

    use_profiler: bool = setting(
        False, "trace some steps into <ckpt_save_path>/profile_traces and print a summary of their time"
    )
    profile_steps: tuple[str, ...] = setting(
        (), "steps to profile, A-B, from 1; empty = 4 to 6 of each start, unless profile_interval is given"
    )
    profile_interval: Duration = setting(Duration(0, "steps"), "how often to profile three steps; 0 = never")
    profiler_rank0_only: bool = setting(True, "trace rank 0 only; false = all ranks, one file each")
    memory_snapshot: bool = setting(
        False, "on CUDA, record each allocation with its line of code, in profiles and when memory runs out"
    )

    @property
    def step_ranges(self) -> list[tuple[int, int]]:
        """`profile_steps` as (first, last) ranges; raises a ConfigError if one is malformed."""
        return parse_ranges("profile_steps", self.profile_steps, smallest=1)


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run."""

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
    """Return the blocks, numbered from 0, that the setting `selective_checkpointing` recomputes.

    Every k-th block is k-1, 2k-1, ... A fraction p selects block i if round(p x (i + 1)) > round(p x i), half rounded
    up: of the first n blocks, for any n, it selects round(p x n).

    Raises:
        ConfigError: the text is malformed, or selects no block.
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
            f"--selective_checkpointing={selective} selects none of {num_hidden_layers} blocks: give 1 to "
            f"{num_hidden_layers}, a larger fraction, or --fsdp_activation_checkpointing=false"
        )
    return blocks


def share_of_blocks(selective: str) -> Fraction:
    """Return the number in `selective_checkpointing` (not "op"): k, or a fraction below 1.

    Raises:
        ConfigError: the text is malformed.
    """
    top, slash, bottom = selective.partition("/")
    numerator, denominator = parse_number(top), parse_number(bottom) if slash else Fraction(1)
    number = numerator / denominator if numerator and denominator else Fraction(0)
    if number <= 0 or (number > 1 and number.denominator > 1):
        raise ConfigError(
            f"--selective_checkpointing={selective}: write 1 for all blocks, k for every k-th (2, 3, ...), a fraction "
            "below 1 (1/3, 0.25), or op"
        )
    return number
