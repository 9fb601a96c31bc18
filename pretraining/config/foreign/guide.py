"""The JSON of a training guide: sections model, training and data, or all of their keys flat.

Its models are what their settings make them: activation, dropout and the place of the norms may make one that is no
Llama. Its text is tokenized and packed as it trains, which `pretrain prepare` does first here.
"""

from __future__ import annotations

from pretraining.config.foreign import deepspeed
from pretraining.config.foreign.raw_text import TextKeys
from pretraining.config.foreign.translation import (
    Rule,
    Translating,
    as_here,
    becomes,
    betas,
    checkpoints_kept,
    left_out,
    lowest_rate,
    of_services,
    one_of,
    only,
    resume_from,
    share_of_run,
    switch,
    trackers,
)
from pretraining.config.plugins import OPTIMIZERS

SECTIONS = ("model", "training", "data")
SIGNS = (
    *("model.d_model", "model.n_heads", "model.n_layers", "model.d_ff", "model.max_seq_len", "model.pre_norm"),
    *("training.batch_size", "training.learning_rate", "training.num_epochs", "training.max_steps"),
    *("training.lr_scheduler", "training.warmup_steps", "training.use_amp", "training.checkpoint_dir"),
    *("training.save_steps", "training.eval_steps", "training.logging_steps", "training.use_deepspeed"),
    *("data.dataset_name", "data.text_column", "data.pack_sequences", "data.packing_strategy", "data.max_length"),
    *("d_model", "n_heads", "n_layers", "d_ff", "max_seq_len", "num_epochs", "use_amp", "amp_dtype"),
    *("checkpoint_dir", "use_deepspeed", "deepspeed_config", "distributed_backend", "early_stopping_patience"),
    *("pack_sequences", "packing_strategy", "text_column"),
)
_SIZES = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "d_ff": "intermediate_size",
}
"""Of a model; without one of them the rest would be laid over the dimensions of another model."""


def read(translating: Translating) -> None:
    """Translates a file of the guide."""
    text = _text_keys(translating)
    rules = TABLE | {
        "validation_split": text.validation,
        **{key.rpartition(".")[2]: rule for key, rule in text.rules().items()},
    }
    translating.know(rules)
    found = {}
    for key in translating.values:
        section, _, name = key.rpartition(".")
        if section in ("", *SECTIONS) and name in rules:
            found[key] = rules[name]
    translating.apply(found)
    _read_deepspeed(translating)
    _complete_dimensions(translating)


def _key(translating: Translating, name: str) -> str:
    """Returns a name as the file has it: alone, or in one of the sections."""
    candidates = [name, *(f"{section}.{name}" for section in SECTIONS)]
    return next((key for key in candidates if translating.has(key)), name)


def _text_keys(translating: Translating) -> TextKeys:
    return TextKeys(
        name=_key(translating, "dataset_name"),
        config=_key(translating, "dataset_config"),
        split=_key(translating, "dataset_split"),
        column=_key(translating, "text_column"),
        tokenizer=_key(translating, "tokenizer_path"),
        vocab_size=_key(translating, "vocab_size"),
    )


def _read_deepspeed(translating: Translating) -> None:
    key = _key(translating, "deepspeed_config")
    if _uses_deepspeed(translating):
        deepspeed.include(translating, key, "the file that names it")
    else:
        translating.leave_out_groups({key: "use_deepspeed is false"})


def _uses_deepspeed(translating: Translating) -> bool:
    is_used = translating.is_true(_key(translating, "use_deepspeed"))
    return translating.has(_key(translating, "deepspeed_config")) and is_used is not False


def _read_use_deepspeed(translating: Translating, key: str) -> None:
    if translating.is_true(key):
        translating.leave_out(key, "FSDP does what deepspeed_config asks for")
    else:
        translating.set(key, "as here")


def _complete_dimensions(translating: Translating) -> None:
    """Adds the usual feed-forward where none is given, and names other sizes that are missing."""
    given = [name for name in _SIZES if _key(translating, name) in translating]
    if not given or translating.is_overridden("model_variant"):
        return
    width = translating.number(_key(translating, "d_model"))
    if width is not None and not translating.is_overridden("intermediate_size"):
        translating.assume(_key(translating, "d_ff"), "4 x d_model, as is usual", intermediate_size=f"{4 * width:g}")
    missing = [name for name in _SIZES if name not in (*given, "d_ff") and not translating.is_overridden(_SIZES[name])]
    if missing:
        translating.add_problem(
            _key(translating, given[0]),
            f"{' and '.join(missing)} of this model are missing: add them, or give "
            + " and ".join(f"--{_SIZES[name]}" for name in missing),
        )


# Model and length


def _read_context(translating: Translating, key: str) -> None:
    """Takes the model's context for the length of sequences, too, unless the data say one."""
    context = translating.text(key)
    if _key(translating, "max_length") in translating:
        translating.set(key, max_position_embeddings=context)
    else:
        translating.set(key, seq_length=context, max_position_embeddings=context)


