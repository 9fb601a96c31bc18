"""Rules for a pipeline with composed configs: optimizer.lr_config.lr, train.max_steps, checkpoint.save_path.

The keys come from a folder of files, which `compose` merges, or from the command line alone:
`optimizer=sgdm optimizer.lr_config.lr=1.0 train.max_steps=100`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

from pretraining.config.plugins import OPTIMIZERS, PLUGIN_PATH, SCHEDULES
from pretraining.config.variants import VARIANTS
from pretraining.files import is_file, is_folder, real_path
from pretraining.tools.translate import key_rules as rules
from pretraining.tools.translate.key_rules import decimal, each, not_a_llama, off, only, renamed, row, skip, when
from pretraining.tools.translate.translation import Rule, System, Translation, plain

_OPTIMIZER, _LR = "optimizer.", "optimizer.lr_config."
_NAME, _BETA, _DECAY, _SCHEDULE = "optimizer.name", "optimizer.beta", "optimizer.weight_decay", f"{_LR}schedule"
_HORIZON, _STEPS, _SEGMENT = f"{_LR}max_steps", "train.max_steps", "checkpoint.num_steps"
_OPTIMIZER_NAMES = {name: name for name in OPTIMIZERS} | {
    **{"sgd_momentum": "sgdm", "normalized_sgd": "normalized_sgdm", "nadamw": "nadam"},
    **{"muon_adamw": "muon", "muon_adam": "muon", "muon_og": "muon"},
}
_DECOUPLED = ("adamw", "nadam", "muon", "normalized_sgdm")
"""Optimizers with decoupled weight decay; the others add it to the gradient."""
_RATIOS, _RATES = f"{_LR}min_lr_ratio {_LR}min_lr_factor", f"{_LR}min_lr {_LR}end_lr {_LR}final_lr"
_ENDS = (*_RATIOS.split(), *_RATES.split())
_WARM_UPS, _CLIPPING = (f"{_LR}warmup", f"{_LR}warmup_steps"), "gradient_clip_val grad_clip max_grad_norm"
_FEED_FORWARD, _DATA_PATHS = "intermediate_size fc_dim ffn_dim mlp_dim hidden_dim d_ff", "path data_path data_dir root"
_STEP = re.compile(r"iter_(\d+)\.\w+")
_NULL_IS_ZERO = ("optimizer.momentum", f"{_LR}decay", *(f"train.{name}" for name in _CLIPPING.split()))


def _name_of(key: str) -> str:
    """Return the key that a key or an argument sets; a choice without a group's file sets the name."""
    return {"optimizer/lr_config": _SCHEDULE, "dataset": "dataset.name"}.get(key, key)


def _defaults(translation: Translation) -> dict[str, str]:
    """Return the pipeline's defaults: a constant rate, no clipping or weight decay, float32, the optimizer's betas."""
    has_phases = any(key.startswith(_LR) and key in translation for key in translation.values if key != f"{_LR}lr")
    schedule = "trapezoid" if f"{_LR}decay" in translation else "linear" if has_phases else "constant"
    found = {_SCHEDULE: schedule, "train.use_amp": "true" if "train.precision" in translation else "false"}
    if not any(f"train.{name}" in translation for name in _CLIPPING.split()):
        found["train.gradient_clip_val"] = "0"
    name = _optimizer(translation) or "adamw"
    if name in OPTIMIZERS:
        found[_DECAY] = "0"
    given = translation.values.keys() | translation.flags.keys()
    if name == "sgdm" and not {_BETA, f"{_OPTIMIZER}momentum", "momentum"} & given:
        found[_BETA] = "0.9"
    if name in ("adam", "adamw", "nadam") and f"{_OPTIMIZER}betas" not in translation:
        missing = [key for key in ("beta1", "beta2") if f"{_OPTIMIZER}adam_{key}" not in translation]
        found |= {f"{_OPTIMIZER}{key}": {"beta1": "0.9", "beta2": "0.999"}[key] for key in missing}
    return found | {key: "0" for key in _NULL_IS_ZERO if key in translation.values}


