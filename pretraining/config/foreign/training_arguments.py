"""The arguments of Hugging Face's Trainer as JSON or YAML: TrainingArguments, and what its examples put beside them.

What the file does not give has the Trainer's default where that changes what is learned. The arguments hold no
dimensions of a model: the user gives them.
"""

from __future__ import annotations

import math
from pathlib import Path

from pretraining.config.foreign import deepspeed
from pretraining.config.foreign.raw_text import TextKeys
from pretraining.config.foreign.translation import (
    Rule,
    Translating,
    as_here,
    becomes,
    checkpoints_kept,
    decimal,
    half_precision,
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
from pretraining.files import exists, is_file, is_folder
from pretraining.progress import parse_number

SIGNS = (
    *("per_device_train_batch_size", "per_gpu_train_batch_size", "per_device_eval_batch_size", "num_train_epochs"),
    *("lr_scheduler_type", "logging_strategy", "save_strategy", "eval_strategy"),
    *("evaluation_strategy", "overwrite_output_dir", "ddp_backend", "dataloader_num_workers"),
)
_OWN_OPTIMIZER = "your own is --optimizer=package.module:Class"
_KWARGS = "lr_scheduler_kwargs."
_DIMENSIONS = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings", "rope_theta", "rms_norm_eps", "tie_word_embeddings"),
}


def read(translating: Translating) -> None:
    """Translates a file of TrainingArguments."""
    text = TextKeys(
        name="dataset_name",
        file="train_file",
        config="dataset_config_name",
        tokenizer="tokenizer_name" if "tokenizer_name" in translating else "model_name_or_path",
    )
    translating.apply(TABLE | text.rules() | {"validation_file": text.validation})
    deepspeed.include(translating, "deepspeed", "the Trainer")
    translating.leave_out_groups(GROUPS)
    _assume_defaults(translating)


def _assume_defaults(translating: Translating) -> None:
    """Adds what the Trainer takes where its file gives nothing, and this project takes something else."""
    default = "the Trainer's default"
    translating.assume("per_device_train_batch_size", default, batch_size="8")
    translating.assume("learning_rate", default, learning_rate="5e-5")
    translating.assume("weight_decay", default, weight_decay="0")
    if _is_adam(translating):
        translating.assume("adam_beta2", default, adam_beta2="0.999")
    translating.assume("lr_scheduler_type", default, schedule="linear", min_lr_ratio=0)
    translating.assume("warmup_steps", default, warmup_steps="0")
    translating.assume("num_train_epochs", default, num_steps="3ep")
    if not translating.has("model_name_or_path") and not translating.has("config_overrides"):
        has_length = "block_size" in translating
        translating.assume(
            "model" if has_length else "model and seq_length",
            "not among these arguments: give --model_variant or its dimensions"
            + ("" if has_length else ", and --seq_length"),
        )


def _word(translating: Translating, key: str) -> str:
    """Returns a name of a choice; "SchedulerType.COSINE" is cosine."""
    return (translating.text(key) or "").rpartition(".")[2].lower()


# Length, and what comes how often


def _is_limited(translating: Translating) -> bool:
    return (translating.number("max_steps") or 0) > 0


def _read_max_steps(translating: Translating, key: str) -> None:
    if _is_limited(translating):
        translating.set(key, num_steps=translating.text(key))
    else:
        translating.set(key, "no limit: num_train_epochs says")


def _read_epochs(translating: Translating, key: str) -> None:
    if _is_limited(translating):
        translating.leave_out(key, "max_steps wins")
    else:
        translating.set(key, num_steps=f"{translating.text(key)}ep")


def _strategy_of(translating: Translating, what: str) -> str:
    older = "evaluation_strategy" if what == "eval" else f"{what}_strategy"
    return _word(translating, f"{what}_strategy") or _word(translating, older)


def _strategy(what: str, setting: str) -> Rule:
    """When something happens: never, every epoch, or every so many steps."""

    def settle(translating: Translating, key: str) -> None:
        strategy = _word(translating, key)
        steps = f"{what}_steps"
        if strategy == "no":
            translating.set(key, "only at the end", **{setting: "0"})
        elif strategy == "epoch":
            translating.set(key, **{setting: "1ep"})
        elif strategy == "best" and what == "save":
            translating.set(key, checkpoint_interval="0", save_best="true")
        elif strategy != "steps":
            translating.refuse(key, "one of no, steps, epoch is needed")
        elif steps in translating:
            translating.set(key, f"{steps} says how often")
        elif what == "eval" and "logging_steps" in translating:
            translating.set(key, "as often as logging_steps", **{setting: _interval_text(translating, "logging_steps")})
        else:
            translating.set(key, "the Trainer's default", **{setting: "500"})

    return settle


