"""Every rule over several settings, in one place.

Most rules are rows: settings that cannot be as they are at the same time, and what to do. The others are functions
whose parameters are named after the settings, or sections, that they read; each yields a sentence per problem, naming
the flag to change, or lets through the ConfigError of what it tries. A rule is left out if one of its settings could
not be read: it would only make a second, misleading problem. Rules use what is known before a run starts; what needs
the number of GPUs or the data is checked where that is known (`batch_sizes.py`, `Duration.to_steps`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from typing import Any, TypeVar

from pretraining.config.commands import (
    DoctorConfig,
    ImportConfig,
    InspectConfig,
    InspectSettings,
    PlanConfig,
    PrepareConfig,
    SampleConfig,
    VerifyConfig,
)
from pretraining.config.fields import sections_of, settings_of, values_of
from pretraining.config.plugins import OPTIMIZERS, OWN, SCHEDULES, TOKEN_FORMATS, TRACKERS, parse_options
from pretraining.config.strategies import STRATEGIES
from pretraining.config.training import (
    ALL_BLOCKS,
    PER_OPERATION,
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    checkpointed_blocks,
    parse_point,
    share_of_blocks,
)
from pretraining.config.values import did_you_mean, format_value, limit_problem, parse_range
from pretraining.config.variants import VARIANTS, resolve_shape
from pretraining.errors import ConfigError
from pretraining.progress import Duration

FLOAT8_MULTIPLE = 16
"""Sides of matrices that multiply in float8 are multiples of this."""

LONGEST_TIMEOUT_SECONDS = 366 * 86400
"""What processes can wait for each other ends somewhere: libraries count it in fractions of a second."""

Problems = Iterable[str]
Check = TypeVar("Check", bound=Callable[..., Problems])
T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """A check over several settings.

    Attributes:
        root: the configurations that it is for.
        check: yields a sentence for each problem.
        more: names of settings that it takes as keywords besides its named parameters.
        unit: of the durations that it takes as keywords, too; None = takes none.
        not_for: of the configurations, those that it is not for.
    """

    root: type
    check: Callable[..., Problems]
    more: tuple[str, ...]
    unit: str | None
    not_for: tuple[type, ...]

    # When they are first needed: a command checks the rules of its own settings only.
    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Settings and sections that it is called with."""
        named = signature(self.check).parameters.values()
        durations = (name for name, setting in settings_of(self.root).items() if self.unit in setting.units)
        return (*(each.name for each in named if each.kind != each.VAR_KEYWORD), *self.more, *durations)

    @cached_property
    def reads(self) -> frozenset[str]:
        """The settings among its parameters, and those of the sections."""
        settings = settings_of(self.root)
        sections = set(self.parameters) - set(settings)
        return frozenset(
            each.name for each in settings.values() if each.name in self.parameters or each.section in sections
        )


@dataclass(frozen=True)
class Row:
    """Settings that cannot be as they are at the same time.

    Attributes:
        settings: by name, `ON`, `OFF`, `GIVEN` (also as 0) or values; the first is named first.
        remedy: what to do.
        root: the configurations that it is for.
    """

    settings: Mapping[str, Any]
    remedy: str
    root: type = TrainConfig

    def problem(self, values: Mapping[str, Any]) -> str | None:
        """Return the sentence about settings that are so; None if they are not."""
        for name, asked in self.settings.items():
            value = values[name]
            is_on = bool(getattr(value, "amount", value))
            kinds = {ON: is_on, OFF: not is_on, GIVEN: value is not None}
            if not (kinds[asked] if asked in (ON, OFF, GIVEN) else value in asked):
                return None
        first, *others = [f"--{name}={format_value(values[name])}" for name in self.settings]
        return f"{first}{' with ' if others else ''}{' and '.join(others)}: {self.remedy}"


