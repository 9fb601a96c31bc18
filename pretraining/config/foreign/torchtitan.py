"""The TOML file of torchtitan 0.2: [job], [model], [training], [parallelism] and the other sections.

What the file leaves out is torchtitan's default where that is another than here, and flags on top of the file
(`--training.steps=100`) are read as torchtitan reads them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pretraining.config.foreign.stub import data_settings
from pretraining.config.foreign.translation import (
    Rule,
    Source,
    Translating,
    as_here,
    becomes,
    copy_tree,
    left_out,
    one_of,
    plain,
    put,
)
from pretraining.config.plugins import TOKEN_SUFFIXES
from pretraining.config.values import did_you_mean
from pretraining.files import exists, is_file, is_folder

SIGNS = (
    *("job", "training.local_batch_size", "training.seq_len", "parallelism", "lr_scheduler.decay_type", "compile"),
    *(
        "activation_checkpoint",
        "metrics.log_freq",
        "profiling.enable_profiling",
        "model.flavor",
        "model.hf_assets_path",
    ),
)
DEFAULTS = {
    "model.flavor": "debugmodel",
    "optimizer.lr": "8e-4",
    "lr_scheduler.warmup_steps": "200",
    "lr_scheduler.decay_type": "linear",
    "lr_scheduler.min_lr_factor": "0.0",
    "training.local_batch_size": "8",
    "training.seq_len": "2048",
    "training.steps": "10000",
    "activation_checkpoint.mode": "selective",
}
"""What a file says without a word, where it is not what no flag means here."""
DEFAULTS_OF_CHECKPOINTS = {"checkpoint.interval": "500", "checkpoint.keep_latest_k": "10"}
"""The same where checkpoints are enabled."""
_DEFAULTS = Source("torchtitan's defaults", None, "", {})


def read(translating: Translating) -> None:
    """Translates a file, with the flags that are torchtitan's."""
    source = translating.source
    flags = {name: "false" if _is_negated(name) else raw for name, raw in source.overrides.items()}
    source, used = replace(source, overrides=flags).overridden(_key_of)
    for name in used:
        translating.use_override(name)
    translating.take(_with_defaults(source))
    if not _model_is_a_llama(translating):
        return
    translating.apply(TABLE)


def _key_of(name: str) -> str | None:
    """Returns the key that a flag sets: `--compile.no-enable` sets compile.enable."""
    section, _, last = name.replace("-", "_").rpartition(".")
    key = f"{section}.{last.removeprefix('no_') if _is_negated(name) else last}"
    return key if key in TABLE else None


def _is_negated(name: str) -> bool:
    section, _, last = name.replace("-", "_").rpartition(".")
    return last.startswith("no_") and f"{section}.{last.removeprefix('no_')}" in TABLE


def _with_defaults(source: Source) -> Source:
    tree, origins, given = copy_tree(source.tree), dict(source.origins), source.flattened()
    defaults = dict(DEFAULTS)
    if plain(str(given.get("checkpoint.enable"))) == "true":
        defaults |= DEFAULTS_OF_CHECKPOINTS
    elif any(key.startswith("checkpoint.") for key in given):
        defaults["checkpoint.enable"] = "false"
    for key, value in defaults.items():
        if key not in given:
            put(tree, key, value)
            origins[key] = (_DEFAULTS, key)
    return replace(source, tree=tree, origins=origins)


# Model


_LLAMA_31 = {"rope_scaling": "8,1,4,8192", "max_position_embeddings": "131072"}
"""torchtitan scales the rotary frequencies of every flavor as Llama 3.1 does."""
FLAVORS: dict[str, dict[str, str]] = {
    "8b": {"model_variant": "llama3_8b", "vocab_size": "128256", **_LLAMA_31},
    "70b": {"model_variant": "llama3_70b", "vocab_size": "128256", **_LLAMA_31},
    "debugmodel": {
        **{"hidden_size": "256", "num_hidden_layers": "6", "num_attention_heads": "16", "num_key_value_heads": "16"},
        **{"intermediate_size": "768", "vocab_size": "2048", "rope_theta": "500000", **_LLAMA_31},
    },
}
"""By the flavor's name in lower case, without what it says about attention."""
_ATTENTION = ("_flex", "_flex_attn", "_varlen", "_varlen_attn")
"""Endings of flavors whose attention stays inside documents."""
_LLAMA_405B = (
    "--hidden_size=16384 --intermediate_size=53248 --num_hidden_layers=126 --num_attention_heads=128 "
    "--num_key_value_heads=8 --vocab_size=128256 --rope_theta=5e5 --rope_scaling=8,1,4,8192"
)


