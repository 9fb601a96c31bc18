"""The JSON that DeepSpeed is configured with: batch, optimizer, schedule, precision and ZeRO stage.

It stands alone, or another system's file names or holds it. That system's settings then fill in "auto", and a value
that the two give differently is a problem. What is about speed or memory alone is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pretraining.config.fields import settings_of
from pretraining.config.foreign.translation import (
    Rule,
    Source,
    Translating,
    as_here,
    becomes,
    betas,
    half_precision,
    left_out,
    switch,
)
from pretraining.config.settings_files import parse_tree, read_text
from pretraining.config.training import TrainConfig
from pretraining.config.values import format_value
from pretraining.errors import ConfigError
from pretraining.files import exists
from pretraining.progress import parse_number

SIGNS = (
    *("train_micro_batch_size_per_gpu", "zero_optimization", "optimizer.params", "scheduler.params"),
    *("fp16.enabled", "bf16.enabled", "gradient_clipping", "steps_per_print", "wall_clock_breakdown"),
)
KIND = "deepspeed"
AUTO = "auto"
_NOTHING_ABOUT = "a DeepSpeed file says nothing about"
_OWN_OPTIMIZER = "give one of those here, or your own as --optimizer=package.module:Class"


def read(translating: Translating, filled_by: str = "") -> None:
    """Translates a DeepSpeed file.

    Args:
        filled_by: the system whose settings take the place of "auto"; "" = the file stands alone.
    """
    _read_auto(translating, filled_by)
    if filled_by:
        translating.apply(_beneath(filled_by))
    translating.apply(TABLE)
    is_compressed = as_here("false", reason="weights are not compressed: take the section out")
    switches = [
        key for key in translating.values if key.startswith("compression_training.") and key.endswith("enabled")
    ]
    translating.apply(dict.fromkeys(switches, is_compressed))
    translating.leave_out_groups(GROUPS)
    if not filled_by:
        _assume_defaults(translating)


def include(translating: Translating, key: str, filled_by: str) -> None:
    """Reads the configuration that a key of another system's file holds, or names by its path."""
    if key in translating and not translating.text(key):
        translating.leave_out(key, "empty")
    elif key in translating:
        path = _find(translating.source.path, translating.text(key) or "")
        if path is None:
            translating.refuse(key, "there is no such file: put it there, or take this line out")
        else:
            translating.set(key, "read, too")
            _include_source(translating, _open(path), filled_by)
    elif translating.has(key):
        _include_source(translating, translating.source.part(key), filled_by)


def _include_source(translating: Translating, source: Source, filled_by: str) -> None:
    part = Translating(KIND, source)
    read(part, filled_by)
    translating.include(part)


def _find(naming: Path | None, named: str) -> Path | None:
    """Returns where a file is: beside the one that names it, or as the path is written."""
    beside = Path(named).expanduser() if naming is None else naming.parent / Path(named).expanduser()
    return next((path for path in (beside, Path(named).expanduser()) if exists(path)), None)


def _open(path: Path) -> Source:
    content = read_text(path, str(path))
    tree = parse_tree(content, str(path), path.suffix)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no settings")
    return Source(str(path), path, content, tree)


def _beneath(filled_by: str) -> dict[str, Rule]:
    """Returns what is different where another system's settings stand above these."""
    reports = dict.fromkeys(("steps_per_print", "tensorboard.enabled", "wandb.enabled"), left_out(f"{filled_by} says"))
    precision = dict.fromkeys(("fp16.enabled", "bf16.enabled"), _take_only_true)
    return {_ACCUMULATION: becomes("grad_accum_steps"), **precision, **reports}


def _read_auto(translating: Translating, filled_by: str) -> None:
    for key, value in translating.values.items():
        if value == AUTO and key in _SETTING_OF:
            setting = _SETTING_OF[key]
            if filled_by:
                reason = f"as {filled_by} has it"
            else:
                default = settings_of(TrainConfig)[setting].default
                alternative = "leave it open" if default is None else f"keep {format_value(default)}"
                reason = f"what another system would fill in: give --{setting}, or {alternative}"
            translating.leave_out(key, reason)


# Batch


def _read_train_batch_size(translating: Translating, key: str) -> None:
    """Sets the batch of a step, and checks that whole numbers of GPUs and micro-batches make it."""
    size, micro, steps = (_count(translating, each) for each in (key, _MICRO, _ACCUMULATION))
    if size is None:
        translating.refuse(key, "a whole number from 1 on is needed")
        return
    share = (micro or 1) * (steps or 1)
    if size % share:
        product = " x ".join(f"{name} {value}" for name, value in ((_MICRO, micro), (_ACCUMULATION, steps)) if value)
        translating.refuse(
            key,
            f"it is {product} x GPUs, and {size} / {share} = {size / share:.2f} is no number of GPUs: change one of "
            "them, or leave one out",
        )
        return
    remark = "on any number of GPUs" if micro else "on any number of GPUs; --batch_size says how many one takes at once"
    translating.set(key, remark, global_batch_size=str(size))


