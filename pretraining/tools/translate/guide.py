"""The JSON of a training guide: sections model, training and data, or all of their keys flat.

Its text is tokenized as it trains; here `pretrain prepare` does that first, with the command that the table shows.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from pretraining.config.commands import PrepareConfig
from pretraining.config.plugins import OPTIMIZERS, TOKEN_SUFFIXES
from pretraining.files import entries_of, exists, is_file, is_folder
from pretraining.progress import parse_number
from pretraining.tools.translate import deepspeed
from pretraining.tools.translate.parse import parse
from pretraining.tools.translate.translation import (
    DEFAULT,
    Given,
    Rule,
    Translating,
    choice,
    context,
    dtype,
    epochs,
    folder_of_data,
    gated_width,
    joint,
    kept,
    left,
    lowest_rate,
    not_a_llama,
    only,
    pair,
    row,
    share,
    trackers,
    when,
)

WHAT = "the JSON of a training guide: model, training, data"
NULLS: dict[str, str] = {}
SIGNS = (
    *("model.d_model", "model.n_heads", "model.n_layers", "model.d_ff", "model.max_seq_len", "model.pre_norm"),
    *("training.batch_size", "training.learning_rate", "training.num_epochs", "training.max_steps"),
    *("training.lr_scheduler", "training.warmup_steps", "training.use_amp", "training.checkpoint_dir"),
    *("training.save_steps", "training.eval_steps", "training.logging_steps", "training.use_deepspeed"),
    *("data.dataset_name", "data.text_column", "data.pack_sequences", "data.packing_strategy", "data.max_length"),
    *("d_model", "n_heads", "n_layers", "d_ff", "max_seq_len", "num_epochs", "use_amp", "amp_dtype", "checkpoint_dir"),
    *("use_deepspeed", "deepspeed_config", "distributed_backend", "early_stopping_patience", "pack_sequences"),
    *("packing_strategy", "text_column"),
)
_SIZES = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}
_ROOT = PrepareConfig().output_path
_PERCENT_OF_A_SPLIT = re.compile(r"\w+\[(?::|-)(\d{1,2})%:?\]")
_CHECKPOINT = re.compile(r"(?:checkpoint-|iter_)(\d+)(?:\.\w+)?")


def name_of(key: str) -> str:
    """Return the name of a key without its section."""
    section, _, name = key.partition(".")
    return name if section in ("model", "training", "data") and name else key


def defaults(translating: Translating) -> dict[str, str]:
    """Return the guide's own values, where they decide on learning."""
    found = {
        **{"batch_size": "32", "learning_rate": "1e-4", "weight_decay": "0.01", "num_epochs": "10"},
        **{"lr_scheduler": "cosine", "optimizer": "adamw", "max_grad_norm": "1.0", "use_amp": "true"},
        **{"beta1": "0.9", "beta2": "0.999", "eps": "1e-8", "gradient_accumulation_steps": "1", "amp_dtype": "float16"},
    }
    steps = translating.number("max_steps") or 0
    if "warmup_ratio" not in translating:
        found |= {"warmup_ratio": "0.1"} if 0 < steps <= 1000 else {"warmup_steps": "1000"}
    if "max_seq_len" not in translating:
        found["max_length"] = "1024"
    return found


def combine(translating: Translating) -> None:
    """Make the batch of a step, and complete the model's sizes; read the DeepSpeed file that is named."""
    _include_deepspeed(translating)
    ranks = translating.count("world_size")
    settings, accumulation = translating.settings, "gradient_accumulation_steps"
    if ranks and ("global_batch_size" not in settings or translating.values["batch_size"].level != DEFAULT):
        size = translating.count("batch_size", "batch_size")
        if "batch_size" in settings and translating.values["batch_size"].level == DEFAULT:
            size = int(settings["batch_size"][0])
        steps = (
            int(settings["grad_accum_steps"][0]) if "grad_accum_steps" in settings else translating.count(accumulation)
        )
        remark = f"{size} x {steps} x {ranks}; accumulation follows from the ranks that are there"
        translating.set("world_size", remark, global_batch_size=(size or 1) * (steps or 1) * ranks)
    elif "world_size" in translating:
        translating.left("world_size", "the launcher says how many processes there are")
    if "global_batch_size" in settings:
        settings.pop("grad_accum_steps", None)
        translating.left(accumulation, "follows from the batch of a step")
    given = [name for name in _SIZES if name in translating]
    missing = [name for name in _SIZES if name not in given and _SIZES[name] not in translating.flags]
    if given and missing and "model_variant" not in translating.flags:
        flags = " and ".join(f"--{_SIZES[name]}" for name in missing)
        translating.refuse(given[0], f"{' and '.join(missing)} of this model are missing: add them, or give {flags}")
    if "d_model" in translating and "d_ff" not in translating:
        translating.fill_in({"d_ff": str(4 * (translating.count("d_model") or 0))})


