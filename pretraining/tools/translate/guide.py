"""The settings of a training guide: sections model, training and data, or all of their keys flat.

The guide tokenizes text while it trains. Here `pretrain prepare` does so first, with the command in the table.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from pretraining.durations import parse_number
from pretraining.files import exists, is_file, is_folder
from pretraining.tools.command_settings import PrepareConfig
from pretraining.tools.translate import deepspeed, rows
from pretraining.tools.translate.engine import KeyValue, System, Translation
from pretraining.tools.translate.foreign_files import read_settings
from pretraining.tools.translate.rows import Key, renamed

_SIZES = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}
_ROOT = PrepareConfig().output_path
_OF_PREPARE = {
    "dataset_config": "hf_config",
    "dataset_split": "hf_split",
    "text_column": "text_field",
    "preprocessing_num_workers": "num_workers",
}
_CHECKPOINT = re.compile(r"checkpoint-(\d+)(?:\.\w+)?")


def _name_of(key: str) -> str:
    """Return the name of a key without its section."""
    section, _, name = key.partition(".")
    return name if section in ("model", "training", "data") and name else key


def _combine(translation: Translation) -> None:
    _include_deepspeed(translation)
    _set_batch(translation)
    _set_precision(translation)
    _set_model(translation)
    _set_packing(translation)
    if "dataset_name" in translation:
        _set_dataset(translation)
    if "validation_split" in translation:
        _set_validation(translation)


def _include_deepspeed(translation: Translation) -> None:
    """Translate the DeepSpeed file that `deepspeed_config` names."""
    key = "deepspeed_config"
    if translation.is_on("use_deepspeed") is False:
        translation.set(key, "use_deepspeed is false")
        return
    if key not in translation:
        return
    path = Path(translation.text(key) or "").expanduser()
    if not is_file(path):
        translation.refuse(key, "there is no such file: correct or delete this line")
        return
    values = {name: KeyValue(name, text, str(path)) for name, text in read_settings(path).items()}
    part = Translation(deepspeed.SYSTEM, translation.name, values, translation.flags, translation.accepts)
    if not any(part.is_on(half) for half in deepspeed.HALF if part.word(half) != "auto"):
        part.skip("off: use_amp decides", *deepspeed.HALF)
    part.translate_keys()
    translation.problems += part.problems
    translation.notes |= {note.given.place: note for note in part.notes.values()}


def _set_batch(translation: Translation) -> None:
    """Set the global batch size from batch, accumulation and ranks, unless the DeepSpeed file sets it."""
    accumulation, ranks, made = "gradient_accumulation_steps", translation.count("world_size"), translation.made()
    if ranks and "global_batch_size" not in made:
        size, steps = (
            int(parse_number(made.get(name, "")) or translation.count(key, name) or 1)
            for name, key in (("batch_size", "batch_size"), ("grad_accum_steps", accumulation))
        )
        remark = f"{size} x {steps} x {ranks}; accumulation follows from the ranks that are there"
        translation.set("world_size", remark, global_batch_size=size * steps * ranks)
    else:
        translation.set("world_size", "the launcher sets the number of processes")
    if "global_batch_size" in translation.made():
        translation.set(accumulation, "follows from the batch of a step")


def _set_precision(translation: Translation) -> None:
    """Resolve use_amp and amp_dtype: a DeepSpeed file wins."""
    if "mp_dtype" in translation.made():
        translation.skip("the DeepSpeed file says it", "use_amp", "amp_dtype")
    elif translation.is_on("use_amp") is False:
        translation.set("use_amp", mixed_precision="false")
        translation.set("amp_dtype", "use_amp is false")


def _set_model(translation: Translation) -> None:
    """Refuse an incomplete model; 4 x d_model is a width for two matrices, and a Llama has three."""
    width, given = translation.count("d_model", "hidden_size"), translation.count("d_ff")
    if width and given is not None and given == 4 * width and translation.word("activation") != "swiglu":
        remark = "8/3 of d_model in multiples of 256, in three matrices for two of 4 x d_model"
        translation.set("d_ff", remark, intermediate_size=rows.width(str(width))["intermediate_size"])
    there = [name for name in _SIZES if name in translation]
    missing = [name for name in _SIZES if name not in there and _SIZES[name] not in translation.flags]
    if there and missing and "model_variant" not in translation.flags:
        flags = " and ".join(f"--{_SIZES[name]}" for name in missing)
        translation.refuse(there[0], f"the model also needs {' and '.join(missing)}: add them, or set {flags}")


def _set_packing(translation: Translation) -> None:
    switch, strategy = "pack_sequences", "packing_strategy"
    if translation.is_on(switch) is False:
        remark = "whole documents side by side, padded at the end, without attention between them; a long one is cut"
        translation.set(switch, remark, packing="best_fit", document_mask="true")
        translation.set(strategy, f"{switch} is false")
    elif switch in translation:
        translation.set(switch, packing=translation.text(strategy) or "greedy")


def _resume(text: str) -> str:
    """Return the checkpoint to resume from: checkpoint-200.pt stands for step 200."""
    step = _CHECKPOINT.fullmatch(Path(text).name)
    return step[1] if step else text


# Text


def _set_dataset(translation: Translation) -> None:
    """Set the training data, with the command that prepares the text."""
    text, tokenizer = translation.text("dataset_name") or "", translation.flags.get("tokenizer_path")
    flags = {"input_path" if _is_path(text) else "hf_dataset": text, "tokenizer_path": tokenizer}
    flags |= {flag: translation.text(name) for name, flag in _OF_PREPARE.items()}
    flags["dataset"] = None if PrepareConfig(input_path=(text,)).dataset_name else _dataset_of(text)
    if _is_path(text):
        flags["hf_config"], split = None, flags.pop("hf_split")
        flags["split"] = None if split == PrepareConfig().hf_split or _is_one_file(text) else split
        translation.skip("files have no configurations", "dataset_config")
    if _is_one_file(text):
        translation.skip("a file has no splits: all of it is read", "dataset_split")
    if tokenizer is None:
        flags["vocab_size"] = translation.text("vocab_size")
    words = [f"--{name}={value}" for name, value in flags.items() if value not in (None, vars(PrepareConfig())[name])]
    command = shlex.join(["pretrain", "prepare", *words, f"--output_path={_ROOT}"])
    translation.prepare = _ROOT, command
    translation.set("dataset_name", f"prepare it first: {command}", data_path=_ROOT, datasets=_dataset_of(text))


def _set_validation(translation: Translation) -> None:
    """Set the evaluation data: a fraction, or a split of the dataset."""
    key, text = "validation_split", translation.text("validation_split") or ""
    dataset = translation.text("dataset_name") or ""
    if parse_number(text) is not None:
        translation.set(key, held_out_fraction=text)
    elif _is_one_file(dataset):
        translation.set(key, "a file has no splits: 1% of its documents", held_out_fraction=0.01)
    elif dataset:
        name = f"{_dataset_of(dataset)}_{text}"
        split = "split" if _is_path(dataset) else "hf_split"
        words = shlex.join([f"--{split}={text}", f"--dataset={name}"])
        remark = f"prepare it, too: the same command with {words}, without --vocab_size"
        translation.set(key, remark, eval_datasets=f"{_ROOT}/{name}")
    else:
        translation.set(key, "no dataset_name for this split: set --eval_datasets or --held_out_fraction")


def _is_path(text: str) -> bool:
    """Return whether a dataset's name means files, and not a dataset of the Hub."""
    return text.startswith((".", "/", "~")) or "*" in text or exists(Path(text)) or bool(Path(text).suffix)


