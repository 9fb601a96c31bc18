"""Rules for the JSON of DeepSpeed: batch, optimizer, schedule, precision and ZeRO stage.

The JSON stands alone, or a guide's file names or contains it. The guide then replaces "auto" and missing keys.
"""

from __future__ import annotations

from pretraining.tools.translate import key_rules as rules
from pretraining.tools.translate.key_rules import each, off, only, renamed, row, skip
from pretraining.tools.translate.translation import Rule, System, Translation

BATCH, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_TYPE, _PARAMS, _SCHEDULE = "optimizer.type", "optimizer.params.", "scheduler.params."
_PEAK = f"{_SCHEDULE}warmup_max_lr"
_PRECISIONS = {"fp16.enabled": "float16", "bf16.enabled": "bfloat16", "bfloat16.enabled": "bfloat16"}
_OWN = "or a user-defined one, --optimizer=package.module:Class"


def _defaults(translation: Translation) -> dict[str, str]:
    """Return DeepSpeed's defaults: no schedule, no clipping, float32."""
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
        found |= {f"{_PARAMS}betas": "0.9,0.999", f"{_PARAMS}eps": "1e-8"}
    return found


def _combine(translation: Translation) -> None:
    """Leave "auto" to our settings, and resolve the global batch size."""
    for key, given in translation.values.items():
        if given.text == "auto":
            reason = "another system's settings fill it in: give a flag, or leave it to the default here"
            translation.skip(key, reason)
    keys = (BATCH, MICRO, ACCUMULATION)
    size, micro, steps = (None if key in translation.notes else translation.count(key) for key in keys)
    if size is None:
        return
    if size % ((micro or 1) * (steps or 1)):
        problem = f"{MICRO} {micro or 1} x {ACCUMULATION} {steps or 1} x GPUs cannot be {size}: change one of them"
        translation.refuse(BATCH, problem, "global_batch_size")
    else:
        translation.set(BATCH, "on any number of GPUs", global_batch_size=size)
    if steps is not None:
        translation.skip(ACCUMULATION, f"follows from {BATCH}, batch_size and the number of GPUs")


def _optimizer(translation: Translation, key: str) -> None:
    name = translation.word(key)
    if name == "adam":  # DeepSpeed's Adam decouples weight decay by default
        name = "adam" if translation.is_on(f"{_PARAMS}adam_w_mode") is False else "adamw"
    elif name == "sgd" and translation.number(f"{_PARAMS}momentum"):
        name = "sgdm"
    if name in ("adam", "adamw", "sgd", "sgdm", "muon"):
        translation.set(key, optimizer=name)
    else:
        translation.refuse(key, f"must be Adam, AdamW, SGD or Muon, {_OWN}", "optimizer")


def _rate(translation: Translation, key: str) -> None:
    """Set the optimizer's rate, unless the schedule or Muon's own rates give the peak."""
    rate = translation.text(key)
    if translation.text(_PEAK) not in (None, "auto"):
        translation.skip(key, f"{_PEAK} replaces it")
    elif f"{_PARAMS}muon_lr" not in translation:
        translation.set(key, learning_rate=rate)
    elif f"{_PARAMS}adam_lr" not in translation:
        translation.set(key, "for all but the hidden matrices", muon_adam_learning_rate=rate)
    else:
        translation.skip(key, "muon_lr and adam_lr replace it")


def _precision(translation: Translation, key: str) -> None:
    others = {translation.word(other) for other in _PRECISIONS if other != key}
    if translation.is_on(key) and key != "fp16.enabled" and translation.word("fp16.enabled") == "true":
        translation.refuse(key, "fp16 and bf16 are both on: keep one", "mixed_precision", "mp_dtype")
    elif translation.is_on(key):
        translation.set(key, mixed_precision="true", mp_dtype=_PRECISIONS[key])
    else:
        translation.set(key, mixed_precision=None if {"true", "auto"} & others else "false")


def _recompute(translation: Translation, key: str) -> None:
    on = translation.word(key) not in ("false", "0")
    translation.set(key, "blocks are computed again; nothing is moved", fsdp_activation_checkpointing=on or None)


