"""Every rule that looks at more than one setting, or at more of one than its type and limits, in one place.

A rule is a function from the configuration of a command to the problems that it sees; the annotation says which
configuration. It names the settings it reads: it is left out where one of them could not be read and would only make a
second, misleading problem. Rules use what is known before a run starts; what needs the number of GPUs or the data is
checked where that is known (`batch.py`, `Duration.to_steps`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from pretraining.config.commands import InspectConfig, PrepareConfig, VerifyConfig
from pretraining.config.fields import settings_of, values_of
from pretraining.config.plugins import OPTIMIZERS, OWN, TOKEN_FORMATS, parse_options
from pretraining.config.training import (
    ALL_BLOCKS,
    PER_OPERATION,
    ModelConfig,
    TrainConfig,
    checkpointed_blocks,
    share_of_blocks,
)
from pretraining.config.values import format_value, limit_problem, nearest
from pretraining.config.variants import VARIANTS, resolve_shape
from pretraining.errors import ConfigError
from pretraining.progress import Duration

FLOAT8_MULTIPLE = 16
"""Sides of matrices that multiply in float8 are multiples of this."""

Problems = Iterator[str]
Check = TypeVar("Check", bound=Callable[..., Problems])


@dataclass(frozen=True)
class Rule:
    """A check over several settings.

    Attributes:
        root: the configurations that it is for.
        reads: names of the settings that it looks at.
        check: yields a sentence for each problem, naming the flag to change.
    """

    root: type
    reads: frozenset[str]
    check: Callable[..., Problems]


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
    rules = [rule for rule in RULES if isinstance(config, rule.root) and rule.reads.isdisjoint(unreadable)]
    return [problem for rule in rules for problem in rule.check(config)]


def _rule(*reads: str) -> Callable[[Check], Check]:
    """Adds a rule, which reads the named settings of the configuration it is annotated with, to the list."""

    def add(check: Check) -> Check:
        RULES.append(Rule(get_type_hints(check)["config"], frozenset(reads), check))
        return check

    return add


_MODEL = tuple(settings_of(ModelConfig))
_MAY_BE_EPOCHS = tuple(name for name, setting in settings_of(TrainConfig).items() if "epochs" in setting.units)


# Model


@_rule(*_MODEL)
def _the_model_can_be_built(config: TrainConfig) -> Problems:
    try:
        resolve_shape(config.model)
    except ConfigError as error:
        yield from error.problems


# Data


@_rule("data_path", "use_dummy_dataset")
def _there_is_one_source_of_data(config: TrainConfig) -> Problems:
    data = config.data
    if data.data_path is None and not data.use_dummy_dataset:
        yield "no data: give --data_path, --use_dummy_dataset=true or --recipe=demo"
    if data.data_path is not None and data.use_dummy_dataset:
        yield (
            f"two sources of data: --data_path={data.data_path} and --use_dummy_dataset=true, which makes its tokens "
            "up; give --data_path=none or --use_dummy_dataset=false"
        )


@_rule("file_type", "token_dtype", "data_path")
def _the_format_of_token_files_is_known(config: TrainConfig) -> Problems:
    data, known = config.data, ("auto", *TOKEN_FORMATS)
    if "parquet" in data.file_type.lower():
        yield (
            f"--file_type={data.file_type}: training does not read Parquet. Make token files of it first: "
            f"pretrain prepare --input_path={data.data_path} --output_path=<folder>"
        )
    elif data.file_type not in known and not OWN.fullmatch(data.file_type):
        near = nearest(data.file_type, known)
        hint = f"; did you mean {near}?" if near else ""
        yield (
            f"--file_type={data.file_type} must be {', '.join(known)} or a class of your own as "
            f"package.module:Class{hint}"
        )
    if data.token_dtype is not None and data.file_type in ("arrow", "npy"):
        own = f"*.{data.file_type} files say the type of their tokens"
        yield f"--token_dtype={data.token_dtype} is for *.bin files; {own}"


@_rule("use_dummy_dataset", *_MAY_BE_EPOCHS)
def _epochs_need_a_dataset(config: TrainConfig) -> Problems:
    if not config.data.use_dummy_dataset:
        return
    values = values_of(config)
    for name in _MAY_BE_EPOCHS:
        if isinstance(values[name], Duration) and values[name].unit == "epochs":
            yield (
                f"--{name}={values[name]} counts passes over a dataset, and made-up data has no end: give steps or "
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
def _each_dataset_has_a_weight(config: TrainConfig) -> Problems:
    datasets, weights = config.data.datasets, config.data.weights
    given = f"--weights={format_value(weights)}"
    if weights and not datasets:
        yield f"{given} are proportions of nothing: give --datasets, in the same order"
    elif weights and len(weights) != len(datasets):
        yield (
            f"{len(weights)} weights for {len(datasets)} datasets: {given} needs one for each of "
            f"--datasets={format_value(datasets)}, in the same order"
        )
    for position, weight in enumerate(weights, start=1):
        if weight < 0:
            yield f"{given}: number {position} is {weight:g}, and proportions are at least 0"
    if weights and not any(weights):
        yield f"{given} leave every dataset out: give one of them more than 0"


@_rule("datasets")
def _each_dataset_is_named_once(config: TrainConfig) -> Problems:
    datasets = config.data.datasets
    for name, times in Counter(datasets).items():
        if times > 1:
            yield f"--datasets={format_value(datasets)} names {name} {times} times; give it once, with a larger weight"


@_rule("skip_samples")
def _skipped_samples_are_ranges(config: TrainConfig) -> Problems:
    try:
        _ = config.data.skipped_ranges
    except ValueError:
        yield (
            f"skip_samples={','.join(config.data.skip_samples)}: write the first and the last sample of each range, "
            "as in --skip_samples=307200-309759,400000-400255"
        )


@_rule("bos_token", "sep_token", "vocab_size", "model_variant")
def _virtual_tokens_are_in_the_vocabulary(config: TrainConfig) -> Problems:
    model = config.model
    if model.model_variant is None and model.vocab_size is None:
        return  # may be a checkpoint's: looked at again once that is known
    if model.model_variant is not None and model.model_variant.lower() not in VARIANTS:
        return  # the rule about the model says so
    vocab_size = resolve_shape(ModelConfig(model_variant=model.model_variant, vocab_size=model.vocab_size)).vocab_size
    for name, token in (("bos_token", config.data.bos_token), ("sep_token", config.data.sep_token)):
        if token is not None and token >= vocab_size:
            yield (
                f"--{name}={token} is outside a vocabulary of {vocab_size} (0 to {vocab_size - 1}): "
                f"change --{name} or --vocab_size"
            )


# Length and batch


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


# Optimizer


@_rule("optimizer", "optimizer_options")
def _options_belong_to_an_optimizer_of_the_users_own(config: TrainConfig) -> Problems:
    optimizer = config.optimizer
    try:
        parse_options("optimizer_options", optimizer.optimizer_options)
    except ConfigError as error:
        yield str(error)
    if optimizer.optimizer_options and optimizer.optimizer in OPTIMIZERS:
        yield (
            f"--optimizer_options are for an optimizer of your own, and {optimizer.optimizer} reads the settings "
            f"{', '.join(OPTIMIZERS[optimizer.optimizer].options)}: leave them out"
        )


# Parallelism and precision


@_rule("hsdp_group_size", "sharding_strategy")
def _groups_belong_to_hsdp(config: TrainConfig) -> Problems:
    size, strategy = config.parallel.hsdp_group_size, config.parallel.sharding_strategy
    if size is not None and not strategy.startswith("hsdp"):
        yield (
            f"--hsdp_group_size={size} needs --sharding_strategy=hsdp or hsdp_zero2, which shard inside groups; "
            f"{strategy} has no groups. Change one or leave --hsdp_group_size out"
        )


@_rule("replica_check_interval", "sharding_strategy")
def _compared_replicas_exist(config: TrainConfig) -> Problems:
    interval, strategy = config.guard.replica_check_interval, config.parallel.sharding_strategy
    if interval.amount and strategy in ("fsdp", "zero2"):
        yield (
            f"--replica_check_interval={interval} compares copies of the weights, and {strategy} keeps one, in pieces: "
            "give --replica_check_interval=0, or --sharding_strategy=ddp or hsdp"
        )


@_rule("fsdp_activation_checkpointing", "selective_checkpointing", "num_hidden_layers", "model_variant")
def _checkpointed_blocks_exist(config: TrainConfig) -> Problems:
    selective, is_on = config.parallel.selective_checkpointing, config.parallel.fsdp_activation_checkpointing
    layers = _known_layers(config.model)
    try:
        if selective != PER_OPERATION:
            share_of_blocks(selective)
        if is_on and layers is not None:
            checkpointed_blocks(selective, layers)
    except ConfigError as error:
        yield from error.problems
        return
    if not is_on and selective != ALL_BLOCKS:
        yield (
            f"--selective_checkpointing={selective} says which blocks --fsdp_activation_checkpointing is for, and that "
            "is off: add --fsdp_activation_checkpointing=true, or leave --selective_checkpointing out"
        )


def _known_layers(model: ModelConfig) -> int | None:
    """Returns the blocks of the model; None where a checkpoint may say, which is looked at again once that is known."""
    if model.num_hidden_layers is not None:
        return model.num_hidden_layers
    variant = VARIANTS.get((model.model_variant or "").lower())
    return None if variant is None else variant.num_hidden_layers


@_rule("mp_dtype", "mixed_precision")
def _a_dtype_of_mixed_precision_is_used(config: TrainConfig) -> Problems:
    parallel = config.parallel
    if parallel.mixed_precision is False and parallel.mp_dtype != "bfloat16":
        yield (
            f"--mp_dtype={parallel.mp_dtype} is what --mixed_precision computes in, and that is off: give "
            "--mixed_precision=true, or leave --mp_dtype out"
        )


@_rule("float8", "mp_dtype", "mixed_precision")
def _float8_goes_with_bfloat16(config: TrainConfig) -> Problems:
    parallel = config.parallel
    if parallel.float8 is not None and (parallel.mixed_precision is False or parallel.mp_dtype != "bfloat16"):
        other = "--mixed_precision=false" if parallel.mixed_precision is False else f"--mp_dtype={parallel.mp_dtype}"
        yield (
            f"--float8={parallel.float8} goes with computing all else in bfloat16, and {other} is given: leave one of "
            "them out"
        )


@_rule("float8", "seq_length", *_MODEL)
def _matrices_fit_float8(config: TrainConfig) -> Problems:
    model, scaling = config.model, config.parallel.float8
    sides = {f"--seq_length={config.data.seq_length}": config.data.seq_length}
    given = (model.hidden_size, model.intermediate_size, model.num_attention_heads, model.num_key_value_heads)
    if scaling is None:
        return
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
                f"--float8={scaling} multiplies matrices whose sides are multiples of {FLOAT8_MULTIPLE}; {origin}: "
                f"{side} / {FLOAT8_MULTIPLE} = {side / FLOAT8_MULTIPLE:g}. Change it, or leave --float8 out"
            )


# Checkpoints


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


# Guards and profiler


@_rule("max_rollbacks", "max_skipped_steps")
def _rollbacks_have_an_occasion(config: TrainConfig) -> Problems:
    if config.guard.max_rollbacks and not config.guard.max_skipped_steps:
        yield (
            f"--max_rollbacks={config.guard.max_rollbacks} happen after --max_skipped_steps updates left out in a row, "
            "and 0 is never: give --max_skipped_steps=20, or --max_rollbacks=0"
        )


@_rule("profile_steps")
def _profiled_steps_are_ranges(config: TrainConfig) -> Problems:
    try:
        _ = config.profiler.step_ranges
    except ValueError:
        yield (
            f"profile_steps={','.join(config.profiler.profile_steps)}: write the first and the last step of each "
            "range, numbered from 1, as in --profile_steps=10-12,1000-1002"
        )


@_rule("use_profiler", "profile_steps", "profile_interval")
def _profiled_steps_need_the_profiler(config: TrainConfig) -> Problems:
    profiler = config.profiler
    if profiler.use_profiler:
        return
    if profiler.profile_steps:
        steps = format_value(profiler.profile_steps)
        yield f"--profile_steps={steps} needs --use_profiler=true: give it, or leave the steps out"
    if profiler.profile_interval.amount:
        yield f"--profile_interval={profiler.profile_interval} needs --use_profiler=true: give it, or leave it out"


# Other commands


@_rule("input_path", "source", "hf_dataset")
def _text_has_one_source(config: PrepareConfig) -> Problems:
    given = {
        "--input_path": ",".join(config.input_path),
        "--source": config.source,
        "--hf_dataset": config.hf_dataset,
    }
    named = [f"{flag}={value}" for flag, value in given.items() if value]
    if not named:
        yield (
            "there is no text to prepare: give --input_path=<files, folders or globs>, --hf_dataset=<name or folder> "
            "or --source=stdlib"
        )
    if len(named) > 1:
        yield f"{' and '.join(named)} all say which text to read: give one of them"


@_rule("hf_config", "hf_dataset")
def _a_configuration_is_of_a_dataset(config: PrepareConfig) -> Problems:
    if config.hf_config is not None and config.hf_dataset is None:
        yield f"--hf_config={config.hf_config} is of which dataset? Give --hf_dataset too, or leave it out"


@_rule("input_path", "extensions")
def _folders_have_files_to_read(config: PrepareConfig) -> Problems:
    if config.input_path and not config.extensions:
        yield (
            "--extensions is empty, so that no file of a folder would be read: name some, such as "
            "--extensions=txt,jsonl"
        )


@_rule("tokenizer_path", "vocab_size")
def _a_vocabulary_is_of_a_tokenizer_trained_here(config: PrepareConfig) -> Problems:
    if config.tokenizer_path is not None and config.vocab_size is not None:
        yield (
            f"--vocab_size={config.vocab_size} is for a tokenizer trained here, or for token ids without one, but "
            "--tokenizer_path gives one: drop one of them"
        )


@_rule("dataset", "source", "hf_dataset", "input_path", "extensions")
def _a_dataset_is_named_like_a_folder(config: PrepareConfig) -> Problems:
    name = config.dataset_name
    if not name and config.dataset is None:
        if config.input_path:
            yield "several inputs or a glob suggest no name for the dataset: give --dataset=<name>"
    elif not name or name.startswith(".") or "/" in name or "," in name:
        yield (
            f"{name!r} cannot be a dataset's name (a plain folder name, without '/' and ',', not hidden): give "
            "another --dataset"
        )


@_rule("step", "steps", "sample_id", "rank", "tokens")
def _there_is_something_to_show(config: InspectConfig) -> Problems:
    asked = config.inspect
    if asked.steps is None:
        if asked.step is None and asked.sample_id is None:
            yield "nothing to show: give --step=N, --sample_id=N, or --steps=A-B for a summary"
        return
    single = {"step": asked.step, "sample_id": asked.sample_id, "rank": asked.rank, "tokens": asked.tokens or None}
    given = [f"--{name}" for name, value in single.items() if value is not None]
    if given:
        yield f"--steps={asked.steps} is a summary of whole steps: leave out {', '.join(given)}"
    try:
        _ = asked.step_range
    except ValueError:
        yield f"--steps={asked.steps}: write the first and the last step, as in --steps=1-1000"


@_rule("rank", "world_size")
def _a_rank_is_one_of_the_world(config: InspectConfig) -> Problems:
    asked = config.inspect
    if asked.rank is None:
        return
    if asked.world_size is None:
        yield f"--rank={asked.rank} is one of how many? Give --world_size=<number of GPUs> too"
    elif asked.rank >= asked.world_size:
        yield f"--rank={asked.rank} is not there: --world_size={asked.world_size} has ranks 0 to {asked.world_size - 1}"


@_rule("ckpt_path", "data_path", "datasets", "vocab_size")
def _there_is_one_thing_to_verify(config: VerifyConfig) -> Problems:
    if config.ckpt_path is None and config.data_path is None:
        yield "nothing to check: give a checkpoint or run, as in `pretrain verify runs/a`, or --data_path"
    if config.ckpt_path is not None and config.data_path is not None:
        yield f"--ckpt_path={config.ckpt_path} and --data_path={config.data_path} are two things to check: give one"
    elif config.ckpt_path is not None:
        for name in ("datasets", "vocab_size"):
            if getattr(config, name):
                yield f"--{name} is about token files, and --ckpt_path about checkpoints: leave it out"
