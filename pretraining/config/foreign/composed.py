"""The fields of a pipeline with composed configs: optimizer.lr_config.lr, train.max_steps, checkpoint.save_path.

They come from a folder of files, which `config_groups` makes one tree of, and from the command line, where they are
understood without any file, too: `optimizer=sgdm optimizer.lr_config.lr=1.0 train.max_steps=100`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fractions import Fraction
from pathlib import Path

from pretraining.config.assignments import names_setting
from pretraining.config.foreign.config_groups import compose
from pretraining.config.foreign.stub import data_settings
from pretraining.config.foreign.translation import (
    COMMAND_LINE,
    Rule,
    Translating,
    as_here,
    becomes,
    betas,
    left_out,
    one_of,
    only,
    plain,
)
from pretraining.config.plugins import OPTIMIZERS, OWN, SCHEDULES
from pretraining.config.values import did_you_mean
from pretraining.config.variants import VARIANTS
from pretraining.files import is_file, is_folder
from pretraining.progress import parse_number

SIGNS = (
    *("defaults", "optimizer.lr_config", "train.max_steps", "logging.wandb_project", "checkpoint.save_steps"),
    *("checkpoint.save", "checkpoint.load", "model.num_blocks", "dataset.total_batch_size"),
)
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def read(translating: Translating) -> None:
    """Translates a main file with the files that it names, or arguments alone."""
    source, choices = translating.source, list[str]()
    if source.path is not None:
        source, choices = compose(source, SECTIONS, _SAID_BY_CHOICE)
    fields = set(source.flattened())

    def field_of(name: str) -> str | None:
        is_ours = names_setting(name) and (source.path is None or "." not in name)
        return key_of(name) if key_of(name) in fields or (knows(name) and not is_ours) else None

    source, arguments = source.overridden(field_of)
    translating.take(source)
    for name in (*choices, *arguments):
        translating.use_override(name)
    if _refuse_what_is_computed(translating):
        return
    _leave_out_options_of_another(translating)
    _settle_nulls(translating)
    translating.apply(TABLE)
    for key, value in translating.values.items():
        if translating.is_settled(key) or value is None:
            continue
        if key.partition(".")[0] in OTHER_SECTIONS:
            _settle_other(translating, key)
        elif names_setting(key):
            translating.apply({key: becomes(key.rpartition(".")[2].replace("-", "_").lower())})


def knows(name: str) -> bool:
    """Whether an argument is a field of such a pipeline, or chooses one of its files."""
    key = key_of(name)
    return key in TABLE or key.partition(".")[0] in OTHER_SECTIONS


def key_of(name: str) -> str:
    """Returns the field that an argument sets; without the group's file, a choice names what is chosen."""
    return _NAMES_OF_CHOICES.get(name, name.replace("-", "_"))


_NAMES_OF_CHOICES = {
    "optimizer/lr_config": "optimizer.lr_config.schedule",
    "optimizer/wrapper": "optimizer.wrapper.name",
    "dataset": "dataset.name",
}


def _refuse_what_is_computed(translating: Translating) -> bool:
    """Refuses references, objects to build and values that must be given; says whether there are any."""
    values, found = translating.values, False
    for key, value in values.items():
        name = key.rpartition(".")[2]
        if key.startswith("hydra.") or value is None:
            continue
        if name == "_target_":
            what = (
                "name the optimizer in place of it, as in optimizer.name: adamw, or your own with "
                "optimizer=package.module:Class"
                if key.startswith("optimizer.")
                else "take it out; docs/extending.md says how each part is replaced"
            )
            translating.refuse(key, f"no objects are built from a recipe: {what}")
        elif reference := re.search(r"\$\{.*?\}", str(value)):
            match = _REFERENCE.fullmatch(reference[0])
            meant = values.get(match[1]) if match else None
            shown = "" if meant is None or "${" in str(meant) else f", {meant}"
            translating.refuse(key, f"references are not followed: write the value itself{shown}")
        elif value == "???":
            translating.refuse(key, f"a value must be given: write {key}=…")
        else:
            continue
        found = True
    return found


# From the tree to settings


