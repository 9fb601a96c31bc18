"""The JSON that DeepSpeed is configured with: batch, optimizer, schedule, precision and ZeRO stage.

It stands alone, or the file of a guide names or holds it; that file's settings then fill in "auto" and what is missing.
"""

from __future__ import annotations

from pretraining.tools.translate.translation import (
    Rule,
    Translating,
    choice,
    joint,
    left,
    only,
    pair,
    row,
    when,
)

WHAT = "the JSON that DeepSpeed is configured with"
NULLS: dict[str, str] = {}
SIGNS = (
    *("train_micro_batch_size_per_gpu", "zero_optimization", "optimizer.params", "scheduler.params"),
    *("fp16.enabled", "bf16.enabled", "gradient_clipping", "steps_per_print", "wall_clock_breakdown"),
)
BATCH, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_TYPE, _PARAMS, _SCHEDULE = "optimizer.type", "optimizer.params.", "scheduler.params."
_PEAK, _GROUP = f"{_SCHEDULE}warmup_max_lr", "zero_optimization.mics_shard_size"
_OWN = "or your own as --optimizer=package.module:Class"
_LEFT_TO_OTHERS = "another system's settings fill it in: give a flag, or leave it to the default here"


def name_of(key: str) -> str:
    """Return the name that the rules have for a key."""
    return key


def combine(translating: Translating) -> None:
    """Leave "auto" to the settings here, and make the batch of a step."""
    for key, given in translating.values.items():
        if given.text == "auto":
            translating.left(key, _LEFT_TO_OTHERS)
    size, micro, steps = (_count(translating, key) for key in (BATCH, MICRO, ACCUMULATION))
    if size is None:
        return
    if size % ((micro or 1) * (steps or 1)):
        problem = f"{MICRO} {micro or 1} x {ACCUMULATION} {steps or 1} x GPUs is never {size}: change one of them"
        translating.refuse(BATCH, problem, "global_batch_size")
    else:
        translating.set(BATCH, "on any number of GPUs", global_batch_size=size)
    if steps is not None:
        translating.left(ACCUMULATION, f"follows from {BATCH}, batch_size and the number of GPUs")


def _count(translating: Translating, key: str) -> int | None:
    return None if key in translating.notes else translating.count(key)


def defaults(translating: Translating) -> dict[str, str]:
    """Return what DeepSpeed takes where its file gives nothing: no schedule, no clipping, float32."""
    found = {"gradient_clipping": "0"}
    if not any(f"{name}.enabled" in translating for name in ("fp16", "bf16", "bfloat16")):
        found["bf16.enabled"] = "false"
    if BATCH not in translating:
        found[ACCUMULATION] = "1"
    kind = translating.word("scheduler.type")
    if not kind:
        found |= {"scheduler.type": "none"}
    else:
        found |= {f"{_SCHEDULE}warmup_num_steps": "1000", f"{_SCHEDULE}warmup_type": "log"}
        found |= {f"{_SCHEDULE}cos_min_ratio": "0.0001"} if kind == "warmupcosinelr" else {_PEAK: "1e-3"}
    if _TYPE in translating:
        decay = "0.01" if translating.is_on(f"{_PARAMS}torch_adam") else "0"
        found |= {f"{_PARAMS}lr": "1e-3", f"{_PARAMS}weight_decay": decay}
        found |= {f"{_PARAMS}betas": "0.9,0.999", f"{_PARAMS}eps": "1e-8"} if _optimizer(translating) in _ADAMS else {}
    return found


def _optimizer(translating: Translating) -> str:
    """Return the optimizer here that a type and its parameters stand for; "" where there is none."""
    name = translating.word(_TYPE)
    if name == "adam":  # DeepSpeed's Adam decouples weight decay unless it is told otherwise
        return "adam" if translating.is_on(f"{_PARAMS}adam_w_mode") is False else "adamw"
    if name == "sgd":
        return "sgdm" if translating.number(f"{_PARAMS}momentum") else "sgd"
    return name if name in ("adamw", "muon") else ""


def _name_optimizer(translating: Translating, key: str) -> None:
    optimizer = _optimizer(translating)
    if optimizer:
        translating.set(key, optimizer=optimizer)
    else:
        translating.refuse(key, f"of DeepSpeed's optimizers Adam, AdamW, SGD and Muon are here, {_OWN}", "optimizer")


