"""The fields of a pipeline with composed configs: optimizer.lr_config.lr, train.max_steps, checkpoint.save_path.

They come from a folder of files, which `compose` merges, and from the command line, where they are understood without
any file, too: `optimizer=sgdm optimizer.lr_config.lr=1.0 train.max_steps=100`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

from pretraining.config.plugins import OPTIMIZERS, OWN, SCHEDULES
from pretraining.config.values import did_you_mean
from pretraining.config.variants import VARIANTS
from pretraining.files import is_file, is_folder
from pretraining.progress import parse_number
from pretraining.tools.translate.translation import (
    ARGUMENT,
    Rule,
    Translating,
    choice,
    context,
    decimal,
    dtype,
    epochs,
    folder_of_data,
    gated_width,
    joint,
    left,
    lowest_rate,
    not_a_llama,
    only,
    pair,
    refuse_model,
    row,
)

WHAT = "a folder of composed configs (defaults, optimizer.lr_config, …)"
SIGNS = (
    *("defaults", "optimizer.lr_config", "train.max_steps", "logging.wandb_project", "checkpoint.save_steps"),
    *("checkpoint.save", "checkpoint.load", "model.num_blocks", "dataset.total_batch_size"),
)
_LR, _OPTIMIZER = "optimizer.lr_config.", "optimizer."
_HORIZON, _STEPS, _SEGMENT = f"{_LR}max_steps", "train.max_steps", "checkpoint.num_steps"
_OPTIMIZER_NAMES = {name: name for name in OPTIMIZERS} | {
    **{"sgd_momentum": "sgdm", "normalized_sgd": "normalized_sgdm", "nadamw": "nadam"},
    **{"muon_adamw": "muon", "muon_adam": "muon", "muon_og": "muon"},
}
_DECOUPLED = ("adamw", "nadam", "muon", "normalized_sgdm")
"""Weight decay beside the update; the other optimizers here add it to the gradient."""
_ENDS = tuple(f"{_LR}{name}" for name in ("min_lr_ratio", "min_lr_factor", "min_lr", "end_lr", "final_lr"))
_WARM_UPS, _CLIPPING = (f"{_LR}warmup", f"{_LR}warmup_steps"), ("gradient_clip_val", "grad_clip", "max_grad_norm")
_STEP = re.compile(r"iter_(\d+)\.\w+")


def name_of(key: str) -> str:
    """Return the field that a key or an argument sets; without the group's file, a choice names what is chosen."""
    return {
        "optimizer/lr_config": f"{_LR}schedule",
        "optimizer/wrapper": "optimizer.wrapper",
        "dataset": "dataset.name",
    }.get(key, key)


NULLS: dict[str, str] = {
    f"{_OPTIMIZER}momentum": "0",
    f"{_LR}decay": "0",
    **{f"train.{name}": "0" for name in _CLIPPING},
}


def defaults(translating: Translating) -> dict[str, str]:
    """Return what holds where the files are silent: a constant rate, nothing clipped or decayed, float32."""
    has_phases = any(key.startswith(_LR) and key in translating for key in translating.values if key != f"{_LR}lr")
    schedule = "trapezoid" if f"{_LR}decay" in translating else "linear" if has_phases else "constant"
    found = {f"{_LR}schedule": schedule, "train.use_amp": "true" if "train.precision" in translating else "false"}
    if not any(f"train.{name}" in translating for name in _CLIPPING):
        found["train.gradient_clip_val"] = "0"
    if _optimizer(translating) in OPTIMIZERS:
        found[f"{_OPTIMIZER}weight_decay"] = "0"
    return found


def combine(translating: Translating) -> None:
    """Refuse what is computed; settle the optimizer's options, the lengths, and what is saved and loaded."""
    if _refuse_computed(translating):
        return
    _settle_options(translating)
    if translating.word(f"{_LR}schedule") == "piecewise_linear":
        _piecewise(translating)
    _lengths(translating)
    _saves(translating)
    _loads(translating)


