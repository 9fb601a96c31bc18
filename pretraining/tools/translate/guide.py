"""Rules for the JSON of a training guide: sections model, training and data, or all of their keys flat.

The guide tokenizes text while it trains. Here `pretrain prepare` does so first, with the command in the table.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from pretraining.config.plugins import OPTIMIZERS
from pretraining.files import exists, is_file
from pretraining.progress import parse_number
from pretraining.tools.commands import PrepareConfig
from pretraining.tools.translate import deepspeed
from pretraining.tools.translate import key_rules as rules
from pretraining.tools.translate.key_rules import each, not_a_llama, off, only, renamed, row, skip, when
from pretraining.tools.translate.parse import parse
from pretraining.tools.translate.translation import DEFAULT, Given, Rule, System, Translation

_SIZES = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}
_SAYS_WHICH_MODEL = {"activation", "dropout", "attention_dropout", "norm", "norm_type", "pre_norm"}
_ROOT = PrepareConfig().output_path
ON_ITS_DEVICES = "where the device has units for it; else float32, as there on a CPU"
_CHECKPOINT = re.compile(r"(?:checkpoint-|iter_)(\d+)(?:\.\w+)?")


def _name_of(key: str) -> str:
    """Return the name of a key without its section."""
    section, _, name = key.partition(".")
    return name if section in ("model", "training", "data") and name else key


def _defaults(translation: Translation) -> dict[str, str]:
    """Return those of the guide's defaults that change what is learned."""
    found = {
        **{"batch_size": "32", "learning_rate": "1e-4", "weight_decay": "0.01", "num_epochs": "10"},
        **{"lr_scheduler": "cosine", "optimizer": "adamw", "max_grad_norm": "1.0", "use_amp": "true"},
        **{"beta1": "0.9", "beta2": "0.999", "eps": "1e-8", "gradient_accumulation_steps": "1", "amp_dtype": "float16"},
    }
    if "d_model" in translation:
        found["d_ff"] = str(4 * (translation.number("d_model") or 0))
    steps = translation.number("max_steps") or 0
    if "warmup_ratio" not in translation:
        found |= {"warmup_ratio": "0.1"} if 0 < steps <= 1000 else {"warmup_steps": "1000"}
    if "max_seq_len" not in translation:
        found["max_length"] = "1024"
    return found


def _combine(translation: Translation) -> None:
    """Read the DeepSpeed file, resolve the global batch size and the precision, and refuse an incomplete model."""
    _include_deepspeed(translation)
    _batch(translation)
    _precision(translation)
    if translation.text("d_model") and not _SAYS_WHICH_MODEL & translation.values.keys():
        remark = "a Llama: RMSNorm, gated SiLU, rotary positions, no dropout and no biases"
        translation.set("d_model", remark, hidden_size=translation.text("d_model"))
    given = [name for name in _SIZES if name in translation]
    missing = [name for name in _SIZES if name not in given and _SIZES[name] not in translation.flags]
    if given and missing and "model_variant" not in translation.flags:
        flags = " and ".join(f"--{_SIZES[name]}" for name in missing)
        translation.refuse(given[0], f"the model also needs {' and '.join(missing)}: add them, or set {flags}")


def _batch(translation: Translation) -> None:
    """Set the global batch size from batch, accumulation and ranks, unless the DeepSpeed file sets it."""
    settings, accumulation = translation.settings, "gradient_accumulation_steps"
    ranks = translation.count("world_size")
    if ranks and "global_batch_size" not in settings:
        size, steps = (
            int(parse_number(settings[name][0]) or 1) if name in settings else translation.count(key, name) or 1
            for name, key in (("batch_size", "batch_size"), ("grad_accum_steps", accumulation))
        )
        remark = f"{size} x {steps} x {ranks}; accumulation follows from the ranks that are there"
        translation.set("world_size", remark, global_batch_size=size * steps * ranks)
    else:
        translation.skip("world_size", "the launcher sets the number of processes")
    if "global_batch_size" in settings:
        settings.pop("grad_accum_steps", None)
        translation.skip(accumulation, "follows from the batch of a step")


