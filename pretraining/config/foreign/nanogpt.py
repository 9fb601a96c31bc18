"""nanoGPT's files of settings, and those of its descendants that count in tokens: assignments that a `train.py` reads.

    max_iters, warmup_iters, lr_decay_iters, eval_interval       steps: nanoGPT
    max_tokens, warmup_tokens, stable_tokens, …_interval_tokens  tokens: a descendant

A file says only what differs from its `train.py`, whose own values hold for the rest: those that decide what is learned
are taken over. Names of nanoGPT that are no settings here may stand on the command line, too, as they may there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from pretraining.config.assignments import ALIASES
from pretraining.config.fields import settings_of
from pretraining.config.foreign.translation import Rule, Translating, becomes, left_out, one_of, only
from pretraining.config.plugins import TOKEN_SUFFIXES
from pretraining.config.training import TrainConfig
from pretraining.errors import ConfigError
from pretraining.files import entries_of, is_file, is_folder
from pretraining.progress import parse_number

SIGNS = (
    *(
        "n_embd",
        "n_layer",
        "n_head",
        "block_size",
        "max_iters",
        "lr_decay_iters",
        "warmup_iters",
        "decay_lr",
        "out_dir",
    ),
    *("eval_iters", "always_save_checkpoint", "wandb_log", "wandb_run_name", "log_interval_tokens", "use_scheduler"),
    *("val_interval_tokens", "checkpoint_interval_tokens", "warmup_tokens", "stable_tokens", "min_lr_factor"),
    *("optimizer_type", "lr_muon_adam", "wd_muon_adam", "resume_ckpt_fname", "train_data_file"),
)
COUNTS_TOKENS = (
    *("max_tokens", "log_interval_tokens", "val_interval_tokens", "checkpoint_interval_tokens", "warmup_tokens"),
    *("stable_tokens", "min_lr_factor", "use_scheduler", "optimizer_type", "train_data_file"),
)
"""Keys that only the descendants have that count in tokens."""

MODEL_OF_NANOGPT = {"n_layer": "12", "n_head": "12", "n_embd": "768", "block_size": "1024"}
MODEL_OF_TOKENS = {"n_layer": "8", "n_head": "12", "n_embd": "480", "block_size": "1024"}
OF_NANOGPT = {
    **{"out_dir": "out", "eval_interval": "2000", "eval_iters": "200", "max_iters": "600000", "learning_rate": "6e-4"},
    **{"batch_size": "12", "gradient_accumulation_steps": "40"},
}
OF_ITS_SCHEDULE = {"warmup_iters": "2000", "lr_decay_iters": "600000", "min_lr": "6e-5"}
OF_TOKENS = {"learning_rate": "3e-4", "batch_size": "32", "gradient_accumulation_steps": "1", "eval_iters": "200"}

VOCABULARY = "50304"
"""GPT-2's 50,257 entries, rounded up to a multiple of 64."""
END_OF_TEXT = 50256
"""Of GPT-2's tokenizer; it ends documents in the token files."""
FEED_FORWARD_MULTIPLE = 64
COSINE_PARTS = 16
"""Straight lines in place of a cosine that ends before or after the run: at most 0.25% of the peak away from it."""
START_POINTS = ("ckpt_load_path", "resume_from_checkpoint")
"""Flags that name a checkpoint, which has a model of its own: none is filled in."""


def read(translating: Translating) -> None:
    """Translates a file of nanoGPT or of a descendant."""
    counts_tokens = "max_iters" not in translating and any(key in translating for key in COUNTS_TOKENS)
    table = {**TABLE, **(TABLE_OF_TOKENS if counts_tokens else TABLE_OF_STEPS)}
    names = table.keys() - settings_of(TrainConfig).keys() - ALIASES.keys()
    source, used = translating.source.overridden(lambda name: name if name in names else None)
    translating.take(source)
    for name in used:
        translating.use_override(name)
    if counts_tokens:
        _fill_in_defaults_of_tokens(translating)
    else:
        _fill_in_defaults_of_steps(translating)
    translating.apply(table)
    if not counts_tokens and translating.is_overridden("data_path"):
        translating.assume("dataset", _other_data(translating))
    if "grad_clip" in translating.values and "grad_clip" not in translating:  # None, which `apply` passes over
        translating.set("grad_clip", "no clipping", grad_clip_thresh="0")