def _model_is_a_llama(translating: Translating) -> bool:
    name = translating.text("model.name")
    if name is None or name.lower() == "llama3":
        return True
    translating.refuse("model.name", "only llama3 is trained here")
    return False


def _flavor(translating: Translating, key: str) -> None:
    name = (translating.text(key) or "").lower()
    ending = next((each for each in _ATTENTION if name.endswith(each)), "")
    name = name.removesuffix(ending)
    if name in FLAVORS:
        mask = {"document_mask": "true"} if ending else {}
        translating.set(key, "attention inside documents" if ending else "", **FLAVORS[name], **mask)
    elif name == "405b":
        translating.refuse(key, f"there is no such variant here; give model.flavor=8B, and besides {_LLAMA_405B}")
    else:
        hint = did_you_mean(name, FLAVORS, "did you mean {}? ")
        translating.refuse(key, f"not a flavor that is known here: {hint}There are 8B, 70B and debugmodel")


def _tokenizer(translating: Translating, key: str) -> None:
    folder = Path(translating.text(key) or "")
    if is_file(folder / "tokenizer.json") or (is_file(folder) and folder.suffix == ".json"):
        translating.set(key, tokenizer_path=str(folder))
    else:
        translating.leave_out(key, "there is no tokenizer.json; data is tokenized by pretrain prepare")


_FLOAT8 = ("quantize.linear.float8.", "float8.")
"""The section, and what it was called before."""
_SCALINGS = {"tensorwise": "tensorwise", "rowwise": "rowwise"}


def _converters(translating: Translating, key: str) -> None:
    """Takes the one converter that is here, with the recipe that the section about it names."""
    names = [name.strip() for name in (translating.text(key) or "").split(",") if name.strip()]
    others = [name for name in names if name not in ("float8", "quantize.linear.float8")]
    recipes = [f"{section}recipe_name" for section in _FLOAT8 if f"{section}recipe_name" in translating]
    recipe = translating.text(recipes[0]) if recipes else "tensorwise"
    if others:
        translating.refuse(key, f"{', '.join(others)}: float8 is the only converter here, as --float8=tensorwise")
    elif not names:
        translating.set(key, "none, as here")
    elif recipe not in _SCALINGS:
        translating.refuse(recipes[0], "one of tensorwise, rowwise is needed")
        translating.leave_out(key, "the recipe cannot be had")
    else:
        translating.set(key, float8=_SCALINGS[recipe])
        for each in recipes:
            translating.set(each, "with the converter")


# Optimizer and schedule


def _optimizer(translating: Translating, key: str) -> None:
    name = (translating.text(key) or "").lower()
    if name in ("adamw", "adam"):
        translating.set(key, optimizer=name)
    else:
        translating.refuse(key, "one of AdamW, Adam is needed, or another one here: give --optimizer", "optimizer")


SHAPE, SHARE, WARM_UP = (f"lr_scheduler.{name}" for name in ("decay_type", "decay_ratio", "warmup_steps"))
STEPS, HORIZON = "training.steps", "lr_scheduler.total_steps"
_SHAPES = {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}


def _schedule(translating: Translating, _: str) -> None:
    """Settles the schedule, and the lengths of the run and of its parts, shortened as torchtitan shortens them."""
    steps, horizon = translating.number(STEPS), translating.number(HORIZON)
    total = steps if horizon is None else horizon
    assert steps is not None and total is not None  # without them, the defaults
    if horizon is None or horizon == steps:
        translating.set(STEPS, num_steps=translating.text(STEPS))
    elif horizon < steps:
        translating.refuse(STEPS, f"the schedule ends before, {HORIZON}={horizon:g}: give it the same number, or less")
    else:
        translating.set(STEPS, f"stops there; the schedule goes on to {horizon:g}", run_steps=translating.text(STEPS))
    if horizon is not None:
        translating.set(HORIZON, num_steps=translating.text(HORIZON if horizon != steps else STEPS))

    warmup = translating.number(WARM_UP) or 0
    if warmup > total:
        translating.set(WARM_UP, f"no more than the {total:g} steps of the run", warmup_steps=f"{total:g}")
        warmup = total
    else:
        translating.set(WARM_UP, warmup_steps=translating.text(WARM_UP))
    _decay(translating, int(total), int(warmup))