_SCHEDULES = {
    "none": {"schedule": "constant", "warmup_steps": "0"},
    "warmuplr": {"schedule": "constant"},
    "warmupdecaylr": {"schedule": "linear", "min_lr_ratio": "0"},
    "warmupcosinelr": {"schedule": "cosine"},
}
_STAGES = {"0": "ddp", "1": "zero2", "2": "zero2", "3": "fsdp", "true": "zero2", "false": "ddp"}
_NOT_HERE = """
    optimizer.params.dampening optimizer.params.amsgrad zero_optimization.zero_quantized_gradients
    zero_optimization.zero_quantized_weights amp.enabled torch_autocast.enabled elasticity.enabled sparse_attention.*
    curriculum_learning.enabled data_efficiency.enabled progressive_layer_drop.enabled compression_training.*
"""
_IGNORED = """
    optimizer.params.torch_adam optimizer.params.fused optimizer.params.foreach optimizer.params.set_grad_none
    optimizer.params.adam_w_mode optimizer.legacy_fusion zero_optimization.* fp16.* bf16.* bfloat16.* aio.* amp.*
    activation_checkpointing.* autotuning.* checkpoint.* comms_logger.* compile.* curriculum_learning.* elasticity.*
    data_efficiency.* flops_profiler.* hybrid_engine.* nebula.* pipeline.* progressive_layer_drop.* tensor_parallel.*
    torch_autocast.* data_types.* tensorboard.* wandb.* csv_monitor.* comet.* dataloader_drop_last disable_allgather
    dump_state memory_breakdown sparse_gradients wall_clock_breakdown zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer prescale_gradients gradient_predivide_factor communication_data_type
    seq_parallel_communication_data_type
"""
_RULES: dict[str, Rule] = {
    BATCH: rules.combined,
    **renamed(**{MICRO: "batch_size", ACCUMULATION: "grad_accum_steps", "gradient_clipping": "grad_clip_thresh"}),
    _TYPE: _optimizer,
    f"{_PARAMS}lr": _rate,
    **renamed(_PARAMS, muon_lr="learning_rate", adam_lr="muon_adam_learning_rate", eps="adam_epsilon"),
    **renamed(_PARAMS, momentum="momentum", nesterov="nesterov"),
    f"{_PARAMS}weight_decay": row("weight_decay", remark=rules.AFTER_DECAY),
    f"{_PARAMS}betas": row("adam_beta1", rules.pair),
    f"{_PARAMS}bias_correction": only("true", reason="Adam corrects the bias of its moments"),
    "scheduler.type": row("schedule", rules.choice(**_SCHEDULES)),
    **renamed(_SCHEDULE, warmup_max_lr="learning_rate", warmup_num_steps="warmup_steps"),
    **renamed(_SCHEDULE, total_num_steps="num_steps", cos_min_ratio="min_lr_ratio"),
    **each("warmup_type warmup_min_lr warmup_min_ratio", skip("the warm-up is a line from near zero"), _SCHEDULE),
    **dict.fromkeys(_PRECISIONS, _precision),
    **each("zero_optimization.stage zero_optimization", row("sharding_strategy", rules.choice(**_STAGES))),
    **each("partition_activations cpu_checkpointing number_checkpoints", _recompute, "activation_checkpointing."),
    "steps_per_print": row("report_interval", lambda text: "0" if text.lower().lstrip("+").startswith("inf") else text),
    "compile.deepcompile": row("use_torch_compile", rules.choice(true="true", false="false")),
    **each(
        "tensor_parallel.autotp_size sequence_parallel_size pipeline.stages",
        only("1", "0", "auto", reason="--sharding_strategy is the only parallelism here: delete it"),
    ),
    **each(_NOT_HERE, off("it does not exist here")),
    **each(_IGNORED, skip("not translated: about speed, memory, reports, or how numbers are stored")),
}
SYSTEM = System("the JSON that DeepSpeed is configured with", _RULES, _defaults, _combine)