def _refuse_computed(translating: Translating) -> bool:
    """Refuse references, objects to build and values that must be given; return whether there are any."""
    found = False
    for key, given in translating.values.items():
        if key.startswith("hydra.") or given.text is None:
            continue
        if key.endswith("_target_"):
            translating.refuse(key, "no objects are built: name the optimizer, as package.module:Class, or take it out")
        elif "${" in given.text:
            translating.refuse(key, "references are not followed: write the value itself")
        elif given.text == "???":
            translating.refuse(key, f"a value must be given: write {key}=…")
        else:
            continue
        found = True
    return found


# The optimizer


def _optimizer(translating: Translating) -> str | None:
    """Return the optimizer that a flag of ours names, or that of the files, under its name here."""
    name = translating.flags.get("optimizer") or translating.text(f"{_OPTIMIZER}name")
    return None if name is None else _OPTIMIZER_NAMES.get(name.strip().lower().replace("-", "_"), name)


def _settle_options(translating: Translating) -> None:
    """Hand the options of a user's own optimizer over to it; leave those of an optimizer that a flag replaces out."""
    chosen, of_file = _optimizer(translating), translating.word(f"{_OPTIMIZER}name")
    is_own = bool(chosen and OWN.fullmatch(chosen))
    replaced = chosen != _OPTIMIZER_NAMES.get(of_file, of_file) and of_file in _OPTIMIZER_NAMES
    kept = (f"{_OPTIMIZER}name", f"{_OPTIMIZER}lr", f"{_OPTIMIZER}weight_decay", f"{_OPTIMIZER}betas")
    options = {}
    for key in list(translating.values):
        if not key.startswith(_OPTIMIZER) or key.startswith(_LR) or key not in translating or key in kept[:2]:
            continue
        if replaced and translating.values[key].level != ARGUMENT:
            translating.left(key, f"of the file's optimizer, and optimizer={chosen} is another")
        elif is_own and key not in kept:
            options[key] = f"{key.removeprefix(_OPTIMIZER)}={translating.text(key)}"
    if options:
        last = list(options)[-1]
        for key in options:
            translating.left(key, "an option of your own optimizer")
        translating.set(last, "options of your own optimizer", optimizer_options=",".join(options.values()))


def _name(translating: Translating, key: str) -> None:
    text = translating.text(key) or ""
    name = _OPTIMIZER_NAMES.get(translating.word(key)) or (text if OWN.fullmatch(text) else None)
    if name is None:
        hint = did_you_mean(translating.word(key), _OPTIMIZER_NAMES, "did you mean {}? ")
        problem = f"not an optimizer here: {hint}There are {', '.join(OPTIMIZERS)}, or optimizer=package.module:Class"
        translating.refuse(key, problem, "optimizer")
    else:
        translating.set(key, optimizer=name)


def _has_decay(translating: Translating) -> bool:
    return bool(translating.number(f"{_OPTIMIZER}weight_decay"))


def _rate(translating: Translating, key: str) -> None:
    """Take the peak; with `beta` the momentum there is a mean of gradients, and a sum here."""
    rate, beta = translating.text(key), translating.number(f"{_OPTIMIZER}beta")
    remark = ""
    if _optimizer(translating) == "muon":
        remark = "updates are 0.2 x sqrt(width) times as long as of plain Muon: choose a smaller one"
    elif _optimizer(translating) == "sgdm" and beta is not None:
        rate = decimal((translating.number(key) or Fraction(0)) * (1 - beta))
        remark = "x (1 - beta): m = beta x m + (1 - beta) x g there, m = beta x m + g here"
    translating.set(key, remark, learning_rate=rate)


