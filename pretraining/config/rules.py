"""Every rule that looks at more than one setting, in one place.

A rule is a function from the configuration to the problems that it sees, and names the settings it reads, so that it is
left out where one of them could not be read and would only make a second, misleading problem. Rules use what is known
before a run starts; what needs the number of GPUs or the data is checked where that is known (`batch.py`,
`durations.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from pretraining.config.data import format_problems, skip_problems, source_problems, weights_problems
from pretraining.config.fields import settings_of, values_of
from pretraining.config.parallel import checkpointing_problems, float8_problems, precision_problems
from pretraining.config.profiler import profiling_problems, step_problems
from pretraining.config.training import ModelConfig, TrainConfig
from pretraining.config.values import format_value, limit_problem
from pretraining.config.variants import VARIANTS, resolve_shape
from pretraining.errors import ConfigError
from pretraining.progress import Duration

Problems = Iterator[str]


@dataclass(frozen=True)
class Rule:
    """A check over several settings.

    Attributes:
        reads: names of the settings that it looks at.
        check: yields a sentence for each problem, naming the flag to change.
    """

    reads: frozenset[str]
    check: Callable[[TrainConfig], Problems]


RULES: list[Rule] = []


def check_config(config: TrainConfig) -> None:
    """Check a configuration that was made in Python: the type and limits of each setting, then the rules over several.

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


def find_problems(config: TrainConfig, unreadable: Collection[str] = ()) -> list[str]:
    """Return what the rules have to say about a configuration whose single values are within their limits.

    Args:
        config: the configuration.
        unreadable: settings that hold their default only because what was given could not be read.
    """
    return [problem for rule in RULES if rule.reads.isdisjoint(unreadable) for problem in rule.check(config)]


def _rule(*reads: str) -> Callable[[Callable[[TrainConfig], Problems]], Callable[[TrainConfig], Problems]]:
    """Add a rule, which reads the named settings, to the list."""

    def add(check: Callable[[TrainConfig], Problems]) -> Callable[[TrainConfig], Problems]:
        RULES.append(Rule(frozenset(reads), check))
        return check

    return add


@_rule(*settings_of(ModelConfig))
def _the_model_can_be_built(config: TrainConfig) -> Problems:
    try:
        resolve_shape(config.model)
    except ConfigError as error:
        yield from error.problems


_DURATIONS = (
    *("num_steps", "warmup_steps"),
    *("checkpoint_interval", "preempt_interval", "eval_interval", "report_interval"),
    *("replica_check_interval", "profile_interval"),
)


def _durations(config: TrainConfig) -> list[tuple[str, Duration | None]]:
    """The settings that may be in epochs, by name."""
    sections = (
        *(config.run, config.schedule),
        *(config.checkpoint, config.checkpoint, config.evaluation, config.report, config.guard, config.profiler),
    )
    return [(name, getattr(section, name)) for name, section in zip(_DURATIONS, sections, strict=True)]


@_rule("data_path", "use_dummy_dataset")
def _there_is_one_source_of_data(config: TrainConfig) -> Problems:
    yield from source_problems(config.data)


@_rule("file_type", "token_dtype", "data_path")
def _the_format_of_token_files_is_known(config: TrainConfig) -> Problems:
    yield from format_problems(config.data)


@_rule("use_dummy_dataset", *_DURATIONS)
def _epochs_need_a_dataset(config: TrainConfig) -> Problems:
    if config.data.use_dummy_dataset:
        for name, duration in _durations(config):
            if duration is not None and duration.unit == "epochs":
                yield (
                    f"--{name}={duration} counts passes over a dataset, and made-up data has no end: give steps or "
                    "tokens"
                )


@_rule("use_dummy_dataset", "datasets")
def _made_up_data_has_no_datasets(config: TrainConfig) -> Problems:
    if config.data.use_dummy_dataset and config.data.datasets:
        yield (
            f"--datasets={format_value(config.data.datasets)} names folders, and --use_dummy_dataset=true reads none; "
            "leave one out"
        )


@_rule("datasets", "weights")
def _weights_belong_to_datasets(config: TrainConfig) -> Problems:
    yield from weights_problems(config.data)


@_rule("bos_token", "sep_token", "vocab_size", "model_variant")
def _virtual_tokens_are_in_the_vocabulary(config: TrainConfig) -> Problems:
    model = config.model
    if model.model_variant is None:
        if model.vocab_size is None:  # may be a checkpoint's: looked at again once that is known
            return
    elif model.model_variant.lower() not in VARIANTS:  # the rule about the model says so
        return
    vocab_size = resolve_shape(ModelConfig(model_variant=model.model_variant, vocab_size=model.vocab_size)).vocab_size
    for name, token in (("bos_token", config.data.bos_token), ("sep_token", config.data.sep_token)):
        if token is not None and token >= vocab_size:
            yield (
                f"--{name}={token} is outside a vocabulary of {vocab_size} (0 to {vocab_size - 1}): "
                f"change --{name} or --vocab_size"
            )


def _known_layers(model: ModelConfig) -> int | None:
    """Blocks of the model; None where a checkpoint may say, which is looked at again once that is known."""
    if model.num_hidden_layers is not None:
        return model.num_hidden_layers
    variant = VARIANTS.get((model.model_variant or "").lower())
    return None if variant is None else variant.num_hidden_layers