def _fill_in_defaults_of_steps(translating: Translating) -> None:
    _fill_in_model(translating, MODEL_OF_NANOGPT)
    translating.fill_in(OF_NANOGPT)
    if _decays(translating):
        translating.fill_in(OF_ITS_SCHEDULE)
    if not _data_is_given(translating):
        translating.fill_in({"dataset": "openwebtext"})


def _fill_in_defaults_of_tokens(translating: Translating) -> None:
    _fill_in_model(translating, MODEL_OF_TOKENS)
    has_schedule = "warmup_tokens" in translating or "stable_tokens" in translating
    translating.fill_in({**OF_TOKENS, "use_scheduler": "true" if has_schedule else "false"})
    if "wandb_project" in translating or "wandb_run_name" in translating:
        translating.fill_in({"wandb_log": "true"})


def _fill_in_model(translating: Translating, dimensions: Mapping[str, str]) -> None:
    if not translating.is_overridden(*START_POINTS, "model_variant"):
        translating.fill_in(dimensions)
    has_vocabulary = translating.is_overridden(*START_POINTS, "vocab_size", "tokenizer_path")
    if not has_vocabulary and not _is_of_characters(translating):
        translating.fill_in({"vocab_size": VOCABULARY})


# The model


def _width(translating: Translating, key: str) -> None:
    width = _whole(translating, key)
    feed_forward = -(-8 * width // (3 * FEED_FORWARD_MULTIPLE)) * FEED_FORWARD_MULTIPLE
    translating.set(
        key,
        "a Llama: RMSNorm, SwiGLU, rotary positions; head tied as there; the feed-forward has about the parameters of "
        "GPT-2's of 4 x n_embd",
        hidden_size=translating.text(key),
        intermediate_size=feed_forward,
        tie_word_embeddings="true",
    )


def _context(translating: Translating, key: str) -> None:
    translating.set(key, seq_length=translating.text(key), max_position_embeddings=translating.text(key))


# Batch and length


def _accumulation(translating: Translating, key: str) -> None:
    if translating.is_overridden("global_batch_size", "grad_accum_steps"):
        translating.leave_out(key, "the command line says the batch")
        return
    batch_size = _batch_size(translating)
    translating.set(
        key,
        f"x batch_size={batch_size}, on any number of GPUs",
        global_batch_size=batch_size * _whole(translating, key),
    )


def _batch_size(translating: Translating) -> int:
    """Returns the command line's, which nanoGPT multiplies by the accumulation as well, or else the file's."""
    if not translating.is_overridden("batch_size"):
        return _whole(translating, "batch_size")
    text = translating.in_force("batch_size", "batch_size") or ""
    number = parse_number(text)
    if number is None or number < 1 or number.denominator != 1:
        raise ConfigError(f"--batch_size={text}: a whole number from 1 on is needed")
    return int(number)


def _evaluation_batches(translating: Translating, key: str) -> None:
    steps = _whole(translating, "gradient_accumulation_steps")
    batches = -(-_whole(translating, key) // steps)
    remark = f"of batch_size there, of {steps} x batch_size here" if steps > 1 else ""
    translating.set(key, remark, eval_batches=batches)


def length_in_tokens(setting: str, remark: str = "") -> Rule:
    """A key that is a length in tokens."""
    return becomes(setting, lambda text: f"{text}tok", remark)


def _evaluation_interval(translating: Translating, key: str) -> None:
    text = translating.text(key)
    translating.set(
        key,
        "saved as often; the newest and the best are kept",
        eval_interval=text,
        checkpoint_interval=translating.in_force("eval_interval", "eval_interval"),
        keep_last="1",
    )


def _checkpoint_interval(translating: Translating, key: str) -> None:
    length = f"{translating.text(key)}tok"
    if "val_interval_tokens" in translating or "eval_interval" in translating:
        translating.set(key, "named as there", checkpoint_interval=length, ckpt_name="tokens")
    else:
        translating.set(
            key,
            "named as there, and evaluated as often",
            checkpoint_interval=length,
            eval_interval=length,
            ckpt_name="tokens",
        )


# The learning rate


def _peak(translating: Translating, key: str) -> None:
    remark = ""
    if (translating.text("optimizer_type") or "").lower() == "muon" and "n_embd" in translating:
        factor = 0.2 * math.sqrt(_whole(translating, "n_embd"))
        remark = (
            f"Muon's updates are as long as AdamW's here, so that its learning rates fit: {factor:.1f} times those of "
            "torch.optim.Muon at this width"
        )
    translating.set(key, remark, learning_rate=translating.text(key))


def _end_of_schedule(translating: Translating, key: str) -> None:
    """Makes nanoGPT's cosine: it comes down to `min_lr` at `lr_decay_iters`, which need not be the end of the run."""
    if _is_cosine(translating):
        translating.set(key, "the end of the run", schedule="cosine")
        return
    warmup, end = _whole(translating, "warmup_iters", smallest=0), _whole(translating, key)
    if end <= warmup:
        translating.refuse(key, f"the learning rate comes down after warmup_iters={warmup}: give more than that")
        return
    remark = f"not the end of the run, max_iters={translating.text('max_iters')}: its cosine as {COSINE_PARTS} lines"
    points = ",".join(_points(warmup, end, _smallest_share(translating)))
    translating.set(key, remark, schedule="piecewise_linear", schedule_points=points)


def _points(warmup: int, end: int, smallest: float) -> Sequence[str]:
    """Returns the schedule's points, as step:share of the peak."""
    shares = {0: 1 / (warmup + 1)}
    for part in range(COSINE_PARTS + 1):
        step = warmup + (end - warmup) * part // COSINE_PARTS
        left = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (end - warmup)))
        shares[step] = smallest + (1 - smallest) * left
    return [f"{step}:{share:.6g}" for step, share in shares.items()]