def _include_deepspeed(translation: Translation) -> None:
    """Translate the DeepSpeed file that `deepspeed_config` names, or the settings below this key."""
    key = "deepspeed_config"
    inside = {name: given for name, given in translation.values.items() if name.startswith(f"{key}.")}
    if translation.is_on("use_deepspeed") is False:
        for name in (*inside, key):
            translation.skip(name, "use_deepspeed is false")
        return
    values = {name.removeprefix(f"{key}."): given for name, given in inside.items()}
    if key in translation:
        named = Path(translation.text(key) or "").expanduser()
        beside = Path(translation.values[key].source).parent / named
        path = next((path for path in (beside, named) if is_file(path)), None)
        if path is None:
            translation.refuse(key, "there is no such file: correct or delete this line")
            return
        values = {name: Given(name, text, str(path)) for name, text in parse(path).items()}
        translation.set(key, "read, too")
    part = Translation(values, translation.flags, translation.accepts)
    part.skip("steps_per_print", "the file that names it says")
    if "fp16.enabled" in part and not part.is_on("fp16.enabled") and "bf16.enabled" not in part:
        part.skip("fp16.enabled", "off: use_amp decides")
    part.apply_rules(deepspeed.SYSTEM.combine, deepspeed.SYSTEM.rules)
    translation.include(part)
    for name in inside:
        translation.skip(name, "read, too")


def _context(translation: Translation, key: str) -> None:
    """Set the model's context, and the sequence length unless max_length sets it."""
    if "max_length" in translation:
        translation.set(key, max_position_embeddings=translation.text(key))
    else:
        rules.context(translation, key)


def _feed_forward(translation: Translation, key: str) -> None:
    """Set the feed-forward width; 4 x d_model is for two matrices, and a Llama has three."""
    width, given = translation.count("d_model", "hidden_size"), translation.count(key)
    if width and given == 4 * width and translation.word("activation") != "swiglu":
        remark = f"8/3 of d_model in multiples of 256: {rules.describe_gated(width, 256)}"
        translation.set(key, remark, intermediate_size=rules.gated_width(width, 256))
    else:
        translation.set(key, intermediate_size=given)


def _length(translation: Translation, key: str) -> None:
    """Set the length to max_steps if it is a limit, else to num_epochs."""
    is_limited = (translation.number("max_steps") or 0) > 0
    if is_limited != (key == "max_steps"):
        translation.skip(key, "max_steps wins" if is_limited else "no limit: num_epochs decides")
    else:
        translation.set(key, num_steps=translation.text(key) if is_limited else f"{translation.text(key)}ep")


def _optimizer(translation: Translation, key: str) -> None:
    name = translation.word(key).removesuffix("_torch")
    if name not in OPTIMIZERS:
        translation.refuse(
            key, f"must be one of {', '.join(OPTIMIZERS)}: --optimizer takes your own class", "optimizer"
        )
    else:
        translation.set(key, optimizer="sgdm" if name == "sgd" and translation.number("momentum") else name)


def _schedule(translation: Translation, key: str) -> None:
    name = translation.word(key).removesuffix("_with_warmup")
    has_end = "min_lr_ratio" in translation or "min_lr" in translation or name == "constant"
    if name in ("cosine", "linear", "constant", "polynomial"):
        translation.set(key, "" if has_end else "to zero", schedule=name, min_lr_ratio=None if has_end else 0)
    else:
        translation.refuse(key, "must be cosine, linear, constant or polynomial", "schedule")


def _precision(translation: Translation) -> None:
    """Resolve use_amp and amp_dtype: a DeepSpeed file wins, and a CPU uses float32, as in the guide."""
    switch, dtype = "use_amp", "amp_dtype"
    own_device = "cpu" if translation.is_on("force_cpu") else translation.word("device")
    device = translation.flags.get("device") or own_device
    if "mixed_precision" in translation.settings:
        translation.skip(switch, "the DeepSpeed file says it")
    elif device == "cpu" or not translation.is_on(switch):
        translation.set(switch, "on a CPU float32, as there" * (device == "cpu"), mixed_precision="false")
    elif translation.values[dtype].level == DEFAULT:
        translation.set(dtype, mp_dtype=translation.text(dtype))
        translation.set(switch, ON_ITS_DEVICES)
    else:
        row("mp_dtype", lambda text: _without_switch(rules.dtype(text)), ON_ITS_DEVICES)(translation, dtype)
        translation.skip(switch, f"{dtype} decides")
    if dtype not in translation.notes:
        translation.skip(dtype, f"{switch} or the DeepSpeed file says it")


def _without_switch(precision: str | Mapping[str, str]) -> Mapping[str, str]:
    """Return the settings of a precision; one of 16 bits is left to the device."""
    settings = dict(precision) if isinstance(precision, Mapping) else {}
    return settings if "mp_dtype" not in settings else {"mp_dtype": settings["mp_dtype"]}


