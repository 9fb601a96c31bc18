"""A pipeline with composed configs: optimizer.lr_config.lr, train.max_steps, checkpoint.save_path.

The keys come from a folder of files, or from words alone: `optimizer=sgdm optimizer.lr_config.lr=1.0`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

from pretraining.config.plugins import OPTIMIZERS, PLUGIN_PATH
from pretraining.config.variants import VARIANTS
from pretraining.files import real_path
from pretraining.tools.translate import rows
from pretraining.tools.translate.engine import System, Translation
from pretraining.tools.translate.rows import Key, NotALlamaError, renamed

WORDS = "the command line"
"""Name of words without a file, in messages."""
_OPTIMIZER, _LR = "optimizer.", "optimizer.lr_config."
_NAME, _BETA, _SCHEDULE = "optimizer.name", "optimizer.beta", f"{_LR}schedule"
_HORIZON, _STEPS, _SEGMENT = f"{_LR}max_steps", "train.max_steps", "checkpoint.num_steps"
_BETA_OF_SGDM = "0.9"
_STEP = re.compile(r"iter_(\d+)\.\w+")
_OF_ADAM = {"adam_beta1": "0.9", "adam_beta2": "0.999"}


def _defaults(translation: Translation) -> Mapping[str, str]:
    """Return what words without a file mean there: a constant rate, not clipped, float32, the optimizer's own betas."""
    if translation.name != WORDS or len(translation.used) + ("optimizer" in translation.flags) < 2:
        return {}  # one word alone is an alias
    settings = {"grad_clip_thresh": "0", "mixed_precision": "false"}
    if f"{_LR}warmup" not in translation:
        settings |= {"warmup_steps": "0"}
    if _SCHEDULE not in translation:
        has_phases = any(key.startswith(_LR) for key in translation.values if key != f"{_LR}lr")
        settings |= {"schedule": "linear", "min_lr_ratio": "0"} if has_phases else {"schedule": "constant"}
    name = _optimizer(translation) or "adamw"
    if name in OPTIMIZERS:
        settings |= {"weight_decay": "0"} | (_OF_ADAM if name in ("adam", "adamw", "nadam") else {})
    return settings | ({"momentum": _BETA_OF_SGDM} if name == "sgdm" else {})


def _combine(translation: Translation) -> None:
    """Refuse references; resolve the optimizer's rate and options, lengths, saves and loads."""
    for key in translation.values:
        if "${" in (translation.text(key) or ""):
            translation.refuse(key, "references are not resolved: write the value itself")
    if translation.problems:
        return
    _set_rate(translation)
    _set_options(translation)
    _set_lengths(translation)
    _set_saves(translation)
    _set_loads(translation)


def _optimizer(translation: Translation) -> str | None:
    """Return the optimizer, from --optimizer or the files."""
    return translation.flags.get("optimizer") or translation.text(_NAME)


def _set_rate(translation: Translation) -> None:
    """Set the peak rate: the momentum of sgdm is a mean of gradients there, a sum here."""
    key, name, remark = f"{_LR}lr", _optimizer(translation), ""
    rate, beta = translation.text(key), translation.number(_BETA)
    if beta is None and "momentum" not in translation.flags:
        beta = Fraction(_BETA_OF_SGDM)
    if rate is not None and name == "muon":
        remark = rows.RATE_OF_MUON
    elif rate is not None and name == "sgdm" and beta is not None:
        rate = rows.decimal((translation.number(key) or Fraction(0)) * (1 - beta))
        remark = "x (1 - beta): m = beta x m + (1 - beta) x g there, m = beta x m + g here"
    translation.set(key, remark, learning_rate=rate)
    if name == "rmsprop":
        translation.set(_BETA, "decay of the mean of squares", rms_alpha=translation.text(_BETA))


def _set_options(translation: Translation) -> None:
    """Turn the keys of a user-defined optimizer into `optimizer_options`."""
    if not PLUGIN_PATH.fullmatch(_optimizer(translation) or ""):
        return
    options = {
        key: f"{key.removeprefix(_OPTIMIZER)}={translation.text(key)}"
        for key in translation.values
        if key.startswith(_OPTIMIZER) and key not in (_NAME, f"{_OPTIMIZER}weight_decay") and key in translation
        if not key.startswith(_LR)
    }
    for key in options:
        remark = "options of a user-defined optimizer"
        translation.set(key, remark, optimizer_options=",".join(options.values()))