ON, OFF, GIVEN = object(), object(), object()
TO_EVALUATE_ON = {"held_out_fraction": OFF, "eval_datasets": OFF}
EVALUATE_ON = "give documents to evaluate on, --held_out_fraction=0.01 or --eval_datasets=<folders>"
ONE = "leave one of them out"
ROWS = (
    # data
    Row({"weights": ON, "datasets": OFF}, "weights are proportions of --datasets: name these, in the same order"),
    Row({"col_name": [""]}, "name the column that holds the token ids"),
    # length and schedule
    Row({"num_steps": OFF}, "give a length, in steps (1000), tokens (5Btok) or epochs (2ep)"),
    Row(
        {"stable_steps": GIVEN, "decay_steps": GIVEN, "schedule": ["wsd", "trapezoid"], "training_stage": ["initial"]},
        "both say where the decay begins; keep the one that stays as it is when the run gets longer",
    ),
    Row(
        {"schedule": ["piecewise_linear"], "schedule_points": OFF},
        "give --schedule_points, as in 0:0,2000:1,80%:1,100%:0.1",
    ),
    # parallelism and precision
    Row({"backend": ["gloo"], "device": ["cuda"]}, f"GPUs talk by NCCL; {ONE}"),
    Row({"backend": ["nccl"], "device": ["cpu"]}, f"CPUs talk by gloo; {ONE}"),
    Row({"float8": ON, "device": ["cpu"]}, f"float8 needs a GPU; {ONE}"),
    Row({"float8": ON, "mixed_precision": [False]}, f"all but the matrices is in bfloat16 then; {ONE}"),
    Row({"float8": ON, "mp_dtype": ["float16", "float32"]}, f"all but the matrices is in bfloat16 then; {ONE}"),
    Row({"mp_dtype": ["float16", "float32"], "mixed_precision": [False]}, f"mixed precision is off; {ONE}"),
    Row(
        {"hsdp_group_size": ON, "sharding_strategy": [name for name, each in STRATEGIES.items() if not each.in_groups]},
        "only hsdp and hsdp_zero2 shard inside groups; change one or leave --hsdp_group_size out",
    ),
    Row(
        {
            "replica_check_interval": ON,
            "sharding_strategy": [n for n, each in STRATEGIES.items() if each.shards_gradients and not each.in_groups],
        },
        "there is one copy of the weights, in pieces; give --replica_check_interval=0, or a strategy with replicas",
    ),
    # checkpoints
    Row({"ckpt_save_path": [""]}, "name the run's folder"),
    Row({"ckpt_save_path": [""]}, "name the run's folder", ImportConfig),
    Row(
        {"weights_only": [True], "ckpt_load_path": OFF},
        "name the run or checkpoint whose weights to begin with, --ckpt_load_path",
    ),
    Row({"init_from": ["scratch"], "ckpt_load_path": ON}, f"a run from scratch loads nothing; {ONE}"),
    Row({"init_from": ["scratch"], "resume_from_checkpoint": ON}, f"a run from scratch loads nothing; {ONE}"),
    Row({"resume_from_checkpoint": ON, "ckpt_load_path": ON}, f"both say what to start from; {ONE}"),
    Row(
        {"resume_from_checkpoint": ["true", "True", "TRUE", "false", "False", "FALSE"]},
        "name a run or a checkpoint; a run in --ckpt_save_path resumes without a flag",
    ),
    Row({"ckpt_format": ["full"], "async_save": [True]}, f"training waits for unsharded checkpoints; {ONE}"),
    # evaluation
    Row({"best_by": ON, **TO_EVALUATE_ON}, EVALUATE_ON),
    Row({"early_stopping_evaluations": ON, **TO_EVALUATE_ON}, EVALUATE_ON),
    Row({"eval_only": [True], **TO_EVALUATE_ON}, EVALUATE_ON),
    Row({"sample_at_evaluations": [True], **TO_EVALUATE_ON}, EVALUATE_ON),
    Row(
        {"held_out_fraction": ON, "eval_only": [True], "data_path": OFF, "use_dummy_dataset": OFF},
        "it is a share of the documents in --data_path: give that, too, or --held_out_fraction=0",
    ),
    Row({"dry_run": [True], "eval_only": [True]}, f"--dry_run shows what a training would do; {ONE}"),
    Row({"sample_at_evaluations": [True], "tokenizer_path": OFF}, "give the tokenizer of the data, --tokenizer_path"),
    Row({"sample_at_evaluations": [True], "sample_tokens": OFF}, "change one"),
    Row(
        {"early_stopping_evaluations": ON, "eval_interval": OFF},
        "the only evaluation is at the end; give --eval_interval",
    ),
    # guards and profiler
    Row({"max_rollbacks": ON, "max_skipped_steps": OFF}, "no number of skipped updates rolls back; give one, as in 20"),
    Row({"profile_steps": ON, "use_profiler": [False]}, "give --use_profiler=true, or leave the steps out"),
    Row({"profile_interval": ON, "use_profiler": [False]}, "give --use_profiler=true, or leave the interval out"),
    # other commands
    Row({"hf_config": ON, "hf_dataset": OFF}, "name the dataset that the configuration is of", PrepareConfig),
    Row({"extensions": OFF, "input_path": ON}, "name some, such as --extensions=txt,jsonl", PrepareConfig),
    Row(
        {"vocab_size": ON, "tokenizer_path": ON},
        f"the size is for a tokenizer trained here, or for token ids without one; {ONE}",
        PrepareConfig,
    ),
    Row({"rank": GIVEN, "world_size": OFF}, "give --world_size=<number of GPUs>, too", InspectConfig),
    Row({"prompt": ON, "prompt_tokens": ON}, f"both are prompts; {ONE}", SampleConfig),
    Row({"ckpt_path": ON, "data_path": ON}, f"verify checks one thing; {ONE}", VerifyConfig),
    Row({"datasets": ON, "ckpt_path": ON}, f"datasets are of token files; {ONE}", VerifyConfig),
    Row({"vocab_size": ON, "ckpt_path": ON}, f"a vocabulary is of token files; {ONE}", VerifyConfig),
    Row({"ckpt_path": OFF, "data_path": OFF}, "name a checkpoint or run, or token files (--data_path)", VerifyConfig),
)