def _leave_out_options_of_another(translating: Translating) -> None:
    """Leaves the options of the file's optimizer out where the command line names another by our own setting."""
    name = translating.source.overrides.get("optimizer")
    of_file = translating.text("optimizer.name") or ""
    if name is None or _optimizer_of(translating) == _OPTIMIZER_NAMES.get(_word(of_file), of_file):
        return
    for key in translating.values:
        is_option = key.startswith("optimizer.") and not key.startswith(LR) and key != "optimizer.name"
        if is_option and translating.source.origin_of(key)[0].name != COMMAND_LINE:
            translating.leave_out(key, f"of the file's optimizer, and optimizer={name} is another")


def _settle_nulls(translating: Translating) -> None:
    """Settles what null says more by than that nothing is given."""
    nulls = {key for key, value in translating.values.items() if value is None and not translating.is_settled(key)}
    if "optimizer.momentum" in nulls and _optimizer_of(translating) == "sgdm":
        translating.set("optimizer.momentum", "no momentum", momentum="0")
    for key in sorted(nulls.intersection(_CLIPPING)):
        translating.set(key, "no clipping", grad_clip_thresh="0")
    if LR + "decay" in nulls and translating.text(LR + "schedule") in ("trapezoid", "wsd"):
        translating.set(LR + "decay", "no decay", decay_steps="0")


_OPTIMIZER_NAMES = {name: name for name in OPTIMIZERS} | {
    "sgd_momentum": "sgdm",
    "normalized_sgd": "normalized_sgdm",
    "nadamw": "nadam",
    "muon_adamw": "muon",
    "muon_adam": "muon",
    "muon_og": "muon",
}
_SAID_BY_CHOICE: dict[str, tuple[str, Collection[str]]] = {
    "optimizer": ("optimizer.name", _OPTIMIZER_NAMES),
    "optimizer/lr_config": ("optimizer.lr_config.schedule", SCHEDULES),
}
"""The field that a choice of a group says where its file does not."""
_DECOUPLED = ("adamw", "nadam", "muon", "normalized_sgdm")
"""Weight decay beside the update; the other optimizers here add it to the gradient."""


def _optimizer_of(translating: Translating) -> str | None:
    """Returns the optimizer that the command line names by our own setting, or that of the file."""
    name = translating.source.overrides.get("optimizer") or translating.values.get("optimizer.name")
    return _OPTIMIZER_NAMES.get(_word(name), name) if isinstance(name, str) else None


def _word(text: str) -> str:
    return text.strip().lower().replace("-", "_")


def _name_optimizer(translating: Translating, key: str) -> None:
    text = translating.text(key) or ""
    name = _OPTIMIZER_NAMES.get(_word(text))
    chosen = translating.in_force("optimizer", key) or ""
    if name is None and (chosen in OPTIMIZERS or OWN.fullmatch(chosen)) and chosen != text:
        translating.set(key, "the command line says which", optimizer=chosen)
    elif name is None and not OWN.fullmatch(text):
        hint = did_you_mean(_word(text), _OPTIMIZER_NAMES, "did you mean {}? ")
        translating.refuse(
            key,
            f"not an optimizer here: {hint}There are {', '.join(OPTIMIZERS)}, or your own with "
            "optimizer=package.module:Class (docs/extending.md)",
        )
    elif name == "muon" and "optimizer.weight_decay" not in translating:
        translating.set(
            key,
            "AdamW updates embedding, head and norms; matrices have no weight decay",
            optimizer=name,
            weight_decay="0",
            muon_adam_weight_decay=None if "optimizer.adam_wd" in translating else "0",
        )
    else:
        translating.set(key, optimizer=name or text)


def _peak(translating: Translating, key: str) -> None:
    remark = ""
    if _optimizer_of(translating) == "muon":
        remark = "of updates that are 0.2 x sqrt(width) times as long as of plain Muon: choose a smaller one"
    translating.set(key, remark, learning_rate=translating.text(key))


def _option(setting: str, *nothing: str, instead: str = "take it out") -> Rule:
    """A key that some optimizers read; `nothing` are values that ask for nothing."""

    def settle(translating: Translating, key: str) -> None:
        name = _optimizer_of(translating)
        if name not in OPTIMIZERS or setting in OPTIMIZERS[name].options:
            translating.set(key, **{setting: translating.text(key) or ""})
        elif plain(translating.text(key)) in {plain(value) for value in nothing}:
            translating.leave_out(key, f"{name} has none, here as well")
        else:
            translating.refuse(key, f"{name} does not read it here: {instead}")

    return settle


