"""Python assignments that a `train.py` reads, of runs whose lengths are counted in tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pretraining.files import is_file
from pretraining.tools.translate import rows
from pretraining.tools.translate.engine import System, Translation
from pretraining.tools.translate.rows import Key, renamed

_END_OF_TEXT = 50256
"""Token of GPT-2's tokenizer that ends documents in the token files."""


def _combine(translation: Translation) -> None:
    """Resolve the global batch size, the schedule, the model, the data and the start point."""
    _set_batch(translation)
    _set_schedule(translation)
    if translation.word("optimizer_type") == "muon":
        translation.set("learning_rate", rows.RATE_OF_MUON, learning_rate=translation.text("learning_rate"))
    _set_data(translation)
    if "ckpt_load_path" in translation.flags:
        translation.set("init_from", "--ckpt_load_path sets the start point")
    if translation.word("init_from") != "resume" or "ckpt_load_path" in translation.flags:
        translation.set("resume_ckpt_fname", "only init_from='resume' reads it")


def _set_batch(translation: Translation) -> None:
    """Set the global batch size, `batch_size` x `gradient_accumulation_steps`, on any number of GPUs."""
    key = "gradient_accumulation_steps"
    steps, size = translation.count(key) or 1, translation.count("batch_size", "batch_size")
    if "grad_accum_steps" in translation.flags:
        translation.set(key, "--grad_accum_steps wins")
    elif size and key in translation:
        translation.set(key, f"x batch_size={size}, on any number of GPUs", global_batch_size=size * steps)
    elif size:
        given = translation.text("batch_size")
        translation.set("batch_size", "on any number of GPUs", batch_size=given, global_batch_size=size)
    if "eval_iters" in translation:
        remark = f"of batch_size there, of {steps} x batch_size here" if steps > 1 else ""
        translation.set("eval_iters", remark, eval_batches=-(-(translation.count("eval_iters") or 1) // steps))


def _set_schedule(translation: Translation) -> None:
    key = "use_scheduler"
    if translation.is_on(key) is False:
        translation.set(key, schedule="constant", warmup_steps="0")
        translation.skip(f"{key} is False", "warmup_tokens", "stable_tokens", "min_lr_factor")
    elif translation.number("stable_tokens"):
        stable = rows.tokens(translation.text("stable_tokens") or "")
        remark = "warm-up, stable, cosine"
        translation.set("stable_tokens", remark, stable_steps=stable, schedule="wsd", decay_shape="cosine")
    else:
        translation.set(key, "warm-up, cosine", schedule="cosine")
        translation.set("stable_tokens", "the cosine follows the warm-up")


def _set_data(translation: Translation) -> None:
    """Set `data/<dataset>/train.bin` and `val.bin`, headerless files of uint16 tokens."""
    name = translation.text("dataset")
    if name is None:
        return
    folder = Path("data", name)
    train, validation = folder / "train.bin", folder / "val.bin"
    vocabulary = translation.number("vocab_size", "vocab_size")
    translation.set(
        "dataset",
        data_path=folder,
        datasets=train.name,
        file_type="bin",
        token_dtype="uint16",
        sep_token=_END_OF_TEXT if vocabulary is None or vocabulary > _END_OF_TEXT else None,
        eval_datasets=None if is_file(train) and not is_file(validation) else validation,
    )


def _width(text: str) -> Mapping[str, str]:
    return {**rows.width(text, 64), "tie_word_embeddings": "true"}


def _save(text: str) -> Mapping[str, str]:
    return {"checkpoint_interval": rows.tokens(text), "eval_interval": rows.tokens(text), "ckpt_name": "tokens"}


_ROWS = {
    **renamed(out_dir="ckpt_save_path", init_from="init_from", eval_iters="eval_batches", batch_size="batch_size"),
    "resume_ckpt_fname": Key("resume_from_checkpoint", lambda text: text.removesuffix(".pt")),
    "log_interval_tokens": Key("report_interval", rows.tokens),
    "checkpoint_interval_tokens": Key("checkpoint_interval", _save, "evaluated as often"),
    "wandb_project": rows.tracked("tracker_project_name"),
    "wandb_run_name": rows.tracked("tracker_run_name"),
    "checkpoint_token_pos": Key(remark="the checkpoint that is loaded has it"),
    "gradient_accumulation_steps": Key("grad_accum_steps"),
    "max_tokens": Key("num_steps", rows.tokens),
    **renamed(optimizer_type="optimizer", learning_rate="learning_rate"),
    "weight_decay": rows.WEIGHT_DECAY,
    **renamed(lr_muon_adam="muon_adam_learning_rate", wd_muon_adam="muon_adam_weight_decay"),
    "use_scheduler": Key(remark="warmup_tokens and stable_tokens give its form"),
    "warmup_tokens": Key("warmup_steps", rows.tokens),
    "stable_tokens": Key("stable_steps", rows.tokens),
    "min_lr_factor": Key("min_lr_ratio"),
    **renamed(n_layer="num_hidden_layers", n_head="num_attention_heads"),
    "n_embd": Key(
        convert=_width, remark="a Llama: RMSNorm, SwiGLU of width 8/3, rotary positions; the head is tied as there"
    ),
    "block_size": Key(convert=rows.context),
    **renamed(vocab_size="vocab_size", dataset="data_path", compile="use_torch_compile", seed="seed"),
    "dtype": Key("mp_dtype", rows.dtype),
}
SYSTEM = System("nanogpt", "Python assignments for a train.py, counted in tokens", _ROWS, _combine)