def _combine(translation: Translation) -> None:
    """Refuse references; resolve the optimizer's options, the lengths, saves and loads."""
    for key, given in translation.values.items():
        text = given.text or ""
        if key.endswith("_target_"):
            translation.refuse(key, "objects are not built: name the optimizer as package.module:Class, or delete this")
        elif ("${" in text or text == "???") and not key.startswith("hydra."):
            translation.refuse(key, "references are not resolved: write the value itself")
    if translation.problems:
        return
    _own_options(translation)
    if translation.word(_NAME) == "muon_adamw" and f"{_OPTIMIZER}beta2" in translation:
        translation.refuse(f"{_OPTIMIZER}beta2", "Muon keeps no squares here: write optimizer.beta2=null", "optimizer")
    if translation.word(_SCHEDULE) == "piecewise_linear":
        _piecewise(translation)
    _lengths(translation)
    _saves(translation)
    _loads(translation)


# The optimizer


def _optimizer(translation: Translation) -> str | None:
    """Return our name of the optimizer, from --optimizer or the files."""
    name = translation.flags.get("optimizer") or translation.text(_NAME)
    return None if name is None else _OPTIMIZER_NAMES.get(name.strip().lower().replace("-", "_"), name)


def _own_options(translation: Translation) -> None:
    """Turn the keys of a user-defined optimizer into `optimizer_options`."""
    options = {}
    if PLUGIN_PATH.fullmatch(_optimizer(translation) or ""):
        for key, given in translation.values.items():
            is_option = key.startswith(_OPTIMIZER) and not key.startswith(_LR) and given.text is not None
            if is_option and key not in (_NAME, f"{_OPTIMIZER}lr", _DECAY, f"{_OPTIMIZER}betas"):
                options[key] = f"{key.removeprefix(_OPTIMIZER)}={given.text}"
                translation.skip(key, "an option of a user-defined optimizer")
    if options:
        translation.set(
            list(options)[-1], "options of a user-defined optimizer", optimizer_options=",".join(options.values())
        )


def _name(translation: Translation, key: str) -> None:
    text, word = translation.text(key) or "", translation.word(key)
    if word in _OPTIMIZER_NAMES or PLUGIN_PATH.fullmatch(text):
        translation.set(key, optimizer=_OPTIMIZER_NAMES.get(word, text))
    else:
        translation.refuse(key, f"must be one of {', '.join(OPTIMIZERS)}, or package.module:Class", "optimizer")


def _rate(translation: Translation, key: str) -> None:
    """Set the peak rate; with `beta`, their momentum is a mean of gradients, ours a sum."""
    rate, beta, remark = translation.text(key), translation.number(_BETA), ""
    if _optimizer(translation) == "muon":
        remark = rules.RATE_OF_MUON
    elif _optimizer(translation) == "sgdm" and beta is not None:
        rate = decimal((translation.number(key) or Fraction(0)) * (1 - beta))
        remark = "x (1 - beta): m = beta x m + (1 - beta) x g there, m = beta x m + g here"
    translation.set(key, remark, learning_rate=rate)


def _momentum(translation: Translation, key: str) -> None:
    """Set the decay of the squares for rmsprop, of the momentum for the others."""
    if _optimizer(translation) == "rmsprop":
        translation.set(key, "decay of the mean of squares", rms_alpha=translation.text(key))
    else:
        translation.set(key, momentum=translation.text(key))


def _decoupling(translation: Translation, key: str) -> None:
    """Accept the kind of weight decay that our optimizer has: decoupled, or added to the gradient."""
    name, decouples = _optimizer(translation), translation.is_on(key)
    if not translation.number(_DECAY) or name not in OPTIMIZERS or decouples == (name in _DECOUPLED):
        translation.set(key, "as here, or there is no weight decay")
    else:
        here = "decoupled" if name in _DECOUPLED else "added to the gradient"
        translation.refuse(key, f"weight decay of {name} is {here} here: change it, or set optimizer.weight_decay=0")


# The schedule and lengths


def _schedule(translation: Translation, key: str) -> None:
    """Set a schedule with their defaults: no warm-up, and an end at zero."""
    name = translation.word(key)
    if PLUGIN_PATH.fullmatch(translation.text(key) or ""):
        translation.set(key, schedule=translation.text(key))
        return
    if name not in SCHEDULES:
        translation.refuse(key, f"must be one of {', '.join(SCHEDULES)}, or package.module:function", "schedule")
        return
    ends_at_zero = name != "constant" and not any(end in translation for end in _ENDS)
    has_warmup = any(warmup in translation for warmup in _WARM_UPS)
    is_trapezoid = name == "linear" and translation.number(f"{_LR}const")
    translation.set(
        key,
        ", ".join(filter(None, ["down to zero" * ends_at_zero, "without warm-up" * (not has_warmup)])),
        schedule="trapezoid" if is_trapezoid else name,
        min_lr_ratio="0" if ends_at_zero else None,
        warmup_steps=None if has_warmup else "0",
    )