def _warmup(translating: Translating, key: str) -> None:
    if _is_cosine(translating):
        translating.set(key, warmup_steps=translating.text(key))
    else:
        translating.set(key, "in the points of the schedule")


def _smallest_rate(translating: Translating, key: str) -> None:
    share = _smallest_share(translating)
    if share > 1:
        translating.refuse(
            key, f"it is more than learning_rate={translating.in_force('learning_rate', 'learning_rate')}"
        )
    elif _is_cosine(translating):
        translating.set(
            key, f"of learning_rate={translating.in_force('learning_rate', 'learning_rate')}", min_lr_ratio=share
        )
    else:
        translating.set(key, "in the points of the schedule")


def _is_cosine(translating: Translating) -> bool:
    """Whether nanoGPT's cosine ends where the run does."""
    return _whole(translating, "lr_decay_iters") == _whole(translating, "max_iters")


def _smallest_share(translating: Translating) -> float:
    smallest = _number(translating, "min_lr")
    peak = parse_number(translating.in_force("learning_rate", "learning_rate") or "")
    return float(smallest / peak) if peak else 1.0


def _decay(translating: Translating, key: str) -> None:
    if translating.is_true(key):
        translating.set(key, "a cosine")
    else:
        translating.set(key, schedule="constant", warmup_steps="0")


def _decays(translating: Translating) -> bool:
    return translating.is_true("decay_lr") is not False


def of_decay(rule: Rule) -> Rule:
    """A key that is read unless `decay_lr` is False."""

    def settle(translating: Translating, key: str) -> None:
        if _decays(translating):
            rule(translating, key)
        else:
            translating.leave_out(key, "decay_lr is False")

    return settle


def _scheduler(translating: Translating, key: str) -> None:
    if not translating.is_true(key):
        translating.set(key, schedule="constant", warmup_steps="0")
    elif _has_stable_phase(translating):
        translating.set(key, "warm-up, stable, cosine", schedule="wsd", decay_shape="cosine")
    else:
        translating.set(key, "warm-up, cosine", schedule="cosine")