def _include_deepspeed(translating: Translating) -> None:
    """Read the DeepSpeed file that a key names, or the settings that stand under it."""
    key = "deepspeed_config"
    inside = {name: given for name, given in translating.values.items() if name.startswith(f"{key}.")}
    if key not in translating and not inside:
        return
    if translating.is_on("use_deepspeed") is False:
        for name in [*inside, *([key] if key in translating else [])]:
            translating.left(name, "use_deepspeed is false")
        return
    values = {name.removeprefix(f"{key}."): given for name, given in inside.items()}
    if key in translating:
        source = translating.values[key].source
        named = Path(translating.text(key) or "").expanduser()
        path = next((path for path in (Path(source).parent / named, named) if is_file(path)), None)
        if path is None:
            translating.refuse(key, "there is no such file: put it there, or take this line out")
            return
        values = {name: Given(name, text, str(path)) for name, text in parse(path).items()}
        translating.set(key, "read, too")
    part = Translating(values, translating.flags, translating.accepts)
    if "steps_per_print" in part:
        part.left("steps_per_print", "the file that names it says")
    if "fp16.enabled" in part and not part.is_on("fp16.enabled") and "bf16.enabled" not in part:
        part.left("fp16.enabled", "off: use_amp says")
    part.settle(deepspeed.combine, deepspeed.RULES)
    part.reject_unknown(deepspeed.RULES)
    translating.include(part)
    for name in inside:
        translating.notes.setdefault(name, part.notes[name.removeprefix(f"{key}.")])


def _context(translating: Translating, key: str) -> None:
    """Take the model's context for the length of sequences, too, unless the data say one."""
    if "max_length" in translating:
        translating.set(key, max_position_embeddings=translating.text(key))
    else:
        context(translating, key)


def _feed_forward(translating: Translating, key: str) -> None:
    """Take the width; 4 x d_model is of two matrices, and a Llama has three."""
    width, given = translating.count("d_model", "hidden_size"), translating.count(key)
    if width and given == 4 * width and translating.word("activation") != "swiglu":
        remark = "8/3 of d_model in multiples of 256: three matrices with the parameters of two of 4 x d_model"
        translating.set(key, remark, intermediate_size=gated_width(width, 256))
    else:
        translating.set(key, intermediate_size=given)


def _length(translating: Translating, key: str) -> None:
    limit = translating.number("max_steps")
    if key == "max_steps" and limit and limit > 0:
        translating.set(key, num_steps=translating.text(key))
    elif key == "num_epochs" and not (limit and limit > 0):
        translating.set(key, num_steps=epochs(translating.text(key) or ""))
    else:
        translating.left(key, "max_steps wins" if key == "num_epochs" else "no limit: num_epochs says")


def _optimizer(translating: Translating, key: str) -> None:
    name = translating.word(key).removesuffix("_torch")
    if name not in OPTIMIZERS:
        translating.refuse(key, f"one of {', '.join(OPTIMIZERS)} is needed, or package.module:Class", "optimizer")
    else:
        translating.set(key, optimizer="sgdm" if name == "sgd" and translating.number("momentum") else name)


def _schedule(translating: Translating, key: str) -> None:
    name = translating.word(key).removesuffix("_with_warmup")
    has_end = "min_lr_ratio" in translating or "min_lr" in translating
    if name == "constant":
        translating.set(key, schedule=name)
    elif name in ("cosine", "linear", "polynomial"):
        translating.set(key, "" if has_end else "to zero", schedule=name, min_lr_ratio=None if has_end else 0)
    else:
        translating.refuse(key, "one of cosine, linear, constant, polynomial is needed", "schedule")


def _is_on_cpu(translating: Translating) -> bool:
    on_cpu = translating.is_on("force_cpu") or translating.word("device") == "cpu"
    return on_cpu if "device" not in translating.flags else translating.flags["device"] == "cpu"