_TO_NADAM = "adamw with it is optimizer=nadam, and momentum with it optimizer=sgdm; or write false"


def _momentum(translating: Translating, key: str) -> None:
    """Takes the one decay of an optimizer: of the squares in rmsprop, of the momentum in others."""
    if _optimizer_of(translating) == "rmsprop":
        translating.set(key, "the decay of the mean of squares", rms_alpha=translating.text(key))
    else:
        _option("momentum", "0", instead="it has beta1 and beta2, or no momentum")(translating, key)


def _squares(setting: str) -> Rule:
    """A key of optimizers that keep squares of gradients; of Muon with squares, which is not here, it is refused."""

    def settle(translating: Translating, key: str) -> None:
        if translating.text("optimizer.name") != "muon_adamw":
            _option(setting, "0", instead="it keeps no squares")(translating, key)
        elif setting == "adam_epsilon":
            translating.leave_out(key, "of squares that are not kept")
        else:
            translating.refuse(key, "Muon keeps no squares here: write optimizer.beta2=null")

    return settle


def _decoupling(translating: Translating, key: str) -> None:
    """Accepts the weight decay that the optimizer has here, beside the update or in the gradient."""
    name, decouples = _optimizer_of(translating), translating.is_true(key)
    decay = translating.number("optimizer.weight_decay")
    if not decay:
        translating.leave_out(key, "there is no weight decay")
    elif name is None or name not in OPTIMIZERS or decouples == (name in _DECOUPLED):
        translating.set(key, "as here")
    else:
        there, here = ("beside the update", "added to the gradient")[:: 1 if decouples else -1]
        translating.refuse(
            key,
            f"weight decay {there}; that of {name} is {here} here: write "
            f"{key}={'false' if decouples else 'true'}, or optimizer.weight_decay=0",
        )


LR = "optimizer.lr_config."
_SHARES_AT_END = (LR + "min_lr_ratio", LR + "min_lr_factor")
_RATES_AT_END = (LR + "min_lr", LR + "end_lr", LR + "final_lr")


def _schedule(translating: Translating, key: str) -> None:
    """Takes a schedule with what it implies there: no warm-up unless one is given, and an end at zero."""
    name = _word(translating.text(key) or "")
    if name not in SCHEDULES:
        own = translating.text(key) or ""
        if OWN.fullmatch(own):
            translating.set(key, schedule=own)
            return
        hint = did_you_mean(name, SCHEDULES, "did you mean {}? ")
        translating.refuse(
            key,
            f"not a schedule here: {hint}There are {', '.join(SCHEDULES)}, or your own with "
            "schedule=package.module:function (docs/extending.md)",
            "schedule",
        )
        return
    if name == "piecewise_linear":
        _piecewise(translating, key)
        return
    implied: dict[str, str] = {}
    if name != "constant" and not any(each in translating for each in (*_SHARES_AT_END, *_RATES_AT_END)):
        implied["min_lr_ratio"] = "0"
    if not any(each in translating for each in _WARM_UPS):
        implied["warmup_steps"] = "0"
    if name == "linear" and translating.number(LR + "const"):
        name = "trapezoid"
    remarks = {"min_lr_ratio": "down to zero", "warmup_steps": "without warm-up"}
    translating.set(key, ", ".join(remarks[each] for each in implied), schedule=name, **implied)


def _piecewise(translating: Translating, key: str) -> None:
    """Makes points of a line from lr1 at start_steps to lr2, max_steps later."""
    keys = [LR + name for name in ("lr1", "lr2", "start_steps", "max_steps")]
    first, second, start, length = (translating.number(each) for each in keys)
    if first is None or second is None or length is None or max(first, second) <= 0:
        translating.refuse(
            key,
            f"a line needs {', '.join(keys)}, and a rate above 0; for more lines write "
            "schedule=piecewise_linear schedule_points=0:0,2000:1,80%:1,100%:0.1",
        )
        return
    peak, begin = max(first, second), int(start or 0)
    points = f"{begin}:{first / peak:g},{begin + int(length)}:{second / peak:g}"
    translating.set(key, schedule="piecewise_linear", schedule_points=points)
    texts = [translating.text(each) for each in keys[:2]]
    translating.set(keys[0], learning_rate=texts[0] if first >= second else texts[1])
    translating.set(keys[1], "in the points")
    for each in (*keys[2:], LR + "warmup", LR + "lr"):
        if each in translating:
            translating.set(each, "in the points") if each in keys else translating.leave_out(
                each, "piecewise_linear does not read it"
            )