def _interval(what: str, setting: str) -> Rule:
    """Every so many steps; below 1 it is a share of the run."""

    def settle(translating: Translating, key: str) -> None:
        strategy = _strategy_of(translating, what)
        if strategy not in ("", "steps"):
            translating.leave_out(key, f"{what}_strategy is {strategy}")
        else:
            translating.set(key, **{setting: _interval_text(translating, key)})

    return settle


def _interval_text(translating: Translating, key: str) -> str:
    text = translating.text(key) or ""
    share = parse_number(text)
    if share is None or not 0 < share < 1:
        return text
    steps, epochs = (
        parse_number(translating.text("max_steps") or ""),
        parse_number(translating.text("num_train_epochs") or "3"),
    )
    if steps is not None and steps > 0:
        return str(math.ceil(share * steps))
    return f"{decimal(share * (epochs or 3))}ep"


def _read_warmup_steps(translating: Translating, key: str) -> None:
    """Takes a number of steps, which wins over a ratio unless it is zero; below 1 it is a share of the run."""
    number = translating.number(key) or 0
    if _word(translating, "lr_scheduler_type") == "constant":
        translating.leave_out(key, "lr_scheduler_type=constant has no warm-up")
    elif number == 0 and (translating.number("warmup_ratio") or 0) > 0:
        translating.leave_out(key, "warmup_ratio says")
    elif 0 < number < 1:
        translating.set(key, warmup_steps=share_of_run(translating.text(key) or ""))
    else:
        translating.set(key, warmup_steps=translating.text(key))


def _read_warmup_ratio(translating: Translating, key: str) -> None:
    if _word(translating, "lr_scheduler_type") == "constant":
        translating.leave_out(key, "lr_scheduler_type=constant has no warm-up")
    elif (translating.number("warmup_steps") or 0) > 0:
        translating.leave_out(key, "warmup_steps wins")
    else:
        becomes("warmup_steps", share_of_run)(translating, key)


# Optimizer and schedule


def _optimizer_of(translating: Translating) -> str | None:
    name = _word(translating, "optim") or "adamw"
    plain = name.removeprefix("paged_")
    if plain.startswith("adamw"):
        return "adamw"
    return {"sgd": "sgd", "rmsprop": "rmsprop"}.get(name.partition("_bnb")[0])


def _is_adam(translating: Translating) -> bool:
    return _optimizer_of(translating) == "adamw"


def _read_optimizer(translating: Translating, key: str) -> None:
    name, optimizer = _word(translating, key), _optimizer_of(translating)
    if optimizer is None:
        translating.refuse(
            key, f"of the Trainer's optimizers AdamW, SGD and RMSprop are there; {_OWN_OPTIMIZER}", "optimizer"
        )
    elif "bit" in name or "bnb" in name or "paged" in name:
        translating.set(key, "the same rule; its moments are float32, sharded", optimizer=optimizer)
    else:
        translating.set(key, optimizer=optimizer)


def _of_adam(setting: str) -> Rule:
    def settle(translating: Translating, key: str) -> None:
        if _is_adam(translating):
            translating.set(key, **{setting: translating.text(key) or ""})
        else:
            translating.leave_out(key, f"optim={translating.text('optim')} does not read it")

    return settle


_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "polynomial": "polynomial",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}
_ENDS = tuple(_KWARGS + name for name in ("min_lr", "min_lr_rate", "min_lr_ratio", "lr_end"))