def _decay(translating: Translating, total: int, warmup: int) -> None:
    """Settles how the learning rate comes down: over all that is left after the warm-up, or over a share of the run."""
    name = translating.text(SHAPE) or ""
    if name not in _SHAPES:
        translating.refuse(SHAPE, f"one of {', '.join(_SHAPES)} is needed", "schedule")
        if SHARE in translating:
            translating.leave_out(SHARE, f"of {SHAPE}")
        return
    ratio = translating.number(SHARE)
    if ratio is None and name != "sqrt":
        translating.set(SHAPE, "from the end of the warm-up", schedule=name)
        return
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    remark = "from the end of the warm-up" if ratio is None else ""
    translating.set(
        SHAPE, remark, schedule="wsd", decay_shape=_SHAPES[name], decay_steps=str(decay) if ratio is None else None
    )
    if ratio is not None:
        translating.set(SHARE, f"of {total} steps", decay_steps=str(decay))


# Data and training


def _data(translating: Translating, key: str) -> None:
    folder = Path(translating.text(key) or "")
    if _has_tokens(folder):
        translating.set(key, **data_settings(folder))
    else:
        translating.leave_out(key, "text is made into token files first, by pretrain prepare: give --data_path")


def _has_tokens(folder: Path) -> bool:
    """Whether there are token files in a folder, or in a folder of it."""
    patterns = [f"{above}*{ending}" for above in ("", "*/") for ending in TOKEN_SUFFIXES]
    return is_folder(folder) and any(next(folder.glob(pattern), None) for pattern in patterns)


def _global_batch(translating: Translating, key: str) -> None:
    size = translating.number(key)
    if size is not None and size > 0:
        translating.set(key, global_batch_size=translating.text(key))
    else:
        translating.leave_out(key, "local_batch_size on each GPU, as here")


def _clipping(translating: Translating, key: str) -> None:
    norm = translating.number(key)
    is_off = norm is None or norm == float("inf")
    translating.set(key, "no clipping" if is_off else "", grad_clip_thresh="0" if is_off else translating.text(key))


def _degrees(translating: Translating, _: str) -> None:
    """Settles the strategy from the degrees of replication and sharding."""
    replicate, shard = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
    reshard = "parallelism.fsdp_reshard_after_forward"
    replicas, shards = translating.number(replicate) or 1, translating.number(shard) or -1
    policy = translating.text(reshard)
    if policy not in (None, "default", "always", "never"):
        translating.refuse(reshard, "one of default, always, never is needed")
        return
    group = None
    if shards == 1:
        strategy = "ddp"
    elif replicas == 1:
        strategy = "zero2" if policy == "never" else "fsdp"
    elif shards > 1:
        strategy, group = "hsdp_zero2" if policy == "never" else "hsdp", translating.text(shard)
    else:
        translating.refuse(
            replicate,
            f"the GPUs of a sharding group are needed: write {shard} = the number of GPUs / {replicas:g}",
        )
        return
    first, *others = [key for key in (shard, replicate, reshard) if key in translating]
    translating.set(first, sharding_strategy=strategy, hsdp_group_size=group)
    for key in others:
        translating.set(key, sharding_strategy=strategy)


def _must_be_one(what: str) -> Rule:
    """A degree of parallelism that is not here."""
    reason = f"there is no {what} parallelism here: write 1; weights are sharded over all GPUs"
    return as_here("1", "-1", reason=reason, remark="1, as here")


def _off(reason: str) -> Rule:
    """A switch that is left out where it is off, and refused with the reason where it is on."""

    def settle(translating: Translating, key: str) -> None:
        text = translating.text(key)
        if text == "" or not translating.is_true(key):
            translating.leave_out(key, "off, as here")
        else:
            translating.refuse(key, f"{reason}: write false")

    return settle


def _only(value: str, reason: str) -> Rule:
    """A key that has one value here."""

    def settle(translating: Translating, key: str) -> None:
        if translating.text(key) == value:
            translating.set(key, "as here")
        else:
            translating.refuse(key, f"{reason}: write {value}")

    return settle