@_rule("global_batch_size", "grad_accum_steps")
def _each_micro_batch_has_a_sequence(config: TrainConfig) -> Problems:
    size, steps = config.batch.global_batch_size, config.batch.grad_accum_steps
    if size is not None and steps is not None and steps > size:
        yield (
            f"--grad_accum_steps={steps} micro-batches cannot share --global_batch_size={size} sequences, even on one "
            f"GPU: give --grad_accum_steps={size} or less, or leave it out to have it derived"
        )


@_rule("num_steps")
def _the_run_has_a_length(config: TrainConfig) -> Problems:
    if config.run.num_steps.amount == 0:
        yield "--num_steps=0 trains nothing: give steps (1000), tokens (5Btok) or epochs (2ep)"


@_rule("warmup_steps", "num_steps", "global_batch_size", "seq_length")
def _warmup_fits_the_run(config: TrainConfig) -> Problems:
    warmup, length = config.schedule.warmup_steps, config.run.num_steps
    if warmup is None or length.amount == 0:
        return
    warmup_text, length_text = f"--warmup_steps={warmup}", f"--num_steps={length}"
    if warmup.unit != length.unit and config.batch.global_batch_size is not None:
        tokens_per_step = config.batch.global_batch_size * config.data.seq_length
        arithmetic = f" of {config.batch.global_batch_size} x {config.data.seq_length} tokens"
        if warmup.unit == "tokens" and length.unit == "steps":
            warmup = Duration(warmup.to_steps(tokens_per_step, None), "steps")
            warmup_text += f" ({warmup} steps{arithmetic})"
        elif warmup.unit == "steps" and length.unit == "tokens":
            length = Duration(length.to_steps(tokens_per_step, None), "steps")
            length_text += f" ({length} steps{arithmetic})"
    if warmup.unit == length.unit and warmup.amount > length.amount:
        yield f"{warmup_text} is longer than {length_text}: shorten the warm-up or lengthen the run"


@_rule("hsdp_group_size", "sharding_strategy")
def _groups_belong_to_hsdp(config: TrainConfig) -> Problems:
    size, strategy = config.parallel.hsdp_group_size, config.parallel.sharding_strategy
    if size is not None and not strategy.startswith("hsdp"):
        yield (
            f"--hsdp_group_size={size} needs --sharding_strategy=hsdp or hsdp_zero2, which shard inside groups; "
            f"{strategy} has no groups. Change one or leave --hsdp_group_size out"
        )


@_rule("fsdp_activation_checkpointing", "selective_checkpointing", "num_hidden_layers", "model_variant")
def _checkpointed_blocks_exist(config: TrainConfig) -> Problems:
    yield from checkpointing_problems(config.parallel, _known_layers(config.model))


@_rule("mp_dtype", "mixed_precision")
def _a_dtype_of_mixed_precision_is_used(config: TrainConfig) -> Problems:
    yield from precision_problems(config.parallel)


@_rule("float8", "mp_dtype", "mixed_precision", "seq_length", *settings_of(ModelConfig))
def _matrices_fit_float8(config: TrainConfig) -> Problems:
    model, sides = config.model, {f"--seq_length={config.data.seq_length}": config.data.seq_length}
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
    yield from float8_problems(config.parallel, sides)


@_rule("ckpt_save_path", "col_name")
def _names_are_not_empty(config: TrainConfig) -> Problems:
    if not config.checkpoint.ckpt_save_path:
        yield "--ckpt_save_path is empty: name the run's folder"
    if not config.data.col_name:
        yield "--col_name is empty: name the column that holds the token ids"


@_rule("weights_only", "ckpt_load_path")
def _weights_alone_come_from_somewhere(config: TrainConfig) -> Problems:
    if config.checkpoint.weights_only and config.checkpoint.ckpt_load_path is None:
        yield (
            "--weights_only=true begins with the weights of another run, and --ckpt_load_path names none: give it, or "
            "leave --weights_only out"
        )


@_rule("ckpt_format", "async_save")
def _unsharded_checkpoints_are_waited_for(config: TrainConfig) -> Problems:
    if config.checkpoint.ckpt_format == "full" and config.checkpoint.async_save:
        yield (
            "--ckpt_format=full is written while training waits, and --async_save=true asks for the opposite: leave "
            "one of them out"
        )


@_rule("skip_samples")
def _skipped_samples_are_ranges(config: TrainConfig) -> Problems:
    yield from skip_problems(config.data)


@_rule("max_rollbacks", "max_skipped_steps")
def _rollbacks_have_an_occasion(config: TrainConfig) -> Problems:
    if config.guard.max_rollbacks and not config.guard.max_skipped_steps:
        yield (
            f"--max_rollbacks={config.guard.max_rollbacks} happen after --max_skipped_steps updates left out in a row, "
            "and 0 is never: give --max_skipped_steps=20, or --max_rollbacks=0"
        )


@_rule("replica_check_interval", "sharding_strategy")
def _compared_replicas_exist(config: TrainConfig) -> Problems:
    interval, strategy = config.guard.replica_check_interval, config.parallel.sharding_strategy
    if interval.amount and strategy in ("fsdp", "zero2"):
        yield (
            f"--replica_check_interval={interval} compares copies of the weights, and {strategy} keeps one, in pieces: "
            "give --replica_check_interval=0, or --sharding_strategy=ddp or hsdp"
        )


@_rule("profile_steps")
def _profiled_steps_are_ranges(config: TrainConfig) -> Problems:
    yield from step_problems(config.profiler)


@_rule("use_profiler", "profile_steps", "profile_interval")
def _profiled_steps_need_the_profiler(config: TrainConfig) -> Problems:
    yield from profiling_problems(config.profiler)