def _read_schedule(translating: Translating, key: str) -> None:
    """Takes the schedule with the Trainer's end, zero, where its arguments say none."""
    name = _word(translating, key)
    cycles = translating.number(f"{_KWARGS}num_cycles")
    usual = 1 if name == "cosine_with_restarts" else 0.5
    if name not in _SCHEDULES:
        translating.refuse(
            key,
            f"one of {', '.join(_SCHEDULES)} is needed, or your own as --schedule=package.module:function",
            "schedule",
        )
    elif cycles not in (None, usual):
        translating.refuse(
            key, "the learning rate comes down once, and lr_scheduler_kwargs has num_cycles: take it out", "schedule"
        )
    elif name == "constant":
        translating.set(key, "without a warm-up", schedule="constant", warmup_steps=0)
    elif name == "constant_with_warmup":
        translating.set(key, schedule="constant")
    else:
        has_end = any(end in translating for end in _ENDS)
        shape = "cosine" if name == "warmup_stable_decay" and f"{_KWARGS}decay_type" not in translating else None
        translating.set(
            key,
            "" if has_end else "to zero",
            schedule=_SCHEDULES[name],
            min_lr_ratio=None if has_end else 0,
            decay_shape=shape,
        )


def _read_stable_steps(translating: Translating, key: str) -> None:
    if f"{_KWARGS}num_decay_steps" in translating:
        translating.leave_out(key, "num_decay_steps says where the decay begins")
    else:
        translating.set(key, stable_steps=translating.text(key))


# Precision and sharding


def _precision(dtype: str, other: str) -> Rule:
    """Half precision by its switch; where DeepSpeed is configured and it is off, that says."""

    def settle(translating: Translating, key: str) -> None:
        if translating.has("deepspeed") and not translating.is_true(key):
            translating.set(key, "off")
        else:
            half_precision(dtype, other)(translating, key)

    return settle


_STRATEGIES = {
    "full_shard": "fsdp",
    "shard_grad_op": "zero2",
    "no_shard": "ddp",
    "hybrid_shard": "hsdp",
    "hybrid_shard_zero2": "hsdp_zero2",
}


def _read_fsdp(translating: Translating, key: str) -> None:
    words = (translating.text(key) or "").lower().replace(",", " ").split()
    named = [_STRATEGIES[word] for word in words if word in _STRATEGIES]
    others = set(words) - {*_STRATEGIES, "auto_wrap", "offload", "true", "false"}
    if others or len(named) > 1:
        translating.refuse(
            key, f"one of {', '.join(_STRATEGIES)}, with auto_wrap and offload, is needed", "sharding_strategy"
        )
    elif not words or words == ["false"]:
        translating.leave_out(key, "off; --sharding_strategy says how parameters are laid out")
    else:
        keeps_whole = translating.is_true("fsdp_config.reshard_after_forward") is False
        strategy = named[0] if named else "zero2" if keeps_whole else "fsdp"
        translating.set(key, "nothing is moved to the host" if "offload" in words else "", sharding_strategy=strategy)


# Model


def _read_model(translating: Translating, key: str) -> None:
    """Starts from a folder with a model; the name of one on the Hub is none."""
    folder = Path(translating.text(key) or "").expanduser()
    if translating.is_overridden("ckpt_load_path", "model_variant"):
        translating.leave_out(key, "the command line says which model")
    elif is_folder(folder):
        has_tokenizer = is_file(folder / "tokenizer.json") and "tokenizer_name" not in translating
        translating.set(key, ckpt_load_path=str(folder), tokenizer_path=str(folder) if has_tokenizer else None)
    else:
        translating.refuse(key, "there is no such folder: download the model and name its folder, or take the line out")


def _read_config_name(translating: Translating, key: str) -> None:
    if translating.is_overridden("hidden_size", "model_variant", "ckpt_load_path"):
        translating.leave_out(key, "the command line says which model")
    else:
        translating.refuse(key, "give its dimensions: --model_variant, or --hidden_size, --num_hidden_layers, …")


def _read_overrides(translating: Translating, key: str) -> None:
    pairs = [pair.partition("=")[::2] for pair in (translating.text(key) or "").split(",")]
    unknown = [name for name, _ in pairs if name.strip() not in _DIMENSIONS]
    if unknown:
        translating.refuse(
            key, f"{', '.join(unknown)}: no dimension of a Llama; they are {', '.join(sorted(_DIMENSIONS))}"
        )
    else:
        translating.set(key, **{name.strip(): value.strip() for name, value in pairs})


def _read_tokenizer(translating: Translating, key: str) -> None:
    text = translating.text(key) or ""
    if exists(Path(text).expanduser()):
        translating.set(key, tokenizer_path=text)
    else:
        translating.leave_out(key, "there is no such folder: download its tokenizer.json, and give --tokenizer_path")