def _set_lengths(translation: Translation) -> None:
    """Resolve num_steps, where the schedule ends, and run_steps, where this invocation stops."""
    if translation.word(_SCHEDULE) == "constant" and _STEPS in translation:
        translation.set(_HORIZON, "a constant rate has no end")
    lengths = {key: translation.count(key) for key in (_HORIZON, _STEPS, _SEGMENT) if key not in translation.notes}
    whole = lengths.get(_HORIZON) or lengths.get(_STEPS)
    stop = min([length for length in lengths.values() if length and (whole is None or length < whole)], default=None)
    for key, length in lengths.items():
        if length is not None and length == whole:
            translation.set(key, num_steps=length)
        elif length is not None and length == stop:
            translation.set(key, "stops there, before the end of the schedule", run_steps=length)
        elif length is not None:
            translation.set(key, "the rate is zero after the schedule, or the run stops earlier")


def _set_saves(translation: Translation) -> None:
    switch, path, steps = "checkpoint.save", "checkpoint.save_path", "checkpoint.save_steps"
    text = translation.text(steps) or ""
    if translation.is_on(switch) is False:
        translation.set(switch, "the final checkpoint is saved anyway", checkpoint_interval="0")
        translation.skip(f"{switch} is false", path, steps)
    elif "," in text or text.startswith("["):
        translation.set(steps, "and at the end", checkpoint_steps=text, checkpoint_interval="0")


def _set_loads(translation: Translation) -> None:
    """Resolve the start point: a run's folder, or a step of a run."""
    switch, path = "checkpoint.load", "checkpoint.load_path"
    loads, place = translation.is_on(switch), translation.text(path)
    if loads is False:
        translation.set(path, "nothing is loaded")
    elif loads and place is None:
        translation.refuse(switch, f"needs {path}", "ckpt_load_path")
    elif place is not None:
        run, step = Path(place).parent, _STEP.fullmatch(Path(place).name)
        saved = translation.flags.get("ckpt_save_path") or translation.text("checkpoint.save_path")
        if step is None:
            translation.set(path, ckpt_load_path=place)
        elif saved is not None and real_path(Path(saved)) == real_path(run):
            translation.set(path, "that step of the run in checkpoint.save_path", resume_from_checkpoint=int(step[1]))
        else:
            start = run / "checkpoints" / f"step_{int(step[1])}_ckp"
            translation.set(path, "the step in its name", ckpt_load_path=start)


def _name_model(text: str) -> Mapping[str, str]:
    name = text.strip().lower()
    if name not in VARIANTS and not name.startswith("llama"):
        raise NotALlamaError("it is no Llama: RMSNorm, SwiGLU, rotary positions")
    return {"model_variant": name} if name in VARIANTS else {}


_ROWS = {
    _SCHEDULE: Key("schedule", rows.schedule),
    **renamed(_LR, lr="learning_rate", warmup="warmup_steps", max_steps="num_steps"),
    **renamed(_OPTIMIZER, name="optimizer", beta="momentum", beta1="adam_beta1", beta2="adam_beta2"),
    f"{_OPTIMIZER}weight_decay": rows.WEIGHT_DECAY,
    **renamed("train.", max_steps="num_steps", random_seed="seed"),
    "dataset.batch_size": Key("batch_size"),
    "model.name": Key(convert=_name_model),
    "model.dim": Key(convert=rows.width, remark="feed-forward 8/3 of it, in multiples of 256"),
    **renamed("model.", num_heads="num_attention_heads", num_blocks="num_hidden_layers"),
    "model.context_length": Key(convert=rows.context),
    "logging.wandb_project": rows.tracked("tracker_project_name"),
    "checkpoint.save": Key(remark="runs are always saved"),
    **renamed("checkpoint.", save_path="ckpt_save_path", save_steps="checkpoint_interval"),
    "checkpoint.load": Key(remark="checkpoint.load_path says from where"),
    **renamed("checkpoint.", load_path="ckpt_load_path", num_steps="run_steps"),
}
SYSTEM = System("composed", "composed configs (defaults, optimizer.lr_config, …)", _ROWS, _combine, defaults=_defaults)