def _read_accumulation(translating: Translating, key: str) -> None:
    """Takes the micro-batches of a step, unless they follow from its batch."""
    if _count(translating, key) is None:
        translating.refuse(key, "a whole number from 1 on is needed")
    elif _count(translating, _BATCH) is not None:
        translating.leave_out(key, "derived from global_batch_size, batch_size and the number of GPUs")
    else:
        translating.set(key, grad_accum_steps=translating.text(key))


def _count(translating: Translating, key: str) -> int | None:
    """Returns a whole number from 1 on; None for everything else, "auto" among it."""
    number = parse_number(translating.text(key) or "")
    return int(number) if number is not None and number > 0 and number.denominator == 1 else None


# Optimizer and schedule


def _optimizer_of(translating: Translating) -> str | None:
    """Returns the optimizer here that a type and its parameters stand for; None where there is none."""
    name = (translating.text(_TYPE) or "").lower()
    if name == "adam":  # DeepSpeed's Adam decouples weight decay unless it is told otherwise
        return "adam" if translating.is_true("optimizer.params.adam_w_mode") is False else "adamw"
    if name == "sgd":
        return "sgdm" if translating.number("optimizer.params.momentum") else "sgd"
    return {"adamw": "adamw", "muon": "muon"}.get(name)


def _read_optimizer(translating: Translating, key: str) -> None:
    optimizer = _optimizer_of(translating)
    if optimizer is None:
        translating.refuse(
            key, f"of DeepSpeed's optimizers Adam, AdamW, SGD and Muon are there: {_OWN_OPTIMIZER}", "optimizer"
        )
    else:
        is_decoupled = (translating.text(key) or "").lower() == "adam" and optimizer == "adamw"
        translating.set(key, "as its Adam is by default" if is_decoupled else "", optimizer=optimizer)


def _of_optimizers(setting: str, *optimizers: str) -> Rule:
    """A parameter that these optimizers read."""

    def settle(translating: Translating, key: str) -> None:
        if _TYPE in translating and _optimizer_of(translating) not in optimizers:
            translating.leave_out(key, f"{translating.text(_TYPE)} does not read it")
        elif setting == "betas":
            betas(translating, key)
        else:
            translating.set(key, **{setting: translating.text(key) or ""})

    return settle


def _read_learning_rate(translating: Translating, key: str) -> None:
    """Takes the optimizer's, unless the schedule or Muon's own say another peak."""
    rate, peak = translating.text(key), translating.text(_PEAK)
    if peak not in (None, AUTO):
        translating.leave_out(key, f"the schedule's {_PEAK} takes its place")
    elif "optimizer.params.muon_lr" not in translating:
        translating.set(key, learning_rate=rate)
    elif "optimizer.params.adam_lr" not in translating:
        translating.set(key, "of all but the hidden matrices", muon_adam_learning_rate=rate)
    else:
        translating.leave_out(key, "muon_lr and adam_lr take its place")


def _read_schedule(translating: Translating, key: str) -> None:
    kind = (translating.text(key) or "").lower()
    if kind == "warmuplr":
        translating.set(key, schedule="constant")
    elif kind == "warmupdecaylr":
        translating.set(key, schedule="linear", min_lr_ratio=0)
    elif kind == "warmupcosinelr":
        translating.set(key, schedule="cosine")
    else:
        translating.refuse(
            key,
            "of DeepSpeed's schedules WarmupLR, WarmupDecayLR and WarmupCosineLR are there: give one of those of "
            "--schedule, or your own as --schedule=package.module:function",
            "schedule",
        )


def _read_warmup_type(translating: Translating, key: str) -> None:
    if (translating.text(key) or "").lower() == "linear":
        translating.set(key, "as here")
    else:
        translating.leave_out(key, "the warm-up is linear here")


