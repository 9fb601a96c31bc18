"""Every rule over several settings.

Most rules are rows: settings that contradict each other, and the remedy. The other rules are functions of a
configuration that yield one sentence per problem, with the flags to change, or raise a ConfigError. A setting that
could not be parsed has a problem already, so problems about it are dropped. Rules that need the number of GPUs, the
batch or the data are elsewhere (`batch_sizes.py`, `progress.py`, `optim/horizon.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pretraining.config.fields import settings_of, values_of
from pretraining.config.plugins import OPTIMIZERS, SCHEDULES, TRACKERS, Entry, parse_options
from pretraining.config.strategies import STRATEGIES
from pretraining.config.training import ALL_BLOCKS, EvaluationConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from pretraining.config.values import format_value
from pretraining.config.variants import resolve_shape
from pretraining.durations import Duration
from pretraining.errors import ConfigError, Problem
from pretraining.files import is_address

FLOAT8_MULTIPLE = 16
"""Divides every dimension of a matrix in a float8 product."""

Problems = Iterable[str | Problem]
T = TypeVar("T")


def is_on(value: Any) -> bool:
    """Return whether a value is not none, false, zero or empty."""
    return bool(getattr(value, "amount", value))


def is_off(value: Any) -> bool:
    """Return whether a value is none, false, zero or empty."""
    return not is_on(value)


def is_given(value: Any) -> bool:
    """Return whether a value is not none."""
    return value is not None


@dataclass(frozen=True)
class Row:
    """Settings that contradict each other.

    Attributes:
        settings: by name, the values that contradict, or a test such as `is_on`; messages name them in this order.
        remedy: what to do.
    """

    settings: Mapping[str, Any]
    remedy: str

    def problem(self, values: Mapping[str, Any]) -> Problem | None:
        """Return the problem if all settings have the values of this row, else None."""
        for name, wrong in self.settings.items():
            if not (wrong(values[name]) if callable(wrong) else values[name] in wrong):
                return None
        first, *others = [f"--{name}={format_value(values[name])}" for name in self.settings]
        text = f"{first}{' with ' if others else ''}{' and '.join(others)}: {self.remedy}"
        return Problem(tuple(self.settings), text)


@dataclass(frozen=True)
class Rules:
    """The rules of a configuration. A command's dataclass names its own as the class attribute `RULES`.

    Attributes:
        checks: functions for the rules that are no rows; each yields problems.
    """

    rows: tuple[Row, ...] = ()
    checks: tuple[Callable[[Any], Problems], ...] = ()

    def problems(self, config: Any) -> list[Problem]:
        """Return the problems of a configuration whose single values are valid."""
        values = values_of(config)
        problems: list[str | Problem] = [problem for row in self.rows if (problem := row.problem(values)) is not None]
        for check in self.checks:
            try:
                problems.extend(check(config))
            except ConfigError as error:
                problems.extend(error.found)
        return ConfigError(problems).found


NO_EVALUATION_SET = {"held_out_fraction": is_off, "eval_datasets": is_off}
NO_EVALUATION = {**NO_EVALUATION_SET, "eval_tasks": is_off, "evaluators": is_off}
DROP_ONE = "leave one of them out"
_WITH_POINTS = [name for name, entry in SCHEDULES.items() if "schedule_points" in entry.options]
_WITHOUT_GROUPS = [name for name, strategy in STRATEGIES.items() if not strategy.in_groups]
_WITHOUT_REPLICAS = [name for name in _WITHOUT_GROUPS if STRATEGIES[name].shards_gradients]
ROWS = (
    # length and schedule
    Row({"num_steps": is_off}, "give a length, in steps (1000), tokens (5Btok) or epochs (2ep)"),
    Row({"stable_steps": is_given, "decay_steps": is_given}, "both set the start of the decay: keep one"),
    Row({"schedule": _WITH_POINTS, "schedule_points": is_off}, "give points, as in 0:0,80%:1,100%:0.1"),
    # data, parallelism and precision
    Row({"token_dtype": is_given, "file_type": ["arrow", "npy"]}, f"these files store their type; {DROP_ONE}"),
    Row({"float8": is_on, "mixed_precision": [False]}, f"float8 needs bfloat16 for all other operations; {DROP_ONE}"),
    Row({"float8": is_on, "mp_dtype": ["float16"]}, f"float8 needs bfloat16 for all other operations; {DROP_ONE}"),
    Row({"mp_dtype": ["float16"], "mixed_precision": [False]}, f"mixed precision is off; {DROP_ONE}"),
    Row({"hsdp_group_size": is_on, "sharding_strategy": _WITHOUT_GROUPS}, f"this strategy has no groups; {DROP_ONE}"),
    Row({"replica_check_interval": is_on, "sharding_strategy": _WITHOUT_REPLICAS}, "there are no replicas; change one"),
    # checkpoints
    Row({"weights_only": [True], "ckpt_load_path": is_off}, "name the run or checkpoint whose weights to load"),
    Row({"init_from": ["scratch"], "ckpt_load_path": is_on}, f"a run from scratch loads nothing; {DROP_ONE}"),
    Row({"init_from": ["scratch"], "resume_from_checkpoint": is_on}, f"a run from scratch loads nothing; {DROP_ONE}"),
    Row({"resume_from_checkpoint": is_on, "ckpt_load_path": is_on}, f"both set where to start; {DROP_ONE}"),
    Row({"ckpt_format": ["full"], "async_save": [True]}, f"full checkpoints cannot be saved async; {DROP_ONE}"),
    # evaluation
    *(
        Row({name: is_on, **NO_EVALUATION}, "give something to evaluate, with one of the last four")
        for name in ("best_by", "early_stopping_evaluations", "eval_only", "sample_at_evaluations")
    ),
    *(
        Row(
            {"early_stopping_evaluations": is_on, name: is_on, "best_by": is_off, **NO_EVALUATION_SET},
            "give --best_by=<task>/<metric> or a number of evaluators, or documents to evaluate on",
        )
        for name in ("eval_tasks", "evaluators")
    ),
    *(
        Row({name: is_given, "eval_tasks": is_off}, "give tasks, with the last one")
        for name in ("eval_tasks_path", "eval_tasks_interval", "eval_tasks_limit", "eval_tasks_shots")
    ),
    Row(
        {"held_out_fraction": is_on, "eval_only": [True], "data_path": is_off, "use_dummy_dataset": is_off},
        "held-out documents come from --data_path: give --data_path, or --held_out_fraction=0",
    ),
    Row(
        {"early_stopping_evaluations": is_on, "eval_interval": is_off, "eval_tasks_interval": is_off},
        "the only evaluation is at the end; change one",
    ),
    *(
        Row({"sample_at_evaluations": [True], **without}, "no text can be generated; change one")
        for without in ({"tokenizer_path": is_off, "data_path": is_off}, {"sample_tokens": is_off})
    ),
    Row({"dry_run": [True], "eval_only": [True], "eval_tasks": is_off}, "a dry run shows a training run or tasks"),
    # guards and profiler
    Row({"max_rollbacks": is_on, "max_skipped_steps": is_off}, "no rollback would ever happen; change one"),
    *(
        Row({name: is_on, "use_profiler": [False]}, f"give --use_profiler=true, or leave --{name} out")
        for name in ("profile_steps", "profile_interval")
    ),
)

NO_EFFECT = "the first has no effect"
_WITHOUT_RATIO = [name for name, entry in SCHEDULES.items() if "min_lr_ratio" not in entry.options]
_CHANGED_INTERVAL = {
    "eval_interval": lambda interval: interval not in (EvaluationConfig().eval_interval, Duration(0, "steps"))
}
_CHANGED_RATIO = {"min_lr_ratio": lambda ratio: ratio != ScheduleConfig().min_lr_ratio}
INEFFECTIVE = (
    Row({"use_dummy_dataset": [True], "data_path": is_on}, "tokens are generated, and no data is read"),
    Row(
        {"selective_checkpointing": lambda value: value != ALL_BLOCKS, "fsdp_activation_checkpointing": [False]},
        NO_EFFECT,
    ),
    Row({**_CHANGED_RATIO, "training_stage": ["annealing"]}, NO_EFFECT),
    Row({**_CHANGED_RATIO, "training_stage": ["initial"], "schedule": _WITHOUT_RATIO}, NO_EFFECT),
    Row({"muon_adam_weight_decay": is_on, "tie_word_embeddings": [True]}, "a tied head does not decay, as embeddings"),
    Row({**_CHANGED_INTERVAL, **NO_EVALUATION}, "there is nothing to evaluate"),
)


def find_problems(config: Any, unreadable: Collection[str] = ()) -> list[Problem]:
    """Return the problems that the rules find in a configuration whose single values are valid.

    Args:
        config: the configuration.
        unreadable: settings whose given value could not be parsed, and that hold their default.
    """
    rules = [TRAINING, COMPLETED] if isinstance(config, TrainConfig) else []
    rules.append(getattr(config, "RULES", Rules()))
    problems = [problem for rule in rules for problem in rule.problems(config)]
    return [problem for problem in dict.fromkeys(problems) if set(unreadable).isdisjoint(problem.names)]


def check_completed(config: TrainConfig) -> None:
    """Check the rules over values that a start completes; raise a ConfigError with every problem."""
    if problems := COMPLETED.problems(config):
        raise ConfigError(problems)
    if config.evaluation.sample_at_evaluations and config.data.tokenizer_path is None:
        raise ConfigError("--sample_at_evaluations=true: the data has no tokenizer; give --tokenizer_path")


def ineffective_settings(config: TrainConfig) -> list[str]:
    """Return a line per setting that has no effect because of another one. They are allowed: users flip one flag."""
    values = values_of(config)
    return [problem.text for row in INEFFECTIVE if (problem := row.problem(values)) is not None]


# Training


def _check_model(config: TrainConfig) -> Problems:
    resolve_shape(config.model)
    return ()


def _check_data(config: TrainConfig) -> Problems:
    data, evaluation = config.data, config.evaluation
    if (
        data.data_path is None
        and not data.use_dummy_dataset
        and not (evaluation.eval_only and (evaluation.eval_datasets or evaluation.eval_tasks or evaluation.evaluators))
    ):
        yield "no data: give --data_path, --use_dummy_dataset=true or --recipe=demo"
    weights = data.weights
    if weights and (len(weights) != len(data.datasets) or min(weights) < 0 or not any(weights)):
        yield (
            f"--weights={format_value(weights)}: give a number of at least 0 for each of "
            f"--datasets={format_value(data.datasets)}, in the same order, at least one above 0"
        )


def _check_ranges(config: TrainConfig) -> Problems:
    _ = config.data.skipped_ranges, config.profiler.step_ranges
    return ()


def _check_schedule(config: TrainConfig) -> Problems:
    schedule, options = config.schedule, {option for entry in SCHEDULES.values() for option in entry.options}
    given = [name for name in sorted(options - {"min_lr_ratio"}) if getattr(schedule, name) not in (None, ())]
    if schedule.training_stage != "annealing":
        yield from _unread_settings("schedule", schedule.schedule, SCHEDULES, given)
    elif given or schedule.schedule != ScheduleConfig().schedule:
        others = ", ".join(f"--{name}" for name in given or ["schedule"])
        yield f"--training_stage=annealing replaces the schedule: leave it out, or {others}"


def _check_optimizer(config: TrainConfig) -> Problems:
    optimizer, options = config.optimizer, {option for entry in OPTIMIZERS.values() for option in entry.options}
    default = OptimizerConfig()
    given = [name for name in sorted(options) if getattr(optimizer, name) != getattr(default, name)]
    yield from _unread_settings("optimizer", optimizer.optimizer, OPTIMIZERS, given)
    if optimizer.optimizer_options and optimizer.optimizer in OPTIMIZERS:
        yield f"--optimizer_options is for a user-defined optimizer, not for {optimizer.optimizer}: leave it out"
    parse_options("optimizer_options", optimizer.optimizer_options)


def _unread_settings(flag: str, chosen: str, table: Mapping[str, Entry], given: Iterable[str]) -> Problems:
    """Yield a problem per given setting that the chosen entry of a table does not read."""
    for name in given:
        if chosen in table and name not in table[chosen].options:
            readers = " or ".join(other for other, entry in table.items() if name in entry.options)
            yield f"--{name} is for --{flag}={readers}, and {chosen} does not read it: leave one out"


def _check_trackers(config: TrainConfig) -> Problems:
    report = config.report
    services = [name for name in report.tracker if name not in TRACKERS or TRACKERS[name].options]
    names = ("tracker_project_name", "tracker_run_name", "tracker_run_id")
    given = [name for name in names if getattr(report, name) is not None]
    if len(set(report.tracker)) < len(report.tracker):
        yield f"--tracker={format_value(report.tracker)} names a tracker twice: give each once"
    if report.tracker and given and not services:  # without any tracker these settings are harmless
        yield f"--{given[0]} is for services such as wandb, and --tracker names none: leave it out"
    if report.tracker_run_id is not None and len(services) > 1:
        yield f"--tracker_run_id={report.tracker_run_id} is for one tracker: give one of {', '.join(services)}"


def _check_norms(config: TrainConfig) -> Problems:
    interval, reports = config.report.norms_interval, config.report.report_interval
    if interval and (reports.unit != "steps" or not reports.amount or interval % reports.amount):
        yield (
            f"--norms_interval={interval} with --report_interval={reports}: norms are part of reports: give a multiple "
            "of a --report_interval in steps"
        )


def _check_window(config: TrainConfig) -> Problems:
    if config.model.model_variant is None and config.model.sliding_window is None:
        return  # weights may have one: `check_completed`
    window, seq_length = resolve_shape(config.model).sliding_window, config.data.seq_length
    if window is not None and seq_length > window:
        yield (
            f"--seq_length={seq_length} exceeds the model's sliding window of {window} tokens, and attention covers "
            f"whole sequences here: give at most {window}, or --sliding_window=0 to train the weights without a window"
        )


def _check_context(config: TrainConfig) -> Problems:
    size, length = config.parallel.context_parallel_size, config.data.seq_length
    if size > 1 and length % (2 * size):
        fitting = length // (2 * size) * 2 * size
        yield (
            f"--seq_length={length} / (2 x --context_parallel_size={size}) = {length / (2 * size):g}: each sequence is "
            f"cut into {2 * size} equal chunks, so give a multiple of {2 * size}"
            f"{f', such as {fitting}' if fitting else ''}"
        )


def _check_float8(config: TrainConfig) -> Problems:
    model, context = config.model, config.parallel.context_parallel_size
    dimensions = (model.hidden_size, model.intermediate_size, model.num_attention_heads, model.num_key_value_heads)
    if config.parallel.float8 is None or (model.model_variant is None and None in dimensions):
        return  # a checkpoint may give the rest: `check_completed`
    shape = resolve_shape(model)
    for name, side in {
        "seq_length" + (f" / {context} ranks" if context > 1 else ""): config.data.seq_length // context,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_key_value_heads x head size": shape.num_key_value_heads * shape.head_dim,
    }.items():
        if side % FLOAT8_MULTIPLE:
            yield (
                f"--{name}={side} / {FLOAT8_MULTIPLE} = {side / FLOAT8_MULTIPLE:g}, but "
                f"--float8={config.parallel.float8} needs dimensions that {FLOAT8_MULTIPLE} divides: change one"
            )


def _check_addresses(config: TrainConfig) -> Problems:
    mirror = config.checkpoint.ckpt_mirror_path
    if mirror is not None and not is_address(mirror):
        yield f"--ckpt_mirror_path={mirror} is not an address: write s3://bucket/runs/mine, gs://, abfss:// or file://"
    if mirror is not None and "{timestamp}" in (config.checkpoint.ckpt_save_path or ""):
        yield "--ckpt_mirror_path holds one run: give a --ckpt_save_path without {timestamp}"
    if config.evaluation.eval_only and is_address(config.checkpoint.ckpt_load_path):
        yield "--eval_only=true cannot read an object store: copy the checkpoint to a disk first (aws s3 sync)"


def _check_run_folder(config: TrainConfig) -> Problems:
    if config.checkpoint.ckpt_save_path is not None or type(config) is not TrainConfig:
        return  # other commands accept the settings of any run
    if config.evaluation.eval_only:
        if config.checkpoint.ckpt_load_path is None:
            yield "--eval_only=true with --ckpt_save_path=none evaluates nothing: give --ckpt_load_path"
        return
    settings, values = settings_of(TrainConfig), values_of(config)
    need_folder = (*vars(config.checkpoint), "max_rollbacks", "use_profiler", "memory_snapshot")
    given = [name for name in need_folder if is_on(values[name]) and values[name] != settings[name].default]
    if config.report.tracker and config.report.tracker_dir is None:
        given.append("tracker")
    if given:
        flags = ", ".join(f"--{name}={format_value(values[name])}" for name in given)
        yield (
            f"{flags}: there is no run folder (--ckpt_save_path=none, the default with --use_dummy_dataset). Give "
            "--ckpt_save_path=<folder>, or leave them out"
        )


TRAINING = Rules(
    ROWS,
    (
        _check_data,
        _check_ranges,
        _check_schedule,
        _check_optimizer,
        _check_trackers,
        _check_context,
        _check_norms,
        _check_addresses,
        _check_run_folder,
    ),
)
"""The rules over settings as they are given."""
COMPLETED = Rules(checks=(_check_model, _check_float8, _check_window))
"""The rules over the model, which a start may complete; checked earlier, too, as far as the settings describe it."""