def _amp_dtype(translating: Translating, key: str) -> None:
    try:
        made = dtype(translating.text(key) or "")
    except ValueError as error:
        translating.refuse(key, str(error), "mp_dtype", "mixed_precision")
        return
    if not translating.is_on("use_amp") or _is_on_cpu(translating):
        translating.left(key, "use_amp is false, or the device a CPU")
    elif translating.values[key].level == DEFAULT:
        translating.set(key, mp_dtype=made["mp_dtype"])
    else:
        translating.set(key, **made)


def _amp(translating: Translating, key: str) -> None:
    """Take the switch; where the file has none, the device decides, as there."""
    if translating.is_on(key) and _is_on_cpu(translating):
        translating.set(key, "on a CPU float32, as there", mixed_precision="false")
    elif "mixed_precision" in translating.settings or translating.values[key].level == DEFAULT:
        translating.left(key, "amp_dtype, the DeepSpeed file or the device say")
    else:
        translating.set(key, mixed_precision=translating.is_on(key))


def _packing(translating: Translating, key: str) -> None:
    if translating.is_on("pack_sequences") is not False:
        translating.set(key, packing=translating.text("packing_strategy") or "greedy")
    elif key == "pack_sequences":
        remark = "a document sees itself alone, without the padding; a longer one is cut, not truncated"
        translating.set(key, remark, packing="best_fit", document_mask="true")
    else:
        translating.left(key, "pack_sequences is false")


def _resume(translating: Translating, key: str) -> None:
    """Take a checkpoint to go back to; checkpoint-200.pt is the step in its name."""
    path = Path(translating.text(key) or "")
    step = _CHECKPOINT.fullmatch(path.name)
    if str(path).lower() in ("true", "false"):
        translating.set(key, "a run that is found in ckpt_save_path is continued anyway")
    elif is_file(path):
        translating.refuse(key, "a checkpoint of another system, which is not read: --ckpt_load_path takes a Llama")
    else:
        translating.set(
            key,
            "the step in its name" if step else "",
            resume_from_checkpoint=step[1] if step else translating.text(key),
        )


# Text


def _dataset(translating: Translating, key: str) -> None:
    text = translating.text(key) or ""
    if _holds_tokens(Path(text)):
        translating.set(key, **folder_of_data(text))
        return
    trained = "tokenizer_path" not in translating
    settings = {"data_path": _ROOT, "datasets": _name_of_dataset(text)}
    settings |= {"tokenizer_path": _ROOT, "sep_token": "0"} if trained else {}
    command = _command(
        translating,
        key,
        vocab_size=translating.text("vocab_size") if trained else None,
        tokenizer_path=translating.text("tokenizer_path"),
    )
    translating.set(key, f"prepare it first: {command}", **settings)


def _validation(translating: Translating, key: str) -> None:
    """Take what is evaluated on: a fraction, a split of the dataset, or a file of text."""
    text = translating.text(key) or ""
    part = _PERCENT_OF_A_SPLIT.fullmatch(text)
    if {"eval_datasets", "held_out_fraction"} & translating.flags.keys():
        translating.left(key, "the command line says what is evaluated on")
    elif {"data_path", "use_dummy_dataset"} & translating.flags.keys():
        translating.set(key, "a hundredth of the data that the command line names", held_out_fraction=0.01)
    elif part:
        translating.set(key, "of the documents, by a hash", held_out_fraction=int(part[1]) / 100)
    elif parse_number(text) is not None:
        translating.set(key, held_out_fraction=text)
    elif _holds_tokens(Path(text)):
        translating.set(key, eval_datasets=text)
    elif "dataset_name" in translating:
        name = f"{_name_of_dataset(translating.text('dataset_name') or '')}_{text}"
        command = _command(translating, "dataset_name", hf_split=text, dataset=name)
        translating.set(key, f"prepare it, too: {command}", eval_datasets=f"{_ROOT}/{name}")
    else:
        translating.left(key, "a split of no dataset: give --eval_datasets or --held_out_fraction")


def _holds_tokens(folder: Path) -> bool:
    """Return whether a folder holds token files, itself or in its sub-folders; Hugging Face's own folders do not."""
    if not is_folder(folder) or any(exists(folder / f"{name}.json") for name in ("dataset_dict", "dataset_info")):
        return False
    entries = entries_of(folder)
    inside = [entry for path in entries if is_folder(path) for entry in entries_of(path)]
    return any(path.suffix in TOKEN_SUFFIXES for path in (*entries, *inside))


def _name_of_dataset(text: str) -> str:
    return PrepareConfig(input_path=(text,)).dataset_name or "text"