def _length(text: str) -> str:
    """Reads a part of a run: below 1, a share of it."""
    number = parse_number(text)
    return f"{float(number * 100):g}%" if number is not None and 0 < number < Fraction(1) else text


def _const(translating: Translating, key: str) -> None:
    schedule = _word(translating.text(LR + "schedule") or "linear")
    if not translating.number(key):
        translating.leave_out(key, "no steps at the peak")
    elif schedule in ("linear", "trapezoid", "wsd"):
        remark = "linear with it is a trapezoid" if schedule == "linear" else ""
        translating.set(key, remark, stable_steps=translating.text(key))
    else:
        translating.refuse(key, f"{schedule} has no steps at the peak: write {LR}schedule=trapezoid, or 0")


def _decay(translating: Translating, key: str) -> None:
    schedule = _word(translating.text(LR + "schedule") or "trapezoid")
    if schedule in ("trapezoid", "wsd"):
        translating.set(key, decay_steps=_length(translating.text(key) or ""))
    else:
        translating.leave_out(key, f"{schedule} decays over the whole run")


def _end_of_schedule(translating: Translating, key: str) -> None:
    peak, end = parse_number(translating.in_force("learning_rate", LR + "lr") or ""), translating.number(key)
    if not peak or end is None:
        translating.refuse(key, f"a share of the peak is needed: write min_lr_ratio=0.1, or give {LR}lr, too")
    else:
        translating.set(key, f"of {float(peak):g}", min_lr_ratio=f"{end / float(peak):g}")


HORIZON, STEPS, SEGMENT = LR + "max_steps", "train.max_steps", "checkpoint.num_steps"


def _lengths(translating: Translating, _: str) -> None:
    """Settles where the schedule ends, where the run does, and how far this invocation goes."""
    horizon, steps, segment = (translating.number(key) for key in (HORIZON, STEPS, SEGMENT))
    schedule = _word(translating.text(LR + "schedule") or "")
    if horizon is not None and translating.is_settled(HORIZON):  # in the points of a line
        horizon = None
    elif horizon is not None and schedule == "constant" and steps:
        translating.leave_out(HORIZON, "a constant rate has no end")
        horizon = None
    if steps is None or horizon is None:
        for key, length in ((STEPS, steps), (HORIZON, horizon)):
            if length is not None:
                translating.set(key, num_steps=translating.text(key))
        if segment is not None:
            translating.set(SEGMENT, run_steps=translating.text(SEGMENT))
        return
    translating.set(HORIZON, num_steps=translating.text(HORIZON if horizon != steps else STEPS))
    if horizon == steps:
        translating.set(STEPS, num_steps=translating.text(STEPS))
    elif horizon < steps and any(key in translating for key in (*_SHARES_AT_END, *_RATES_AT_END)):
        translating.refuse(STEPS, f"the schedule ends before, {HORIZON}={horizon:g}: give both the same number")
    elif horizon < steps:
        translating.leave_out(STEPS, f"the learning rate is zero from step {horizon:g} on: the run ends there")
    elif segment is None or steps <= segment:
        translating.set(STEPS, f"stops there; the schedule goes on to {horizon:g}", run_steps=translating.text(STEPS))
    else:
        translating.leave_out(STEPS, f"{SEGMENT} ends this invocation before")
    if segment is not None:
        is_later = steps < horizon and steps <= segment
        translating.leave_out(SEGMENT, f"{STEPS} ends the run before") if is_later else translating.set(
            SEGMENT, run_steps=translating.text(SEGMENT)
        )


def _saves(translating: Translating, _: str) -> None:
    """Settles where and how often a run is saved."""
    switch, path, steps = "checkpoint.save", "checkpoint.save_path", "checkpoint.save_steps"
    saves = translating.is_true(switch)
    if saves is False:
        translating.set(switch, "the end of the run is kept all the same", checkpoint_interval="0")
        for key in (path, steps):
            if key in translating:
                translating.leave_out(key, f"{switch} is false")
        return
    if saves:
        translating.set(switch, "runs are always saved")
    if path in translating:
        translating.set(path, ckpt_save_path=translating.text(path))
    text = translating.text(steps)
    if isinstance(translating.values.get(steps), list) or (text and "," in text):
        translating.set(steps, "and at the end", checkpoint_steps=text, checkpoint_interval="0")
    elif text is not None:
        translating.set(steps, checkpoint_interval=text)


