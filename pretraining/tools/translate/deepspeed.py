"""The JSON that DeepSpeed is configured with: batch, optimizer, schedule, precision and ZeRO stage.

It stands alone, or the file of a guide names or holds it; that file's settings then fill in "auto" and what is missing.
"""

from __future__ import annotations

from pretraining.tools.translate import key_rules as rules
from pretraining.tools.translate.key_rules import each, left, off, only, renamed, row, when
from pretraining.tools.translate.translation import Rule, System, Translation

_SIGNS = (
    *("train_micro_batch_size_per_gpu", "zero_optimization", "optimizer.params", "scheduler.params"),
    *("fp16.enabled", "bf16.enabled", "gradient_clipping", "steps_per_print", "wall_clock_breakdown"),
)
BATCH, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_TYPE, _PARAMS, _SCHEDULE = "optimizer.type", "optimizer.params.", "scheduler.params."
_PEAK = f"{_SCHEDULE}warmup_max_lr"
_PRECISIONS = {"fp16.enabled": "float16", "bf16.enabled": "bfloat16", "bfloat16.enabled": "bfloat16"}
_OWN = "or your own as --optimizer=package.module:Class"


def _defaults(translation: Translation) -> dict[str, str]:
    """Return what DeepSpeed takes if its file gives nothing: no schedule, no clipping, float32."""
    found = {"gradient_clipping": "0"}
    if not any(key in translation for key in _PRECISIONS):
        found["bf16.enabled"] = "false"
    if BATCH not in translation:
        found[ACCUMULATION] = "1"
    kind = translation.word("scheduler.type")
    if not kind:
        found |= {"scheduler.type": "none"}
    else:
        found |= {f"{_SCHEDULE}warmup_num_steps": "1000", f"{_SCHEDULE}warmup_type": "log"}
        found |= {f"{_SCHEDULE}cos_min_ratio": "0.0001"} if kind == "warmupcosinelr" else {_PEAK: "1e-3"}
    if _TYPE in translation:
        decay = "0.01" if translation.is_on(f"{_PARAMS}torch_adam") else "0"
        found |= {f"{_PARAMS}lr": "1e-3", f"{_PARAMS}weight_decay": decay}
        found |= {f"{_PARAMS}betas": "0.9,0.999", f"{_PARAMS}eps": "1e-8"} if _optimizer(translation) in _ADAMS else {}
    return found


def _combine(translation: Translation) -> None:
    """Leave "auto" to the settings here, and make the batch of a step."""
    for key, given in translation.values.items():
        if given.text == "auto":
            reason = "another system's settings fill it in: give a flag, or leave it to the default here"
            translation.left(key, reason)
    size, micro, steps = (_count(translation, key) for key in (BATCH, MICRO, ACCUMULATION))
    if size is None:
        return
    if size % ((micro or 1) * (steps or 1)):
        problem = f"{MICRO} {micro or 1} x {ACCUMULATION} {steps or 1} x GPUs is never {size}: change one of them"
        translation.refuse(BATCH, problem, "global_batch_size")
    else:
        translation.set(BATCH, "on any number of GPUs", global_batch_size=size)
    if steps is not None:
        translation.left(ACCUMULATION, f"follows from {BATCH}, batch_size and the number of GPUs")


def _count(translation: Translation, key: str) -> int | None:
    return None if key in translation.notes else translation.count(key)


def _optimizer(translation: Translation) -> str:
    """Return the optimizer here that a type and its parameters stand for; "" if there is none."""
    name = translation.word(_TYPE)
    if name == "adam":  # DeepSpeed's Adam decouples weight decay unless it is told otherwise
        return "adam" if translation.is_on(f"{_PARAMS}adam_w_mode") is False else "adamw"
    if name == "sgd":
        return "sgdm" if translation.number(f"{_PARAMS}momentum") else "sgd"
    return name if name in ("adamw", "muon") else ""