RULES: list[Rule] = []


def check_config(config: Any) -> None:
    """Checks a configuration that was made in Python: type and limits of each setting, then the rules over several.

    Raises:
        ConfigError: carries every problem.
    """
    values = values_of(config)
    problems = {}
    for name, setting in settings_of(type(config)).items():
        problem = limit_problem(setting, values[name])
        if problem:
            problems[name] = f"{name}={format_value(values[name])}: {problem}"
    found = [*problems.values(), *find_problems(config, problems)]
    if found:
        raise ConfigError(found)


def find_problems(config: Any, unreadable: Collection[str] = ()) -> list[str]:
    """Returns what the rules have to say about a configuration whose single values are within their limits.

    Args:
        config: the configuration.
        unreadable: settings that hold their default only because what was given could not be read.
    """
    sections = {name: getattr(config, name) for name in sections_of(type(config))}
    values = sections | values_of(config)
    problems: list[str] = []
    for row in ROWS:
        if isinstance(config, row.root) and row.settings.keys().isdisjoint(unreadable):
            problems += filter(None, [row.problem(values)])
    for rule in RULES:
        if isinstance(config, rule.root) and not isinstance(config, rule.not_for) and rule.reads.isdisjoint(unreadable):
            try:
                problems.extend(rule.check(**{name: values[name] for name in rule.parameters}))
            except ConfigError as error:
                problems.extend(error.problems)
    return problems


def settle_run_folder(config: T, given: Collection[str]) -> T:
    """Give made-up data no run folder, and a run without a folder no tracker, unless the user asks for them.

    Args:
        config: settings of training; others are returned as they are.
        given: names of the settings that the user has given.
    """
    if not isinstance(config, TrainConfig) or config.evaluation.eval_only:
        return config
    checkpoint, report = config.checkpoint, config.report
    if config.data.use_dummy_dataset and "ckpt_save_path" not in given:
        checkpoint = replace(checkpoint, ckpt_save_path=None)
    if checkpoint.ckpt_save_path is None and report.tracker_dir is None and "tracker" not in given:
        report = replace(report, tracker=())
    return replace(config, checkpoint=checkpoint, report=report)


def remarks(config: TrainConfig) -> list[str]:
    """Returns a line for each setting that another one leaves without an effect, so that one flag can be flipped."""
    lines = []
    data, parallel = config.data, config.parallel
    unread = {name: getattr(data, name) for name in ("data_path", "datasets", "weights") if getattr(data, name)}
    if data.use_dummy_dataset and unread:
        given = ", ".join(f"{name}={format_value(value)}" for name, value in unread.items())
        lines.append(f"use_dummy_dataset=true: tokens are made up, and {given} not read")
    if parallel.selective_checkpointing != ALL_BLOCKS and not parallel.fsdp_activation_checkpointing:
        lines.append(
            f"selective_checkpointing={parallel.selective_checkpointing} has no effect: fsdp_activation_checkpointing, "
            "whose blocks it chooses, is off"
        )
    return [*lines, *_unread_ratio(config.schedule), *_unread_prompt(config)]