# Evaluation and reports


def _read_best_metric(translating: Translating, key: str) -> None:
    if _word(translating, key) in ("loss", "eval_loss"):
        translating.set(key, "as here")
    else:
        translating.leave_out(key, "the best checkpoint is the one with the lowest evaluation loss")


def _read_percentage(translating: Translating, key: str) -> None:
    number = translating.number(key) or 0
    translating.set(key, "of the documents, by a hash", held_out_fraction=f"{number / 100:g}")


def _read_run_name(translating: Translating, key: str) -> None:
    of_services(translating, key, "report_to", tracker_run_name=translating.text(key) or "")


def _read_project(translating: Translating, key: str) -> None:
    of_services(translating, key, "report_to", tracker_project_name=translating.text(key) or "")


TABLE: dict[str, Rule] = {
    "per_device_train_batch_size": becomes("batch_size"),
    "per_gpu_train_batch_size": becomes("batch_size"),
    "gradient_accumulation_steps": becomes("grad_accum_steps"),
    "num_train_epochs": _read_epochs,
    "max_steps": _read_max_steps,
    "learning_rate": becomes("learning_rate"),
    "weight_decay": becomes("weight_decay", remark="not applied to norms and embeddings"),
    "adam_beta1": _of_adam("adam_beta1"),
    "adam_beta2": _of_adam("adam_beta2"),
    "adam_epsilon": _of_adam("adam_epsilon"),
    "max_grad_norm": becomes("grad_clip_thresh"),
    "optim": _read_optimizer,
    "optim_args": as_here(
        "", "none", reason=f"arguments of an optimizer are settings here; {_OWN_OPTIMIZER}", instead="optimizer"
    ),
    "adafactor": as_here("false", reason=f"there is no Adafactor: {_OWN_OPTIMIZER}", instead="optimizer"),
    "lr_scheduler_type": _read_schedule,
    _KWARGS + "min_lr_rate": becomes("min_lr_ratio"),
    _KWARGS + "min_lr_ratio": becomes("min_lr_ratio"),
    _KWARGS + "min_lr": lowest_rate("learning_rate", "5e-5"),
    _KWARGS + "lr_end": lowest_rate("learning_rate", "5e-5"),
    _KWARGS + "power": becomes("decay_power"),
    _KWARGS + "num_cycles": left_out("of lr_scheduler_type"),
    _KWARGS + "num_decay_steps": becomes("decay_steps"),
    _KWARGS + "num_stable_steps": _read_stable_steps,
    _KWARGS + "decay_type": becomes("decay_shape"),
    _KWARGS + "warmup_type": as_here("linear", reason="the warm-up is linear: take it out"),
    _KWARGS + "warmup_lr_rate": left_out("the warm-up begins near zero"),
    "warmup_steps": _read_warmup_steps,
    "warmup_ratio": _read_warmup_ratio,
    "label_smoothing_factor": as_here("0", reason="the loss is plain cross-entropy: take it out"),
    "neftune_noise_alpha": as_here("0", reason="no noise is added to embeddings: take it out"),
    "logging_strategy": _strategy("logging", "report_interval"),
    "logging_steps": _interval("logging", "report_interval"),
    "save_strategy": _strategy("save", "checkpoint_interval"),
    "save_steps": _interval("save", "checkpoint_interval"),
    "save_total_limit": becomes("keep_last", checkpoints_kept),
    "eval_strategy": _strategy("eval", "eval_interval"),
    "evaluation_strategy": _strategy("eval", "eval_interval"),
    "eval_steps": _interval("eval", "eval_interval"),
    "load_best_model_at_end": switch("save_best", "checkpoints/best in the run's folder is the best one"),
    "metric_for_best_model": _read_best_metric,
    "bf16": _precision("bfloat16", "fp16"),
    "fp16": _precision("float16", "bf16"),
    "seed": becomes("seed"),
    "full_determinism": switch("deterministic"),
    "use_cpu": switch("device", on="cpu"),
    "no_cuda": switch("device", on="cpu"),
    "gradient_checkpointing": switch("fsdp_activation_checkpointing"),
    "activation_checkpointing": switch("fsdp_activation_checkpointing"),
    "fsdp_config.activation_checkpointing": switch("fsdp_activation_checkpointing"),
    "fsdp_config.fsdp_activation_checkpointing": switch("fsdp_activation_checkpointing"),
    "torch_compile": switch("use_torch_compile"),
    "fsdp": _read_fsdp,
    "accelerator_config.split_batches": as_here(
        "false", reason="the batch is of each GPU here: take it out and give --global_batch_size"
    ),
    "dataloader_num_workers": becomes("num_workers", remark="threads"),
    "report_to": trackers,
    "run_name": _read_run_name,
    "project": _read_project,
    "logging_dir": becomes("tracker_dir"),
    "output_dir": becomes("ckpt_save_path"),
    "resume_from_checkpoint": resume_from,
    "disable_tqdm": one_of("progress", {"true": "plain", "false": "auto"}),
    "model_name_or_path": _read_model,
    "config_name": _read_config_name,
    "config_overrides": _read_overrides,
    "model_type": only("llama", reason="it is no Llama"),
    "tokenizer_name": _read_tokenizer,
    "block_size": becomes("seq_length"),
    "validation_split_percentage": _read_percentage,
}
"""Arguments by what becomes of them."""

