"""The arguments of Hugging Face's Trainer: each of them, its defaults, and what the whole of a file starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pretraining.config.command_line import load_train_config
from pretraining.config.foreign.kinds import translate
from pretraining.config.foreign.training_arguments import GROUPS
from pretraining.config.foreign.translation import Source, Translation
from pretraining.config.settings_files import parse_tree
from pretraining.errors import ConfigError

CONFIG = {
    "output_dir": "out",
    "overwrite_output_dir": False,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "learning_rate": 6e-4,
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-7,
    "max_grad_norm": 0.5,
    "num_train_epochs": 2.0,
    "max_steps": -1,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr": 6e-5},
    "warmup_ratio": 0.03,
    "warmup_steps": 0,
    "logging_strategy": "steps",
    "logging_steps": 20,
    "save_strategy": "steps",
    "save_steps": 0.25,
    "save_total_limit": 3,
    "eval_strategy": "epoch",
    "eval_steps": None,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": False,
    "bf16": True,
    "fp16": False,
    "tf32": True,
    "seed": 7,
    "full_determinism": True,
    "use_cpu": False,
    "optim": "adamw_torch_fused",
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "torch_compile": True,
    "report_to": ["wandb"],
    "run_name": "a",
    "project": "b",
    "logging_dir": "out/logs",
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"backward_prefetch": "backward_pre", "activation_checkpointing": False},
    "dataloader_num_workers": 4,
    "ddp_backend": None,
    "ddp_find_unused_parameters": False,
    "disable_tqdm": True,
    "hub_token": "<HUB_TOKEN>",
    "resume_from_checkpoint": None,
}
SETTINGS = {
    "ckpt_save_path": "out",
    "batch_size": "16",
    "grad_accum_steps": "2",
    "learning_rate": "0.0006",
    "weight_decay": "0.1",
    "adam_beta1": "0.8",
    "adam_beta2": "0.95",
    "adam_epsilon": "1e-07",
    "grad_clip_thresh": "0.5",
    "num_steps": "2.0ep",
    "schedule": "cosine",
    "min_lr_ratio": "0.1",
    "warmup_steps": "3%",
    "report_interval": "20",
    "checkpoint_interval": "0.5ep",
    "keep_last": "3",
    "eval_interval": "1ep",
    "save_best": "true",
    "mixed_precision": "true",
    "mp_dtype": "bfloat16",
    "seed": "7",
    "deterministic": "true",
    "optimizer": "adamw",
    "fsdp_activation_checkpointing": "true",
    "use_torch_compile": "true",
    "tracker": "wandb",
    "tracker_run_name": "a",
    "tracker_project_name": "b",
    "tracker_dir": "out/logs",
    "sharding_strategy": "fsdp",
    "num_workers": "4",
    "progress": "plain",
}
DEFAULTS = {
    "batch_size": "8",
    "learning_rate": "5e-5",
    "weight_decay": "0",
    "adam_beta2": "0.999",
    "schedule": "linear",
    "min_lr_ratio": "0",
    "warmup_steps": "0",
    "num_steps": "3ep",
}
ENOUGH = {"per_device_eval_batch_size": 8}
"""A key by which the kind is recognised, so that a test has only its own keys besides."""


def translated(tree: dict[str, Any], path: Path | None = None, **overrides: str) -> Translation:
    content = json.dumps(ENOUGH | tree, indent=1)
    source = Source("a.json", path, content, parse_tree(content, "a.json", ".json"), overrides)
    return translate(source, ".json")


def remark_of(translation: Translation, key: str) -> str:
    return next(note.remark for note in translation.notes if note.key == key)


def test_the_length_of_sequences_is_not_asked_for_where_it_is_given() -> None:
    done = translated({"per_device_train_batch_size": 2, "block_size": 128})
    assert "--model_variant" in remark_of(done, "model") and "--seq_length" not in remark_of(done, "model")


def test_every_key_is_translated() -> None:
    done = translated(CONFIG)
    assert done.settings == SETTINGS
    assert not [note.key for note in done.notes if "not known" in note.remark]
    assert "--seq_length" in remark_of(done, "model and seq_length")
    assert next(note.value for note in done.notes if note.key == "hub_token") == "(not shown)"


def test_what_is_not_given_is_the_trainers_default() -> None:
    done = translated({})
    assert done.settings == DEFAULTS
    assert "  num_train_epochs: (not given)" in "\n".join(done.table())


@pytest.mark.parametrize("name", ["training_args.json", "args.yaml"])
def test_it_is_a_recipe_as_it_stands(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(CONFIG))
    config = load_train_config([str(path)], {"model_variant": "tiny", "data_path": "data"})
    assert config.batch.batch_size == 16
    assert str(config.schedule.warmup_steps) == "3%"
    assert str(config.checkpoint.checkpoint_interval) == "0.5ep"
    assert config.report.tracker_run_name == "a"


@pytest.mark.parametrize(
    ("tree", "settings"),
    [
        ({"per_gpu_train_batch_size": 4}, {"batch_size": "4"}),
        ({"max_steps": 100, "num_train_epochs": 5}, {"num_steps": "100"}),
        ({"max_steps": 0, "num_train_epochs": 5}, {"num_steps": "5ep"}),
        ({"max_steps": 1000, "save_steps": 0.0015}, {"num_steps": "1000", "checkpoint_interval": "2"}),
        ({"logging_steps": 0.1}, {"report_interval": "0.3ep"}),
        ({"logging_strategy": "no", "logging_steps": 5}, {"report_interval": "0"}),
        ({"logging_strategy": "epoch", "logging_steps": 5}, {"report_interval": "1ep"}),
        ({"logging_strategy": "steps"}, {"report_interval": "500"}),
        ({"save_strategy": "no", "save_steps": 5}, {"checkpoint_interval": "0"}),
        ({"save_strategy": "IntervalStrategy.EPOCH"}, {"checkpoint_interval": "1ep"}),
        ({"save_strategy": "best"}, {"checkpoint_interval": "0", "save_best": "true"}),
        ({"eval_strategy": "no", "eval_steps": 5}, {"eval_interval": "0"}),
        ({"evaluation_strategy": "epoch", "eval_steps": 5}, {"eval_interval": "1ep"}),
        ({"eval_strategy": "steps", "eval_steps": 5}, {"eval_interval": "5"}),
        ({"eval_strategy": "steps", "logging_steps": 7}, {"eval_interval": "7", "report_interval": "7"}),
        ({"save_total_limit": -1}, {"keep_last": "none"}),
        ({"warmup_steps": 100, "warmup_ratio": 0.1}, {"warmup_steps": "100"}),
        ({"warmup_steps": 0.05}, {"warmup_steps": "5%"}),
        ({"lr_scheduler_type": "SchedulerType.COSINE"}, {"schedule": "cosine"}),
        (
            {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 1}},
            {"schedule": "cosine"},
        ),
        (
            {
                "lr_scheduler_type": "polynomial",
                "lr_scheduler_kwargs": {"power": 2, "lr_end": 1e-5},
                "learning_rate": 1e-4,
            },
            {"schedule": "polynomial", "decay_power": "2", "min_lr_ratio": "0.1", "learning_rate": "0.0001"},
        ),
        (
            {
                "lr_scheduler_type": "cosine_warmup_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr_rate": 0.2, "warmup_lr_rate": 0.1},
            },
            {"schedule": "cosine", "min_lr_ratio": "0.2"},
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 10, "num_stable_steps": 5},
            },
            {"schedule": "wsd", "decay_steps": "10", "decay_shape": "cosine"},
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {
                    "num_stable_steps": 5,
                    "decay_type": "1-sqrt",
                    "min_lr_ratio": 0.1,
                    "warmup_type": "linear",
                },
            },
            {"schedule": "wsd", "stable_steps": "5", "decay_shape": "1-sqrt", "min_lr_ratio": "0.1"},
        ),
        ({"fp16": True, "bf16": False}, {"mixed_precision": "true", "mp_dtype": "float16"}),
        ({"fp16": False, "bf16": False}, {"mixed_precision": "false"}),
        ({"no_cuda": True}, {"device": "cpu"}),
        ({"optim": "paged_adamw_8bit"}, {"optimizer": "adamw"}),
        ({"optim": "OptimizerNames.ADAMW_HF"}, {"optimizer": "adamw"}),
        ({"fsdp": ["shard_grad_op", "offload"]}, {"sharding_strategy": "zero2"}),
        ({"fsdp": "hybrid_shard,auto_wrap"}, {"sharding_strategy": "hsdp"}),
        ({"fsdp": "hybrid_shard_zero2"}, {"sharding_strategy": "hsdp_zero2"}),
        ({"fsdp": "no_shard"}, {"sharding_strategy": "ddp"}),
        ({"fsdp": True}, {"sharding_strategy": "fsdp"}),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, {"sharding_strategy": "zero2"}),
        ({"fsdp": []}, {}),
        (
            {"fsdp": False, "fsdp_config": {"fsdp_activation_checkpointing": True}},
            {"fsdp_activation_checkpointing": "true"},
        ),
        ({"activation_checkpointing": True}, {"fsdp_activation_checkpointing": "true"}),
        ({"disable_tqdm": False}, {"progress": "auto"}),
        ({"report_to": "none", "run_name": "a"}, {"tracker": "none"}),
        ({"resume_from_checkpoint": "out/checkpoint-500"}, {"resume_from_checkpoint": "out/checkpoint-500"}),
        ({"label_smoothing_factor": 0.0, "adafactor": False, "optim_args": ""}, {}),
        ({"neftune_noise_alpha": 0, "accelerator_config": {"split_batches": False}}, {}),
        ({"block_size": 512, "validation_split_percentage": 5}, {"seq_length": "512", "held_out_fraction": "0.05"}),
        ({"config_overrides": "hidden_size=64,num_hidden_layers=2"}, {"hidden_size": "64", "num_hidden_layers": "2"}),
        ({"model_type": "llama", "metric_for_best_model": "accuracy"}, {}),
    ],
)
def test_a_key_becomes(tree: dict[str, Any], settings: dict[str, str]) -> None:
    assert translated(tree).settings == DEFAULTS | settings


def test_a_constant_rate_has_no_warm_up() -> None:
    expected = {name: value for name, value in DEFAULTS.items() if name != "min_lr_ratio"} | {"schedule": "constant"}
    done = translated({"lr_scheduler_type": "constant", "warmup_steps": 100, "warmup_ratio": 0.1})
    assert done.settings == expected
    done = translated({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 100})
    assert done.settings == expected | {"warmup_steps": "100"}


@pytest.mark.parametrize("name", ["sgd", "rmsprop"])
def test_what_an_optimizer_does_not_read_is_left_out(name: str, tmp_path: Path) -> None:
    tree = {"optim": name, "adam_beta1": 0.8, "adam_beta2": 0.8, "adam_epsilon": 1e-6}
    done = translated(tree)
    assert done.settings == {key: value for key, value in DEFAULTS.items() if key != "adam_beta2"} | {"optimizer": name}
    assert remark_of(done, "adam_beta1") == f"optim={name} does not read it"
    (tmp_path / "a.json").write_text(json.dumps(ENOUGH | tree))
    assert load_train_config([str(tmp_path / "a.json")], {"data_path": "data"}).optimizer.optimizer == name


@pytest.mark.parametrize("group", GROUPS)
def test_what_has_no_equivalent_is_left_out_with_its_reason(group: str) -> None:
    for value in (1, {"anything": 1}):
        done = translated({group: value})
        assert {note.remark for note in done.notes if note.key.startswith(group)} == {GROUPS[group]}


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"lr_scheduler_type": "inverse_sqrt"}, "lr_scheduler_type: inverse_sqrt: one of linear, cosine, "),
        (
            {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}},
            "lr_scheduler_type: cosine_with_restarts: the learning rate comes down once",
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1}},
            "lr_scheduler_kwargs.min_lr: 1: a learning rate from 0 to learning_rate is needed",
        ),
        (
            {"lr_scheduler_kwargs": {"warmup_type": "cosine"}},
            "lr_scheduler_kwargs.warmup_type: cosine: the warm-up is linear",
        ),
        ({"warmup_ratio": 2}, "warmup_ratio: 2: a number from 0 to 1 is needed"),
        ({"eval_strategy": "often"}, "eval_strategy: often: one of no, steps, epoch is needed"),
        ({"optim": "lion_32bit"}, "optim: lion_32bit: of the Trainer's optimizers AdamW, SGD and RMSprop are there"),
        ({"optim_args": "a=1"}, "optim_args: a=1: arguments of an optimizer are settings here"),
        ({"adafactor": True}, "adafactor: true: there is no Adafactor"),
        ({"bf16": True, "fp16": True}, "bf16: true: fp16 is true, too: keep one"),
        ({"bf16": "maybe"}, "bf16: maybe: true or false is needed"),
        ({"fsdp": "full_shard shard_grad_op"}, "fsdp: full_shard shard_grad_op: one of full_shard"),
        ({"fsdp": "sharded"}, "fsdp: sharded: one of full_shard"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: 0.1: the loss is plain cross-entropy"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha: 5: no noise is added"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config.split_batches: true: the batch is of"),
        ({"model_type": "gpt2"}, "model_type: gpt2: it is no Llama"),
        ({"config_overrides": "n_embd=64"}, "config_overrides: n_embd=64: n_embd: no dimension of a Llama; they are"),
        ({"config_name": "gpt2"}, "config_name: gpt2: give its dimensions: --model_variant"),
        ({"model_name_or_path": "gpt2"}, "model_name_or_path: gpt2: there is no such folder: download the model"),
    ],
)
def test_what_cannot_be_translated_is_named(tree: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        translated(tree)
    assert f": {problem}" in str(error.value)


# Model and text of the examples


def test_a_folder_with_a_model_is_started_from_with_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    done = translated({"model_name_or_path": str(tmp_path)})
    assert done.settings == DEFAULTS | {"ckpt_load_path": str(tmp_path), "tokenizer_path": str(tmp_path)}
    done = translated({"model_name_or_path": str(tmp_path), "tokenizer_name": "gpt2"})
    assert done.settings == DEFAULTS | {"ckpt_load_path": str(tmp_path)}
    assert remark_of(done, "tokenizer_name").startswith("there is no such folder: download its tokenizer.json")


@pytest.mark.parametrize("key", ["model_name_or_path", "config_name"])
def test_a_model_of_the_command_line_wins(key: str) -> None:
    done = translated({key: "gpt2"}, model_variant="tiny")
    assert done.settings == DEFAULTS
    assert remark_of(done, key) == "the command line says which model"


def test_files_of_text_are_prepared_first() -> None:
    done = translated({"train_file": "texts/train.jsonl", "validation_file": "texts/valid.jsonl"})
    prepared = {"data_path": "data", "datasets": "train", "tokenizer_path": "data", "sep_token": "0"}
    assert done.settings == DEFAULTS | prepared | {"eval_datasets": "data/valid"}
    command = "pretrain prepare --input_path=texts/train.jsonl --output_path=data"
    assert remark_of(done, "train_file") == f"prepare it first: {command}"


def test_text_is_prepared_with_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    done = translated({"model_name_or_path": str(tmp_path), "dataset_name": "corpus", "dataset_config_name": "en"})
    assert done.settings == DEFAULTS | {
        "ckpt_load_path": str(tmp_path),
        "tokenizer_path": str(tmp_path),
        "data_path": "data",
        "datasets": "corpus",
    }
    assert remark_of(done, "dataset_name") == (
        f"prepare it first: pretrain prepare --hf_dataset=corpus --hf_config=en --tokenizer_path={tmp_path} "
        "--output_path=data; it prints the --sep_token to give"
    )


# DeepSpeed within

DEEPSPEED = {
    "train_batch_size": "auto",
    "gradient_accumulation_steps": 4,
    "fp16": {"enabled": False},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
    "steps_per_print": 2000,
    "tensorboard": {"enabled": False},
}
TREE = {"bf16": True, "fp16": False, "gradient_accumulation_steps": 4, "warmup_steps": 10, "logging_steps": 10}
WITH_DEEPSPEED = {name: value for name, value in DEFAULTS.items() if name != "min_lr_ratio"} | {
    "mixed_precision": "true",
    "mp_dtype": "bfloat16",
    "grad_accum_steps": "4",
    "schedule": "constant",
    "warmup_steps": "10",
    "report_interval": "10",
    "sharding_strategy": "fsdp",
}


def test_deepspeed_in_the_file_is_read_with_it() -> None:
    done = translated(TREE | {"deepspeed": DEEPSPEED})
    assert done.settings == WITH_DEEPSPEED
    assert remark_of(done, "deepspeed.bf16.enabled") == "as the Trainer has it"
    assert remark_of(done, "deepspeed.steps_per_print") == "the Trainer says"
    assert not [note.key for note in done.notes if "not known" in note.remark]


def test_a_deepspeed_file_beside_it_is_read_with_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    done = translated(TREE | {"deepspeed": "ds.json"}, tmp_path / "a.json")
    assert done.settings == WITH_DEEPSPEED
    assert remark_of(translated({"deepspeed": ""}), "deepspeed") == "empty"


def test_what_deepspeed_gives_differently_is_named_with_both_places() -> None:
    with pytest.raises(
        ConfigError, match=r"two values for grad_accum_steps, 4 and 8: a.json:5: .*deepspeed.gradient_acc"
    ):
        translated(TREE | {"deepspeed": DEEPSPEED | {"gradient_accumulation_steps": 8}})
    with pytest.raises(ConfigError, match="two values for mp_dtype, bfloat16 and float16"):
        translated(TREE | {"deepspeed": DEEPSPEED | {"fp16": {"enabled": True}}})