def _unread_ratio(schedule: ScheduleConfig) -> Problems:
    known = SCHEDULES.get(schedule.schedule)
    reads = known is None or "min_lr_ratio" in known.options
    if schedule.min_lr_ratio != ScheduleConfig().min_lr_ratio and (schedule.training_stage == "annealing" or not reads):
        chosen = "schedule" if schedule.training_stage != "annealing" else "training_stage"
        yield (
            f"min_lr_ratio={schedule.min_lr_ratio:g} has no effect: {chosen}={getattr(schedule, chosen)} has an end of "
            "its own"
        )


def _unread_prompt(config: TrainConfig) -> Problems:
    if config.evaluation.sample_prompt and (config.data.tokenizer_path is None or not config.evaluation.sample_tokens):
        yield "sample_prompt has no effect: samples of text need tokenizer_path, and sample_tokens above 0"


def _rule(
    *more: str, root: type = TrainConfig, unit: str | None = None, not_for: tuple[type, ...] = ()
) -> Callable[[Check], Check]:
    """Adds a rule to the list; the arguments are those of `Rule`."""

    def add(check: Check) -> Check:
        RULES.append(Rule(root, check, more, unit, not_for))
        return check

    return add


# Model


@_rule()
def _the_model_can_be_built(model: ModelConfig) -> Problems:
    resolve_shape(model)
    return ()


# Data


@_rule()
def _there_is_one_source_of_data(
    data_path: str | None, use_dummy_dataset: bool, eval_only: bool, eval_datasets: tuple[str, ...]
) -> Problems:
    if data_path is None and not use_dummy_dataset and not (eval_only and eval_datasets):
        yield "no data: give --data_path, --use_dummy_dataset=true or --recipe=demo"


@_rule(root=VerifyConfig)
@_rule()
def _the_format_of_token_files_is_known(file_type: str, token_dtype: str | None, data_path: str | None) -> Problems:
    known = ("auto", *TOKEN_FORMATS)
    if "parquet" in file_type.lower():
        yield (
            f"--file_type={file_type}: training does not read Parquet. Make token files of it first: "
            f"pretrain prepare --input_path={data_path or '<its folder>'} --output_path=<folder>"
        )
    elif file_type not in known and not OWN.fullmatch(file_type):
        hint = did_you_mean(file_type, known, "; did you mean {}?")
        yield f"--file_type={file_type} must be {', '.join(known)} or a class of your own as package.module:Class{hint}"
    if token_dtype is not None and file_type in ("arrow", "npy"):
        yield f"--token_dtype={token_dtype} is for *.bin files; *.{file_type} files say the type of their tokens"


@_rule(unit="epochs", not_for=(PlanConfig, DoctorConfig))  # these need no data, and take recipes that have some
def _epochs_need_a_dataset(use_dummy_dataset: bool, **durations: Duration | None) -> Problems:
    for name, duration in durations.items():
        if use_dummy_dataset and isinstance(duration, Duration) and duration.unit == "epochs":
            yield f"--{name}={duration} counts passes over a dataset, and made-up data has no end: give steps or tokens"


@_rule()
def _each_dataset_has_a_weight(datasets: tuple[str, ...], weights: tuple[float, ...]) -> Problems:
    given = f"--weights={format_value(weights)}"
    if weights and datasets and len(weights) != len(datasets):
        yield (
            f"{len(weights)} weights for {len(datasets)} datasets: {given} needs one for each of "
            f"--datasets={format_value(datasets)}, in the same order"
        )
    for position, weight in enumerate(weights, start=1):
        if weight < 0:
            yield f"{given}: number {position} is {weight:g}, and proportions are at least 0"
    if weights and not any(weights):
        yield f"{given} leave every dataset out: give one of them more than 0"


@_rule()
def _each_dataset_is_named_once(datasets: tuple[str, ...]) -> Problems:
    for name, times in Counter(datasets).items():
        if times > 1:
            yield f"--datasets={format_value(datasets)} names {name} {times} times; give it once, with a larger weight"


