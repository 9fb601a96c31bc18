"""Python files of assignments that a `train.py` reads: of token-counted runs, and nanoGPT's that count in steps.

    max_tokens, warmup_tokens, stable_tokens, …_interval_tokens     tokens
    max_iters, warmup_iters, lr_decay_iters, eval_interval          steps: nanoGPT

A file says only what differs from its `train.py`, whose own values hold for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

from pretraining.config.plugins import TOKEN_SUFFIXES
from pretraining.files import entries_of, is_file, is_folder
from pretraining.tools.translate import key_rules as rules
from pretraining.tools.translate.key_rules import decimal, each, left, only, renamed, row, tokens, when
from pretraining.tools.translate.translation import Rule, System, Translation

_COUNTS_TOKENS = (
    *("max_tokens", "log_interval_tokens", "val_interval_tokens", "checkpoint_interval_tokens", "warmup_tokens"),
    *("stable_tokens", "min_lr_factor", "use_scheduler", "optimizer_type", "train_data_file"),
)
_SIGNS = (
    *("max_iters", "n_embd", "n_layer", "n_head", "block_size", "lr_decay_iters", "warmup_iters", "decay_lr"),
    *("out_dir", "eval_iters", "always_save_checkpoint", "wandb_log", "wandb_run_name", "lr_muon_adam", "wd_muon_adam"),
    *("resume_ckpt_fname", *(name for name in _COUNTS_TOKENS if name != "max_tokens")),
)
_OF_BOTH = {
    **{"n_head": "12", "block_size": "1024", "eval_iters": "200", "vocab_size": "50304"},
    **{"weight_decay": "0.1", "beta1": "0.9", "beta2": "0.95", "grad_clip": "1.0"},
}
_OF_STEPS = _OF_BOTH | {
    **{"out_dir": "out", "n_layer": "12", "n_embd": "768", "batch_size": "12", "gradient_accumulation_steps": "40"},
    **{"max_iters": "600000", "learning_rate": "6e-4", "eval_interval": "2000", "dataset": "openwebtext"},
    **{"decay_lr": "true", "warmup_iters": "2000", "lr_decay_iters": "600000", "min_lr": "6e-5"},
}
_OF_TOKENS = _OF_BOTH | {
    **{"n_layer": "8", "n_embd": "480", "batch_size": "32", "gradient_accumulation_steps": "1"},
    **{"learning_rate": "3e-4", "min_lr_factor": "0.1", "optimizer_type": "adamw"},
}
_MODEL = ("n_layer", "n_head", "n_embd", "block_size")
_END_OF_TEXT = 50256
"""Of GPT-2's tokenizer; it ends documents in the token files."""
_COSINE_PARTS = 16
"""Straight lines in place of a cosine that ends before or after the run: at most 0.25% of the peak away from it."""
_STARTS = {"ckpt_load_path", "resume_from_checkpoint"}
_DATA = {"data_path", "use_dummy_dataset"}


def _counts_tokens(translation: Translation) -> bool:
    return "max_iters" not in translation and any(key in translation for key in _COUNTS_TOKENS)


def _defaults(translation: Translation) -> Mapping[str, str]:
    """Return what `train.py` takes if its file is silent."""
    found = dict(_OF_TOKENS if _counts_tokens(translation) else _OF_STEPS)
    if _counts_tokens(translation):
        has_schedule = "warmup_tokens" in translation or "stable_tokens" in translation
        found["use_scheduler"] = "true" if has_schedule else "false"
        if "wandb_project" in translation or "wandb_run_name" in translation:
            found["wandb_log"] = "true"
    given = translation.flags.keys()
    silent = set(_MODEL) if given & (_STARTS | {"model_variant"}) else set()
    silent |= {"vocab_size"} if given & (_STARTS | {"tokenizer_path"}) or _is_of_characters(translation) else set()
    silent |= {"dataset"} if given & _DATA else set()
    return {key: text for key, text in found.items() if key not in silent}