def _has_stable_phase(translating: Translating) -> bool:
    return bool(translating.number("stable_tokens"))


def of_scheduler(rule: Rule) -> Rule:
    """A key that is read with `use_scheduler` alone."""

    def settle(translating: Translating, key: str) -> None:
        if translating.is_true("use_scheduler"):
            rule(translating, key)
        else:
            translating.leave_out(key, "use_scheduler is False")

    return settle


def _stable(translating: Translating, key: str) -> None:
    if _has_stable_phase(translating):
        translating.set(key, stable_steps=f"{translating.text(key)}tok")
    else:
        translating.set(key, "the cosine follows the warm-up")


def of_muon(setting: str) -> Rule:
    """A key that is read with Muon alone."""

    def settle(translating: Translating, key: str) -> None:
        if (translating.text("optimizer_type") or "").lower() == "muon":
            translating.set(key, **{setting: translating.text(key) or ""})
        else:
            translating.leave_out(key, "read with optimizer_type='muon' only")

    return settle


# Data


def _dataset(translating: Translating, key: str) -> None:
    """Makes nanoGPT's `data/<dataset>/train.bin` and `val.bin` what datasets are here: folders of their own."""
    name = translating.text(key) or ""
    train, validation = Path("data", name, "train.bin"), Path("data", name, "val.bin")
    if _is_of_characters(translating):
        translating.refuse(
            key,
            "its tokens are characters, and no token ends a document, so it is not trained on. Make token files of its "
            f"text: pretrain prepare --input_path=data/{name}/input.txt --output_path=data/prepared, and give "
            "--data_path=data/prepared and the other flags that this prints",
        )
    elif is_file(train) and not is_file(validation):
        translating.set(key, **_training_data(translating, train))
    else:
        settings = _training_data(translating, train)
        translating.set(key, **settings, eval_datasets=str(place_of(validation)))


def _training_file(translating: Translating, key: str) -> None:
    path = Path(translating.text(key) or "")
    translating.set(key, **_training_data(translating, path))


def _validation_file(translating: Translating, key: str) -> None:
    path = Path(translating.text(key) or "")
    translating.set(key, eval_datasets=str(place_of(path)))


def of_data(rule: Rule) -> Rule:
    """A key that is read unless the command line has other data."""

    def settle(translating: Translating, key: str) -> None:
        if _data_is_given(translating):
            translating.leave_out(key, _other_data(translating))
        else:
            rule(translating, key)

    return settle


def _other_data(translating: Translating) -> str:
    """Says what the file's data would have set besides, and the command line's does not."""
    missing = []
    if not translating.is_overridden("eval_datasets", "held_out_fraction"):
        missing.append("--eval_datasets or --held_out_fraction, without which nothing is evaluated")
    if not translating.is_overridden("sep_token", "eos_token"):
        missing.append("--sep_token, the token that ends its documents")
    if translating.is_overridden("use_dummy_dataset") or not missing:
        return "the command line has other data"
    return f"the command line has other data; nothing else is set for it: give {', and '.join(missing)}"


def _data_is_given(translating: Translating) -> bool:
    return translating.is_overridden("data_path", "use_dummy_dataset")


def _training_data(translating: Translating, path: Path) -> dict[str, str]:
    """Returns the settings for a file of uint16 without a header; of GPT-2's tokens, also what ends documents."""
    folder = place_of(path)
    settings = {"data_path": str(folder.parent), "datasets": folder.name, "file_type": "bin", "token_dtype": "uint16"}
    vocabulary = parse_number(translating.in_force("vocab_size", "vocab_size") or VOCABULARY)
    if not translating.is_overridden(*START_POINTS) and vocabulary is not None and vocabulary > END_OF_TEXT:
        settings["sep_token"] = str(END_OF_TEXT)
    return settings


def place_of(path: Path) -> Path:
    """Return what a token file is as a dataset: the folder that it has for itself, or the file."""
    around, made = path.parent, path.with_suffix("")
    if is_file(path) and all(
        each.name == path.name or not (is_folder(each) or each.suffix in TOKEN_SUFFIXES) for each in entries_of(around)
    ):
        return around
    return made if is_folder(made) else path


