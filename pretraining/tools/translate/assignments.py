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
from pretraining.tools.translate.translation import (
    Rule,
    Translating,
    choice,
    context,
    decimal,
    gated_width,
    joint,
    left,
    not_a_llama,
    only,
    row,
    tokens,
    when,
)

_COUNTS_TOKENS = (
    *("max_tokens", "log_interval_tokens", "val_interval_tokens", "checkpoint_interval_tokens", "warmup_tokens"),
    *("stable_tokens", "min_lr_factor", "use_scheduler", "optimizer_type", "train_data_file"),
)
WHAT = "Python assignments for a train.py, token-counted or nanoGPT's"
SIGNS = (
    *(
        "max_iters",
        "n_embd",
        "n_layer",
        "n_head",
        "block_size",
        "lr_decay_iters",
        "warmup_iters",
        "decay_lr",
        "out_dir",
    ),
    *("eval_iters", "always_save_checkpoint", "wandb_log", "wandb_run_name", "lr_muon_adam", "wd_muon_adam"),
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


def _counts_tokens(translating: Translating) -> bool:
    return "max_iters" not in translating and any(key in translating for key in _COUNTS_TOKENS)


def defaults(translating: Translating) -> Mapping[str, str]:
    """Return what `train.py` takes where its file is silent."""
    found = dict(_OF_TOKENS if _counts_tokens(translating) else _OF_STEPS)
    if _counts_tokens(translating):
        has_schedule = "warmup_tokens" in translating or "stable_tokens" in translating
        found["use_scheduler"] = "true" if has_schedule else "false"
        if "wandb_project" in translating or "wandb_run_name" in translating:
            found["wandb_log"] = "true"
    given = translating.flags.keys()
    silent = set(_MODEL) if given & (_STARTS | {"model_variant"}) else set()
    silent |= {"vocab_size"} if given & (_STARTS | {"tokenizer_path"}) or _is_of_characters(translating) else set()
    silent |= {"dataset"} if given & _DATA else set()
    return {key: text for key, text in found.items() if key not in silent}


def name_of(key: str) -> str:
    """Return the name that the rules have for a key."""
    return key


def combine(translating: Translating) -> None:
    """Make the batch of a step, the shape of the schedule, and the data."""
    steps = translating.count("gradient_accumulation_steps") or 1
    size = translating.count("batch_size", "batch_size") or 1
    key = "gradient_accumulation_steps"
    if "grad_accum_steps" in translating.flags:
        translating.left(key, "--grad_accum_steps wins")
    else:
        translating.set(key, f"x batch_size={size}, on any number of GPUs", global_batch_size=size * steps)
    if "eval_iters" in translating:
        remark = f"of batch_size there, of {steps} x batch_size here" if steps > 1 else ""
        translating.set("eval_iters", remark, eval_batches=-(-(translating.count("eval_iters") or 1) // steps))
    if _counts_tokens(translating):
        _schedule_of_tokens(translating)
    else:
        _schedule_of_steps(translating)


# The learning rate


def _schedule_of_tokens(translating: Translating) -> None:
    key = "use_scheduler"
    if not translating.is_on(key):
        translating.set(key, schedule="constant", warmup_steps="0")
        for name in ("warmup_tokens", "stable_tokens", "min_lr_factor"):
            if name in translating:
                translating.left(name, "use_scheduler is False")
    elif translating.number("stable_tokens"):
        translating.set(key, "warm-up, stable, cosine", schedule="wsd", decay_shape="cosine")
    else:
        translating.set(key, "warm-up, cosine", schedule="cosine")
        if "stable_tokens" in translating:
            translating.left("stable_tokens", "the cosine follows the warm-up")


def _schedule_of_steps(translating: Translating) -> None:
    """Make nanoGPT's cosine: it comes down to `min_lr` at `lr_decay_iters`, which need not be the end of the run."""
    if not translating.is_on("decay_lr"):
        translating.set("decay_lr", schedule="constant", warmup_steps="0")
        for name in ("warmup_iters", "lr_decay_iters", "min_lr"):
            if name in translating:
                translating.left(name, "decay_lr is False")
        return
    warmup = translating.count("warmup_iters", smallest=0) or 0
    end, length = translating.count("lr_decay_iters") or 1, translating.count("max_iters", "num_steps")
    peak = translating.number("learning_rate", "learning_rate")
    lowest = (translating.number("min_lr") or Fraction(0)) / peak if peak else Fraction(1)
    if lowest > 1:
        translating.refuse("min_lr", f"it is more than learning_rate={decimal(peak or Fraction(0))}", "min_lr_ratio")
    elif end == length:
        translating.set("lr_decay_iters", "the end of the run", schedule="cosine")
        translating.set("warmup_iters", warmup_steps=warmup)
        translating.set("min_lr", "as a share of learning_rate", min_lr_ratio=decimal(lowest))
    elif end <= warmup:
        problem = f"the learning rate comes down after warmup_iters={warmup}: give more than that"
        translating.refuse("lr_decay_iters", problem, "schedule")
    else:
        remark = f"not the end of the run: its cosine as {_COSINE_PARTS} lines"
        points = _points(warmup, end, float(lowest))
        translating.set("lr_decay_iters", remark, schedule="piecewise_linear", schedule_points=points)
        for name in ("warmup_iters", "min_lr"):
            translating.left(name, "in the points of the schedule")


def _points(warmup: int, end: int, lowest: float) -> str:
    """Return the schedule's points, as step:share of the peak."""
    shares = {0: 1 / (warmup + 1)}
    for part in range(_COSINE_PARTS + 1):
        step = warmup + (end - warmup) * part // _COSINE_PARTS
        shares[step] = lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (end - warmup)))
    return ",".join(f"{step}:{share:.6g}" for step, share in shares.items())


def _peak(translating: Translating, key: str) -> None:
    remark = ""
    if _is_muon(translating) and "n_embd" in translating:
        factor = 0.2 * math.sqrt(translating.count("n_embd") or 1)
        remark = f"updates are as long as AdamW's: {factor:.1f} times those of torch.optim.Muon at this width"
    translating.set(key, remark, learning_rate=translating.text(key))


def _is_muon(translating: Translating) -> bool:
    return translating.word("optimizer_type") == "muon"


def _evaluation_interval(translating: Translating, key: str) -> None:
    interval = translating.text(key)
    if _counts_tokens(translating):
        translating.set(key, eval_interval=interval)
    else:
        saved = translating.flags.get("eval_interval", interval)
        remark = "saved as often; the newest and the best are kept"
        translating.set(key, remark, eval_interval=interval, checkpoint_interval=saved, keep_last=1)


def _checkpoint_interval(translating: Translating, key: str) -> None:
    length = tokens(translating.text(key) or "")
    alone = "val_interval_tokens" not in translating and "eval_interval" not in translating
    remark = "evaluated as often" if alone else ""
    translating.set(
        key, remark, checkpoint_interval=length, eval_interval=length if alone else None, ckpt_name="tokens"
    )


# The model


def _width(translating: Translating, key: str) -> None:
    width = translating.count(key) or 1
    translating.set(
        key,
        "a Llama: RMSNorm, SwiGLU with the parameters of 4 x n_embd, rotary positions; the head is tied as there",
        hidden_size=translating.text(key),
        intermediate_size=gated_width(width, 64),
        tie_word_embeddings="true",
    )


# Data


def _dataset(translating: Translating, key: str) -> None:
    """Take nanoGPT's `data/<dataset>/train.bin` and `val.bin`."""
    name = translating.text(key) or ""
    train, validation = Path("data", name, "train.bin"), Path("data", name, "val.bin")
    if _DATA & translating.flags.keys():
        translating.left(key, "the command line has other data: give --sep_token and --eval_datasets for it, too")
    elif _is_of_characters(translating):
        problem = "its tokens are characters, and none ends a document: make token files of its text, pretrain prepare "
        translating.refuse(key, f"{problem}--input_path=data/{name}/input.txt --output_path=data/prepared")
    else:
        evaluated = None if is_file(train) and not is_file(validation) else str(_place_of(validation))
        translating.set(key, **_training_data(translating, train), eval_datasets=evaluated)


def _training_file(translating: Translating, key: str) -> None:
    translating.set(key, **_training_data(translating, Path(translating.text(key) or "")))


def _validation_file(translating: Translating, key: str) -> None:
    translating.set(key, eval_datasets=_place_of(Path(translating.text(key) or "")))


def _training_data(translating: Translating, path: Path) -> dict[str, str]:
    """Return the settings for a file of uint16 without a header; of GPT-2's tokens, also what ends documents."""
    place = _place_of(path)
    settings = {"data_path": str(place.parent), "datasets": place.name, "file_type": "bin", "token_dtype": "uint16"}
    vocabulary = translating.number("vocab_size", "vocab_size")
    if vocabulary is not None and vocabulary > _END_OF_TEXT:
        settings["sep_token"] = str(_END_OF_TEXT)
    return settings


def _place_of(path: Path) -> Path:
    """Return what a token file is as a dataset: the folder that it has for itself, or the file."""
    if not path.name:
        return path
    around, made = path.parent, path.with_suffix("")
    if is_file(path) and all(
        each.name == path.name or not (is_folder(each) or each.suffix in TOKEN_SUFFIXES) for each in entries_of(around)
    ):
        return around
    return made if is_folder(made) else path


def _is_of_characters(translating: Translating) -> bool:
    """Return whether the dataset has a vocabulary of its own, in a pickle that is not opened."""
    name = translating.text("dataset")
    return name is not None and (name.endswith("_char") or is_file(Path("data", name, "meta.pkl")))


# Where a run begins, and where it runs


def _beginning(translating: Translating, key: str) -> None:
    text = translating.text(key) or ""
    if "ckpt_load_path" in translating.flags:
        translating.left(key, "--ckpt_load_path says what it begins with")
    elif text in ("scratch", "resume", "auto"):
        translating.set(key, "a ckpt.pt is not read" if text == "resume" else "", init_from=text)
    elif text.startswith("gpt2"):
        translating.refuse(
            key, "GPT-2 is no Llama: give --ckpt_load_path=<Hugging Face folder of a Llama>, or 'scratch'"
        )
    else:
        translating.refuse(key, "one of scratch, resume is needed")


def _checkpoint(translating: Translating, key: str) -> None:
    name, folder = translating.text(key) or "", Path(translating.text("out_dir") or "")
    if not name or translating.text("init_from") != "resume" or "ckpt_load_path" in translating.flags:
        translating.left(key, "read with init_from='resume' only")
    elif is_file(folder / name):
        translating.refuse(key, f"{folder / name} holds a GPT, which is not read: give init_from = 'scratch'")
    else:
        path = name.removesuffix(".pt")
        translating.set(key, resume_from_checkpoint=str(folder / path) if "/" in path else path)


def _device(translating: Translating, key: str) -> None:
    kind, colon, _ = (translating.text(key) or "").partition(":")
    if kind in ("cuda", "cpu", "auto"):
        translating.set(key, "which one, CUDA_VISIBLE_DEVICES says" if colon else "", device=kind)
    else:
        translating.refuse(key, "one of cuda, cpu is needed", "device")


def _dtype(translating: Translating, key: str) -> None:
    device = translating.flags.get("device") or translating.text("device")
    name = translating.text(key)
    if name not in ("bfloat16", "float16", "float32"):
        translating.refuse(key, "one of bfloat16, float16, float32 is needed", "mp_dtype", "mixed_precision")
    elif name == "float32" or device == "cpu":
        translating.set(key, "" if name == "float32" else "on a CPU float32, as there", mixed_precision="false")
    else:
        translating.set(key, mixed_precision="true", mp_dtype=name)


def _uses_wandb(translating: Translating) -> bool:
    flag = translating.flags.get("tracker")
    return bool(translating.is_on("wandb_log")) if flag is None else "wandb" in flag


def _wandb(translating: Translating, key: str) -> None:
    on = translating.is_on(key) and _uses_wandb(translating)
    translating.set(key, "" if on else "TensorBoard's files are in the run's folder", tracker="wandb" if on else None)


NULLS: dict[str, str] = {"grad_clip": "0"}
RULES: dict[str, Rule] = {
    **joint("gradient_accumulation_steps", "eval_iters", "use_scheduler", "decay_lr", "warmup_iters", "lr_decay_iters"),
    **joint("min_lr"),
    "out_dir": row("ckpt_save_path"),
    "init_from": _beginning,
    "resume_ckpt_fname": _checkpoint,
    "n_embd": _width,
    "n_layer": row("num_hidden_layers"),
    "n_head": row("num_attention_heads"),
    "n_kv_head": row("num_key_value_heads"),
    "block_size": context,
    "vocab_size": row("vocab_size"),
    "dropout": not_a_llama("0", reason="a Llama is trained without dropout"),
    "bias": not_a_llama("false", reason="a Llama has no biases"),
    "batch_size": row("batch_size", remark="what a GPU takes at once"),
    "max_iters": row("num_steps"),
    "max_tokens": row("num_steps", tokens),
    "warmup_tokens": row("warmup_steps", tokens),
    "stable_tokens": row("stable_steps", tokens),
    "min_lr_factor": row("min_lr_ratio"),
    "learning_rate": _peak,
    "weight_decay": row("weight_decay", remark="not of norms and the embedding"),
    "beta1": row("adam_beta1"),
    "beta2": row("adam_beta2"),
    "grad_clip": row("grad_clip_thresh"),
    "optimizer_type": row("optimizer", choice(adamw="adamw", muon="muon")),
    "lr_muon_adam": when(_is_muon, row("muon_adam_learning_rate"), "read with optimizer_type='muon' only"),
    "wd_muon_adam": when(_is_muon, row("muon_adam_weight_decay"), "read with optimizer_type='muon' only"),
    "eval_interval": _evaluation_interval,
    "val_interval_tokens": row("eval_interval", tokens),
    "eval_only": row("eval_only"),
    "checkpoint_interval_tokens": _checkpoint_interval,
    "log_interval": row("report_interval"),
    "log_interval_tokens": row("report_interval", tokens),
    **dict.fromkeys(("seed", "train_seed"), row("seed")),
    "wandb_log": _wandb,
    "wandb_project": when(_uses_wandb, row("tracker_project_name"), "wandb is not asked for"),
    "wandb_run_name": when(_uses_wandb, row("tracker_run_name"), "wandb is not asked for"),
    "device": _device,
    "dtype": _dtype,
    **dict.fromkeys(("compile", "compile_model"), row("use_torch_compile")),
    "dataset": _dataset,
    "train_data_file": when(lambda t: not _DATA & t.flags.keys(), _training_file, "the command line has other data"),
    "val_data_file": when(lambda t: not _DATA & t.flags.keys(), _validation_file, "the command line has other data"),
    "branch_seed": only(
        "-1", reason="a branch is a new run: --ckpt_load_path=… --weights_only=true and another --seed"
    ),
    "branch_window_size_tokens": left("of branches"),
    "total_tokens": left("the files say it"),
    "checkpoint_token_pos": left("a checkpoint knows its position in the data"),
    "always_save_checkpoint": left("the newest and the best checkpoint are kept"),
    "backend": left("the device decides: GPUs talk by NCCL, CPUs by gloo"),
    "ignore_fused": left("AdamW is always fused; the results are the same"),
}