@_rule()
def _skipped_samples_are_ranges(skip_samples: tuple[str, ...]) -> Problems:
    if not _are_ranges(skip_samples, smallest=0):
        yield (
            f"skip_samples={','.join(skip_samples)}: write the first and the last sample of each range, "
            "as in --skip_samples=307200-309759,400000-400255"
        )


def _are_ranges(texts: Iterable[str], smallest: int) -> bool:
    try:
        return all(parse_range(text, smallest) for text in texts)
    except ValueError:
        return False


@_rule()
def _virtual_tokens_are_in_the_vocabulary(
    bos_token: int | None,
    sep_token: int | None,
    vocab_size: int | None,
    model_variant: str | None,
    tokenizer_path: str | None,
) -> Problems:
    # That of a tokenizer is known, and checked, once it is read.
    size = vocab_size if tokenizer_path is not None else _known_dimension("vocab_size", vocab_size, model_variant)
    for name, token in (("bos_token", bos_token), ("sep_token", sep_token)):
        if size is not None and token is not None and token >= size:
            yield (
                f"--{name}={token} is outside a vocabulary of {size} (0 to {size - 1}): change --{name} or --vocab_size"
            )


def _known_dimension(name: str, given: int | None, model_variant: str | None) -> int | None:
    """Returns a dimension of the model; None where a checkpoint may say it, which is checked again once it is read."""
    variant = VARIANTS.get((model_variant or "").lower())
    return getattr(variant, name, None) if given is None else given


# Length and batch


@_rule()
def _each_micro_batch_has_a_sequence(global_batch_size: int | None, grad_accum_steps: int | None) -> Problems:
    size, steps = global_batch_size, grad_accum_steps
    if size is not None and steps is not None and steps > size:
        yield (
            f"--grad_accum_steps={steps} micro-batches cannot share --global_batch_size={size} sequences, even on one "
            f"GPU: give --grad_accum_steps={size} or less, or leave it out to have it derived"
        )


@_rule()
def _warmup_fits_the_run(
    warmup_steps: Duration | None, num_steps: Duration, global_batch_size: int | None, seq_length: int
) -> Problems:
    if warmup_steps is None or num_steps.amount == 0:
        return
    lengths, texts = [warmup_steps, num_steps], [f"--warmup_steps={warmup_steps}", f"--num_steps={num_steps}"]
    if {length.unit for length in lengths} == {"steps", "tokens"} and global_batch_size is not None:
        position = [length.unit for length in lengths].index("tokens")
        steps = lengths[position].to_steps(global_batch_size * seq_length, None)
        lengths[position] = Duration(steps, "steps")
        texts[position] += f" ({steps} steps of {global_batch_size} x {seq_length} tokens)"
    warmup, length = lengths
    if warmup.unit == length.unit and warmup.amount > length.amount:
        yield f"{texts[0]} is longer than {texts[1]}: shorten the warm-up or lengthen the run"


@_rule("warmup_steps", "stable_steps", "decay_steps", "decay_shape", "decay_power", "schedule_points")
def _the_schedule_reads_what_is_given(schedule: str, training_stage: str, **options: Any) -> Problems:
    given = [name for name, value in options.items() if value not in (None, ())]
    if training_stage == "annealing":
        if schedule != ScheduleConfig().schedule or given:
            others = [f"--{name}" for name in given] or [f"--schedule={schedule}"]
            yield (
                "--training_stage=annealing is a schedule of its own, from the peak to zero: leave it out, or "
                f"{', '.join(others)}"
            )
        return
    if schedule not in SCHEDULES:  # the user's own gets all of them
        return
    for name in given:
        if name not in SCHEDULES[schedule].options:
            readers = [other for other, entry in SCHEDULES.items() if name in entry.options]
            yield f"--{name} is for --schedule={' or '.join(readers)}, and {schedule} does not read it: leave one out"


@_rule()
def _points_can_be_read(schedule_points: tuple[str, ...]) -> Problems:
    for text in schedule_points:
        parse_point(text)
    return ()


# Optimizer


_OPTIMIZER_OPTIONS = sorted({option for entry in OPTIMIZERS.values() for option in entry.options})