def _is_of_characters(translating: Translating) -> bool:
    """Whether the dataset has a vocabulary of its own, in a pickle that is not opened."""
    name = translating.text("dataset")
    return name is not None and (name.endswith("_char") or is_file(Path("data", name, "meta.pkl")))


# Where a run begins, and where it runs


def _beginning(translating: Translating, key: str) -> None:
    text = translating.text(key) or ""
    if translating.is_overridden("ckpt_load_path"):
        translating.leave_out(key, "--ckpt_load_path says what it begins with")
    elif text == "resume":
        translating.set(key, "the run that this project has in out_dir; a ckpt.pt is not read", init_from=text)
    elif text == "scratch":
        translating.set(key, init_from=text)
    elif text.startswith("gpt2"):
        translating.refuse(
            key,
            "GPT-2 is no Llama, and its weights are not read. To go on from a Llama, give "
            "--ckpt_load_path=<its Hugging Face folder>; to begin anew, init_from = 'scratch'",
        )
    else:
        translating.refuse(key, "one of scratch, resume is needed")


def _checkpoint(translating: Translating, key: str) -> None:
    name, folder = translating.text(key) or "", Path(translating.text("out_dir") or "")
    if not name or translating.text("init_from") != "resume" or translating.is_overridden("ckpt_load_path"):
        translating.leave_out(key, "read with init_from='resume' only")
    elif is_file(folder / name):
        translating.refuse(
            key, f"{folder / name} holds a GPT, which is no Llama and not read: give init_from = 'scratch'"
        )
    else:
        path = name.removesuffix(".pt")
        path = str(folder / path) if "/" in path else path
        translating.set(key, "one that this project has saved", resume_from_checkpoint=path)


def _device(translating: Translating, key: str) -> None:
    kind, colon, _ = (translating.text(key) or "").partition(":")
    if kind in ("cuda", "cpu"):
        translating.set(key, "which one, CUDA_VISIBLE_DEVICES says" if colon else "", device=kind)
    else:
        translating.refuse(key, "one of cuda, cpu is needed", "device")


def _is_on_cpu(translating: Translating) -> bool:
    return translating.in_force("device", "device") == "cpu"


def _dtype(translating: Translating, key: str) -> None:
    dtype = translating.text(key)
    if dtype not in ("bfloat16", "float16", "float32"):
        translating.refuse(key, "one of bfloat16, float16, float32 is needed", "mp_dtype", "mixed_precision")
    elif dtype == "float32" or _is_on_cpu(translating):
        translating.set(key, "" if dtype == "float32" else "on a CPU float32, as there", mixed_precision="false")
    else:
        translating.set(key, mixed_precision="true", mp_dtype=dtype)


def of_wandb(setting: str) -> Rule:
    """A key about Weights & Biases, where that is asked for."""

    def settle(translating: Translating, key: str) -> None:
        if _uses_wandb(translating):
            translating.set(key, **{setting: translating.text(key) or ""})
        else:
            translating.leave_out(key, "wandb is not asked for")

    return settle


def _uses_wandb(translating: Translating) -> bool:
    """Whether reports go to wandb; a flag about trackers wins over `wandb_log`."""
    if translating.is_overridden("tracker", "report_to"):
        return any("wandb" in (translating.in_force(name, name) or "") for name in ("tracker", "report_to"))
    return bool(translating.is_true("wandb_log"))


def _wandb(translating: Translating, key: str) -> None:
    if translating.is_true(key) and _uses_wandb(translating):
        translating.set(key, tracker="wandb")
    elif translating.is_true(key):
        translating.leave_out(key, "--tracker says where reports go")
    else:
        translating.set(key, "metrics.jsonl and TensorBoard's files are in the run's folder")


def _branch(translating: Translating, key: str) -> None:
    if (translating.number(key) or 0) < 0:
        translating.set(key, "no branch")
    else:
        translating.refuse(
            key,
            "a branch is a new run from another one's weights: give --ckpt_load_path=<checkpoint> --weights_only=true, "
            "and another --seed for another order of the data",
        )