def _assume_defaults(translating: Translating) -> None:
    """Adds what DeepSpeed takes where its file gives nothing, and this project takes something else."""
    optimizer = _optimizer_of(translating)
    if optimizer is not None:
        remark = f"as DeepSpeed takes it for {translating.text(_TYPE)}"
        decay = "0.01" if translating.is_true("optimizer.params.torch_adam") else "0"
        translating.assume("optimizer.params.lr", remark, learning_rate="1e-3")
        if optimizer != "muon":
            translating.assume("optimizer.params.weight_decay", remark, weight_decay=decay)
        if optimizer in ("adam", "adamw"):
            translating.assume("optimizer.params.betas", remark, adam_beta1="0.9", adam_beta2="0.999")
    schedule = translating.text("scheduler.type")
    if schedule is not None:
        remark = f"as DeepSpeed takes it for {schedule}"
        translating.assume("scheduler.params.warmup_num_steps", remark, warmup_steps="1000")
        translating.assume("scheduler.params.warmup_type", "DeepSpeed warms up by a logarithm, and this linearly")
        if schedule.lower() == "warmupcosinelr":
            translating.assume("scheduler.params.cos_min_ratio", remark, min_lr_ratio="0.0001")
        else:
            translating.assume(_PEAK, "DeepSpeed takes 0.001; here the optimizer's learning rate is the peak")
    if translating.text(_STEPS) in (None, AUTO):
        missing, flags = "the model, the data and the length of the run", "--model_variant, --data_path and --num_steps"
        translating.assume("model, data, num_steps", f"{_NOTHING_ABOUT} {missing}: give {flags}")
    else:
        translating.assume(
            "model, data", f"{_NOTHING_ABOUT} the model and the data: give --model_variant and --data_path"
        )


# Precision and sharding


def _take_only_true(translating: Translating, key: str) -> None:
    """Settles a switch that is off: another system's settings say what is computed in."""
    if not translating.is_true(key):
        translating.set(key, "off")


def _read_stage(translating: Translating, key: str) -> None:
    stage = (translating.text(key) or "").lower()
    stage = {"true": "1", "false": "0"}.get(stage, stage)  # how its oldest versions wrote it
    group = _count(translating, _GROUP_SIZE)
    if stage == "3" and group is not None:
        translating.set(key, "in groups, as MiCS makes them", sharding_strategy="hsdp", hsdp_group_size=group)
    elif stage == "1":
        translating.set(key, "the nearest; it shards the gradients, too", sharding_strategy="zero2")
    elif stage in _STRATEGIES:
        translating.set(key, sharding_strategy=_STRATEGIES[stage])
    else:
        translating.refuse(key, "a stage from 0 to 3 is needed", "sharding_strategy")


_STRATEGIES = {"0": "ddp", "2": "zero2", "3": "fsdp"}


def _read_offload(translating: Translating, key: str) -> None:
    if (translating.text(key) or "").lower() in ("none", "false"):
        translating.set(key, "as here")
    else:
        translating.leave_out(key, _NO_OFFLOAD)


_NO_OFFLOAD = (
    "nothing is moved to the host or to disk; where memory is short: more GPUs, --fsdp_activation_checkpointing=true, "
    "or a smaller --batch_size with the same --global_batch_size"
)


def _read_checkpointing(translating: Translating, key: str) -> None:
    if (translating.text(key) or "").lower() in ("false", "0"):
        translating.set(key, "off")
    else:
        translating.set(key, "blocks are computed again; nothing is moved", fsdp_activation_checkpointing="true")


# Reports


def _read_print_interval(translating: Translating, key: str) -> None:
    text = translating.text(key) or ""
    is_never = text.lower().lstrip("+") in ("inf", "infinity")
    translating.set(key, report_interval="0" if is_never else text)


def _monitor(translating: Translating, key: str) -> None:
    """Takes a monitor's switch, which decides together with the other one's where reports go."""
    on = [name for name in ("tensorboard", "wandb") if translating.is_true(f"{name}.enabled")]
    translating.set(key, tracker=",".join(on) or "none")


def _where(switch_key: str, convert: Callable[[Translating, str], dict[str, str]]) -> Rule:
    """A key that counts where a switch is on."""

    def settle(translating: Translating, key: str) -> None:
        if translating.is_true(switch_key):
            translating.set(key, **convert(translating, translating.text(key) or ""))
        else:
            translating.leave_out(key, f"{switch_key} is not true")

    return settle


def _tensorboard_folder(translating: Translating, text: str) -> dict[str, str]:
    return {"tracker_dir": f"{text.rstrip('/')}/{translating.text('tensorboard.job_name') or 'DeepSpeedJobName'}"}


def _must_be_one(what: str, *off: str) -> Rule:
    """A degree of parallelism that is not here: it would make another number of GPUs share the batch."""
    reason = f"there is no {what} parallelism here: take it out; weights are sharded over all GPUs"
    return as_here("1", *off, reason=reason)