def _combine(translation: Translation) -> None:
    """Make the batch of a step, and the shape of the schedule."""
    key = "gradient_accumulation_steps"
    steps, size = translation.count(key) or 1, translation.count("batch_size", "batch_size") or 1
    if "grad_accum_steps" in translation.flags:
        translation.left(key, "--grad_accum_steps wins")
    else:
        translation.set(key, f"x batch_size={size}, on any number of GPUs", global_batch_size=size * steps)
    if "eval_iters" in translation:
        remark = f"of batch_size there, of {steps} x batch_size here" if steps > 1 else ""
        translation.set("eval_iters", remark, eval_batches=-(-(translation.count("eval_iters") or 1) // steps))
    if _counts_tokens(translation):
        _schedule_of_tokens(translation)
    else:
        _schedule_of_steps(translation)


# The learning rate


def _schedule_of_tokens(translation: Translation) -> None:
    for name in filter(translation.__contains__, ("warmup_iters", "lr_decay_iters", "min_lr", "decay_lr")):
        problem = "the file counts in tokens: write warmup_tokens, stable_tokens, min_lr_factor, use_scheduler"
        translation.refuse(name, problem)
    key = "use_scheduler"
    if not translation.is_on(key):
        _constant(translation, key, "warmup_tokens", "stable_tokens", "min_lr_factor")
    elif translation.number("stable_tokens"):
        translation.set(key, "warm-up, stable, cosine", schedule="wsd", decay_shape="cosine")
    else:
        translation.set(key, "warm-up, cosine", schedule="cosine")
        translation.left("stable_tokens", "the cosine follows the warm-up")


def _schedule_of_steps(translation: Translation) -> None:
    """Make nanoGPT's cosine: it comes down to `min_lr` at `lr_decay_iters`, which need not be the end of the run."""
    if not translation.is_on("decay_lr"):
        _constant(translation, "decay_lr", "warmup_iters", "lr_decay_iters", "min_lr")
        return
    warmup = translation.count("warmup_iters", smallest=0) or 0
    end, length = translation.count("lr_decay_iters") or 1, translation.count("max_iters", "num_steps")
    peak = translation.number("learning_rate", "learning_rate")
    lowest = (translation.number("min_lr") or Fraction(0)) / peak if peak else Fraction(1)
    if lowest > 1:
        translation.refuse("min_lr", f"it is more than learning_rate={decimal(peak or Fraction(0))}", "min_lr_ratio")
    elif end == length:
        translation.set("lr_decay_iters", "the end of the run", schedule="cosine")
        translation.set("warmup_iters", warmup_steps=warmup)
        translation.set("min_lr", "as a share of learning_rate", min_lr_ratio=decimal(lowest))
    elif end <= warmup:
        problem = f"the learning rate comes down after warmup_iters={warmup}: give more than that"
        translation.refuse("lr_decay_iters", problem, "schedule")
    else:
        remark = f"not the end of the run: its cosine as {_COSINE_PARTS} lines"
        points = _points(warmup, end, float(lowest))
        translation.set("lr_decay_iters", remark, schedule="piecewise_linear", schedule_points=points)
        translation.left("warmup_iters", "in the points of the schedule")
        translation.left("min_lr", "in the points of the schedule")


def _constant(translation: Translation, switch: str, *unread: str) -> None:
    translation.set(switch, schedule="constant", warmup_steps="0")
    for key in unread:
        translation.left(key, f"{switch} is False")


def _points(warmup: int, end: int, lowest: float) -> str:
    """Return the schedule's points, as step:share of the peak."""
    shares = {0: 1 / (warmup + 1)}
    for part in range(_COSINE_PARTS + 1):
        step = warmup + (end - warmup) * part // _COSINE_PARTS
        shares[step] = lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (end - warmup)))
    return ",".join(f"{step}:{share:.6g}" for step, share in shares.items())


def _is_muon(translation: Translation) -> bool:
    return translation.word("optimizer_type") == "muon"


def _peak(translation: Translation, key: str) -> None:
    remark = ""
    if _is_muon(translation) and "n_embd" in translation:
        factor = 0.2 * math.sqrt(translation.count("n_embd") or 1)
        remark = f"updates are as long as AdamW's: {factor:.1f} times those of torch.optim.Muon at this width"
    translation.set(key, remark, learning_rate=translation.text(key))


def _evaluation_interval(translation: Translation, key: str) -> None:
    interval = translation.text(key)
    if _counts_tokens(translation):
        translation.set(key, eval_interval=interval)
    else:
        saved = translation.flags.get("eval_interval", interval)
        remark = "saved as often; the newest and the best are kept"
        translation.set(key, remark, eval_interval=interval, checkpoint_interval=saved, keep_last=1)