@_rule(*_OPTIMIZER_OPTIONS)
def _the_optimizer_reads_what_is_given(optimizer: str, **options: Any) -> Problems:
    if optimizer not in OPTIMIZERS:  # what the user's own is told stands in optimizer_options
        return
    unchanged = OptimizerConfig()
    for name, value in options.items():
        if name not in OPTIMIZERS[optimizer].options and value != getattr(unchanged, name):
            readers = [other for other, entry in OPTIMIZERS.items() if name in entry.options]
            yield f"--{name} is for --optimizer={' or '.join(readers)}, and {optimizer} does not read it: leave one out"


@_rule()
def _nesterov_needs_momentum(optimizer: str, momentum: float | None, nesterov: bool | None) -> Problems:
    chosen = OptimizerConfig(optimizer=optimizer, momentum=momentum, nesterov=nesterov).resolved()
    if chosen.nesterov and not chosen.momentum:
        yield f"--nesterov=true looks ahead along the momentum, and --momentum={momentum} has none: change one"


@_rule()
def _options_belong_to_an_optimizer_of_the_users_own(optimizer: str, optimizer_options: tuple[str, ...]) -> Problems:
    if optimizer_options and optimizer in OPTIMIZERS:
        names = ("learning_rate", "weight_decay", *OPTIMIZERS[optimizer].options)
        yield (
            f"--optimizer_options are for an optimizer of your own, and {optimizer} reads the settings "
            f"{', '.join(names)}: leave them out"
        )
    parse_options("optimizer_options", optimizer_options)


# Trackers


_TRACKER_OPTIONS = sorted({option for entry in TRACKERS.values() for option in entry.options})


@_rule(*_TRACKER_OPTIONS)
def _a_tracker_reads_what_is_given(tracker: tuple[str, ...], **options: str | None) -> Problems:
    if not tracker:  # none: what would be said to trackers waits until there are some again
        return
    for name, value in options.items():
        readers = [each for each in tracker if each not in TRACKERS or name in TRACKERS[each].options]
        if value is not None and not readers:
            known = [each for each, entry in TRACKERS.items() if name in entry.options]
            yield (
                f"--{name} is for --tracker={' or '.join(known)}, and {','.join(tracker)} does not read it: leave one "
                "out"
            )
        if value is not None and name == "tracker_run_id" and len(readers) > 1:
            yield f"--tracker_run_id={value} can be the id of one tracker only, and {' and '.join(readers)} have ids"


# Parallelism and precision


@_rule()
def _checkpointed_blocks_exist(
    fsdp_activation_checkpointing: bool,
    selective_checkpointing: str,
    num_hidden_layers: int | None,
    model_variant: str | None,
) -> Problems:
    layers = _known_dimension("num_hidden_layers", num_hidden_layers, model_variant)
    if selective_checkpointing != PER_OPERATION:
        share_of_blocks(selective_checkpointing)
    if fsdp_activation_checkpointing and layers is not None:
        checkpointed_blocks(selective_checkpointing, layers)
    return ()


@_rule()
def _matrices_fit_float8(float8: str | None, seq_length: int, model: ModelConfig) -> Problems:
    if float8 is None:
        return
    sides = {f"--seq_length={seq_length}": seq_length}
    given = (model.hidden_size, model.intermediate_size, model.num_attention_heads, model.num_key_value_heads)
    if model.model_variant is not None or None not in given:  # otherwise a checkpoint may say the rest
        try:
            shape = resolve_shape(model)
        except ConfigError:  # the rule about the model says so
            return
        heads, size = shape.num_key_value_heads, shape.head_dim
        sides |= {
            f"--hidden_size={shape.hidden_size}": shape.hidden_size,
            f"--intermediate_size={shape.intermediate_size}": shape.intermediate_size,
            f"--num_key_value_heads={heads} x head size {size} = {heads * size}": heads * size,
        }
    for origin, side in sides.items():
        if side % FLOAT8_MULTIPLE:
            yield (
                f"--float8={float8} multiplies matrices whose sides are multiples of {FLOAT8_MULTIPLE}; {origin}: "
                f"{side} / {FLOAT8_MULTIPLE} = {side / FLOAT8_MULTIPLE:g}. Change it, or leave --float8 out"
            )


# Checkpoints