def _name_optimizer(translation: Translation, key: str) -> None:
    optimizer = _optimizer(translation)
    if optimizer:
        translation.set(key, optimizer=optimizer)
    else:
        translation.refuse(key, f"of DeepSpeed's optimizers Adam, AdamW, SGD and Muon are here, {_OWN}", "optimizer")


def _of(optimizers: tuple[str, ...], rule: Rule) -> Rule:
    return when(
        lambda translation: _TYPE not in translation or _optimizer(translation) in optimizers,
        rule,
        "optimizer.type does not read it",
    )


def _rate(translation: Translation, key: str) -> None:
    """Take the optimizer's rate, unless the schedule or Muon's own rates say another peak."""
    rate = translation.text(key)
    if translation.text(_PEAK) not in (None, "auto"):
        translation.left(key, f"{_PEAK} takes its place")
    elif f"{_PARAMS}muon_lr" not in translation:
        translation.set(key, learning_rate=rate)
    elif f"{_PARAMS}adam_lr" not in translation:
        translation.set(key, "of all but the hidden matrices", muon_adam_learning_rate=rate)
    else:
        translation.left(key, "muon_lr and adam_lr take its place")


def _schedule(translation: Translation, key: str) -> None:
    if translation.word(key) in _SCHEDULES:
        translation.set(key, **_SCHEDULES[translation.word(key)])
    else:
        problem = "of DeepSpeed's schedules WarmupLR, WarmupDecayLR and WarmupCosineLR are here: give --schedule"
        translation.refuse(key, problem, "schedule")


def _precision(translation: Translation, key: str) -> None:
    others = {translation.word(other) for other in _PRECISIONS if other != key}
    if translation.is_on(key) and "true" in others:
        translation.refuse(key, "fp16 and bf16 are both on: keep one", "mixed_precision", "mp_dtype")
    elif translation.is_on(key):
        translation.set(key, mixed_precision="true", mp_dtype=_PRECISIONS[key])
    else:
        translation.set(key, mixed_precision=None if {"true", "auto"} & others else "false")


def _stage(translation: Translation, key: str) -> None:
    stage = {"true": "1", "false": "0"}.get(translation.word(key), translation.word(key))
    if stage in _STAGES:
        remark = "the nearest: gradients are sharded, too" if stage == "1" else ""
        translation.set(key, remark, sharding_strategy=_STAGES[stage])
    else:
        translation.refuse(key, "a stage from 0 to 3 is needed", "sharding_strategy")


def _recompute(translation: Translation, key: str) -> None:
    on = translation.word(key) not in ("false", "0")
    translation.set(key, "blocks are computed again; nothing is moved", fsdp_activation_checkpointing=on or None)