def _empty(reason: str) -> Rule:
    """A text that is left out where it is empty, and refused with the reason where it is not."""

    def settle(translating: Translating, key: str) -> None:
        if translating.text(key) == "":
            translating.leave_out(key, "none")
        else:
            translating.refuse(key, f"{reason}: take it out")

    return settle


# Places, checkpoints, evaluation


FOLDER, SUBFOLDER = "job.dump_folder", "checkpoint.folder"


def _places(translating: Translating, _: str) -> None:
    """Makes the run's folder of the dump folder, and of the checkpoints' where it has a name of its own."""
    folder, name = translating.text(FOLDER), translating.text(SUBFOLDER)
    if name is not None and name != "checkpoint":
        path = str(Path(folder or "outputs") / name)
        translating.set(SUBFOLDER, "the run's folder; checkpoints are in checkpoints/", ckpt_save_path=path)
        if folder is not None:
            translating.set(FOLDER, "in front of the checkpoints' folder")
        return
    if folder is not None:
        translating.set(FOLDER, ckpt_save_path=folder)
    if name is not None:
        translating.leave_out(SUBFOLDER, "checkpoints are in checkpoints/ of the run's folder")


def _checkpoints(translating: Translating, key: str) -> None:
    """Where checkpoints are not enabled, leaves out all that is said about them."""
    if translating.is_true(key):
        translating.set(key, "runs are always saved")
        return
    translating.set(key, "the end of the run is kept all the same", checkpoint_interval="0")
    for other in translating.values:
        if other.startswith("checkpoint.") and not translating.is_settled(other):
            translating.leave_out(other, "checkpoint.enable is false")


def _first_step(translating: Translating, key: str) -> None:
    if translating.is_true(key):
        translating.set(key, checkpoint_steps="1")
    else:
        translating.leave_out(key, "off, as here")


def _start(translating: Translating, key: str) -> None:
    """Takes a run, a checkpoint or a Hugging Face folder to start from."""
    weights, hub = "checkpoint.initial_load_model_only", "checkpoint.initial_load_in_hf"
    path = Path(translating.text(key) or "")
    if exists(path / ".metadata"):
        translating.refuse(
            key,
            "a checkpoint of torchtitan's is not read: make a Hugging Face folder of it with its "
            "scripts/checkpoint_conversion/convert_to_hf.py, and name that",
        )
        return
    weights_only = translating.is_true(weights)
    translating.set(key, ckpt_load_path=str(path), weights_only="false" if weights_only is False else "true")
    if weights in translating:
        translating.set(weights, weights_only="true" if weights_only else "false")
    if hub in translating:
        translating.leave_out(hub, "what a folder holds is seen")


def _load_step(translating: Translating, key: str) -> None:
    if (translating.number(key) or 0) < 0:
        translating.leave_out(key, "the newest, as here")
    else:
        translating.set(key, resume_from_checkpoint=translating.text(key))


def _left_behind(translating: Translating, key: str) -> None:
    names = {name.strip() for name in (translating.text(key) or "").split(",") if name.strip()}
    all_but_weights = {"optimizer", "lr_scheduler", "dataloader"}
    if not names:
        translating.leave_out(key, "everything is loaded, as here")
    elif names == {"optimizer"}:
        translating.set(key, load_optimizer="false")
    elif names - {"train_state"} == all_but_weights:
        translating.set(key, "a new run with the weights", weights_only="true")
    else:
        translating.refuse(
            key, "optimizer alone, or optimizer,lr_scheduler,dataloader (a new run with the weights) can be left behind"
        )


def _keep(translating: Translating, key: str) -> None:
    if translating.number(key):
        translating.set(key, keep_last=translating.text(key))
    else:
        translating.set(key, "all, as here")


def _recompute(translating: Translating, key: str) -> None:
    """Settles which blocks keep no activations."""
    option = "activation_checkpoint.selective_ac_option"
    mode, which = translating.text(key), translating.text(option) or "2"
    if mode == "none":
        translating.set(key, fsdp_activation_checkpointing="false")
    elif mode == "full":
        translating.set(key, fsdp_activation_checkpointing="true", selective_checkpointing="1")
    elif mode == "selective":
        translating.set(key, fsdp_activation_checkpointing="true", selective_checkpointing=which)
        if option in translating:
            translating.set(option, selective_checkpointing=which)
    elif mode == "memory_budget":
        translating.leave_out(
            key, "memory only: give --fsdp_activation_checkpointing=true --selective_checkpointing=op"
        )
    else:
        translating.refuse(key, "one of none, full, selective is needed")
    if option in translating and not translating.is_settled(option):
        translating.leave_out(option, f"of selective, and the mode is {mode}")