def _packing(translation: Translation, key: str) -> None:
    if translation.is_on("pack_sequences") is not False:
        translation.set(key, packing=translation.text("packing_strategy") or "greedy")
    elif key == "pack_sequences":
        remark = "attention stays inside a document, without padding; a long document is cut, not truncated"
        translation.set(key, remark, packing="best_fit", document_mask="true")
    else:
        translation.skip(key, "pack_sequences is false")


def _resume(translation: Translation, key: str) -> None:
    """Set the checkpoint to resume from; checkpoint-200.pt stands for step 200."""
    text = translation.text(key) or ""
    step = _CHECKPOINT.fullmatch(Path(text).name)
    if text.lower() in ("true", "false"):
        translation.skip(key, "a run in ckpt_save_path is always resumed")
    else:
        translation.set(key, "the step in its name" if step else "", resume_from_checkpoint=step[1] if step else text)


# Text


def _dataset(translation: Translation, key: str) -> None:
    text = translation.text(key) or ""
    if rules.holds_tokens(Path(text)):
        translation.set(key, **rules.folder_of_data(text))
        return
    tokenizer, size = translation.text("tokenizer_path"), translation.text("vocab_size")
    settings = {"data_path": _ROOT, "datasets": _name_of_dataset(text)}
    if tokenizer is None:  # prepare trains one
        settings |= {"tokenizer_path": _ROOT, "sep_token": "0"}
    is_path = _is_path(text)
    flags = {
        "input_path" if is_path else "hf_dataset": text,
        "hf_config": None if is_path else translation.text("dataset_config"),
        "hf_split": None if is_path else translation.text("dataset_split"),
        "text_field": translation.text("text_column"),
        "vocab_size": size if tokenizer is None else None,
        "tokenizer_path": tokenizer,
        "num_workers": translation.text("preprocessing_num_workers"),
    }
    words = [f"--{name}={value}" for name, value in flags.items() if value not in (None, vars(PrepareConfig())[name])]
    command = shlex.join(["pretrain", "prepare", *words, f"--output_path={_ROOT}"])
    translation.prepare = _ROOT, command
    translation.set(key, f"prepare it first: {command}", **settings)


def _is_path(text: str) -> bool:
    """Return whether a dataset's name means files, and not a dataset of the Hub."""
    return text.startswith((".", "/", "~")) or "*" in text or exists(Path(text)) or bool(Path(text).suffix)


def _validation(translation: Translation, key: str) -> None:
    """Set the evaluation data: a fraction, a folder of token files, or a split of the dataset."""
    text = translation.text(key) or ""
    if {"eval_datasets", "held_out_fraction"} & translation.flags.keys():
        translation.skip(key, "the command line sets the evaluation data")
    elif {"data_path", "use_dummy_dataset"} & translation.flags.keys():
        translation.set(key, "1% of the data that the command line names", held_out_fraction=0.01)
    elif parse_number(text) is not None:
        translation.set(key, held_out_fraction=text)
    elif rules.holds_tokens(Path(text)):
        translation.set(key, eval_datasets=text)
    elif _is_file(dataset := translation.text("dataset_name") or ""):
        translation.set(key, "a file has no splits: 1% of its documents", held_out_fraction=0.01)
    elif dataset:
        name = f"{_name_of_dataset(dataset)}_{text}"
        split = "split" if _is_path(dataset) else "hf_split"
        words = shlex.join([f"--{split}={text}", f"--dataset={name}"])
        remark = f"prepare it, too: the same command with {words}, without --vocab_size"
        translation.set(key, remark, eval_datasets=f"{_ROOT}/{name}")
    else:
        translation.skip(key, "no dataset_name for this split: set --eval_datasets or --held_out_fraction")


def _is_file(text: str) -> bool:
    path = Path(text).expanduser()
    return _is_path(text) and "*" not in text and (is_file(path) or (bool(path.suffix) and not exists(path)))


def _name_of_dataset(text: str) -> str:
    return PrepareConfig(input_path=(text,)).dataset_name or "text"