def _whole(translating: Translating, key: str, smallest: int = 1) -> int:
    """Returns a whole number; a ConfigError where a key has none."""
    number = _number(translating, key)
    if number.denominator != 1 or number < smallest:
        raise ConfigError(f"{translating.told(key)}: a whole number from {smallest} on is needed")
    return int(number)


def _number(translating: Translating, key: str) -> Fraction:
    number = parse_number(translating.text(key) or "")
    if number is None:
        raise ConfigError(f"{translating.told(key)}: a number is needed")
    return number


TABLE: dict[str, Rule] = {
    "out_dir": becomes("ckpt_save_path"),
    "init_from": _beginning,
    "resume_ckpt_fname": _checkpoint,
    "checkpoint_token_pos": left_out("a checkpoint knows its position in the data"),
    "n_embd": _width,
    "n_layer": becomes("num_hidden_layers"),
    "n_head": becomes("num_attention_heads"),
    "n_kv_head": becomes("num_key_value_heads"),
    "block_size": _context,
    "vocab_size": becomes("vocab_size"),
    "dropout": only("0", reason="a Llama is trained without dropout"),
    "bias": only("false", reason="a Llama has no biases"),
    "batch_size": becomes("batch_size", remark="what a GPU takes at once"),
    "gradient_accumulation_steps": _accumulation,
    "eval_iters": _evaluation_batches,
    "eval_only": becomes("eval_only"),
    "learning_rate": _peak,
    "weight_decay": becomes("weight_decay", remark="not of norms and the embedding"),
    "beta1": becomes("adam_beta1"),
    "beta2": becomes("adam_beta2"),
    "grad_clip": becomes("grad_clip_thresh"),
    "ignore_fused": left_out("AdamW is always fused; the results are the same"),
    "seed": becomes("seed"),
    "wandb_log": _wandb,
    "wandb_project": of_wandb("tracker_project_name"),
    "wandb_run_name": of_wandb("tracker_run_name"),
    "device": _device,
    "dtype": _dtype,
    "backend": left_out("the device decides: GPUs talk by NCCL, CPUs by gloo"),
    "compile": becomes("use_torch_compile"),
    "compile_model": becomes("use_torch_compile"),
}
TABLE_OF_STEPS: dict[str, Rule] = {
    "max_iters": becomes("num_steps"),
    "decay_lr": _decay,
    "warmup_iters": of_decay(_warmup),
    "lr_decay_iters": of_decay(_end_of_schedule),
    "min_lr": of_decay(_smallest_rate),
    "eval_interval": _evaluation_interval,
    "log_interval": becomes("report_interval"),
    "always_save_checkpoint": left_out("the newest and the best checkpoint are kept"),
    "dataset": of_data(_dataset),
}
TABLE_OF_TOKENS: dict[str, Rule] = {
    "max_tokens": length_in_tokens("num_steps"),
    "log_interval_tokens": length_in_tokens("report_interval"),
    "val_interval_tokens": length_in_tokens("eval_interval"),
    "log_interval": becomes("report_interval"),
    "eval_interval": becomes("eval_interval"),
    "checkpoint_interval_tokens": _checkpoint_interval,
    "optimizer_type": one_of("optimizer", {"adamw": "adamw", "muon": "muon"}),
    "lr_muon_adam": of_muon("muon_adam_learning_rate"),
    "wd_muon_adam": of_muon("muon_adam_weight_decay"),
    "use_scheduler": _scheduler,
    "warmup_tokens": of_scheduler(length_in_tokens("warmup_steps")),
    "stable_tokens": of_scheduler(_stable),
    "min_lr_factor": of_scheduler(becomes("min_lr_ratio")),
    "train_data_file": of_data(_training_file),
    "val_data_file": of_data(_validation_file),
    "dataset": of_data(_dataset),
    "total_tokens": left_out("the files say it"),
    "branch_seed": _branch,
    "branch_window_size_tokens": left_out("of branches"),
}