_FILE_OF_STEP = re.compile(r"iter_(\d+)\.\w+")


def _loads(translating: Translating, _: str) -> None:
    """Settles what a run starts from: a run's folder, or the step of one."""
    switch, path, file = "checkpoint.load", "checkpoint.load_path", "checkpoint.load_file"
    config, optimizer = "checkpoint.overwrite_config", "checkpoint.overwrite_optimizer"
    loads, folder, name = translating.is_true(switch), translating.text(path), translating.text(file)
    if loads is False:
        for key in (switch, path, file, config, optimizer):
            if key in translating:
                translating.leave_out(key, "nothing is loaded")
        return
    if loads and folder is None:
        translating.refuse(switch, f"from where? write {path}=…")
    elif loads:
        translating.set(switch, f"from {path}")
    if folder is not None:
        _load_from(translating, path, Path(folder), name)
    if file in translating:
        translating.set(file, "in the path") if folder else translating.leave_out(file, f"{path} is not given")
    if config in translating:
        translating.leave_out(config, "settings given here always count; --recipe=<run>/config.yaml takes the run's")
    if optimizer in translating:
        translating.set(optimizer, load_optimizer="false" if translating.is_true(optimizer) else "true")


def _load_from(translating: Translating, key: str, folder: Path, name: str | None) -> None:
    if name is None and _FILE_OF_STEP.fullmatch(folder.name):
        folder, name = folder.parent, folder.name
    step = _FILE_OF_STEP.fullmatch(name or "")
    if name is None:
        translating.set(key, ckpt_load_path=str(folder))
    elif is_file(folder / name):
        translating.refuse(
            key,
            f"{folder / name} is a checkpoint of another system, which is not read: start from the folder of a run "
            "here, or of a Hugging Face Llama",
        )
    elif step:
        translating.set(
            key, f"step {step[1]} of that run", ckpt_load_path=f"{folder}/checkpoints/step_{int(step[1])}_ckp"
        )
    else:
        translating.set(key, ckpt_load_path=str(folder / name))


def _wandb(translating: Translating, _: str) -> None:
    """Settles the names at Weights & Biases, which count where there is a project."""
    project = "logging.wandb_project"
    has_project = project in translating
    if has_project:
        translating.set(project, tracker_project_name=translating.text(project), tracker="wandb")
    for key, setting in (("logging.wandb_name", "tracker_run_name"), ("logging.wandb_runid", "tracker_run_id")):
        if key in translating and has_project:
            translating.set(key, **{setting: translating.text(key) or ""})
        elif key in translating:
            translating.leave_out(key, f"without {project} nothing goes to wandb")