def _option(setting: str, *nothing: str) -> Rule:
    """Make a rule for a key that some optimizers read; `nothing` are values that ask for nothing."""

    def apply(translating: Translating, key: str) -> None:
        name = _optimizer(translating)
        if name not in OPTIMIZERS or setting in OPTIMIZERS[name].options:
            row(setting)(translating, key)
        else:
            only(*nothing, reason=f"{name} does not read it here: take it out")(translating, key)

    return apply


def _momentum(translating: Translating, key: str) -> None:
    """Take the one decay of an optimizer: of the squares in rmsprop, of the momentum in others."""
    if _optimizer(translating) == "rmsprop":
        translating.set(key, "the decay of the mean of squares", rms_alpha=translating.text(key))
    else:
        _option("momentum", "0")(translating, key)


def _squares(setting: str) -> Rule:
    """Make a rule for a key of optimizers that keep squares; Muon with squares is not here."""

    def apply(translating: Translating, key: str) -> None:
        if translating.word(f"{_OPTIMIZER}name") != "muon_adamw":
            _option(setting, "0")(translating, key)
        elif setting == "adam_epsilon":
            translating.left(key, "of squares that are not kept")
        else:
            translating.refuse(key, "Muon keeps no squares here: write optimizer.beta2=null")

    return apply


def _decoupling(translating: Translating, key: str) -> None:
    """Accept the weight decay that the optimizer has here, beside the update or in the gradient."""
    name, decouples = _optimizer(translating), translating.is_on(key)
    if not _has_decay(translating) or name not in OPTIMIZERS or decouples == (name in _DECOUPLED):
        translating.set(key, "as here, or there is no weight decay")
    else:
        here = "beside the update" if name in _DECOUPLED else "added to the gradient"
        translating.refuse(key, f"weight decay of {name} is {here} here: change it, or write optimizer.weight_decay=0")


# The schedule and lengths


def _schedule(translating: Translating, key: str) -> None:
    """Take a schedule with what it implies there: no warm-up unless one is given, and an end at zero."""
    name = translating.word(key)
    if OWN.fullmatch(translating.text(key) or ""):
        translating.set(key, schedule=translating.text(key))
        return
    if name not in SCHEDULES:
        hint = did_you_mean(name, SCHEDULES, "did you mean {}? ")
        problem = f"not a schedule here: {hint}There are {', '.join(SCHEDULES)}, or schedule=package.module:function"
        translating.refuse(key, problem, "schedule")
        return
    ends_at_zero = name != "constant" and not any(each in translating for each in _ENDS)
    has_warmup = any(each in translating for each in _WARM_UPS)
    is_trapezoid = name == "linear" and translating.number(f"{_LR}const")
    translating.set(
        key,
        ", ".join(filter(None, ["down to zero" * ends_at_zero, "without warm-up" * (not has_warmup)])),
        schedule="trapezoid" if is_trapezoid else name,
        min_lr_ratio="0" if ends_at_zero else None,
        warmup_steps=None if has_warmup else "0",
    )


def _piecewise(translating: Translating) -> None:
    """Make points of a line from lr1 at start_steps to lr2, max_steps later."""
    keys = [f"{_LR}{name}" for name in ("lr1", "lr2", "start_steps", "max_steps")]
    first, second, start, length = (translating.number(each) for each in keys)
    peak = max(first or Fraction(0), second or Fraction(0))
    schedule = f"{_LR}schedule"
    if first is None or second is None or length is None or peak <= 0:
        problem = f"a line needs {', '.join(keys)}, and a rate above 0; for more lines there is schedule_points"
        translating.refuse(schedule, problem, "schedule")
        return
    begin = int(start or 0)
    shares = (decimal(first / peak), decimal(second / peak))
    points = f"{begin}:{shares[0]},{begin + int(length)}:{shares[1]}"
    translating.set(schedule, schedule="piecewise_linear", schedule_points=points)
    _rate(translating, keys[0] if first >= second else keys[1])
    for each in (*keys, *_WARM_UPS, f"{_LR}lr"):
        if each in translating and each not in translating.notes:
            translating.left(each, "in the points" if each in keys else "piecewise_linear does not read it")