def _of(optimizers: tuple[str, ...], rule: Rule) -> Rule:
    return when(
        lambda translating: _TYPE not in translating or _optimizer(translating) in optimizers,
        rule,
        "optimizer.type does not read it",
    )


def _rate(translating: Translating, key: str) -> None:
    """Take the optimizer's rate, unless the schedule or Muon's own rates say another peak."""
    rate = translating.text(key)
    if translating.text(_PEAK) not in (None, "auto"):
        translating.left(key, f"{_PEAK} takes its place")
    elif f"{_PARAMS}muon_lr" not in translating:
        translating.set(key, learning_rate=rate)
    elif f"{_PARAMS}adam_lr" not in translating:
        translating.set(key, "of all but the hidden matrices", muon_adam_learning_rate=rate)
    else:
        translating.left(key, "muon_lr and adam_lr take its place")


_SCHEDULES = {
    "none": {"schedule": "constant", "warmup_steps": "0"},
    "warmuplr": {"schedule": "constant"},
    "warmupdecaylr": {"schedule": "linear", "min_lr_ratio": "0"},
    "warmupcosinelr": {"schedule": "cosine"},
}


def _schedule(translating: Translating, key: str) -> None:
    if translating.word(key) in _SCHEDULES:
        translating.set(key, **_SCHEDULES[translating.word(key)])
    else:
        problem = "of DeepSpeed's schedules WarmupLR, WarmupDecayLR and WarmupCosineLR are here: give --schedule"
        translating.refuse(key, problem, "schedule")


def _precision(dtype: str) -> Rule:
    def apply(translating: Translating, key: str) -> None:
        others = {
            translating.word(f"{name}.enabled") for name in ("fp16", "bf16", "bfloat16") if f"{name}.enabled" != key
        }
        if translating.is_on(key) and "true" in others:
            translating.refuse(key, "fp16 and bf16 are both on: keep one", "mixed_precision", "mp_dtype")
        elif translating.is_on(key):
            translating.set(key, mixed_precision="true", mp_dtype=dtype)
        else:
            translating.set(key, mixed_precision=None if {"true", "auto"} & others else "false")

    return apply


def _stage(translating: Translating, key: str) -> None:
    stage = {"true": "1", "false": "0"}.get(translating.word(key), translating.word(key))
    if stage == "3" and _count(translating, _GROUP) is not None:
        group = _count(translating, _GROUP)
        translating.set(key, "in groups, as MiCS makes them", sharding_strategy="hsdp", hsdp_group_size=group)
    elif stage in _STAGES:
        remark = "the nearest: gradients are sharded, too" if stage == "1" else ""
        translating.set(key, remark, sharding_strategy=_STAGES[stage])
    else:
        translating.refuse(key, "a stage from 0 to 3 is needed", "sharding_strategy")


def _recompute(translating: Translating, key: str) -> None:
    on = translating.word(key) not in ("false", "0")
    translating.set(key, "blocks are computed again; nothing is moved", fsdp_activation_checkpointing=on or None)


def _off(reason: str, *values: str) -> Rule:
    return only("false", "none", "auto", *values, reason=f"{reason}: take it out")