def _read_max_steps(translating: Translating, key: str) -> None:
    if (translating.number(key) or 0) > 0:
        translating.set(key, num_steps=translating.text(key))
    else:
        translating.set(key, "no limit: num_epochs says")


def _read_epochs(translating: Translating, key: str) -> None:
    if (translating.number(_key(translating, "max_steps")) or 0) > 0:
        translating.leave_out(key, "max_steps wins")
    else:
        translating.set(key, num_steps=f"{translating.text(key)}ep")


# Optimizer and schedule


def _read_optimizer(translating: Translating, key: str) -> None:
    name = (translating.text(key) or "").lower().removesuffix("_torch")
    momentum = translating.number(_key(translating, "momentum"))
    if name not in OPTIMIZERS:
        translating.refuse(
            key, f"one of {', '.join(OPTIMIZERS)} is needed, or your own as package.module:Class", "optimizer"
        )
    else:
        translating.set(key, optimizer="sgdm" if name == "sgd" and momentum else name)


_ENDS = ("min_lr_ratio", "min_lr")


def _read_lowest_rate(translating: Translating, key: str) -> None:
    if _key(translating, "min_lr_ratio") in translating:
        translating.leave_out(key, "min_lr_ratio wins")
    else:
        lowest_rate(_key(translating, "learning_rate"))(translating, key)


def _read_schedule(translating: Translating, key: str) -> None:
    name = (translating.text(key) or "").lower().removesuffix("_with_warmup")
    has_end = any(_key(translating, end) in translating for end in _ENDS)
    end = None if has_end else 0
    if name == "constant":
        translating.set(key, schedule=name)
    elif name in ("cosine", "linear", "polynomial"):
        translating.set(key, "to zero" if end == 0 else "", schedule=name, min_lr_ratio=end)
    else:
        translating.refuse(key, "one of cosine, linear, constant, polynomial is needed", "schedule")


# Precision


def _read_amp(translating: Translating, key: str) -> None:
    if translating.is_true(key):
        translating.set(key, mixed_precision="true")
    elif _uses_deepspeed(translating):
        translating.set(key, "off: the DeepSpeed configuration says what is computed in")
    else:
        translating.set(key, mixed_precision="false")


def _read_amp_dtype(translating: Translating, key: str) -> None:
    words = {"fp16": "float16", "half": "float16", "bf16": "bfloat16"}
    name = (translating.text(key) or "").lower().removeprefix("torch.")
    name = words.get(name, name)
    is_used = translating.is_true(_key(translating, "use_amp"))
    if name not in ("float16", "bfloat16"):
        translating.refuse(key, "float16 or bfloat16 is needed", "mp_dtype", "mixed_precision")
    elif is_used is False:
        translating.leave_out(key, "use_amp is false")
    else:
        translating.set(key, mp_dtype=name, mixed_precision="true" if is_used is None else None)


# Data


def _read_pack_sequences(translating: Translating, key: str) -> None:
    if not translating.is_true(key):
        remark = "a document sees itself alone, as there, without the padding; a longer one is cut, not truncated"
        translating.set(key, remark, packing="best_fit", document_mask="true")
    elif _key(translating, "packing_strategy") in translating:
        translating.set(key, "packing_strategy says how")
    else:
        translating.set(key, packing="greedy")


def _read_packing_strategy(translating: Translating, key: str) -> None:
    if translating.is_true(_key(translating, "pack_sequences")) is False:
        translating.leave_out(key, "pack_sequences is false")
    else:
        translating.set(key, packing=translating.text(key))


def _of_services(setting: str) -> Rule:
    return lambda translating, key: of_services(
        translating, key, _key(translating, "report_to"), **{setting: translating.text(key) or ""}
    )