def _piecewise(translation: Translation) -> None:
    """Set the points of a line from lr1 at start_steps to lr2, max_steps later."""
    keys = [f"{_LR}{name}" for name in ("lr1", "lr2", "start_steps", "max_steps")]
    first, second, start, length = (translation.number(key) for key in keys)
    peak = max(first or Fraction(0), second or Fraction(0))
    if first is None or second is None or length is None or peak <= 0:
        problem = f"a line needs {', '.join(keys)}, and a rate above 0; for several lines set --schedule_points"
        translation.refuse(_SCHEDULE, problem, "schedule")
        return
    begin = int(start or 0)
    points = f"{begin}:{decimal(first / peak)},{begin + int(length)}:{decimal(second / peak)}"
    translation.set(_SCHEDULE, schedule="piecewise_linear", schedule_points=points)
    for key in keys:
        translation.skip(key, "in the points")
    for key in (*_WARM_UPS, f"{_LR}lr"):
        translation.skip(key, "piecewise_linear does not read it")
    _rate(translation, keys[0] if first >= second else keys[1])


def _lengths(translation: Translation) -> None:
    """Resolve num_steps, where the schedule ends, and run_steps, where this invocation stops."""
    is_constant = translation.word(_SCHEDULE) == "constant"
    if _HORIZON not in translation.notes and is_constant and _STEPS in translation:
        translation.skip(_HORIZON, "a constant rate has no end")
    lengths = {key: translation.count(key) for key in (_HORIZON, _STEPS, _SEGMENT) if key not in translation.notes}
    horizon, steps = lengths.get(_HORIZON), lengths.get(_STEPS)
    if horizon and steps and horizon < steps and any(end in translation for end in _ENDS):
        problem = f"the schedule ends earlier, at {_HORIZON}={horizon}: set both to the same number"
        translation.refuse(_STEPS, problem, "num_steps")
        return
    whole = horizon or steps
    stop = min([length for length in lengths.values() if length and (whole is None or length < whole)], default=None)
    for key, length in lengths.items():
        if length is None:
            continue
        if length == whole:
            translation.set(key, num_steps=length)
        elif length == stop:
            translation.set(key, "stops there, before the end of the schedule", run_steps=length)
        else:
            translation.skip(key, "the rate is zero after the schedule, or the run stops earlier")


# Runs


def _saves(translation: Translation) -> None:
    switch, path, steps = "checkpoint.save", "checkpoint.save_path", "checkpoint.save_steps"
    text = translation.text(steps) or ""
    if translation.is_on(switch) is False:
        translation.set(switch, "the final checkpoint is saved anyway", checkpoint_interval="0")
        translation.skip(path, f"{switch} is false")
        translation.skip(steps, f"{switch} is false")
    elif "," in text or text.startswith("["):
        translation.set(steps, "and at the end", checkpoint_steps=text, checkpoint_interval="0")


def _loads(translation: Translation) -> None:
    """Resolve the start point: a run's folder, or a step of a run."""
    switch, path, file = "checkpoint.load", "checkpoint.load_path", "checkpoint.load_file"
    loads, place = translation.is_on(switch), translation.text(path)
    if loads is False:
        for key in (path, file, "checkpoint.overwrite_optimizer"):
            translation.skip(key, "nothing is loaded")
    elif loads and place is None:
        translation.refuse(switch, f"needs {path}", "ckpt_load_path")
    elif place is not None:
        whole = Path(place, translation.text(file) or "")
        step = _STEP.fullmatch(whole.name)
        saved = translation.flags.get("ckpt_save_path") or translation.text("checkpoint.save_path")
        start = whole.parent / "checkpoints" / f"step_{int(step[1])}_ckp" if step else whole
        if is_file(whole):
            translation.refuse(path, f"{whole} is a checkpoint of another system and cannot be read", "ckpt_load_path")
        elif step and saved is not None and real_path(Path(saved)) == real_path(whole.parent):
            translation.set(path, "that step of the run in checkpoint.save_path", resume_from_checkpoint=int(step[1]))
        else:
            translation.set(path, "the step in its name" if step else "", ckpt_load_path=start)