_SCHEDULES = {
    "none": {"schedule": "constant", "warmup_steps": "0"},
    "warmuplr": {"schedule": "constant"},
    "warmupdecaylr": {"schedule": "linear", "min_lr_ratio": "0"},
    "warmupcosinelr": {"schedule": "cosine"},
}
_STAGES = {"0": "ddp", "1": "zero2", "2": "zero2", "3": "fsdp"}
_ADAMS, _WITH_MOMENTUM = ("adamw", "adam", "muon"), ("sgdm", "muon")
_NO_OFFLOAD = "nothing is moved to the host; memory: more GPUs, --fsdp_activation_checkpointing, a smaller --batch_size"
_SPEED = left("about speed or memory: the result is the same")
_SUMS = left("sums of gradients are float32, their mean is over all tokens")
_NO_EFFECT = left("about speed, memory or reports, or off: nothing that is learned depends on it")
_RULES: dict[str, Rule] = {
    BATCH: rules.SETTLED,
    **renamed(**{MICRO: "batch_size", ACCUMULATION: "grad_accum_steps", "gradient_clipping": "grad_clip_thresh"}),
    _TYPE: _name_optimizer,
    f"{_PARAMS}lr": _rate,
    **renamed(_PARAMS, muon_lr="learning_rate", adam_lr="muon_adam_learning_rate"),
    f"{_PARAMS}weight_decay": row("weight_decay", remark=rules.AFTER_DECAY),
    f"{_PARAMS}betas": _of(_ADAMS, row("adam_beta1", rules.pair)),
    f"{_PARAMS}eps": _of(_ADAMS, row("adam_epsilon")),
    f"{_PARAMS}momentum": _of(_WITH_MOMENTUM, row("momentum")),
    f"{_PARAMS}nesterov": _of(_WITH_MOMENTUM, row("nesterov")),
    f"{_PARAMS}bias_correction": only("true", reason="Adam corrects the bias of its moments"),
    f"{_PARAMS}dampening": only("0", reason=f"momentum is not dampened: take it out, {_OWN}"),
    f"{_PARAMS}amsgrad": off("there is no AMSGrad"),
    f"{_PARAMS}adam_w_mode": left("of optimizer.type"),
    **each("torch_adam fused foreach set_grad_none", _SPEED, _PARAMS),
    "scheduler.type": _schedule,
    **renamed(_SCHEDULE, warmup_max_lr="learning_rate", warmup_num_steps="warmup_steps"),
    **renamed(_SCHEDULE, total_num_steps="num_steps", cos_min_ratio="min_lr_ratio"),
    f"{_SCHEDULE}warmup_type": left("the warm-up is linear here"),
    **each("warmup_min_lr warmup_min_ratio", left("the warm-up begins near zero"), _SCHEDULE),
    **dict.fromkeys(_PRECISIONS, _precision),
    **each("fp16.* bf16.*", left("master weights are float32; the scale of the loss is found")),
    **each("zero_optimization.stage zero_optimization", _stage),
    **each(
        "offload_optimizer.* offload_param.* cpu_offload cpu_offload_params", left(_NO_OFFLOAD), "zero_optimization."
    ),
    **each("zero_quantized_gradients zero_quantized_weights", off("nothing is quantised"), "zero_optimization."),
    "zero_optimization.*": _SPEED,
    **each("partition_activations cpu_checkpointing number_checkpoints", _recompute, "activation_checkpointing."),
    "steps_per_print": row("report_interval", lambda text: "0" if text.lower().lstrip("+").startswith("inf") else text),
    **each(
        "tensor_parallel.autotp_size sequence_parallel_size pipeline.stages",
        only("1", "0", "auto", reason="models are laid out by --sharding_strategy alone: take it out"),
    ),
    **each("amp.enabled torch_autocast.enabled", off("bf16.enabled and fp16.enabled say it here")),
    "elasticity.enabled": off("train_batch_size stays the same on any number of GPUs"),
    **each("curriculum_learning.enabled data_efficiency.enabled", off("data is neither sorted nor dropped")),
    **each("progressive_layer_drop.enabled compression_training.*", off("no layer is dropped, no weight compressed")),
    "sparse_attention.*": off("attention is dense"),
    "compile.deepcompile": row("use_torch_compile", rules.choice(true="true", false="false")),
    **each("prescale_gradients gradient_predivide_factor data_types.* communication_data_type", _SUMS),
    **each("tensorboard.* wandb.* csv_monitor.* comet.*", left("--tracker says where reports go")),
    **each("activation_checkpointing.* aio.* amp.* autotuning.* checkpoint.* comms_logger.* compile.*", _NO_EFFECT),
    **each("curriculum_learning.* data_efficiency.* dataloader_drop_last disable_allgather dump_state", _NO_EFFECT),
    **each("elasticity.* flops_profiler.* hybrid_engine.* memory_breakdown nebula.* pipeline.*", _NO_EFFECT),
    **each("progressive_layer_drop.* sparse_gradients tensor_parallel.* torch_autocast.*", _NO_EFFECT),
    **each("wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", _NO_EFFECT),
    **each("seq_parallel_communication_data_type optimizer.legacy_fusion", _NO_EFFECT),
}
SYSTEM = System("the JSON that DeepSpeed is configured with", _SIGNS, _RULES, _defaults, _combine)
