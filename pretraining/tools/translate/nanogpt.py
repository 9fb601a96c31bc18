"""Rules for Python assignments that a `train.py` reads: token-counted runs, and nanoGPT, which counts steps.

    max_tokens, warmup_tokens, stable_tokens, …_interval_tokens     tokens
    max_iters, warmup_iters, lr_decay_iters, eval_interval          steps: nanoGPT

A file sets only the values that differ from the defaults of its `train.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

from pretraining.files import is_file
from pretraining.tools.translate import key_rules as rules
from pretraining.tools.translate.key_rules import decimal, each, only, renamed, row, skip, tokens, when
from pretraining.tools.translate.translation import Rule, System, Translation

_COUNTS_TOKENS = (
    *("max_tokens", "log_interval_tokens", "val_interval_tokens", "checkpoint_interval_tokens", "warmup_tokens"),
    *("stable_tokens", "min_lr_factor", "use_scheduler", "optimizer_type", "train_data_file"),
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
_MODEL = {"n_layer", "n_head", "n_embd", "block_size", "vocab_size"}
_END_OF_TEXT = 50256
"""Token of GPT-2's tokenizer that ends documents in the token files."""
_COSINE_PARTS = 16
"""Lines that replace a cosine that does not end with the run; they differ by at most 0.25% of the peak."""
_OTHER_MODEL = {"ckpt_load_path", "resume_from_checkpoint", "model_variant"}
_DATA = {"data_path", "use_dummy_dataset"}


def _counts_tokens(translation: Translation) -> bool:
    return "max_iters" not in translation and any(key in translation for key in _COUNTS_TOKENS)


def _defaults(translation: Translation) -> Mapping[str, str]:
    found = dict(_OF_TOKENS if _counts_tokens(translation) else _OF_STEPS)
    if _counts_tokens(translation):
        has_schedule = "warmup_tokens" in translation or "stable_tokens" in translation
        found["use_scheduler"] = "true" if has_schedule else "false"
        if "wandb_project" in translation or "wandb_run_name" in translation:
            found["wandb_log"] = "true"
    if "grad_clip" in translation.values:  # null: no clipping
        found["grad_clip"] = "0"
    silent = _MODEL if translation.flags.keys() & _OTHER_MODEL else set()
    return {key: text for key, text in found.items() if key not in silent}


def _combine(translation: Translation) -> None:
    """Resolve the global batch size and the schedule."""
    key = "gradient_accumulation_steps"
    steps, size = translation.count(key) or 1, translation.count("batch_size", "batch_size") or 1
    if "grad_accum_steps" in translation.flags:
        translation.skip(key, "--grad_accum_steps wins")
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
    key = "use_scheduler"
    if not translation.is_on(key):
        _constant(translation, key, "warmup_tokens", "stable_tokens", "min_lr_factor")
    elif translation.number("stable_tokens"):
        translation.set(key, "warm-up, stable, cosine", schedule="wsd", decay_shape="cosine")
    else:
        translation.set(key, "warm-up, cosine", schedule="cosine")
        translation.skip("stable_tokens", "the cosine follows the warm-up")


def _schedule_of_steps(translation: Translation) -> None:
    """Set nanoGPT's cosine, which reaches `min_lr` at `lr_decay_iters`; the run may end at another step."""
    if not translation.is_on("decay_lr"):
        _constant(translation, "decay_lr", "warmup_iters", "lr_decay_iters", "min_lr")
        return
    translation.skip("decay_lr", "as here")
    warmup = translation.count("warmup_iters", smallest=0) or 0
    end, length = translation.count("lr_decay_iters") or 1, translation.count("max_iters", "num_steps")
    peak = translation.number("learning_rate", "learning_rate")
    lowest = (translation.number("min_lr") or Fraction(0)) / peak if peak else Fraction(1)
    if end == length:
        translation.set("lr_decay_iters", "the end of the run", schedule="cosine")
        translation.set("warmup_iters", warmup_steps=warmup)
        translation.set("min_lr", "as a share of learning_rate", min_lr_ratio=decimal(lowest))
    elif end <= warmup:
        problem = f"must be above warmup_iters={warmup}, where the decay begins"
        translation.refuse("lr_decay_iters", problem, "schedule")
    else:
        remark = f"not the end of the run: its cosine as {_COSINE_PARTS} lines"
        points = _points(warmup, end, float(lowest))
        translation.set("lr_decay_iters", remark, schedule="piecewise_linear", schedule_points=points)
        translation.skip("warmup_iters", "in the points of the schedule")
        translation.skip("min_lr", "in the points of the schedule")


def _constant(translation: Translation, switch: str, *unread: str) -> None:
    translation.set(switch, schedule="constant", warmup_steps="0")
    for key in unread:
        translation.skip(key, f"{switch} is False")


def _points(warmup: int, end: int, lowest: float) -> str:
    """Return the schedule's points, as step:share of the peak."""
    shares = {0: 1 / (warmup + 1)}
    for part in range(_COSINE_PARTS + 1):
        step = warmup + (end - warmup) * part // _COSINE_PARTS
        shares[step] = lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (end - warmup)))
    return ",".join(f"{step}:{share:.6g}" for step, share in shares.items())


