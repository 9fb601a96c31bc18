"""The JSON of DeepSpeed: batch, optimizer, schedule, precision and ZeRO stage.

The JSON stands alone, or a guide's file names it. The guide then replaces "auto" and missing keys.
"""

from __future__ import annotations

from collections.abc import Mapping

from pretraining.tools.translate import rows
from pretraining.tools.translate.engine import System, Translation
from pretraining.tools.translate.rows import Key, renamed

BATCH, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_PARAMS, _SCHEDULE = "optimizer.params.", "scheduler.params."
_PEAK = f"{_SCHEDULE}warmup_max_lr"
HALF = ("fp16.enabled", "bf16.enabled")


def _defaults(translation: Translation) -> Mapping[str, str]:
    """Return what a file without a scheduler, clipping or precision means there: constant, not clipped, float32."""
    settings = {} if "scheduler.type" in translation else {"schedule": "constant", "warmup_steps": "0"}
    settings |= {} if "gradient_clipping" in translation else {"grad_clip_thresh": "0"}
    return settings if any(key in translation for key in HALF) else settings | rows.FLOAT32


def _combine(translation: Translation) -> None:
    """Leave "auto" to our settings, and resolve the global batch size, the peak rate and the precision."""
    silent = [key for key in translation.values if key.startswith("zero_optimization.") and key not in _ROWS]
    translation.skip("left out: it says nothing here", "steps_per_print", *silent)
    for key in translation.values:
        if translation.word(key) == "auto":
            translation.set(key, "another system's settings fill it in: give a flag, or leave it to the default here")
    if _PEAK in translation and _PEAK not in translation.notes:
        translation.set(f"{_PARAMS}lr", f"{_PEAK} replaces it")
    _precision(translation)
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
        translation.set(ACCUMULATION, f"follows from {BATCH}, batch_size and the number of GPUs")


def _precision(translation: Translation) -> None:
    given = [key for key in HALF if key in translation and key not in translation.notes]
    on = [key for key in given if translation.is_on(key)]
    if len(on) == 2:
        translation.refuse(on[1], "fp16 and bf16 are both on: keep one", "mixed_precision", "mp_dtype")
    for key in given:
        half = rows.FLOAT16 if key == HALF[0] else rows.BFLOAT16
        is_float32 = not on and len(given) == sum(half in translation for half in HALF)
        translation.set(key, **half if key in on else rows.FLOAT32 if is_float32 else {})


_ROWS = {
    BATCH: Key("global_batch_size"),
    **renamed(**{MICRO: "batch_size", ACCUMULATION: "grad_accum_steps", "gradient_clipping": "grad_clip_thresh"}),
    "optimizer.type": Key("optimizer", rows.words(adamw="adamw", adam="adamw")),
    **renamed(_PARAMS, lr="learning_rate", eps="adam_epsilon"),
    f"{_PARAMS}betas": Key("adam_beta1", rows.pair),
    f"{_PARAMS}weight_decay": rows.WEIGHT_DECAY,
    "scheduler.type": Key(
        "schedule", rows.words(warmuplr="constant", warmupdecaylr={"schedule": "linear", "min_lr_ratio": "0"})
    ),
    **renamed(_SCHEDULE, warmup_max_lr="learning_rate", warmup_num_steps="warmup_steps", total_num_steps="num_steps"),
    f"{_SCHEDULE}warmup_min_lr": Key(remark="the warm-up is a line from near zero"),
    **renamed(**dict.fromkeys(HALF, "mp_dtype")),
    "zero_optimization.stage": Key("sharding_strategy", rows.words(**{"0": "ddp", "2": "zero2", "3": "fsdp"})),
    "steps_per_print": Key(),
}
SYSTEM = System("deepspeed", "the JSON that DeepSpeed is configured with", _ROWS, _combine, defaults=_defaults)