def _checkpoint_interval(translation: Translation, key: str) -> None:
    length = tokens(translation.text(key) or "")
    is_alone = "val_interval_tokens" not in translation and "eval_interval" not in translation
    made = {"checkpoint_interval": length, "eval_interval": length if is_alone else None, "ckpt_name": "tokens"}
    translation.set(key, "evaluated as often" if is_alone else "", **made)


# Model and data


def _width(translation: Translation, key: str) -> None:
    translation.set(
        key,
        "a Llama: RMSNorm, SwiGLU with the parameters of 4 x n_embd, rotary positions; the head is tied as there",
        hidden_size=translation.text(key),
        intermediate_size=rules.gated_width(translation.count(key) or 1, 64),
        tie_word_embeddings="true",
    )


def _dataset(translation: Translation, key: str) -> None:
    """Take nanoGPT's `data/<dataset>/train.bin` and `val.bin`."""
    name = translation.text(key) or ""
    train, validation = Path("data", name, "train.bin"), Path("data", name, "val.bin")
    if _DATA & translation.flags.keys():
        translation.left(key, "the command line has other data: give --sep_token and --eval_datasets for it, too")
    elif _is_of_characters(translation):
        problem = "its tokens are characters, and none ends a document: make token files of its text, pretrain prepare "
        translation.refuse(key, f"{problem}--input_path=data/{name}/input.txt --output_path=data/prepared")
    else:
        evaluated = None if is_file(train) and not is_file(validation) else str(_place_of(validation))
        translation.set(key, **_training_data(translation, train), eval_datasets=evaluated)


def _training_file(translation: Translation, key: str) -> None:
    translation.set(key, **_training_data(translation, Path(translation.text(key) or "")))


def _validation_file(translation: Translation, key: str) -> None:
    translation.set(key, eval_datasets=_place_of(Path(translation.text(key) or "")))


def _training_data(translation: Translation, path: Path) -> dict[str, str]:
    """Return the settings for a file of uint16 without a header; of GPT-2's tokens, also what ends documents."""
    place = _place_of(path)
    settings = {"data_path": str(place.parent), "datasets": place.name, "file_type": "bin", "token_dtype": "uint16"}
    vocabulary = translation.number("vocab_size", "vocab_size")
    if vocabulary is not None and vocabulary > _END_OF_TEXT:
        settings["sep_token"] = str(_END_OF_TEXT)
    return settings


def _place_of(path: Path) -> Path:
    """Return what a token file is as a dataset: the folder that it has for itself, or the file."""
    if not path.name:
        return path
    around, made = path.parent, path.with_suffix("")
    if is_file(path) and all(
        other.name == path.name or not (is_folder(other) or other.suffix in TOKEN_SUFFIXES)
        for other in entries_of(around)
    ):
        return around
    return made if is_folder(made) else path


def _is_of_characters(translation: Translation) -> bool:
    """Return whether the dataset has a vocabulary of its own, in a pickle that is not opened."""
    name = translation.text("dataset")
    return name is not None and (name.endswith("_char") or is_file(Path("data", name, "meta.pkl")))


# Where a run begins, and where it runs


def _beginning(translation: Translation, key: str) -> None:
    text = translation.text(key) or ""
    if "ckpt_load_path" in translation.flags:
        translation.left(key, "--ckpt_load_path says what it begins with")
    elif text in ("scratch", "resume", "auto"):
        translation.set(key, "a ckpt.pt is not read" if text == "resume" else "", init_from=text)
    else:
        problem = "GPT-2 is no Llama: give --ckpt_load_path=<Hugging Face folder of a Llama>, or 'scratch'"
        translation.refuse(key, problem if text.startswith("gpt2") else "one of scratch, resume is needed")


def _checkpoint(translation: Translation, key: str) -> None:
    name, folder = translation.text(key) or "", Path(translation.text("out_dir") or "")
    path = name.removesuffix(".pt")
    if translation.text("init_from") != "resume" or "ckpt_load_path" in translation.flags:
        translation.left(key, "read with init_from='resume' only")
    elif is_file(folder / name):
        translation.refuse(key, f"{folder / name} holds a GPT, which is not read: give init_from = 'scratch'")
    else:
        translation.set(key, resume_from_checkpoint=str(folder / path) if "/" in path else path)