_BATCH, _MICRO, _ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_TYPE, _PEAK = "optimizer.type", "scheduler.params.warmup_max_lr"
_STEPS = "scheduler.params.total_num_steps"
_GROUP_SIZE = "zero_optimization.mics_shard_size"
_ADAMS, _WITH_MOMENTUM = ("adamw", "adam", "muon"), ("sgdm", "muon")
_KERNELS = (
    *("optimizer.legacy_fusion", "optimizer.params.torch_adam", "optimizer.params.fused", "optimizer.params.foreach"),
    *("optimizer.params.set_grad_none", "optimizer.params.fp32_optimizer_states"),
)
_LOSS_SCALE = "the scale of the loss is found on the way"
_COMMUNICATION = "gradients are added up in float32"

TABLE: dict[str, Rule] = {
    _BATCH: _read_train_batch_size,
    _MICRO: becomes("batch_size"),
    _ACCUMULATION: _read_accumulation,
    "gradient_clipping": becomes("grad_clip_thresh"),
    "optimizer.type": _read_optimizer,
    "optimizer.params.lr": _read_learning_rate,
    "optimizer.params.muon_lr": becomes("learning_rate"),
    "optimizer.params.adam_lr": becomes("muon_adam_learning_rate"),
    "optimizer.params.weight_decay": becomes("weight_decay", remark="not applied to norms and embeddings"),
    "optimizer.params.betas": _of_optimizers("betas", *_ADAMS),
    "optimizer.params.eps": _of_optimizers("adam_epsilon", *_ADAMS),
    "optimizer.params.momentum": _of_optimizers("momentum", *_WITH_MOMENTUM),
    "optimizer.params.nesterov": _of_optimizers("nesterov", *_WITH_MOMENTUM),
    "optimizer.params.bias_correction": as_here("true", reason="Adam corrects the bias of its moments"),
    "optimizer.params.dampening": as_here(
        "0", reason=f"momentum is not dampened: {_OWN_OPTIMIZER}", instead="optimizer"
    ),
    "optimizer.params.amsgrad": as_here("false", reason=f"there is no AMSGrad: {_OWN_OPTIMIZER}", instead="optimizer"),
    "optimizer.params.adam_w_mode": left_out("of optimizer.type"),
    "scheduler.type": _read_schedule,
    _PEAK: becomes("learning_rate"),
    "scheduler.params.warmup_num_steps": becomes("warmup_steps"),
    _STEPS: becomes("num_steps"),
    "scheduler.params.cos_min_ratio": becomes("min_lr_ratio"),
    "scheduler.params.warmup_type": _read_warmup_type,
    "fp16.enabled": half_precision("float16", "bf16.enabled"),
    "bf16.enabled": half_precision("bfloat16", "fp16.enabled"),
    "bfloat16.enabled": half_precision("bfloat16", "fp16.enabled"),
    "zero_optimization": _read_stage,
    "zero_optimization.stage": _read_stage,
    "zero_optimization.offload_optimizer.device": _read_offload,
    "zero_optimization.offload_param.device": _read_offload,
    "zero_optimization.cpu_offload": _read_offload,
    "zero_optimization.cpu_offload_params": _read_offload,
    _GROUP_SIZE: left_out("of zero_optimization.stage 3"),
    "activation_checkpointing.partition_activations": _read_checkpointing,
    "activation_checkpointing.cpu_checkpointing": _read_checkpointing,
    "activation_checkpointing.number_checkpoints": _read_checkpointing,
    "compile.deepcompile": switch("use_torch_compile"),
    "steps_per_print": _read_print_interval,
    "flops_profiler.enabled": switch("use_profiler", "traces of some steps; FLOPs are in every report"),
    "flops_profiler.profile_step": _where("flops_profiler.enabled", lambda _, text: {"profile_steps": text}),
    "tensorboard.enabled": _monitor,
    "tensorboard.output_path": _where("tensorboard.enabled", _tensorboard_folder),
    "tensorboard.job_name": left_out("the last part of tensorboard.output_path"),
    "wandb.enabled": _monitor,
    "wandb.project": _where("wandb.enabled", lambda _, text: {"tracker_project_name": text}),
    "wandb.group": left_out("of wandb's own environment: WANDB_RUN_GROUP"),
    "wandb.team": left_out("of wandb's own environment: WANDB_ENTITY"),
    "tensor_parallel.autotp_size": _must_be_one("tensor", "0"),
    "sequence_parallel_size": _must_be_one("sequence"),
    "pipeline.stages": _must_be_one("pipeline", AUTO),
    "amp.enabled": as_here("false", reason="Apex is not there: give bf16.enabled or fp16.enabled"),
    "torch_autocast.enabled": as_here("false", reason="give bf16.enabled or fp16.enabled in its place"),
    "elasticity.enabled": as_here(
        "false", reason="give train_batch_size in its place: it stays the same on any number of GPUs"
    ),
    "progressive_layer_drop.enabled": as_here("false", reason="no layers are dropped: take it out"),
    "curriculum_learning.enabled": as_here("false", reason="the length of sequences does not change: take it out"),
    "data_efficiency.enabled": as_here("false", reason="data is neither sorted nor dropped: take it out"),
    "sparse_attention.mode": as_here("dense", reason="attention is dense: take the section out"),
    "zero_optimization.zero_quantized_gradients": as_here("false", reason="gradients are not quantised: take it out"),
    "zero_optimization.zero_quantized_weights": as_here("false", reason="weights are not quantised: take it out"),
}
"""Keys of DeepSpeed's file by what becomes of them."""