def _compile(translating: Translating, key: str) -> None:
    parts = "compile.components"
    names = (translating.text(parts) or "model,loss").split(",")
    compiles = translating.is_true(key) and "model" in [name.strip() for name in names]
    translating.set(key, use_torch_compile="true" if compiles else "false")
    if parts in translating:
        translating.set(parts, "the blocks are what is compiled")


def _profiles(translating: Translating, key: str) -> None:
    interval = "profiling.profile_freq"
    if translating.is_true(key):
        translating.set(key, use_profiler="true", profile_interval=None if interval in translating else "10")
        if interval in translating:
            translating.set(interval, "three steps each time", profile_interval=translating.text(interval))
    else:
        translating.set(key, use_profiler="false")
        if interval in translating:
            translating.leave_out(interval, "the profiler is off")


def _trackers(translating: Translating, _: str) -> None:
    switches = {"metrics.enable_tensorboard": "tensorboard", "metrics.enable_wandb": "wandb"}
    given = [key for key in switches if key in translating]
    names = ",".join(name for key, name in switches.items() if translating.is_true(key))
    for key in given:
        remark = "the project is --tracker_project_name" if key.endswith("wandb") and translating.is_true(key) else ""
        translating.set(key, remark, tracker=names or "none")


def _evaluates(translating: Translating, key: str) -> None:
    """Settles how often is evaluated, and on which folder."""
    path, often, steps = "validation.dataset_path", "validation.freq", "validation.steps"
    others = [each for each in translating.values if each.startswith("validation.") and each != key]
    if not translating.is_true(key):
        translating.leave_out(key, "nothing is evaluated")
        for each in others:
            translating.leave_out(each, "validation.enable is false")
        return
    folder = Path(translating.text(path) or "")
    if path in translating and _has_tokens(folder):
        translating.set(key, f"on {path}")
        translating.set(path, eval_datasets=str(folder))
    else:
        translating.leave_out(key, "on what? give --held_out_fraction=0.01, or token files with --eval_datasets")
        if path in translating:
            translating.leave_out(path, "no token files: pretrain prepare makes them")
    if often in translating:
        translating.set(often, eval_interval=translating.text(often))
    if (translating.number(steps) or -1) > 0:
        translating.set(steps, eval_batches=translating.text(steps))
    elif steps in translating:
        translating.leave_out(steps, "all of the data: give --eval_batches")
    for each in others:
        if not translating.is_settled(each):
            translating.leave_out(each, "evaluation reads as training does")


def _seconds(text: str) -> str:
    return f"{text}s"


_TRACES = "traces are in profile_traces/ of the run's folder"
_SPEED = "about speed only"
_PIPELINE = "there is no pipeline parallelism"
_LOADING = "about speed only; num_workers threads read ahead"
_ONE_AT_A_TIME = "mixtures of experts are not trained here"