@_rule(not_for=(PlanConfig, DoctorConfig))  # these take the settings of any run, and keep nothing
def _what_is_kept_has_a_folder(
    checkpoint: CheckpointConfig,
    eval_only: bool,
    max_rollbacks: int,
    use_profiler: bool,
    memory_snapshot: bool,
    tracker: tuple[str, ...],
    tracker_dir: str | None,
) -> Problems:
    if checkpoint.ckpt_save_path is not None:
        return
    if eval_only:
        if checkpoint.ckpt_load_path is None:
            yield "--eval_only=true with --ckpt_save_path=none evaluates nothing: give --ckpt_load_path"
        return
    defaults = vars(CheckpointConfig())
    others = {"max_rollbacks": max_rollbacks, "use_profiler": use_profiler, "memory_snapshot": memory_snapshot}
    asked = {
        name: value
        for name, value in (vars(checkpoint) | others).items()
        if getattr(value, "amount", value) and value != defaults.get(name)  # what is off needs no folder
    }
    if asked:
        flags = ", ".join(f"--{name}={format_value(value)}" for name, value in asked.items())
        yield (
            f"{flags}: there is no run folder (--ckpt_save_path=none, the default with --use_dummy_dataset). Give "
            f"--ckpt_save_path=<folder>, or leave {'it' if len(asked) == 1 else 'them'} out"
        )
    if tracker and tracker_dir is None:
        yield f"--tracker={format_value(tracker)} needs a folder: give --tracker_dir or --ckpt_save_path"


# Evaluation


# Guards and profiler


@_rule()
def _processes_wait_for_a_year_at_most(hang_timeout: Duration, first_step_timeout: Duration) -> Problems:
    for name, timeout in (("hang_timeout", hang_timeout), ("first_step_timeout", first_step_timeout)):
        if timeout.amount > LONGEST_TIMEOUT_SECONDS:
            yield f"--{name}={timeout} is more than a year: give less, or --{name}=0s, which is never"


@_rule()
def _profiled_steps_are_ranges(profile_steps: tuple[str, ...]) -> Problems:
    if not _are_ranges(profile_steps, smallest=1):
        yield (
            f"profile_steps={','.join(profile_steps)}: write the first and the last step of each range, numbered from "
            "1, as in --profile_steps=10-12,1000-1002"
        )


# Other commands


@_rule(root=PrepareConfig)
def _text_has_one_source(input_path: tuple[str, ...], source: str | None, hf_dataset: str | None) -> Problems:
    given = {"--input_path": ",".join(input_path), "--source": source, "--hf_dataset": hf_dataset}
    named = [f"{flag}={value}" for flag, value in given.items() if value]
    if not named:
        yield (
            "there is no text to prepare: give --input_path=<files, folders or globs>, --hf_dataset=<name or folder> "
            "or --source=stdlib"
        )
    if len(named) > 1:
        yield f"{' and '.join(named)} all say which text to read: give one of them"


@_rule("dataset", "source", "hf_dataset", "input_path", "extensions", root=PrepareConfig)
def _a_dataset_is_named_like_a_folder(**naming: Any) -> Problems:
    name = PrepareConfig(**naming).dataset_name
    if not name and naming["dataset"] is None:
        if naming["input_path"]:
            yield "several inputs or a glob suggest no name for the dataset: give --dataset=<name>"
    elif not name or name.startswith(".") or "/" in name or "," in name:
        yield (
            f"{name!r} cannot be a dataset's name (a plain folder name, without '/' and ',', not hidden): give "
            "another --dataset"
        )


@_rule(root=InspectConfig)
def _there_is_something_to_show(inspect: InspectSettings) -> Problems:
    if inspect.steps is None:
        if inspect.step is None and inspect.sample_id is None:
            yield "nothing to show: give --step=N, --sample_id=N, or --steps=A-B for a summary"
        return
    single = {"step": inspect.step, "sample_id": inspect.sample_id, "rank": inspect.rank, "tokens": inspect.tokens}
    given = [f"--{name}" for name, value in single.items() if value is not None and value is not False]
    if given:
        yield f"--steps={inspect.steps} is a summary of whole steps: leave out {', '.join(given)}"
    try:
        _ = inspect.step_range
    except ValueError:
        yield f"--steps={inspect.steps}: write the first and the last step, as in --steps=1-1000"


@_rule(root=InspectConfig)
def _a_rank_is_one_of_the_world(rank: int | None, world_size: int | None) -> Problems:
    if rank is not None and world_size is not None and rank >= world_size:
        yield f"--rank={rank} is not there: --world_size={world_size} has ranks 0 to {world_size - 1}"