_PRECISIONS = {
    **dict.fromkeys(("bfloat16", "bf16", "bf16_mixed", "bf16_true"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16", "16", "16_mixed", "half"), "float16"),
    **dict.fromkeys(("float32", "fp32", "32", "32_true"), "float32"),
}


def _precision(translating: Translating, _: str) -> None:
    """Settles whether products are computed in 16 bits, and in which."""
    switch, key = "train.use_amp", "train.precision"
    text, uses = translating.text(key), translating.is_true(switch)
    dtype = None if text is None else _PRECISIONS.get(_word(text))
    if text is not None and dtype is None:
        translating.refuse(key, "one of bfloat16, float16, float32 is needed")
        return
    if uses is not None:
        translating.set(switch, mixed_precision="true" if uses and dtype != "float32" else "false")
    if text is None:
        return
    if uses is False:
        translating.leave_out(key, f"{switch} is false")
    elif dtype == "float32":
        translating.set(key, mixed_precision="false")
    else:
        translating.set(key, mp_dtype=dtype, mixed_precision="true")


def _width(translating: Translating, key: str) -> None:
    """Takes the width; where no feed-forward width is given, it is 8/3 of it.

    Three matrices of that width have as many parameters as a GPT's two of 4 x the width.
    """
    text = translating.text(key) or ""
    number = parse_number(text)
    if number is None or any(each in translating for each in _FEED_FORWARD):
        translating.set(key, hidden_size=text)
    else:
        feed_forward = -(-int(number) * 8 // (3 * 256)) * 256
        translating.set(
            key,
            "feed-forward 8/3 of it, in multiples of 256",
            hidden_size=text,
            intermediate_size=str(feed_forward),
        )


def _context(translating: Translating, key: str) -> None:
    text = translating.text(key)
    translating.set(key, seq_length=text, max_position_embeddings=text)


def _name_model(translating: Translating, key: str) -> None:
    name = _word(translating.text(key) or "")
    if (translating.text(key) or "").lower() in VARIANTS:
        translating.set(key, model_variant=(translating.text(key) or "").lower())
    elif name.startswith("llama"):
        translating.set(key, "as here")
    else:
        reason = "it is no Llama"
        if "gpt" in name:
            reason = "a GPT has layer norms, GELU and learned positions, a Llama RMSNorm, SwiGLU and rotary ones"
        translating.refuse_unless_accepted(key, reason)


def _data_path(translating: Translating, key: str) -> None:
    folder = Path(translating.text(key) or "")
    translating.set(key, **(data_settings(folder) if is_folder(folder) else {"data_path": str(folder)}))


def _name_data(translating: Translating, key: str) -> None:
    name = translating.text(key) or ""
    folders = [translating.text(each) for each in _DATA_PATHS if each in translating]
    if folders and is_folder(Path(folders[0] or "") / name):
        translating.set(key, datasets=name)
    else:
        translating.leave_out(key, "data is a folder of token files: give --data_path (pretrain prepare makes one)")


def _tokenizer(translating: Translating, key: str) -> None:
    path = Path(translating.text(key) or "")
    if is_file(path) or is_file(path / "tokenizer.json"):
        translating.set(key, tokenizer_path=str(path))
    else:
        translating.leave_out(key, "there is no such folder; data is tokenized by pretrain prepare --tokenizer_path=…")


def _must_be(value: str, reason: str) -> Rule:
    """A switch that has one value here."""
    return as_here(value, reason=f"{reason}: write {value}")


def _off(reason: str) -> Rule:
    """A switch that is left out where it is off, and refused with the reason where it is on."""
    return as_here("false", "no", "off", "0", reason=f"{reason}: take it out, or write null", remark="off, as here")


OTHER_SECTIONS = ("experimental", "test", "hydra")


def _settle_other(translating: Translating, key: str) -> None:
    """Leaves out what is not about training; an experiment that is on is refused."""
    section = key.partition(".")[0]
    if section != "experimental":
        reason = "of its tests" if section == "test" else "of the composing program; logs are in the run's folder"
        translating.leave_out(key, reason)
        return
    value = translating.values[key]
    above = key.rpartition(".")[0]
    if key.rpartition(".")[2] != "use" and plain(str(translating.values.get(f"{above}.use"))) == "false":
        translating.leave_out(key, f"{above} is off")
    elif not isinstance(value, str) or plain(value) in ("false", 0.0):
        translating.leave_out(key, "off")
    else:
        translating.refuse(key, "experiments of that pipeline are not here: take it out, or write null")


_CLIPPING = ("train.gradient_clip_val", "train.grad_clip", "train.max_grad_norm")
_WARM_UPS = (LR + "warmup", LR + "warmup_steps")
_FEED_FORWARD = tuple(
    f"model.{name}" for name in ("intermediate_size", "fc_dim", "ffn_dim", "mlp_dim", "hidden_dim", "d_ff")
)
_DATA_PATHS = tuple(f"dataset.{name}" for name in ("path", "data_path", "data_dir", "root"))
_LOGGED = "metrics are those of logs/metrics.jsonl"
_LOADING = "how samples are read ahead is the loader's own; the data is the same"
_NO_DROPOUT = "a Llama is trained without dropout"
_NO_BIAS = "a Llama has no biases"
_OF_ADAM_BASE = "a switch of a general Adam; adam, adamw and nadam are here"

TABLE: dict[str, Rule] = {
    # The schedule comes before its parts, for it may settle them.
    LR + "schedule": _schedule,
    LR + "lr": _peak,
    **{key: becomes("warmup_steps", _length) for key in _WARM_UPS},
    LR + "const": _const,
    LR + "stable_steps": _const,
    LR + "decay": _decay,
    LR + "decay_steps": _decay,
    LR + "power": becomes("decay_power"),
    **{key: becomes("min_lr_ratio") for key in _SHARES_AT_END},
    **dict.fromkeys(_RATES_AT_END, _end_of_schedule),
    **{LR + name: left_out("piecewise_linear alone reads it") for name in ("lr1", "lr2", "start_steps")},
    **dict.fromkeys((HORIZON, STEPS, SEGMENT), _lengths),
    "optimizer.name": _name_optimizer,
    "optimizer.lr": _peak,
    "optimizer.beta": _momentum,
    "optimizer.momentum": _momentum,
    "optimizer.beta1": _option("adam_beta1", instead="it has momentum alone: optimizer.momentum"),
    "optimizer.beta2": _squares("adam_beta2"),
    "optimizer.betas": betas,
    "optimizer.eps": _squares("adam_epsilon"),
    "optimizer.weight_decay": becomes("weight_decay"),
    "optimizer.decouple_weight_decay": _decoupling,
    "optimizer.nesterov": _option("nesterov", "false", instead=_TO_NADAM),
    "optimizer.use_nesterov": _option("nesterov", "false", instead=_TO_NADAM),
    "optimizer.alpha": _option("rms_alpha", instead="rmsprop alone has it"),
    "optimizer.normalize": _must_be("global", "updates are divided by one norm over the whole model"),
    "optimizer.ns_steps": _option("muon_ns_steps", instead="muon alone has it"),
    "optimizer.ns_embedding": _off("AdamW updates the embedding"),
    "optimizer.ns_head": _off("AdamW updates the head"),
    "optimizer.offset_beta": _off("momentum of updates is not here"),
    "optimizer.adam_lr": _option("muon_adam_learning_rate", instead="muon alone has it"),
    "optimizer.adam_wd": _option("muon_adam_weight_decay", "0", instead="muon alone has it"),
    "optimizer.adam_beta1": _option("adam_beta1", instead="muon alone has it"),
    "optimizer.adam_beta2": _option("adam_beta2", instead="muon alone has it"),
    "optimizer.adam_eps": _option("adam_epsilon", instead="muon alone has it"),
    "optimizer.wrapper": _off("optimizers are not wrapped"),
    "optimizer.wrapper.name": _off("optimizers are not wrapped"),
    "optimizer.visualize": left_out(_LOGGED),
    "optimizer.fused": left_out("it always is, where it can be"),
    **{
        f"optimizer.{name}": _must_be("true", _OF_ADAM_BASE)
        for name in (
            *("debias_beta1", "debias_beta2", "use_momentum", "use_momentum_state", "use_precond"),
            "use_precond_state",
        )
    },
    **{key: becomes("grad_clip_thresh") for key in _CLIPPING},
    "train.use_amp": _precision,
    "train.precision": _precision,
    "train.random_seed": becomes("seed"),
    "train.seed": becomes("seed"),
    "random_seed": becomes("seed"),
    "train.epochs": becomes("num_steps", lambda text: f"{text}ep"),
    "train.num_epochs": becomes("num_steps", lambda text: f"{text}ep"),
    "train.batch_size": becomes("batch_size"),
    "train.gradient_accumulation_steps": becomes("grad_accum_steps"),
    "train.accumulate_steps": becomes("grad_accum_steps"),
    "train.log_interval": becomes("report_interval"),
    "train.eval_interval": becomes("eval_interval"),
    "train.eval_steps": becomes("eval_interval"),
    "train.eval_batches": becomes("eval_batches"),
    "train.compile": becomes("use_torch_compile"),
    "train.deterministic": becomes("deterministic"),
    "train.device": one_of("device", {"auto": "auto", "cuda": "cuda", "gpu": "cuda", "cpu": "cpu"}),
    "train.wrap_o2nc": _off("conversion of online learners is not here"),
    "train.random_scaling": _off("updates are not scaled at random"),
    "train.random_scaling_seed": left_out("updates are not scaled at random"),
    "train.use_importance_sampling": left_out("updates are not scaled at random"),
    "dataset.name": _name_data,
    **dict.fromkeys(_DATA_PATHS, _data_path),
    "dataset.batch_size": becomes("batch_size"),
    "dataset.total_batch_size": becomes("global_batch_size"),
    "dataset.global_batch_size": becomes("global_batch_size"),
    "dataset.context_length": becomes("seq_length"),
    "dataset.seq_length": becomes("seq_length"),
    "dataset.seq_len": becomes("seq_length"),
    "dataset.dataloader_workers": becomes("num_workers"),
    "dataset.num_workers": becomes("num_workers"),
    "dataset.tokenizer": _tokenizer,
    "dataset.tokenizer_path": _tokenizer,
    "dataset.vocab_size": becomes("vocab_size"),
    "dataset.seed": left_out("one seed, `seed`, is of the order of the data, too"),
    "dataset.split": left_out("held_out_fraction keeps documents for evaluation"),
    "dataset.shift_labels": left_out("labels are always the next tokens"),
    "dataset.use_loadit": left_out("a format of its own; data_path takes token files"),
    "dataset.loadit_path": left_out("a format of its own; data_path takes token files"),
    "dataset.loadit_length": left_out("a format of its own; data_path takes token files"),
    **{
        f"dataset.{name}": left_out("the order is random over all of the data, without a buffer")
        for name in ("shuffle", "shuffle_buffer_size")
    },
    **{f"dataset.{name}": left_out(_LOADING) for name in ("pin_memory", "prefetch", "prefetch_factor", "streaming")},
    "model.name": _name_model,
    "model.dim": _width,
    "model.context_length": _context,
    "model.num_heads": becomes("num_attention_heads"),
    "model.num_kv_heads": becomes("num_key_value_heads"),
    "model.num_blocks": becomes("num_hidden_layers"),
    "model.num_layers": becomes("num_hidden_layers"),
    **{key: becomes("intermediate_size") for key in _FEED_FORWARD},
    "model.vocab_size": becomes("vocab_size"),
    "model.rope_theta": becomes("rope_theta"),
    "model.norm_eps": becomes("rms_norm_eps"),
    "model.tie_embeddings": becomes("tie_word_embeddings"),
    "model.tie_weights": becomes("tie_word_embeddings"),
    "model.pad_token": left_out("nothing is padded in packed samples, and no id stands for it"),
    "model.rescale_residuals": left_out("initial weights are those of docs/model.md"),
    "model.load_pytorch": _off("initial weights come from the seed; ckpt_load_path takes those of a checkpoint"),
    **{
        f"model.{name}": only("0", reason=_NO_DROPOUT)
        for name in ("dropout", "attn_dropout", "attn_linear_dropout", "transformer_dropout", "gpt_dropout")
    },
    **{
        f"model.{name}": only("false", reason=_NO_BIAS)
        for name in ("bias", "use_bias", "head_bias", "attn_bias", "mlp_bias")
    },
    "model.activation": only("silu", "swish", "swiglu", reason="a Llama's activation is SiLU, gated"),
    "model.norm": only("rmsnorm", "rms_norm", "rms", reason="a Llama has RMSNorm"),
    "model.positional_embedding": only("rope", "rotary", reason="a Llama's positions are rotary"),
    **{f"logging.{name}": _wandb for name in ("wandb_project", "wandb_name", "wandb_runid")},
    "logging.log_interval": becomes("report_interval"),
    "logging.log_steps": becomes("report_interval"),
    "logging.wandb_logs_per_sec": left_out("report_interval says how often, in steps"),
    "logging.running_stats_window": left_out("averages are over the steps since the last report"),
    **{
        f"logging.{name}": left_out(_LOGGED)
        for name in (
            *("log_callback_data", "log_fn", "store_last_grads", "store_past_grads", "store_last_params"),
            *("compute_last_loss", "compute_last_grads"),
        )
    },
    **{f"checkpoint.{name}": _saves for name in ("save", "save_path", "save_steps")},
    **{
        f"checkpoint.{name}": _loads
        for name in ("load", "load_path", "load_file", "overwrite_config", "overwrite_optimizer")
    },
    "checkpoint.keep_last": becomes("keep_last"),
    "checkpoint.max_to_keep": becomes("keep_last"),
}
"""The fields, with what becomes of each."""

SECTIONS = {key.partition(".")[0] for key in TABLE if "." in key} | set(OTHER_SECTIONS)