def _part(text: str) -> str:
    """Return a part of a run: below 1, a share of it."""
    number = parse_number(text)
    return f"{decimal(number * 100)}%" if number is not None and 0 < number < 1 else text


def _stable(translating: Translating, key: str) -> None:
    schedule = translating.word(f"{_LR}schedule")
    if not translating.number(key):
        translating.left(key, "no steps at the peak")
    elif schedule in ("linear", "trapezoid", "wsd", ""):
        translating.set(
            key, "linear with it is a trapezoid" * (schedule == "linear"), stable_steps=translating.text(key)
        )
    else:
        translating.refuse(key, f"{schedule} has no steps at the peak: write {_LR}schedule=trapezoid, or 0")


def _decay(translating: Translating, key: str) -> None:
    if translating.word(f"{_LR}schedule") in ("trapezoid", "wsd", ""):
        translating.set(key, decay_steps=_part(translating.text(key) or ""))
    else:
        translating.left(key, "the decay lasts the whole run")


def _lengths(translating: Translating) -> None:
    """Settle where the schedule ends, where the run does, and how far this invocation goes."""
    horizon, steps, segment = (translating.count(key, smallest=0) for key in (_HORIZON, _STEPS, _SEGMENT))
    if _HORIZON in translating.notes:
        horizon = None
    elif horizon is not None and translating.word(f"{_LR}schedule") == "constant" and steps:
        translating.left(_HORIZON, "a constant rate has no end")
        horizon = None
    if horizon is not None and steps is not None and horizon < steps and any(key in translating for key in _ENDS):
        problem = f"the schedule ends before, {_HORIZON}={horizon}: give both the same number"
        translating.refuse(_STEPS, problem, "num_steps")
        return
    stops = [each for each in (segment, steps if horizon is not None and steps and steps < horizon else None) if each]
    for key, length in ((_HORIZON, horizon), (_STEPS, steps), (_SEGMENT, segment)):
        if length is None:
            continue
        if key == _HORIZON or (key == _STEPS and horizon in (None, steps)):
            translating.set(key, num_steps=length)
        elif stops and length == min(stops):
            translating.set(key, "stops there; the schedule goes on", run_steps=length)
            stops = [0]
        else:
            translating.left(key, "the rate is zero from the end of the schedule on, or the run stops before")


# Runs


def _saves(translating: Translating) -> None:
    switch, path, steps = "checkpoint.save", "checkpoint.save_path", "checkpoint.save_steps"
    saves, text = translating.is_on(switch), translating.text(steps)
    if saves is False:
        translating.set(switch, "the end of the run is kept all the same", checkpoint_interval="0")
        for key in (path, steps):
            if key in translating:
                translating.left(key, f"{switch} is false")
        return
    if saves:
        translating.set(switch, "runs are always saved")
    if text is not None and ("," in text or text.startswith("[")):
        translating.set(steps, "and at the end", checkpoint_steps=text, checkpoint_interval="0")


def _loads(translating: Translating) -> None:
    """Settle what a run starts from: a run's folder, or the step of one."""
    switch, path, file = "checkpoint.load", "checkpoint.load_path", "checkpoint.load_file"
    loads, place, name = translating.is_on(switch), translating.text(path), translating.text(file)
    if loads is False:
        for key in (path, file, "checkpoint.overwrite_optimizer"):
            if key in translating:
                translating.left(key, "nothing is loaded")
    elif loads and place is None:
        translating.refuse(switch, f"from where? write {path}=…", "ckpt_load_path")
    elif place is not None:
        whole = Path(place) / name if name else Path(place)
        step = _STEP.fullmatch(whole.name)
        if is_file(whole):
            translating.refuse(path, f"{whole} is a checkpoint of another system, which is not read", "ckpt_load_path")
        else:
            start = whole.parent / "checkpoints" / f"step_{int(step[1])}_ckp" if step else whole
            translating.set(path, "the step in its name" if step else "", ckpt_load_path=start)