_STAGES = {"0": "ddp", "1": "zero2", "2": "zero2", "3": "fsdp"}
_ADAMS, _WITH_MOMENTUM = ("adamw", "adam", "muon"), ("sgdm", "muon")
_NO_OFFLOAD = "nothing is moved to the host; memory: more GPUs, --fsdp_activation_checkpointing, a smaller --batch_size"
_SPEED = left("about speed or memory: the result is the same")
_SUMS = left("sums of gradients are float32, their mean is over all tokens")
_SILENT = """
    activation_checkpointing.* aio.* amp.* autotuning.* checkpoint.* comms_logger.* compile.* curriculum_learning.*
    data_efficiency.* dataloader_drop_last disable_allgather dump_state elasticity.* flops_profiler.* hybrid_engine.*
    memory_breakdown nebula.* pipeline.* progressive_layer_drop.* sparse_attention.* sparse_gradients tensor_parallel.*
    torch_autocast.* use_data_before_expert_parallelism wall_clock_breakdown zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer seq_parallel_communication_data_type
"""
RULES: dict[str, Rule] = {
    **joint(BATCH),
    MICRO: row("batch_size"),
    ACCUMULATION: row("grad_accum_steps"),
    "gradient_clipping": row("grad_clip_thresh"),
    _TYPE: _name_optimizer,
    f"{_PARAMS}lr": _rate,
    f"{_PARAMS}muon_lr": row("learning_rate"),
    f"{_PARAMS}adam_lr": row("muon_adam_learning_rate"),
    f"{_PARAMS}weight_decay": row("weight_decay", remark="not of norms and embeddings"),
    f"{_PARAMS}betas": _of(_ADAMS, row("adam_beta1", pair)),
    f"{_PARAMS}eps": _of(_ADAMS, row("adam_epsilon")),
    f"{_PARAMS}momentum": _of(_WITH_MOMENTUM, row("momentum")),
    f"{_PARAMS}nesterov": _of(_WITH_MOMENTUM, row("nesterov")),
    f"{_PARAMS}bias_correction": only("true", reason="Adam corrects the bias of its moments"),
    f"{_PARAMS}dampening": only("0", reason=f"momentum is not dampened: take it out, {_OWN}"),
    f"{_PARAMS}amsgrad": _off("there is no AMSGrad"),
    f"{_PARAMS}adam_w_mode": left("of optimizer.type"),
    **{f"{_PARAMS}{name}": _SPEED for name in ("torch_adam", "fused", "foreach", "set_grad_none")},
    "optimizer.legacy_fusion": _SPEED,
    "scheduler.type": _schedule,
    _PEAK: row("learning_rate"),
    f"{_SCHEDULE}warmup_num_steps": row("warmup_steps"),
    f"{_SCHEDULE}total_num_steps": row("num_steps"),
    f"{_SCHEDULE}cos_min_ratio": row("min_lr_ratio"),
    f"{_SCHEDULE}warmup_type": left("the warm-up is linear here"),
    f"{_SCHEDULE}warmup_min_lr": left("the warm-up begins near zero"),
    f"{_SCHEDULE}warmup_min_ratio": left("the warm-up begins near zero"),
    "fp16.enabled": _precision("float16"),
    "bf16.enabled": _precision("bfloat16"),
    "bfloat16.enabled": _precision("bfloat16"),
    **{f"{name}.*": left("master weights are float32; the scale of the loss is found") for name in ("fp16", "bf16")},
    "zero_optimization.stage": _stage,
    "zero_optimization": _stage,
    **{f"zero_optimization.{name}.*": left(_NO_OFFLOAD) for name in ("offload_optimizer", "offload_param")},
    **{f"zero_optimization.{name}": left(_NO_OFFLOAD) for name in ("cpu_offload", "cpu_offload_params")},
    "zero_optimization.zero_quantized_gradients": _off("gradients are not quantised"),
    "zero_optimization.zero_quantized_weights": _off("weights are not quantised"),
    "zero_optimization.*": _SPEED,
    "activation_checkpointing.partition_activations": _recompute,
    "activation_checkpointing.cpu_checkpointing": _recompute,
    "activation_checkpointing.number_checkpoints": _recompute,
    "steps_per_print": row("report_interval", lambda text: "0" if text.lower().lstrip("+").startswith("inf") else text),
    "tensor_parallel.autotp_size": only("1", "0", reason="there is no tensor parallelism here: take it out"),
    "sequence_parallel_size": only("1", reason="there is no sequence parallelism here: take it out"),
    "pipeline.stages": only("1", "auto", reason="there is no pipeline parallelism here: take it out"),
    "amp.enabled": _off("Apex is not here, bf16.enabled and fp16.enabled are"),
    "torch_autocast.enabled": _off("bf16.enabled and fp16.enabled say it here"),
    "elasticity.enabled": _off("train_batch_size stays the same on any number of GPUs"),
    "progressive_layer_drop.enabled": _off("no layers are dropped"),
    "curriculum_learning.enabled": _off("the length of sequences does not change"),
    "data_efficiency.enabled": _off("data is neither sorted nor dropped"),
    "compression_training.*": only("false", reason="weights are not compressed: take the section out"),
    "sparse_attention.mode": _off("attention is dense", "dense"),
    "compile.deepcompile": row("use_torch_compile", choice(true="true", false="false")),
    "prescale_gradients": _SUMS,
    "gradient_predivide_factor": _SUMS,
    "data_types.*": _SUMS,
    "communication_data_type": _SUMS,
    **{
        f"{name}.*": left("--tracker says where reports go")
        for name in ("tensorboard", "wandb", "csv_monitor", "comet")
    },
    **dict.fromkeys(
        _SILENT.split(), left("about speed, memory or reports, or off: nothing that is learned depends on it")
    ),
}