_SWITCH = rules.choice(true="true", false="false")
_ROTARY = not_a_llama("rope", "rotary", "true", reason="a Llama's positions are rotary")
_RMS = not_a_llama("rmsnorm", "rms_norm", "rms", "true", reason="a Llama has RMSNorm")
_SILU = not_a_llama("silu", "swish", "swiglu", reason="a Llama's activation is SiLU, in a gated feed-forward")
_OF_PREPARE = skip("of pretrain prepare: the command for dataset_name has it")
_NOT_HERE = """
    amsgrad label_smoothing label_smoothing_factor use_peft early_stopping_threshold ema_decay ema use_ema use_swa swa
"""
_IGNORED = """
    tokenizer_type special_tokens stride filter_empty_lines filter_short_sequences use_streaming cache_dir data_format
    test_split test_file dataloader_pin_memory dataloader_drop_last log_level eval_strategy eval_accumulation_steps
    local_rank use_accelerate accelerate_mixed_precision peft_type peft_r peft_alpha peft_dropout peft_target_modules
    peft_bias peft_task_type compile_mode
"""
_RULES: dict[str, Rule] = {
    **each("world_size use_amp amp_dtype deepspeed_config deepspeed_config.*", rules.combined),
    **renamed(**_SIZES, n_kv_heads="num_key_value_heads", vocab_size="vocab_size", rope_theta="rope_theta"),
    "d_ff": _feed_forward,
    "max_seq_len": _context,
    **each("tie_word_embeddings tie_embeddings tie_weights weight_tying", row("tie_word_embeddings")),
    **each("norm_eps rms_norm_eps layer_norm_eps", row("rms_norm_eps")),
    **each("positional_encoding position_embedding position_embedding_type pos_embedding use_rope", _ROTARY),
    **each("norm norm_type normalization use_rmsnorm", _RMS),
    **each("dropout attention_dropout attn_dropout embedding_dropout residual_dropout", rules.NO_DROPOUT),
    **each("resid_dropout ffn_dropout layer_drop layerdrop drop_path", rules.NO_DROPOUT),
    "activation": _SILU,
    "pre_norm": not_a_llama("true", reason="a Llama has its norms before attention and feed-forward"),
    **each("bias use_bias", rules.NO_BIAS),
    "init_std": rules.INITIAL_WEIGHTS,
    "gradient_checkpointing": row("fsdp_activation_checkpointing", _SWITCH),
    **renamed(batch_size="batch_size", gradient_accumulation_steps="grad_accum_steps", learning_rate="learning_rate"),
    "weight_decay": row("weight_decay", remark=rules.AFTER_DECAY),
    **each("max_steps num_epochs", _length),
    "lr_scheduler": _schedule,
    **renamed(min_lr_ratio="min_lr_ratio", warmup_steps="warmup_steps", momentum="momentum"),
    "min_lr": when(lambda t: "min_lr_ratio" not in t, rules.lowest_rate("learning_rate"), "min_lr_ratio wins"),
    "warmup_ratio": when(
        lambda t: "warmup_steps" not in t, row("warmup_steps", rules.part_of_run), "warmup_steps wins"
    ),
    "loss": only("cross_entropy", "ce", "none", reason="the loss is plain cross-entropy: delete it"),
    "optimizer": _optimizer,
    "betas": row("adam_beta1", rules.pair),
    **each("beta1 adam_beta1", row("adam_beta1")),
    **each("beta2 adam_beta2", row("adam_beta2")),
    **each("eps epsilon adam_epsilon", row("adam_epsilon")),
    **renamed(max_grad_norm="grad_clip_thresh", save_steps="checkpoint_interval", eval_steps="eval_interval"),
    **renamed(logging_steps="report_interval", early_stopping_patience="early_stopping_evaluations", seed="seed"),
    **renamed(distributed_backend="backend", tokenizer_path="tokenizer_path", max_length="seq_length"),
    **renamed(run_name="tracker_run_name", wandb_project="tracker_project_name"),
    **each("checkpoint_dir output_dir", row("ckpt_save_path")),
    "save_total_limit": row("keep_last", lambda text: "none" if text.startswith(("0", "-")) else text),
    "resume_from_checkpoint": _resume,
    "report_to": row("tracker", lambda text: text.strip("[]").replace(" ", "") or "none"),
    **each("logging_dir log_dir", row("tracker_dir")),
    "use_deepspeed": skip("FSDP does what deepspeed_config asks for"),
    "device": row("device", rules.choice(cuda="cuda", gpu="cuda", cpu="cpu", auto="auto")),
    "force_cpu": row("device", rules.choice(true="cpu", false="auto")),
    **each("use_torch_compile compile compile_model", row("use_torch_compile", _SWITCH)),
    **each("num_workers dataloader_num_workers", row("num_workers")),
    "min_length": row("min_length", remark="in tokens"),
    "dataset_name": _dataset,
    "validation_split": _validation,
    **each("pack_sequences packing_strategy", _packing),
    **each("dataset_config dataset_split text_column preprocessing_num_workers", _OF_PREPARE),
    **each(_NOT_HERE, off("it changes what is learned, and does not exist here")),
    **each(_IGNORED, skip("not translated: nothing that is learned depends on it")),
}
SYSTEM = System("the JSON of a training guide: model, training, data", _RULES, _defaults, _combine, _name_of)