def _amp(translation: Translation, key: str) -> None:
    on = translation.is_on(key)
    translation.set(key, mixed_precision=None if "train.precision" in translation and on else bool(on))


# The model and data


def _width(translation: Translation, key: str) -> None:
    """Set the width, and without a feed-forward width 8/3 of it."""
    number = translation.number(key)
    has_own = any(f"model.{name}" in translation for name in _FEED_FORWARD.split())
    width = None if has_own or number is None else rules.gated_width(number, 256)
    remark = "" if width is None else "feed-forward 8/3 of it, in multiples of 256"
    translation.set(key, remark, hidden_size=translation.text(key), intermediate_size=width)


def _name_model(translation: Translation, key: str) -> None:
    name = (translation.text(key) or "").lower()
    if name in VARIANTS:
        translation.set(key, model_variant=name)
    elif name.startswith("llama"):
        translation.skip(key, "as here")
    else:
        rules.refuse_model(translation, key, "it is no Llama: RMSNorm, SwiGLU, rotary positions")


def _name_data(translation: Translation, key: str) -> None:
    name = translation.text(key) or ""
    roots = [text for path in _DATA_PATHS.split() if (text := translation.text(f"dataset.{path}"))]
    if roots and is_folder(Path(roots[0]) / name):
        translation.set(key, datasets=name)
    else:
        translation.skip(key, "data is a folder of token files: give --data_path (pretrain prepare makes one)")


def _experiment(translation: Translation, key: str) -> None:
    switch = f"{key.rpartition('.')[0]}.use"
    if "false" in (translation.word(switch), translation.word(key)) or translation.word(key) in ("0", "0.0"):
        translation.skip(key, "off")
    else:
        translation.refuse(key, "experiments of that pipeline do not exist here: delete it, or write null")