def _wandb(setting: str) -> Rule:
    def apply(translating: Translating, key: str) -> None:
        if "logging.wandb_project" in translating:
            tracker = "wandb" if key == "logging.wandb_project" else None
            translating.set(key, tracker=tracker, **{setting: translating.text(key) or ""})
        else:
            translating.left(key, "without logging.wandb_project nothing goes to wandb")

    return apply


def _precision(translating: Translating, key: str) -> None:
    if translating.is_on("train.use_amp") is False:
        translating.left(key, "train.use_amp is false")
    else:
        row("mp_dtype", dtype)(translating, key)


def _amp(translating: Translating, key: str) -> None:
    on = translating.is_on(key)
    translating.set(key, mixed_precision=None if "train.precision" in translating and on else bool(on))


# The model and data


def _width(translating: Translating, key: str) -> None:
    """Take the width; where no feed-forward width is given, it is 8/3 of it."""
    number = translating.number(key)
    has_own = any(f"model.{name}" in translating for name in _FEED_FORWARD)
    width = None if has_own or number is None else gated_width(number, 256)
    remark = "" if width is None else "feed-forward 8/3 of it, in multiples of 256"
    translating.set(key, remark, hidden_size=translating.text(key), intermediate_size=width)


def _name_model(translating: Translating, key: str) -> None:
    name = (translating.text(key) or "").lower()
    if name in VARIANTS:
        translating.set(key, model_variant=name)
    elif name.startswith("llama"):
        translating.set(key, "as here")
    else:
        refuse_model(translating, key, "it is no Llama: RMSNorm, SwiGLU, rotary positions")


def _name_data(translating: Translating, key: str) -> None:
    name = translating.text(key) or ""
    root = next((text for each in _DATA_PATHS if (text := translating.text(f"dataset.{each}"))), None)
    if root is not None and is_folder(Path(root) / name):
        translating.set(key, datasets=name)
    else:
        translating.left(key, "data is a folder of token files: give --data_path (pretrain prepare makes one)")


def _tokenizer(translating: Translating, key: str) -> None:
    path = Path(translating.text(key) or "")
    if is_file(path) or is_file(path / "tokenizer.json"):
        translating.set(key, tokenizer_path=path)
    else:
        translating.left(key, "data is tokenized by pretrain prepare --tokenizer_path=…")


def _experiment(translating: Translating, key: str) -> None:
    above = f"{key.rpartition('.')[0]}.use"
    if (key != above and translating.word(above) == "false") or translating.word(key) in (
        "false",
        "0",
        "0.0",
        "no",
        "off",
    ):
        translating.left(key, "off")
    else:
        translating.refuse(key, "experiments of that pipeline are not here: take it out, or write null")


def _off(reason: str) -> Rule:
    return only("false", "no", "off", "none", "0", reason=f"{reason}: take it out, or write null")