def _device(translation: Translation, key: str) -> None:
    kind, colon, _ = (translation.text(key) or "").partition(":")
    if kind in ("cuda", "cpu", "auto"):
        translation.set(key, "which one, CUDA_VISIBLE_DEVICES says" if colon else "", device=kind)
    else:
        translation.refuse(key, "one of cuda, cpu is needed", "device")


def _dtype(translation: Translation, key: str) -> None:
    if (translation.flags.get("device") or translation.text("device")) == "cpu":
        translation.set(key, "on a CPU float32, as there", mixed_precision="false")
    else:
        row("mp_dtype", rules.dtype)(translation, key)


def _uses_wandb(translation: Translation) -> bool:
    flag = translation.flags.get("tracker")
    return bool(translation.is_on("wandb_log")) if flag is None else "wandb" in flag


def _wandb(translation: Translation, key: str) -> None:
    on = translation.is_on(key) and _uses_wandb(translation)
    translation.set(key, "" if on else "TensorBoard's files are in the run's folder", tracker="wandb" if on else None)


def _has_own_data(translation: Translation) -> bool:
    return not _DATA & translation.flags.keys()


_OF_MUON = "read with optimizer_type='muon' only"
_NEW_RUN = "a branch is a new run: --ckpt_load_path=… --weights_only=true and another --seed"
_RULES: dict[str, Rule] = {
    **each("gradient_accumulation_steps eval_iters use_scheduler", rules.SETTLED),
    "decay_lr": left(""),
    **each("warmup_iters lr_decay_iters min_lr", rules.SETTLED),
    "init_from": _beginning,
    "resume_ckpt_fname": _checkpoint,
    "n_embd": _width,
    **renamed(n_layer="num_hidden_layers", n_head="num_attention_heads", n_kv_head="num_key_value_heads"),
    "block_size": rules.context,
    **renamed(vocab_size="vocab_size", out_dir="ckpt_save_path", max_iters="num_steps", eval_only="eval_only"),
    "dropout": rules.NO_DROPOUT,
    "bias": rules.NO_BIAS,
    "batch_size": row("batch_size", remark="what a GPU takes at once"),
    "max_tokens": row("num_steps", tokens),
    "warmup_tokens": row("warmup_steps", tokens),
    "stable_tokens": row("stable_steps", tokens),
    "learning_rate": _peak,
    "weight_decay": row("weight_decay", remark="not of norms and the embedding"),
    **renamed(min_lr_factor="min_lr_ratio", beta1="adam_beta1", beta2="adam_beta2", grad_clip="grad_clip_thresh"),
    **renamed(log_interval="report_interval", seed="seed", train_seed="seed", compile="use_torch_compile"),
    "optimizer_type": row("optimizer", rules.choice(adamw="adamw", muon="muon")),
    "lr_muon_adam": when(_is_muon, row("muon_adam_learning_rate"), _OF_MUON),
    "wd_muon_adam": when(_is_muon, row("muon_adam_weight_decay"), _OF_MUON),
    "eval_interval": _evaluation_interval,
    "val_interval_tokens": row("eval_interval", tokens),
    "checkpoint_interval_tokens": _checkpoint_interval,
    "log_interval_tokens": row("report_interval", tokens),
    "wandb_log": _wandb,
    "wandb_project": when(_uses_wandb, row("tracker_project_name"), "wandb is not asked for"),
    "wandb_run_name": when(_uses_wandb, row("tracker_run_name"), "wandb is not asked for"),
    "device": _device,
    "dtype": _dtype,
    "compile_model": row("use_torch_compile"),
    "dataset": _dataset,
    "train_data_file": when(_has_own_data, _training_file, "the command line has other data"),
    "val_data_file": when(_has_own_data, _validation_file, "the command line has other data"),
    "branch_seed": only("-1", reason=_NEW_RUN),
    "branch_window_size_tokens": left("of branches"),
    "total_tokens": left("the files say it"),
    "checkpoint_token_pos": left("a checkpoint knows its position in the data"),
    "always_save_checkpoint": left("the newest and the best checkpoint are kept"),
    "backend": left("the device decides: GPUs talk by NCCL, CPUs by gloo"),
    "ignore_fused": left("AdamW is always fused; the results are the same"),
}
SYSTEM = System(
    "Python assignments for a train.py, token-counted or nanoGPT's",
    _SIGNS,
    _RULES,
    _defaults,
    _combine,
    nulls={"grad_clip": "0"},
)