_NOT_HERE = """
    optimizer.offset_beta optimizer.ns_embedding optimizer.ns_head optimizer.wrapper optimizer.wrapper.*
    train.wrap_o2nc train.random_scaling model.load_pytorch
"""
_ALWAYS_ON = """
    optimizer.debias_beta1 optimizer.debias_beta2 optimizer.use_momentum optimizer.use_momentum_state
    optimizer.use_precond optimizer.use_precond_state
"""
_IGNORED = """
    optimizer.visualize optimizer.fused train.random_scaling_seed train.use_importance_sampling dataset.tokenizer
    dataset.tokenizer_path dataset.seed dataset.split dataset.shift_labels dataset.use_loadit dataset.loadit_path
    dataset.loadit_length dataset.shuffle dataset.shuffle_buffer_size dataset.pin_memory dataset.prefetch
    dataset.prefetch_factor dataset.streaming logging.* test.* hydra.*
"""
_RULES: dict[str, Rule] = {
    _SCHEDULE: _schedule,
    **each("lr lr_config.lr", _rate, _OPTIMIZER),
    **dict.fromkeys(_WARM_UPS, row("warmup_steps", rules.part_of_run)),
    **each(
        "const stable_steps", row("stable_steps", lambda text: {} if plain(text) == 0 else {"stable_steps": text}), _LR
    ),
    **each(
        "decay decay_steps",
        when(
            lambda t: t.word(_SCHEDULE) in ("trapezoid", "wsd", ""),
            row("decay_steps", rules.part_of_run),
            "the decay covers the whole run",
        ),
        _LR,
    ),
    f"{_LR}power": row("decay_power"),
    **each(_RATIOS, row("min_lr_ratio")),
    **each(_RATES, rules.lowest_rate(f"{_LR}lr")),
    **each("lr1 lr2 start_steps", skip("only piecewise_linear reads it"), _LR),
    **each(f"{_HORIZON} {_STEPS} {_SEGMENT} checkpoint.load_path", rules.combined),
    _NAME: _name,
    **each("beta momentum", _momentum, _OPTIMIZER),
    **each("beta1 adam_beta1", row("adam_beta1"), _OPTIMIZER),
    **each("beta2 adam_beta2", row("adam_beta2"), _OPTIMIZER),
    f"{_OPTIMIZER}betas": row("adam_beta1", rules.pair),
    **each("eps adam_eps", row("adam_epsilon"), _OPTIMIZER),
    _DECAY: row("weight_decay", remark=rules.AFTER_DECAY),
    f"{_OPTIMIZER}decouple_weight_decay": _decoupling,
    **each("nesterov use_nesterov", row("nesterov"), _OPTIMIZER),
    **renamed(_OPTIMIZER, alpha="rms_alpha", ns_steps="muon_ns_steps"),
    **renamed(_OPTIMIZER, adam_lr="muon_adam_learning_rate", adam_wd="muon_adam_weight_decay"),
    f"{_OPTIMIZER}normalize": only("global", reason="updates are divided by one norm of the model: write global"),
    **each(_CLIPPING, row("grad_clip_thresh"), "train."),
    "train.precision": when(
        lambda t: t.is_on("train.use_amp") is not False, row("mp_dtype", rules.dtype), "train.use_amp is false"
    ),
    "train.use_amp": _amp,
    **each("train.random_seed train.seed random_seed", row("seed")),
    **each("epochs num_epochs", row("num_steps", rules.epochs), "train."),
    **each("train.batch_size dataset.batch_size", row("batch_size")),
    **each("gradient_accumulation_steps accumulate_steps", row("grad_accum_steps"), "train."),
    **each("eval_interval eval_steps", row("eval_interval"), "train."),
    **renamed("train.", eval_batches="eval_batches", compile="use_torch_compile", deterministic="deterministic"),
    "train.device": row("device", rules.choice(auto="auto", cuda="cuda", gpu="cuda", cpu="cpu")),
    "dataset.name": _name_data,
    **each(_DATA_PATHS, row("data_path", rules.folder_of_data), "dataset."),
    **each("total_batch_size global_batch_size", row("global_batch_size"), "dataset."),
    **each("context_length seq_length seq_len", row("seq_length"), "dataset."),
    **each("dataloader_workers num_workers", row("num_workers"), "dataset."),
    **each("dataset.vocab_size model.vocab_size", row("vocab_size")),
    "model.name": _name_model,
    "model.dim": _width,
    "model.context_length": rules.context,
    **renamed("model.", num_heads="num_attention_heads", num_kv_heads="num_key_value_heads"),
    **renamed("model.", num_blocks="num_hidden_layers", num_layers="num_hidden_layers"),
    **each(_FEED_FORWARD, row("intermediate_size"), "model."),
    **renamed("model.", rope_theta="rope_theta", norm_eps="rms_norm_eps"),
    **renamed("model.", tie_embeddings="tie_word_embeddings", tie_weights="tie_word_embeddings"),
    **each("dropout attn_dropout attn_linear_dropout transformer_dropout gpt_dropout", rules.NO_DROPOUT, "model."),
    **each("bias use_bias head_bias attn_bias mlp_bias", rules.NO_BIAS, "model."),
    "model.activation": not_a_llama("silu", "swish", "swiglu", reason="a Llama's activation is SiLU, gated"),
    "model.norm": not_a_llama("rmsnorm", "rms_norm", "rms", reason="a Llama has RMSNorm"),
    "model.positional_embedding": not_a_llama("rope", "rotary", reason="a Llama's positions are rotary"),
    **each("pad_token rescale_residuals", rules.INITIAL_WEIGHTS, "model."),
    "logging.wandb_project": row(
        "tracker_project_name", lambda text: {"tracker_project_name": text, "tracker": "wandb"}
    ),
    **renamed("logging.", wandb_name="tracker_run_name", wandb_runid="tracker_run_id"),
    **each("train.log_interval logging.log_interval logging.log_steps", row("report_interval")),
    **renamed("checkpoint.", save_path="ckpt_save_path", save_steps="checkpoint_interval"),
    "checkpoint.save": skip("runs are always saved"),
    **each("load load_file", skip("checkpoint.load_path says from where"), "checkpoint."),
    "checkpoint.overwrite_config": skip("given settings always apply; --recipe=<run>/config.yaml reads the run's"),
    "checkpoint.overwrite_optimizer": row("load_optimizer", rules.choice(true="false", false="true")),
    **each("keep_last max_to_keep", row("keep_last"), "checkpoint."),
    "experimental.*": _experiment,
    **each(_NOT_HERE, off("it changes what is learned, and does not exist here")),
    **each(_ALWAYS_ON, only("true", reason="adam, adamw and nadam have it always on: write true")),
    **each(_IGNORED, skip("not translated: nothing that is learned depends on it")),
}
_TITLE = "a folder of composed configs (defaults, optimizer.lr_config, …)"
SYSTEM = System(_TITLE, _RULES, _defaults, _combine, _name_of)
