"""Every rule over several settings, in one place.

Most rules are rows: settings that cannot be as they are at the same time, and what to do. The others are functions
whose parameters are named after the settings, or sections, that they read; each yields a sentence per problem, naming
the flag to change, or lets through the ConfigError of what it tries. A rule is left out if one of its settings could
not be read: it would only make a second, misleading problem. Rules use what is known before a run starts; what needs
the number of GPUs or the data is checked where that is known (`batch_sizes.py`, `Duration.to_steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    parse_point,
    share_of_blocks,
)
from pretraining.config.values import did_you_mean, format_value, limit_problem, parse_range
from pretraining.config.variants import resolve_shape
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
        not_for: of the configurations, those that it is not for.
    """

    root: type
    check: Callable[..., Problems]
    more: tuple[str, ...]
    not_for: tuple[type, ...]

    # When they are first needed: a command checks the rules of its own settings only.
    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Settings and sections that it is called with."""
        named = signature(self.check).parameters.values()
        return (*(each.name for each in named if each.kind != each.VAR_KEYWORD), *self.more)

    @cached_property
    def reads(self) -> frozenset[str]:
        """The settings among its parameters, and those of the sections."""
        settings = settings_of(self.root)
        sections = set(self.parameters) - set(settings)
        return frozenset(
            each.name for each in settings.values() if each.name in self.parameters or each.section in sections
        )


def _is_on(value: Any) -> bool:
    return bool(getattr(value, "amount", value))


def _is_off(value: Any) -> bool:
    return not _is_on(value)


def _is_given(value: Any) -> bool:
    return value is not None


def _is_another_ratio(value: float) -> bool:
    return value != ScheduleConfig().min_lr_ratio


ON, OFF, GIVEN = _is_on, _is_off, _is_given
"""Tests of a value: whether it is something, whether it is nothing, and whether it is not none, as 0 is not."""


@dataclass(frozen=True)
class Row:
    """Settings that cannot be as they are at the same time.

    Attributes:
        settings: by name, values, or or a test such as `ON`; the first is named first.
        remedy: what to do.
        root: the configurations that it is for.
    """

    settings: Mapping[str, Any]
    remedy: str
    root: type = TrainConfig

    def problem(self, values: Mapping[str, Any]) -> str | None:
        """Return the sentence about settings that are so; None if they are not."""
        for name, asked in self.settings.items():
            if not (asked(values[name]) if callable(asked) else values[name] in asked):
                return None
        first, *others = [f"--{name}={format_value(values[name])}" for name in self.settings]
        return f"{first}{' with ' if others else ''}{' and '.join(others)}: {self.remedy}"


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
        {
            "stable_steps": GIVEN,
            "decay_steps": GIVEN,
            "schedule": ["wsd", "trapezoid"],
            "training_stage": ["initial"],
        },
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
    Row(
        {"max_rollbacks": ON, "max_skipped_steps": OFF},
        "no number of skipped updates rolls back; give one, as in 20",
    ),
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
    Row({"step": [None], "sample_id": [None], "steps": [None]}, "nothing to show: give one of them", InspectConfig),
    *(
        Row({"steps": GIVEN, name: asked}, f"a summary is of whole steps; {ONE}", InspectConfig)
        for name, asked in (("step", GIVEN), ("sample_id", GIVEN), ("rank", GIVEN), ("tokens", ON))
    ),
    Row({"prompt": ON, "prompt_tokens": ON}, f"both are prompts; {ONE}", SampleConfig),
    Row({"ckpt_path": ON, "data_path": ON}, f"verify checks one thing; {ONE}", VerifyConfig),
    Row({"datasets": ON, "ckpt_path": ON}, f"datasets are of token files; {ONE}", VerifyConfig),
    Row({"vocab_size": ON, "ckpt_path": ON}, f"a vocabulary is of token files; {ONE}", VerifyConfig),
    Row(
        {"ckpt_path": OFF, "data_path": OFF},
        "name a checkpoint or run, or token files (--data_path)",
        VerifyConfig,
    ),
)

VAIN = "the first has no effect"
_WITHOUT_RATIO = [name for name, entry in SCHEDULES.items() if "min_lr_ratio" not in entry.options]
REMARKS = (
    Row({"use_dummy_dataset": [True], "data_path": ON}, "tokens are made up, and no data is read"),
    Row({"selective_checkpointing": lambda value: value != ALL_BLOCKS, "fsdp_activation_checkpointing": [False]}, VAIN),
    Row({"min_lr_ratio": _is_another_ratio, "training_stage": ["annealing"]}, VAIN),
    Row({"min_lr_ratio": _is_another_ratio, "training_stage": ["initial"], "schedule": _WITHOUT_RATIO}, VAIN),
    Row({"sample_prompt": ON, "tokenizer_path": OFF}, VAIN),
    Row({"sample_prompt": ON, "sample_tokens": OFF}, VAIN),
)

RULES: list[Rule] = []


def check_config(config: Any) -> None:
    """Check a configuration that was made in Python: type and limits of each setting, then the rules over several.

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
    """Return what the rules have to say about a configuration whose single values are within their limits.

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
    """Return a line for each setting that another one leaves without an effect, so that one flag can be flipped."""
    values = values_of(config)
    return [line for row in REMARKS if (line := row.problem(values)) is not None]


def _rule(*more: str, root: type = TrainConfig, not_for: tuple[type, ...] = ()) -> Callable[[Check], Check]:
    """Add a rule to the list; the arguments are those of `Rule`."""

    def add(check: Check) -> Check:
        RULES.append(Rule(root, check, more, not_for))
        return check

    return add


def _unread(flag: str, chosen: str, options: Mapping[str, Sequence[str]], given: Iterable[str]) -> Problems:
    """Yield a problem for each given setting that the chosen entry of a table does not read; `options` are those."""
    for name in given:
        if chosen in options and name not in options[chosen]:
            readers = " or ".join(other for other, names in options.items() if name in names)
            yield f"--{name} is for --{flag}={readers}, and {chosen} does not read it: leave one out"


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


@_rule()
def _each_dataset_has_a_weight(datasets: tuple[str, ...], weights: tuple[float, ...]) -> Problems:
    if weights and datasets and (len(weights) != len(datasets) or min(weights) < 0 or not any(weights)):
        yield (
            f"--weights={format_value(weights)}: give a number of at least 0 for each of "
            f"--datasets={format_value(datasets)}, in the same order, and one of them above 0"
        )


@_rule()
def _ranges_can_be_read(skip_samples: tuple[str, ...], profile_steps: tuple[str, ...]) -> Problems:
    for name, texts, smallest in (("skip_samples", skip_samples, 0), ("profile_steps", profile_steps, 1)):
        try:
            for text in texts:
                parse_range(text, smallest)
        except ValueError:
            yield (
                f"--{name}={','.join(texts)}: write the first and the last of each range, counted from {smallest}, "
                "as in 10-12,1000-1002"
            )


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
    if training_stage != "annealing":
        yield from _unread("schedule", schedule, {name: entry.options for name, entry in SCHEDULES.items()}, given)
    elif schedule != ScheduleConfig().schedule or given:
        others = [f"--{name}" for name in given] or [f"--schedule={schedule}"]
        yield (
            "--training_stage=annealing is a schedule of its own, from the peak to zero: leave it out, or "
            f"{', '.join(others)}"
        )


@_rule()
def _points_can_be_read(schedule_points: tuple[str, ...]) -> Problems:
    for text in schedule_points:
        parse_point(text)
    return ()


# Optimizer


_OPTIMIZER_OPTIONS = sorted({option for entry in OPTIMIZERS.values() for option in entry.options})


@_rule(*_OPTIMIZER_OPTIONS)
def _the_optimizer_reads_what_is_given(optimizer: str, **options: Any) -> Problems:
    given = [name for name, value in options.items() if value != getattr(OptimizerConfig(), name)]
    yield from _unread("optimizer", optimizer, {name: entry.options for name, entry in OPTIMIZERS.items()}, given)


@_rule()
def _nesterov_needs_momentum(optimizer: str, momentum: float | None, nesterov: bool | None) -> Problems:
    chosen = OptimizerConfig(optimizer=optimizer, momentum=momentum, nesterov=nesterov).resolved()
    if chosen.nesterov and not chosen.momentum:
        yield f"--nesterov=true looks ahead along the momentum, and --momentum={momentum} has none: change one"


@_rule()
def _options_belong_to_an_optimizer_of_the_users_own(optimizer: str, optimizer_options: tuple[str, ...]) -> Problems:
    if optimizer_options and optimizer in OPTIMIZERS:
        yield f"--optimizer_options are for an optimizer of your own, and {optimizer} has settings: leave them out"
    parse_options("optimizer_options", optimizer_options)


# Trackers


@_rule()
def _a_tracker_reads_what_is_given(
    tracker: tuple[str, ...],
    tracker_project_name: str | None,
    tracker_run_name: str | None,
    tracker_run_id: str | None,
) -> Problems:
    names = {"project_name": tracker_project_name, "run_name": tracker_run_name, "run_id": tracker_run_id}
    given = [f"tracker_{name}" for name, value in names.items() if value is not None]
    services = [each for each in tracker if each not in TRACKERS or TRACKERS[each].options]
    if tracker and given and not services:  # without trackers, what would be said to them waits until there are some
        yield f"--{given[0]} is for trackers that are services, such as wandb, and --tracker names none: leave it out"
    if tracker_run_id is not None and len(services) > 1:
        yield f"--tracker_run_id={tracker_run_id} can be the id of one tracker only: give one of {', '.join(services)}"


# Parallelism and precision


@_rule()
def _checkpointed_blocks_can_be_read(selective_checkpointing: str) -> Problems:
    if selective_checkpointing != PER_OPERATION:
        share_of_blocks(selective_checkpointing)
    return ()


@_rule()
def _matrices_fit_float8(float8: str | None, seq_length: int, model: ModelConfig) -> Problems:
    if float8 is None:
        return
    sides = {"seq_length": seq_length}
    given = (model.hidden_size, model.intermediate_size, model.num_attention_heads, model.num_key_value_heads)
    if model.model_variant is not None or None not in given:  # otherwise a checkpoint may say the rest
        try:
            shape = resolve_shape(model)
        except ConfigError:  # the rule about the model says so
            return
        sides |= {
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_key_value_heads x head size": shape.num_key_value_heads * shape.head_dim,
        }
    for name, side in sides.items():
        if side % FLOAT8_MULTIPLE:
            yield (
                f"--{name}={side} / {FLOAT8_MULTIPLE} = {side / FLOAT8_MULTIPLE:g}, and --float8={float8} multiplies "
                f"matrices whose sides are multiples of {FLOAT8_MULTIPLE}: change one"
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
            "--ckpt_save_path=<folder>, or leave them out"
        )
    if tracker and tracker_dir is None:
        yield f"--tracker={format_value(tracker)} needs a folder: give --tracker_dir or --ckpt_save_path"


# Guards


@_rule()
def _processes_wait_for_a_year_at_most(hang_timeout: Duration, first_step_timeout: Duration) -> Problems:
    for name, timeout in (("hang_timeout", hang_timeout), ("first_step_timeout", first_step_timeout)):
        if timeout.amount > LONGEST_TIMEOUT_SECONDS:
            yield f"--{name}={timeout} is more than a year: give less, or --{name}=0s, which is never"


# Other commands


@_rule(root=PrepareConfig)
def _text_has_one_source(input_path: tuple[str, ...], source: str | None, hf_dataset: str | None) -> Problems:
    given = {"--input_path": ",".join(input_path), "--source": source, "--hf_dataset": hf_dataset}
    named = [f"{flag}={value}" for flag, value in given.items() if value]
    if len(named) != 1:
        yield f"{' and '.join(named) or 'nothing'} says which text to prepare: give one of {', '.join(given)}"


@_rule("dataset", "source", "hf_dataset", "input_path", "extensions", root=PrepareConfig)
def _a_dataset_is_named_like_a_folder(**naming: Any) -> Problems:
    name = PrepareConfig(**naming).dataset_name
    is_suggested = naming["dataset"] is not None or naming["source"] or naming["hf_dataset"] or naming["input_path"]
    if is_suggested and (not name or name.startswith(".") or "/" in name or "," in name):
        yield f"{name!r} is no plain name of a folder that is not hidden: give another --dataset=<name>"


@_rule(root=InspectConfig)
def _steps_to_show_are_a_range(inspect: InspectSettings) -> Problems:
    try:
        _ = inspect.steps and inspect.step_range
    except ValueError:
        yield f"--steps={inspect.steps}: write the first and the last step, as in --steps=1-1000"


@_rule(root=InspectConfig)
def _a_rank_is_one_of_the_world(rank: int | None, world_size: int | None) -> Problems:
    if rank is not None and world_size is not None and rank >= world_size:
        yield f"--rank={rank} is not there: --world_size={world_size} has ranks 0 to {world_size - 1}"