def _is_one_file(text: str) -> bool:
    return bool(Path(text).suffix) and "*" not in text and not is_folder(Path(text))


def _dataset_of(text: str) -> str:
    return PrepareConfig(input_path=(text,)).dataset_name or "text"


_ROWS = {
    **renamed(**_SIZES, vocab_size="vocab_size", d_ff="intermediate_size"),
    "max_seq_len": Key(convert=rows.context),
    **dict.fromkeys(("dropout", "attention_dropout"), rows.only("0", reason="a Llama is trained without dropout")),
    "activation": rows.only("silu", "swiglu", reason="a Llama's activation is SiLU, in a gated feed-forward"),
    "pre_norm": rows.only("true", reason="a Llama has its norms before attention and feed-forward"),
    "gradient_checkpointing": Key("fsdp_activation_checkpointing"),
    **renamed(batch_size="batch_size", gradient_accumulation_steps="grad_accum_steps", learning_rate="learning_rate"),
    "weight_decay": rows.WEIGHT_DECAY,
    "num_epochs": Key("num_steps", lambda text: f"{text}ep"),
    "lr_scheduler": Key("schedule", rows.schedule),
    **renamed(
        warmup_steps="warmup_steps", optimizer="optimizer", max_grad_norm="grad_clip_thresh", amp_dtype="mp_dtype"
    ),
    "use_amp": Key(remark="where the device has units for it; else float32, as there on a CPU"),
    **renamed(save_steps="checkpoint_interval", eval_steps="eval_interval", logging_steps="report_interval"),
    **renamed(checkpoint_dir="ckpt_save_path", distributed_backend="backend", seed="seed"),
    "save_total_limit": Key("keep_last", lambda text: "none" if text.startswith(("0", "-")) else text),
    "resume_from_checkpoint": Key("resume_from_checkpoint", _resume),
    "report_to": Key("tracker"),
    "world_size": Key("global_batch_size"),
    "use_deepspeed": Key(remark="FSDP does what deepspeed_config asks for"),
    "deepspeed_config": Key(remark="read, too"),
    **dict.fromkeys(_OF_PREPARE, Key(remark="of pretrain prepare: the command for dataset_name has it")),
    **renamed(dataset_name="data_path", validation_split="eval_datasets", max_length="seq_length"),
    "min_length": Key("min_length", remark="in tokens"),
    **renamed(pack_sequences="packing", packing_strategy="packing"),
}
SYSTEM = System("guide", "the settings of a training guide: model, training, data", _ROWS, _combine, _name_of)