def _command(translating: Translating, key: str, **options: str | None) -> str:
    """Write the command that makes token files, without what is the default anyway."""
    text = translating.text(key) or ""
    is_path = text.startswith((".", "/", "~")) or "*" in text or exists(Path(text)) or bool(Path(text).suffix)
    of_dataset = {"hf_config": translating.text("dataset_config"), "hf_split": translating.text("dataset_split")}
    given = {
        **({"input_path": text} if is_path else {"hf_dataset": text} | of_dataset),
        "text_field": translating.text("text_column"),
        **{name: value for name, value in options.items() if value is not None},
    }
    usual = vars(PrepareConfig())
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None and value != usual[name]]
    return shlex.join(["pretrain", "prepare", *flags, f"--output_path={_ROOT}"])


def _service(setting: str) -> Rule:
    return when(
        lambda translating: "wandb" in translating.word("report_to") or "tracker" in translating.flags,
        row(setting),
        "reports do not go to wandb",
    )


def _same(reason: str, *keys: str) -> dict[str, Rule]:
    return dict.fromkeys(keys, left(reason))


_SWITCH = choice(true="true", false="false")
_NO_DROPOUT = not_a_llama("0", reason="a Llama is trained without dropout")
_NO_BIAS = not_a_llama("false", reason="a Llama has no biases")
_NO_EXPERTS = not_a_llama("0", "1", "false", reason="a Llama has no experts")
_NO_WINDOW = not_a_llama("0", "none", reason="attention reaches back to the beginning, without a window")
_ROTARY = not_a_llama("rope", "rotary", reason="a Llama's positions are rotary")
_RMS = not_a_llama("rmsnorm", "rms_norm", "rms", "true", reason="a Llama has RMSNorm")
_PLAIN_LOSS = only("0", "none", "cross_entropy", "ce", reason="the loss is plain cross-entropy: take it out")
_NO_AVERAGE = only("0", "none", "false", reason="no average of the weights is kept: take it out")
RULES: dict[str, Rule] = {
    **joint("world_size", "deepspeed_config", "deepspeed_config.*"),
    "vocab_size": row("vocab_size"),
    **{name: row(setting) for name, setting in _SIZES.items()},
    "n_kv_heads": row("num_key_value_heads"),
    "d_ff": _feed_forward,
    "max_seq_len": _context,
    "rope_theta": row("rope_theta"),
    **dict.fromkeys(
        ("tie_word_embeddings", "tie_embeddings", "tie_weights", "weight_tying"), row("tie_word_embeddings")
    ),
    **dict.fromkeys(("norm_eps", "rms_norm_eps", "layer_norm_eps"), row("rms_norm_eps")),
    **dict.fromkeys(("positional_encoding", "position_embedding", "position_embedding_type", "pos_embedding"), _ROTARY),
    "use_rope": not_a_llama("true", reason="a Llama's positions are rotary"),
    "use_learned_pos_emb": not_a_llama("false", reason="a Llama's positions are rotary"),
    **dict.fromkeys(("norm", "norm_type", "normalization", "use_rmsnorm"), _RMS),
    "qk_norm": not_a_llama("false", reason="a Llama does not normalise queries and keys"),
    "rope_scaling": not_a_llama("none", "1", reason="it is not translated: take it out, and give --rope_scaling"),
    "parallel_residual": not_a_llama("false", reason="feed-forward follows attention in a Llama"),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window"), _NO_WINDOW),
    **dict.fromkeys(("num_experts", "n_experts", "moe", "use_moe"), _NO_EXPERTS),
    **{
        f"{part}dropout": _NO_DROPOUT
        for part in ("", "attention_", "attn_", "embedding_", "residual_", "resid_", "ffn_")
    },
    **dict.fromkeys(("layer_drop", "layerdrop", "drop_path"), _NO_DROPOUT),
    "activation": not_a_llama(
        "silu", "swish", "swiglu", reason="a Llama's activation is SiLU, in a gated feed-forward"
    ),
    "pre_norm": not_a_llama("true", reason="a Llama has its norms before attention and feed-forward"),
    **dict.fromkeys(("bias", "use_bias"), _NO_BIAS),
    **_same("initial weights are those of docs/model.md", "init_std"),
    "gradient_checkpointing": row("fsdp_activation_checkpointing", _SWITCH),
    "batch_size": row("batch_size"),
    "gradient_accumulation_steps": row("grad_accum_steps"),
    "learning_rate": row("learning_rate"),
    "weight_decay": row("weight_decay", remark="not of norms and embeddings"),
    "max_steps": _length,
    "num_epochs": _length,
    "lr_scheduler": _schedule,
    "min_lr_ratio": row("min_lr_ratio"),
    "min_lr": when(lambda t: "min_lr_ratio" not in t, lowest_rate("learning_rate"), "min_lr_ratio wins"),
    "warmup_steps": row("warmup_steps"),
    "warmup_ratio": when(lambda t: "warmup_steps" not in t, row("warmup_steps", share), "warmup_steps wins"),
    "optimizer": _optimizer,
    "momentum": row("momentum"),
    "betas": row("adam_beta1", pair),
    **dict.fromkeys(("beta1", "adam_beta1"), row("adam_beta1")),
    **dict.fromkeys(("beta2", "adam_beta2"), row("adam_beta2")),
    **dict.fromkeys(("eps", "epsilon", "adam_epsilon"), row("adam_epsilon")),
    "amsgrad": only("false", reason="there is no AMSGrad: take it out"),
    **dict.fromkeys(("label_smoothing", "label_smoothing_factor", "loss"), _PLAIN_LOSS),
    **dict.fromkeys(("ema_decay", "ema", "use_ema", "use_swa", "swa"), _NO_AVERAGE),
    "use_peft": only("false", reason="all weights are trained: take it out"),
    "amp_dtype": _amp_dtype,
    "use_amp": _amp,
    "max_grad_norm": row("grad_clip_thresh"),
    "save_steps": row("checkpoint_interval"),
    "eval_steps": row("eval_interval"),
    "logging_steps": row("report_interval"),
    **dict.fromkeys(("checkpoint_dir", "output_dir"), row("ckpt_save_path")),
    "save_total_limit": row("keep_last", kept),
    "resume_from_checkpoint": _resume,
    "report_to": row("tracker", trackers),
    **dict.fromkeys(("logging_dir", "log_dir"), row("tracker_dir")),
    "run_name": _service("tracker_run_name"),
    "wandb_project": _service("tracker_project_name"),
    "early_stopping_patience": row("early_stopping_evaluations"),
    "early_stopping_threshold": only("0", reason="every lower loss counts: write 0"),
    "seed": row("seed"),
    "distributed_backend": row("backend"),
    "use_deepspeed": left("FSDP does what deepspeed_config asks for"),
    "device": row("device", choice(cuda="cuda", gpu="cuda", cpu="cpu", auto="auto")),
    "force_cpu": row("device", choice(true="cpu", false="auto")),
    **dict.fromkeys(("use_torch_compile", "compile", "compile_model"), row("use_torch_compile", _SWITCH)),
    **dict.fromkeys(("num_workers", "dataloader_num_workers"), row("num_workers")),
    "tokenizer_path": row("tokenizer_path"),
    "max_length": row("seq_length"),
    "min_length": row("min_length", remark="in tokens"),
    "dataset_name": _dataset,
    "validation_split": _validation,
    "pack_sequences": _packing,
    "packing_strategy": _packing,
    **_same(
        "of pretrain prepare: the command for dataset_name has it", "dataset_config", "dataset_split", "text_column"
    ),
    **_same("of pretrain prepare, which takes every core", "preprocessing_num_workers"),
    **_same("of how the guide reads text: pretrain prepare does it here", "tokenizer_type", "special_tokens", "stride"),
    **_same(
        "of how the guide reads text: pretrain prepare does it here", "filter_empty_lines", "filter_short_sequences"
    ),
    **_same("of how the guide reads text: pretrain prepare does it here", "use_streaming", "cache_dir", "data_format"),
    **_same("nothing is evaluated on it", "test_split", "test_file"),
    **_same("samples are read ahead by threads; none is dropped", "dataloader_pin_memory", "dataloader_drop_last"),
    **_same("how the guide reports and evaluates", "log_level", "eval_strategy", "eval_accumulation_steps"),
    **_same(
        "the launcher says it: torchrun, srun or mpirun", "local_rank", "use_accelerate", "accelerate_mixed_precision"
    ),
    **_same(
        "use_peft is false", "peft_type", "peft_r", "peft_alpha", "peft_dropout", "peft_target_modules", "peft_bias"
    ),
    **_same("use_peft is false", "peft_task_type"),
    **_same("how torch.compile is called", "compile_mode"),
}