_NO_DROPOUT = "a Llama is trained without dropout"
_NO_EXPERTS = "a Llama has no experts"
_NO_WINDOW = "attention reaches back to the beginning, without a window"
_POSITIONS = ("positional_encoding", "position_encoding", "pos_encoding", "positional_embedding", "position_embedding")
TABLE: dict[str, Rule] = {
    "vocab_size": becomes("vocab_size"),
    **{name: becomes(setting) for name, setting in _SIZES.items()},
    "n_kv_heads": becomes("num_key_value_heads"),
    "max_seq_len": _read_context,
    "rope_theta": becomes("rope_theta"),
    "tie_word_embeddings": becomes("tie_word_embeddings"),
    "tie_embeddings": becomes("tie_word_embeddings"),
    "tie_weights": becomes("tie_word_embeddings"),
    "weight_tying": becomes("tie_word_embeddings"),
    **{name: becomes("rms_norm_eps") for name in ("norm_eps", "rms_norm_eps", "layer_norm_eps")},
    **{
        name: only("rope", "rotary", reason="a Llama's positions are rotary")
        for name in (*_POSITIONS, "position_embedding_type", "pos_embedding")
    },
    "use_rope": only("true", reason="a Llama's positions are rotary"),
    **{
        name: only("rmsnorm", "rms_norm", "rms", reason="a Llama has RMSNorm")
        for name in ("norm", "norm_type", "normalization", "normalization_type")
    },
    "use_rmsnorm": only("true", reason="a Llama has RMSNorm"),
    "qk_norm": only("false", reason="a Llama does not normalise queries and keys"),
    "rope_scaling": only("none", "1", reason="it is not translated: take it out, and give --rope_scaling"),
    "parallel_residual": only("false", reason="feed-forward follows attention in a Llama"),
    **{name: only("0", "none", reason=_NO_WINDOW) for name in ("sliding_window", "window_size", "attention_window")},
    **{name: only("0", "1", reason=_NO_EXPERTS) for name in ("num_experts", "n_experts")},
    **{name: only("false", reason=_NO_EXPERTS) for name in ("moe", "use_moe")},
    "dropout": only("0", reason=_NO_DROPOUT),
    **{
        f"{what}_dropout": only("0", reason=_NO_DROPOUT)
        for what in ("attention", "attn", "embedding", "embed", "residual", "resid", "hidden", "ffn")
    },
    **{name: only("0", reason="all layers are trained always") for name in ("layer_drop", "layerdrop", "drop_path")},
    "activation": only("silu", "swish", "swiglu", reason="a Llama's activation is SiLU, in a gated feed-forward"),
    "pre_norm": only("true", reason="a Llama has its norms before attention and feed-forward"),
    "bias": only("false", reason="a Llama has no biases"),
    "use_bias": only("false", reason="a Llama has no biases"),
    "gradient_checkpointing": switch("fsdp_activation_checkpointing"),
    "batch_size": becomes("batch_size"),
    "gradient_accumulation_steps": becomes("grad_accum_steps"),
    "learning_rate": becomes("learning_rate"),
    "weight_decay": becomes("weight_decay", remark="not applied to norms and embeddings"),
    "max_steps": _read_max_steps,
    "num_epochs": _read_epochs,
    "lr_scheduler": _read_schedule,
    "min_lr_ratio": becomes("min_lr_ratio"),
    "min_lr": _read_lowest_rate,
    **{
        name: as_here("0", "none", reason="the loss is plain cross-entropy: take it out")
        for name in ("label_smoothing", "label_smoothing_factor")
    },
    **{
        name: as_here("0", "none", "false", reason="no average of the weights is kept: take it out")
        for name in ("ema_decay", "ema", "use_ema", "use_swa", "swa")
    },
    "amsgrad": as_here("false", reason="there is no AMSGrad: take it out"),
    "loss": as_here("cross_entropy", "cross-entropy", "ce", reason="the loss is cross-entropy: take it out"),
    "warmup_steps": becomes("warmup_steps"),
    "warmup_ratio": becomes("warmup_steps", share_of_run),
    "optimizer": _read_optimizer,
    "momentum": becomes("momentum"),
    "betas": betas,
    **{name: becomes("adam_beta1") for name in ("adam_beta1", "beta1")},
    **{name: becomes("adam_beta2") for name in ("adam_beta2", "beta2")},
    **{name: becomes("adam_epsilon") for name in ("adam_epsilon", "epsilon", "eps")},
    "use_amp": _read_amp,
    "amp_dtype": _read_amp_dtype,
    "max_grad_norm": becomes("grad_clip_thresh"),
    "save_steps": becomes("checkpoint_interval"),
    "eval_steps": becomes("eval_interval"),
    "logging_steps": becomes("report_interval"),
    "checkpoint_dir": becomes("ckpt_save_path"),
    "output_dir": becomes("ckpt_save_path"),
    "save_total_limit": becomes("keep_last", checkpoints_kept),
    "resume_from_checkpoint": resume_from,
    "report_to": trackers,
    "logging_dir": becomes("tracker_dir"),
    "log_dir": becomes("tracker_dir"),
    "run_name": _of_services("tracker_run_name"),
    "wandb_project": _of_services("tracker_project_name"),
    "early_stopping_patience": becomes("early_stopping_evaluations"),
    "seed": becomes("seed"),
    "world_size": left_out("the launcher says how many processes there are: torchrun, srun or mpirun"),
    "distributed_backend": left_out("NCCL on GPUs, gloo on CPUs: --backend=auto"),
    "use_deepspeed": _read_use_deepspeed,
    "device": one_of("device", {"cuda": "cuda", "gpu": "cuda", "cpu": "cpu", "auto": "auto"}),
    "use_torch_compile": switch("use_torch_compile"),
    "compile": switch("use_torch_compile"),
    "num_workers": becomes("num_workers"),
    "dataloader_num_workers": becomes("num_workers"),
    "tokenizer_path": becomes("tokenizer_path"),
    "max_length": becomes("seq_length"),
    "min_length": becomes("min_length", remark="in tokens"),
    "pack_sequences": _read_pack_sequences,
    "packing_strategy": _read_packing_strategy,
    "preprocessing_num_workers": left_out("of pretrain prepare, which takes every core"),
}
"""Names in the guide's files, in whatever section, by what becomes of them."""