def _peak(translation: Translation, key: str) -> None:
    is_muon = translation.word("optimizer_type") == "muon"
    translation.set(key, rules.RATE_OF_MUON * is_muon, learning_rate=translation.text(key))


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
    width = translation.count(key) or 1
    remark = (
        f"a Llama: RMSNorm, SwiGLU ({rules.describe_gated(width, 64)}), rotary positions; the head is tied as there"
    )
    settings = {"hidden_size": translation.text(key), "intermediate_size": rules.gated_width(width, 64)}
    translation.set(key, remark, **settings, tie_word_embeddings="true")


def _dataset(translation: Translation, key: str) -> None:
    """Set nanoGPT's `data/<dataset>/train.bin` and `val.bin`."""
    folder = Path("data", translation.text(key) or "")
    train, validation = folder / "train.bin", folder / "val.bin"
    if _is_character_level(translation):
        problem = "its tokens are characters, and none ends a document: make token files with pretrain prepare "
        remedy = f"--input_path={folder}/input.txt --output_path=data/prepared"
        translation.refuse(key, problem + remedy, *_DATA)
    else:
        evaluated = None if is_file(train) and not is_file(validation) else validation
        translation.set(key, **_training_data(translation, train), eval_datasets=evaluated)


def _training_file(translation: Translation, key: str) -> None:
    translation.set(key, **_training_data(translation, Path(translation.text(key) or "")))


def _training_data(translation: Translation, path: Path) -> dict[str, str]:
    """Return the settings for a headerless file of uint16 tokens; GPT-2's tokens also have a separator."""
    settings = {"data_path": str(path.parent), "datasets": path.name, "file_type": "bin", "token_dtype": "uint16"}
    vocabulary = translation.number("vocab_size", "vocab_size")
    if vocabulary is not None and vocabulary > _END_OF_TEXT:
        settings["sep_token"] = str(_END_OF_TEXT)
    return settings


def _is_character_level(translation: Translation) -> bool:
    """Return whether the dataset has its own vocabulary, in a pickle (which is never opened)."""
    name = translation.text("dataset")
    return name is not None and (name.endswith("_char") or is_file(Path("data", name, "meta.pkl")))


# Start point, device and tracker


def _checkpoint(translation: Translation, key: str) -> None:
    if translation.text("init_from") != "resume" or "ckpt_load_path" in translation.flags:
        translation.skip(key, "only init_from='resume' reads it")
    else:
        translation.set(key, resume_from_checkpoint=(translation.text(key) or "").removesuffix(".pt"))


def _dtype(translation: Translation, key: str) -> None:
    if (translation.flags.get("device") or translation.text("device")) == "cpu":
        translation.set(key, "on a CPU float32, as there", mixed_precision="false")
    else:
        row("mp_dtype", rules.dtype)(translation, key)


def _wandb(translation: Translation, key: str) -> None:
    on = translation.is_on(key)
    translation.set(key, "" if on else "TensorBoard's files are in the run's folder", tracker="wandb" if on else None)


_NEW_RUN = "a branch is a new run: --ckpt_load_path=… --weights_only=true and another --seed"
_IGNORED = skip("not translated: nothing that is learned depends on it")
_RULES: dict[str, Rule] = {
    **each("gradient_accumulation_steps eval_iters use_scheduler decay_lr", rules.combined),
    **each("warmup_iters lr_decay_iters min_lr", rules.combined),
    "init_from": when(
        lambda t: "ckpt_load_path" not in t.flags,
        row("init_from", rules.choice(scratch="scratch", resume="resume", auto="auto")),
        "--ckpt_load_path sets the start point",
    ),
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
    **renamed(lr_muon_adam="muon_adam_learning_rate", wd_muon_adam="muon_adam_weight_decay"),
    **renamed(wandb_project="tracker_project_name", wandb_run_name="tracker_run_name", val_data_file="eval_datasets"),
    "optimizer_type": row("optimizer", rules.choice(adamw="adamw", muon="muon")),
    "eval_interval": _evaluation_interval,
    "val_interval_tokens": row("eval_interval", tokens),
    "checkpoint_interval_tokens": _checkpoint_interval,
    "log_interval_tokens": row("report_interval", tokens),
    "wandb_log": _wandb,
    "device": row("device", lambda text: text.partition(":")[0]),
    "dtype": _dtype,
    "compile_model": row("use_torch_compile"),
    "dataset": _dataset,
    "train_data_file": _training_file,
    "branch_seed": only("-1", reason=_NEW_RUN),
    **each("branch_window_size_tokens total_tokens checkpoint_token_pos always_save_checkpoint", _IGNORED),
    **each("backend ignore_fused", _IGNORED),
}
SYSTEM = System("Python assignments for a train.py, token-counted or nanoGPT's", _RULES, _defaults, _combine)