TABLE: dict[str, Rule] = {
    FOLDER: _places,
    "job.description": left_out("tracker_run_name names a run"),
    "job.print_config": left_out("settings are in config.yaml of the run's folder"),
    "job.save_config_file": left_out("settings are in config.yaml of the run's folder"),
    "job.config_file": left_out("the file itself"),
    "job.use_for_integration_test": left_out("of its tests"),
    "job.custom_config_module": _empty("settings cannot be added; docs/extending.md says what can"),
    "profiling.enable_profiling": _profiles,
    "profiling.profile_freq": left_out("the profiler is off"),
    "profiling.save_traces_folder": left_out(_TRACES),
    "profiling.profiler_active": left_out("three steps are recorded at a time"),
    "profiling.profiler_warmup": left_out("three steps are recorded at a time"),
    "profiling.enable_memory_snapshot": becomes("memory_snapshot"),
    "profiling.save_memory_snapshot_folder": left_out(_TRACES),
    "metrics.log_freq": becomes("report_interval"),
    "metrics.enable_tensorboard": _trackers,
    "metrics.enable_wandb": _trackers,
    "metrics.disable_color_printing": left_out("lines have no colors"),
    "metrics.save_tb_folder": left_out("in logs/ of the run's folder, or tracker_dir"),
    "metrics.save_for_all_ranks": left_out("the first process reports for all"),
    "model.name": left_out("as here"),
    "model.flavor": _flavor,
    "model.hf_assets_path": _tokenizer,
    "model.tokenizer_path": _tokenizer,
    "model.converters": _converters,
    "model.print_after_conversion": left_out("about the log only"),
    **{
        f"{section}{name}": left_out(reason)
        for section in _FLOAT8
        for name, reason in {
            "recipe_name": "model.converters has no float8",
            "enable_fsdp_float8_all_gather": _SPEED,
            "precompute_float8_dynamic_scale_for_fsdp": _SPEED,
            "filter_fqns": "all matrices of the blocks, and no others",
            "force_recompute_fp8_weight_in_bwd": _SPEED,
        }.items()
    },
    **{f"{section}emulate": _off("float8 is not emulated; a CPU computes in bfloat16") for section in _FLOAT8},
    **{
        f"quantize.{name}": left_out("model.converters names no such converter")
        for name in (
            *("linear.mx.recipe_name", "linear.mx.filter_fqns", "linear.mx.mxfp8_dim1_cast_kernel_choice"),
            *("grouped_mm.float8.fqns", "grouped_mm.mx.fqns", "grouped_mm.mx.recipe_name"),
        )
    },
    "optimizer.name": _optimizer,
    "optimizer.lr": becomes("learning_rate"),
    "optimizer.beta1": becomes("adam_beta1"),
    "optimizer.beta2": becomes("adam_beta2"),
    "optimizer.eps": becomes("adam_epsilon"),
    "optimizer.weight_decay": becomes("weight_decay", remark="not of norms and embeddings"),
    "optimizer.implementation": left_out(_SPEED),
    "optimizer.early_step_in_backward": left_out("about memory only"),
    **dict.fromkeys((SHAPE, SHARE, WARM_UP, HORIZON, STEPS), _schedule),
    "lr_scheduler.min_lr_factor": becomes("min_lr_ratio"),
    "training.dataset": left_out("text is made into token files first, by pretrain prepare: give --data_path"),
    "training.dataset_path": _data,
    "training.local_batch_size": becomes("batch_size"),
    "training.global_batch_size": _global_batch,
    "training.seq_len": becomes("seq_length"),
    "training.max_norm": _clipping,
    "training.enable_cpu_offload": left_out("about memory only: everything stays on the GPU"),
    "training.dtype": _only("float32", "weights, gradients and optimizer state are float32"),
    "training.mixed_precision_param": one_of("mixed_precision", {"bfloat16": "true", "float32": "false"}),
    "training.mixed_precision_reduce": left_out("float32, as here"),
    "training.gc_freq": becomes("gc_interval"),
    "training.gc_debug": left_out("memory_snapshot shows what is held"),
    "training.dataloader.num_workers": becomes("num_workers"),
    **{
        f"training.dataloader.{name}": left_out(_LOADING)
        for name in ("persistent_workers", "pin_memory", "prefetch_factor")
    },
    **{f"{section}.seed": becomes("seed") for section in ("training", "debug")},
    **{f"{section}.deterministic": becomes("deterministic") for section in ("training", "debug")},
    "debug.deterministic_warn_only": left_out("what has no such kernel is an error"),
    "debug.moe_force_load_balance": left_out(_ONE_AT_A_TIME),
    "training.debug_moe_force_load_balance": left_out(_ONE_AT_A_TIME),
    **dict.fromkeys(
        (
            "parallelism.data_parallel_replicate_degree",
            "parallelism.data_parallel_shard_degree",
            "parallelism.fsdp_reshard_after_forward",
        ),
        _degrees,
    ),
    "parallelism.tensor_parallel_degree": _must_be_one("tensor"),
    "parallelism.pipeline_parallel_degree": _must_be_one("pipeline"),
    "parallelism.context_parallel_degree": _must_be_one("context"),
    "parallelism.expert_parallel_degree": _must_be_one("expert"),
    "parallelism.expert_tensor_parallel_degree": _must_be_one("expert"),
    **{
        f"parallelism.{name}": left_out("there is no tensor parallelism")
        for name in ("disable_loss_parallel", "enable_async_tensor_parallel")
    },
    "parallelism.enable_compiled_autograd": left_out(_SPEED),
    "parallelism.module_fqns_per_model_part": left_out(_PIPELINE),
    **{
        f"parallelism.pipeline_parallel_{name}": left_out(_PIPELINE)
        for name in (
            *("schedule", "schedule_csv", "microbatch_size", "layers_per_stage", "expert_parallel_overlap"),
            *("first_stage_less_layers", "last_stage_less_layers", "split_points"),
        )
    },
    **{
        f"parallelism.context_parallel_{name}": left_out("there is no context parallelism")
        for name in ("load_balancer", "rotate_method")
    },
    "parallelism.expert_parallel_comm_backend": left_out(_ONE_AT_A_TIME),
    SUBFOLDER: _places,
    "checkpoint.enable": _checkpoints,
    "checkpoint.interval": becomes("checkpoint_interval"),
    "checkpoint.initial_load_path": _start,
    "checkpoint.initial_load_model_only": left_out("initial_load_path is not given"),
    "checkpoint.initial_load_in_hf": left_out("initial_load_path is not given: name the folder there"),
    "checkpoint.initial_load_in_hf_quantized": _off("quantized weights are not read"),
    "checkpoint.last_save_model_only": left_out("the last checkpoint is a whole one; pretrain export writes weights"),
    "checkpoint.last_save_in_hf": left_out("pretrain export writes it"),
    "checkpoint.export_dtype": left_out("pretrain export says in what"),
    "checkpoint.async_mode": one_of(
        "async_save", {"disabled": "false", "async": "true", "async_with_pinned_mem": "true"}
    ),
    "checkpoint.keep_latest_k": _keep,
    "checkpoint.load_step": _load_step,
    "checkpoint.exclude_from_loading": _left_behind,
    "checkpoint.enable_first_step_checkpoint": _first_step,
    "checkpoint.create_seed_checkpoint": _off("initial weights come from the seed, the same on any number of GPUs"),
    "checkpoint.load_only": _off("a run is always saved at its end"),
    "checkpoint.enable_ft_dataloader_checkpoints": left_out("the place in the data is always saved"),
    "activation_checkpoint.mode": _recompute,
    "activation_checkpoint.selective_ac_option": left_out("of selective"),
    **{
        f"activation_checkpoint.{name}": left_out("about memory and speed only")
        for name in (
            *("per_op_sac_force_recompute_mm_shapes_by_fqns", "early_stop", "memory_budget", "preserve_rng_state"),
            *("visualize_memory_budget_pareto", "determinism_check", "debug"),
        )
    },
    "compile.enable": _compile,
    "compile.components": left_out("compile.enable is not given"),
    "compile.backend": left_out("inductor, as here"),
    "comm.init_timeout_seconds": becomes("first_step_timeout", _seconds),
    "comm.train_timeout_seconds": becomes("hang_timeout", _seconds),
    **{
        f"comm.{name}": left_out("stacks of all processes are in the log where one hangs")
        for name in ("trace_buf_size", "save_traces_folder", "save_traces_file_prefix")
    },
    "comm.mode": _only("default", "processes talk for real"),
    "memory_estimation.enable": left_out("each start estimates its memory first"),
    "memory_estimation.disable_fake_mode": left_out("each start estimates its memory first"),
    "fault_tolerance.enable": _off("torchft is not here; MAX_RESTARTS of scripts/train.sh starts processes again"),
    **{
        f"fault_tolerance.{name}": left_out("fault_tolerance is off")
        for name in (
            *("process_group", "process_group_timeout_ms", "replica_id", "group_size", "min_replica_size"),
            *("semi_sync_method", "sync_steps", "should_quantize", "fragment_sync_delay", "fragment_update_alpha"),
            "module_fqns_per_model_fragment",
        )
    },
    "experimental.custom_import": _empty("modules are named where they are used: docs/extending.md"),
    "experimental.custom_args_module": _empty("settings cannot be added; docs/extending.md says what can"),
    "validation.enable": _evaluates,
    **{
        f"validation.{name}": left_out("validation.enable is not given")
        for name in ("dataset", "dataset_path", "local_batch_size", "seq_len", "freq", "steps")
    },
    **{
        f"validation.dataloader.{name}": left_out(_LOADING)
        for name in ("num_workers", "persistent_workers", "pin_memory", "prefetch_factor")
    },
}
"""The keys, with what becomes of each."""