_FEED_FORWARD = ("intermediate_size", "fc_dim", "ffn_dim", "mlp_dim", "hidden_dim", "d_ff")
_DATA_PATHS = ("path", "data_path", "data_dir", "root")
_NO_DROPOUT = not_a_llama("0", reason="a Llama is trained without dropout")
_NO_BIAS = not_a_llama("false", reason="a Llama has no biases")
_GENERAL_ADAM = (
    "debias_beta1",
    "debias_beta2",
    "use_momentum",
    "use_momentum_state",
    "use_precond",
    "use_precond_state",
)
RULES: dict[str, Rule] = {
    f"{_LR}schedule": _schedule,
    **dict.fromkeys((f"{_LR}lr", f"{_OPTIMIZER}lr"), _rate),
    **dict.fromkeys(_WARM_UPS, row("warmup_steps", _part)),
    **dict.fromkeys((f"{_LR}const", f"{_LR}stable_steps"), _stable),
    **dict.fromkeys((f"{_LR}decay", f"{_LR}decay_steps"), _decay),
    f"{_LR}power": row("decay_power"),
    **dict.fromkeys(_ENDS[:2], row("min_lr_ratio")),
    **dict.fromkeys(_ENDS[2:], lowest_rate(f"{_LR}lr")),
    **{f"{_LR}{name}": left("piecewise_linear alone reads it") for name in ("lr1", "lr2", "start_steps")},
    **joint(_HORIZON, _STEPS, _SEGMENT, "checkpoint.save", "checkpoint.load_path"),
    f"{_OPTIMIZER}name": _name,
    **dict.fromkeys((f"{_OPTIMIZER}beta", f"{_OPTIMIZER}momentum"), _momentum),
    f"{_OPTIMIZER}beta1": _option("adam_beta1"),
    f"{_OPTIMIZER}beta2": _squares("adam_beta2"),
    f"{_OPTIMIZER}betas": row("adam_beta1", pair),
    f"{_OPTIMIZER}eps": _squares("adam_epsilon"),
    f"{_OPTIMIZER}weight_decay": row("weight_decay", remark="not of norms and embeddings"),
    f"{_OPTIMIZER}decouple_weight_decay": _decoupling,
    **dict.fromkeys((f"{_OPTIMIZER}nesterov", f"{_OPTIMIZER}use_nesterov"), _option("nesterov", "false")),
    f"{_OPTIMIZER}alpha": _option("rms_alpha"),
    f"{_OPTIMIZER}normalize": only(
        "global", reason="updates are divided by one norm over the whole model: write global"
    ),
    f"{_OPTIMIZER}ns_steps": _option("muon_ns_steps"),
    f"{_OPTIMIZER}adam_lr": _option("muon_adam_learning_rate"),
    f"{_OPTIMIZER}adam_wd": _option("muon_adam_weight_decay", "0"),
    f"{_OPTIMIZER}adam_beta1": _option("adam_beta1"),
    f"{_OPTIMIZER}adam_beta2": _option("adam_beta2"),
    f"{_OPTIMIZER}adam_eps": _option("adam_epsilon"),
    **dict.fromkeys((f"{_OPTIMIZER}ns_embedding", f"{_OPTIMIZER}ns_head"), _off("AdamW updates embedding and head")),
    f"{_OPTIMIZER}offset_beta": _off("momentum of updates is not here"),
    **dict.fromkeys((f"{_OPTIMIZER}wrapper", f"{_OPTIMIZER}wrapper.*"), _off("optimizers are not wrapped")),
    **dict.fromkeys((f"{_OPTIMIZER}visualize", f"{_OPTIMIZER}fused"), left("nothing that is learned depends on it")),
    **{
        f"{_OPTIMIZER}{name}": only("true", reason="adam, adamw and nadam are here: write true")
        for name in _GENERAL_ADAM
    },
    **{f"train.{name}": row("grad_clip_thresh") for name in _CLIPPING},
    "train.precision": _precision,
    "train.use_amp": _amp,
    **dict.fromkeys(("train.random_seed", "train.seed", "random_seed"), row("seed")),
    **dict.fromkeys(("train.epochs", "train.num_epochs"), row("num_steps", epochs)),
    **dict.fromkeys(("train.batch_size", "dataset.batch_size"), row("batch_size")),
    **dict.fromkeys(("train.gradient_accumulation_steps", "train.accumulate_steps"), row("grad_accum_steps")),
    **dict.fromkeys(("train.eval_interval", "train.eval_steps"), row("eval_interval")),
    "train.eval_batches": row("eval_batches"),
    "train.compile": row("use_torch_compile"),
    "train.deterministic": row("deterministic"),
    "train.device": row("device", choice(auto="auto", cuda="cuda", gpu="cuda", cpu="cpu")),
    **{
        f"train.{name}": _off("it changes what is learned, and is not here") for name in ("wrap_o2nc", "random_scaling")
    },
    **{f"train.{name}": left("of train.random_scaling") for name in ("random_scaling_seed", "use_importance_sampling")},
    "dataset.name": _name_data,
    **{f"dataset.{name}": row("data_path", folder_of_data) for name in _DATA_PATHS},
    **dict.fromkeys(("dataset.total_batch_size", "dataset.global_batch_size"), row("global_batch_size")),
    **dict.fromkeys(("dataset.context_length", "dataset.seq_length", "dataset.seq_len"), row("seq_length")),
    **dict.fromkeys(("dataset.dataloader_workers", "dataset.num_workers"), row("num_workers")),
    **dict.fromkeys(("dataset.tokenizer", "dataset.tokenizer_path"), _tokenizer),
    **dict.fromkeys(("dataset.vocab_size", "model.vocab_size"), row("vocab_size")),
    **{
        f"dataset.{name}": left("token files, read in one random order of all documents")
        for name in (
            *("seed", "split", "shift_labels", "use_loadit", "loadit_path", "loadit_length", "shuffle"),
            *("shuffle_buffer_size", "pin_memory", "prefetch", "prefetch_factor", "streaming"),
        )
    },
    "model.name": _name_model,
    "model.dim": _width,
    "model.context_length": context,
    "model.num_heads": row("num_attention_heads"),
    "model.num_kv_heads": row("num_key_value_heads"),
    **dict.fromkeys(("model.num_blocks", "model.num_layers"), row("num_hidden_layers")),
    **{f"model.{name}": row("intermediate_size") for name in _FEED_FORWARD},
    "model.rope_theta": row("rope_theta"),
    "model.norm_eps": row("rms_norm_eps"),
    **dict.fromkeys(("model.tie_embeddings", "model.tie_weights"), row("tie_word_embeddings")),
    **{f"model.{name}dropout": _NO_DROPOUT for name in ("", "attn_", "attn_linear_", "transformer_", "gpt_")},
    **{f"model.{name}bias": _NO_BIAS for name in ("", "use_", "head_", "attn_", "mlp_")},
    "model.activation": not_a_llama("silu", "swish", "swiglu", reason="a Llama's activation is SiLU, gated"),
    "model.norm": not_a_llama("rmsnorm", "rms_norm", "rms", reason="a Llama has RMSNorm"),
    "model.positional_embedding": not_a_llama("rope", "rotary", reason="a Llama's positions are rotary"),
    **{
        f"model.{name}": left("initial weights are those of docs/model.md")
        for name in ("pad_token", "rescale_residuals")
    },
    "model.load_pytorch": _off("ckpt_load_path takes the weights of a checkpoint"),
    "logging.wandb_project": _wandb("tracker_project_name"),
    "logging.wandb_name": _wandb("tracker_run_name"),
    "logging.wandb_runid": _wandb("tracker_run_id"),
    **dict.fromkeys(("train.log_interval", "logging.log_interval", "logging.log_steps"), row("report_interval")),
    "logging.*": left("metrics are those of logs/metrics.jsonl"),
    "checkpoint.save_path": row("ckpt_save_path"),
    "checkpoint.save_steps": row("checkpoint_interval"),
    "checkpoint.load": left("checkpoint.load_path says from where"),
    "checkpoint.load_file": left("part of checkpoint.load_path"),
    "checkpoint.overwrite_config": left("settings given here always count; --recipe=<run>/config.yaml takes the run's"),
    "checkpoint.overwrite_optimizer": row("load_optimizer", choice(true="false", false="true")),
    **dict.fromkeys(("checkpoint.keep_last", "checkpoint.max_to_keep"), row("keep_last")),
    "experimental.*": _experiment,
    "test.*": left("of its tests"),
    "hydra.*": left("of the composing program; logs are in the run's folder"),
}