_OF_EVALUATION = "evaluations take as many sequences at once as training, --eval_batches of them"
_OF_THE_LOADER = "the data is the same; threads read it"
_OF_KERNELS = "how kernels are chosen: the result is the same"
_OF_DDP = "how gradients are exchanged: the result is the same"
_OF_THE_HUB = "nothing is uploaded: `pretrain export` writes a folder that can be"
_OF_LOGS = "how the Trainer writes its own lines"
_OF_DATASETS = "of Python's datasets: training reads token files"
GROUPS = {
    "per_device_eval_batch_size": _OF_EVALUATION,
    "per_gpu_eval_batch_size": _OF_EVALUATION,
    "eval_accumulation_steps": _OF_EVALUATION,
    "eval_delay": "the first evaluation is one eval_interval after the start",
    "eval_on_start": "evaluations come after steps",
    "eval_do_concat_batches": _OF_EVALUATION,
    "eval_use_gather_object": _OF_EVALUATION,
    "batch_eval_metrics": _OF_EVALUATION,
    "include_inputs_for_metrics": _OF_EVALUATION,
    "include_for_metrics": _OF_EVALUATION,
    "prediction_loss_only": _OF_EVALUATION,
    "bf16_full_eval": "evaluations compute as training does",
    "fp16_full_eval": "evaluations compute as training does",
    "max_eval_samples": _OF_EVALUATION,
    "greater_is_better": "the best checkpoint is the one with the lowest evaluation loss",
    "do_train": "`pretrain train` trains; --eval_only=true only evaluates",
    "do_eval": "--held_out_fraction or --eval_datasets say what is evaluated on",
    "do_predict": "`pretrain sample` continues a prompt",
    "auto_find_batch_size": "the memory is estimated before the start; --batch_size stays",
    "average_tokens_across_devices": "the loss is always over the tokens of all devices",
    "torch_empty_cache_steps": "the memory's cache is left alone",
    "data_seed": "--seed is of the weights and of the order of the data",
    "tf32": "what is computed in float32 is not cut to TF32",
    "gradient_checkpointing_kwargs": _OF_KERNELS,
    "activation_checkpointing_kwargs": _OF_KERNELS,
    "torch_compile_backend": _OF_KERNELS,
    "torch_compile_mode": _OF_KERNELS,
    "torchdynamo": _OF_KERNELS,
    "use_liger_kernel": _OF_KERNELS,
    "liger_kernel_config": _OF_KERNELS,
    "use_ipex": _OF_KERNELS,
    "jit_mode_eval": _OF_KERNELS,
    "half_precision_backend": _OF_KERNELS,
    "fp16_backend": _OF_KERNELS,
    "fp16_opt_level": _OF_KERNELS,
    "use_cache": "of generation; nothing is cached while training",
    "use_mps_device": "training is on NVIDIA GPUs or on CPUs",
    "tpu_num_cores": "training is on NVIDIA GPUs or on CPUs",
    "tpu_metrics_debug": "training is on NVIDIA GPUs or on CPUs",
    "optim_target_modules": "of optimizers that are not there",
    "lr_scheduler_kwargs": "no argument of that schedule here",
    "fsdp_config": "FSDP wraps each block; nothing is moved to the host",
    "fsdp_min_num_params": "FSDP wraps each block",
    "fsdp_transformer_layer_cls_to_wrap": "FSDP wraps each block",
    "accelerator_config": "how Accelerate cuts batches: every process knows which samples are its own",
    "parallelism_config": "parameters are sharded (FSDP), matrices and sequences are not: the result is the same",
    "mp_parameters": "of SageMaker",
    "ddp_backend": "NCCL on GPUs, gloo on CPUs: --backend=auto",
    "ddp_timeout": "--hang_timeout ends a job that hangs",
    "ddp_find_unused_parameters": _OF_DDP,
    "ddp_bucket_cap_mb": _OF_DDP,
    "ddp_broadcast_buffers": _OF_DDP,
    "ddp_static_graph": _OF_DDP,
    "local_rank": "the launcher gives it in the environment",
    "ray_scope": "of hyperparameter search; `pretrain sweep` tries settings",
    "dataloader_drop_last": "no sample is dropped",
    "dataloader_pin_memory": _OF_THE_LOADER,
    "dataloader_persistent_workers": _OF_THE_LOADER,
    "dataloader_prefetch_factor": _OF_THE_LOADER,
    "dataloader_multiprocessing_context": _OF_THE_LOADER,
    "dataloader_in_order": _OF_THE_LOADER,
    "remove_unused_columns": "token files have one column that is read",
    "label_names": "labels are the next tokens",
    "group_by_length": "all sequences are equally long",
    "length_column_name": "all sequences are equally long",
    "train_sampling_strategy": "the order of the data is a keyed shuffle",
    "ignore_data_skip": "a run goes on with the sample after the last",
    "past_index": "of models that are not there",
    "skip_memory_metrics": "reports have the memory",
    "debug": "updates whose loss or gradient is not finite are left out, and reported",
    "log_level": _OF_LOGS,
    "log_level_replica": _OF_LOGS,
    "log_on_each_node": _OF_LOGS,
    "logging_first_step": _OF_LOGS,
    "logging_nan_inf_filter": "updates with a loss that is not finite are left out, and reported",
    "include_tokens_per_second": "reports have it",
    "include_num_input_tokens_seen": "reports have it",
    "trackio_space_id": "of a tracker that is not there",
    "trackio_bucket_id": "of a tracker that is not there",
    "trackio_static_space_id": "of a tracker that is not there",
    "overwrite_output_dir": "a run that is found in ckpt_save_path is continued; another folder begins a new one",
    "save_safetensors": "checkpoints are safetensors",
    "save_on_each_node": "a checkpoint is one folder that all nodes see",
    "save_only_model": "checkpoints hold the optimizer, too; `pretrain export` writes the weights alone",
    "restore_callback_states_from_checkpoint": "nothing but the run itself is restored",
    "enable_jit_checkpoint": "a checkpoint is saved ahead of the end of a job anyway",
    "push_to_hub": _OF_THE_HUB,
    "push_to_hub_model_id": _OF_THE_HUB,
    "push_to_hub_organization": _OF_THE_HUB,
    "push_to_hub_token": _OF_THE_HUB,
    "hub_model_id": _OF_THE_HUB,
    "hub_strategy": _OF_THE_HUB,
    "hub_token": _OF_THE_HUB,
    "hub_private_repo": _OF_THE_HUB,
    "hub_always_push": _OF_THE_HUB,
    "hub_revision": _OF_THE_HUB,
    "train_batch_size": "of the Trainer's own reports",
    "eval_batch_size": "of the Trainer's own reports",
    "cache_dir": _OF_DATASETS,
    "streaming": _OF_DATASETS,
    "overwrite_cache": _OF_DATASETS,
    "keep_linebreaks": "text is taken as it is",
    "preprocessing_num_workers": "of pretrain prepare, which takes every core",
    "max_train_samples": "all of the data is trained on; --num_steps says how long",
    "use_fast_tokenizer": "tokenizers are tokenizer.json files",
    "model_revision": "models are folders here",
    "token": "nothing is downloaded",
    "use_auth_token": "nothing is downloaded",
    "trust_remote_code": "no code of a model is run",
    "torch_dtype": "master weights are float32",
    "dtype": "master weights are float32",
    "low_cpu_mem_usage": "weights are read shard by shard: --low_cpu_fsdp",
}
"""Arguments that are left out, with the reason; those of a mapping stand under its name."""