GROUPS = {
    **dict.fromkeys(_KERNELS, "which kernel computes the update: the result is the same"),
    "scheduler.params.warmup_min_lr": "the warm-up begins near zero",
    "scheduler.params.warmup_min_ratio": "the warm-up begins near zero",
    "fp16": _LOSS_SCALE,
    "bf16": "master weights and sums of gradients are float32",
    "bfloat16": "master weights and sums of gradients are float32",
    "amp": "off",
    "torch_autocast": "off",
    "data_types": _COMMUNICATION,
    "communication_data_type": _COMMUNICATION,
    "seq_parallel_communication_data_type": _COMMUNICATION,
    "prescale_gradients": "the same mean over all tokens",
    "gradient_predivide_factor": "the same mean over all tokens",
    "sparse_gradients": "gradients of the embedding are dense: the same result",
    "zero_optimization.offload_optimizer": _NO_OFFLOAD,
    "zero_optimization.offload_param": _NO_OFFLOAD,
    "zero_optimization": "how ZeRO cuts memory and messages; a block is the unit here",
    "zero_allow_untested_optimizer": "every optimizer here is sharded",
    "zero_force_ds_cpu_optimizer": _NO_OFFLOAD,
    "aio": _NO_OFFLOAD,
    "activation_checkpointing": "blocks are computed again; nothing is moved",
    "tensor_parallel": "parameters are sharded (FSDP), matrices are not: the result is the same",
    "pipeline": "there are no pipeline stages: the result is the same",
    "sequence_parallel_size": "sequences are not cut: the result is the same",
    "compile": "how torch.compile is called",
    "checkpoint": "any checkpoint loads on any number of GPUs",
    "nebula": "checkpoints are written beside the training anyway",
    "wall_clock_breakdown": "reports say what share of the time is data and step",
    "memory_breakdown": "reports have the memory",
    "flops_profiler": "FLOPs and MFU are in every report",
    "comms_logger": "--use_profiler=true shows the messages",
    "dump_state": "the resolved configuration is config.yaml in the run's folder",
    "tensorboard": "how DeepSpeed names its files",
    "wandb": "how DeepSpeed names its run",
    "csv_monitor": "the numbers are in logs/metrics.jsonl anyway",
    "comet": "Comet is no tracker here; one of your own is --tracker=package.module:Class",
    "autotuning": "nothing is tuned; `pretrain sweep` tries settings",
    "elasticity": "off",
    "progressive_layer_drop": "off",
    "curriculum_learning": "off",
    "data_efficiency": "off",
    "compression_training": "off",
    "sparse_attention": "attention is dense",
    "hybrid_engine": "of reinforcement learning",
    "dataloader_drop_last": "no sample is dropped",
    "disable_allgather": "how ZeRO cuts memory and messages; a block is the unit here",
    "use_data_before_expert_parallelism": "a Llama has no experts",
}
"""What DeepSpeed's files hold besides, by section, and why it is left out."""

_SETTING_OF = {
    _BATCH: "global_batch_size",
    _MICRO: "batch_size",
    _ACCUMULATION: "grad_accum_steps",
    "gradient_clipping": "grad_clip_thresh",
    "optimizer.type": "optimizer",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.betas": "adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "scheduler.type": "schedule",
    _PEAK: "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    _STEPS: "num_steps",
    "scheduler.params.warmup_min_lr": "warmup_steps",
    "fp16.enabled": "mixed_precision",
    "bf16.enabled": "mixed_precision",
    "zero_optimization.stage": "sharding_strategy",
    "steps_per_print": "report_interval",
}
"""What an "auto" leaves to the settings here."""
