"""DeepSpeed's JSON alone: each of its keys, the arithmetic of the batch, and what the whole of it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pretraining.config.command_line import load_train_config
from pretraining.config.foreign.deepspeed import GROUPS
from pretraining.config.foreign.kinds import translate
from pretraining.config.foreign.translation import Source, Translation
from pretraining.config.settings_files import parse_tree
from pretraining.errors import ConfigError

CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.01}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 10, "total_num_steps": 100},
    },
    "fp16": {
        "enabled": False,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "allgather_bucket_size": 5e8,
    },
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False, "profile": False},
    "steps_per_print": 20,
    "wall_clock_breakdown": False,
    "flops_profiler": {"enabled": True, "profile_step": 5, "module_depth": -1},
    "tensorboard": {"enabled": True, "output_path": "logs/", "job_name": "a"},
    "wandb": {"enabled": True, "project": "p", "team": "t", "group": "g"},
}
ENOUGH = {"wall_clock_breakdown": False}
"""A key by which the kind is recognised, so that a test has only its own keys besides."""


def translated(tree: dict[str, Any]) -> Translation:
    content = json.dumps(ENOUGH | tree, indent=1)
    return translate(Source("ds.json", None, content, parse_tree(content, "ds.json", ".json")), ".json")


def problem_of(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        translated(tree)
    return str(error.value)


def remark_of(translation: Translation, key: str) -> str:
    return next(note.remark for note in translation.notes if note.key == key)


def test_every_key_is_translated() -> None:
    done = translated(CONFIG)
    assert done.settings == {
        "global_batch_size": "32",
        "batch_size": "4",
        "grad_clip_thresh": "0.5",
        "optimizer": "adamw",
        "learning_rate": "0.0003",
        "adam_beta1": "0.8",
        "adam_beta2": "0.9",
        "adam_epsilon": "1e-07",
        "weight_decay": "0.01",
        "schedule": "linear",
        "min_lr_ratio": "0",
        "warmup_steps": "10",
        "num_steps": "100",
        "mixed_precision": "true",
        "mp_dtype": "bfloat16",
        "sharding_strategy": "zero2",
        "fsdp_activation_checkpointing": "true",
        "report_interval": "20",
        "use_profiler": "true",
        "profile_steps": "5",
        "tracker": "tensorboard,wandb",
        "tracker_dir": "logs/a",
        "tracker_project_name": "p",
    }
    assert not [note.key for note in done.notes if "not known" in note.remark]
    assert remark_of(done, "model, data").endswith("give --model_variant and --data_path")
    assert "a smaller --batch_size" in remark_of(done, "zero_optimization.offload_optimizer.device")
    assert remark_of(done, "zero_optimization.offload_param.device") == "as here"


def test_it_is_a_recipe_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    config = load_train_config([str(path)], {"model_variant": "tiny", "data_path": "data"})
    assert config.batch.global_batch_size == 32
    assert config.parallel.sharding_strategy == "zero2"
    assert config.optimizer.adam_beta2 == 0.9


# Batch


@pytest.mark.parametrize(
    ("tree", "settings"),
    [
        ({"train_batch_size": 32}, {"global_batch_size": "32"}),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, {"global_batch_size": "32"}),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4},
            {"global_batch_size": "32", "batch_size": "4"},
        ),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            {"batch_size": "4", "grad_accum_steps": "2"},
        ),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, {}),
    ],
)
def test_two_of_the_three_numbers_make_the_batch(tree: dict[str, Any], settings: dict[str, str]) -> None:
    assert translated(tree).settings == settings


def test_a_batch_that_no_number_of_gpus_makes_is_refused_with_the_arithmetic() -> None:
    tree = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    assert problem_of(tree) == (
        "ds.json:3: train_batch_size: 32: it is train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 3 x "
        "GPUs, and 32 / 12 = 2.67 is no number of GPUs: change one of them, or leave one out"
    )


# Optimizer and schedule


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ({"type": "Adam"}, {"optimizer": "adamw"}),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, {"optimizer": "adam"}),
        ({"type": "AdamW", "params": {"torch_adam": True}}, {"optimizer": "adamw", "weight_decay": "0.01"}),
        ({"type": "AdamW", "params": {"amsgrad": False, "bias_correction": True}}, {"optimizer": "adamw"}),
    ],
)
def test_what_an_adam_is_not_given_is_as_deepspeed_has_it(optimizer: dict[str, Any], settings: dict[str, str]) -> None:
    own = {"learning_rate": "1e-3", "weight_decay": "0", "adam_beta1": "0.9", "adam_beta2": "0.999"}
    assert translated({"optimizer": optimizer}).settings == own | settings


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (
            {"type": "SGD", "params": {"lr": 0.1, "weight_decay": 0, "momentum": 0, "betas": [0.9, 0.9]}},
            {"optimizer": "sgd", "learning_rate": "0.1", "weight_decay": "0"},
        ),
        (
            {"type": "SGD", "params": {"lr": 0.1, "weight_decay": 0, "momentum": 0.9, "nesterov": True}},
            {
                "optimizer": "sgdm",
                "learning_rate": "0.1",
                "weight_decay": "0",
                "momentum": "0.9",
                "nesterov": "true",
            },
        ),
        (
            {"type": "Muon", "params": {"lr": 1e-3, "muon_lr": 0.02}},
            {"optimizer": "muon", "learning_rate": "0.02", "muon_adam_learning_rate": "0.001"},
        ),
        (
            {"type": "Muon", "params": {"lr": 1, "muon_lr": 0.02, "adam_lr": 3e-4, "momentum": 0.9}},
            {
                "optimizer": "muon",
                "learning_rate": "0.02",
                "muon_adam_learning_rate": "0.0003",
                "momentum": "0.9",
            },
        ),
    ],
)
def test_other_optimizers(optimizer: dict[str, Any], settings: dict[str, str]) -> None:
    assert translated({"optimizer": optimizer}).settings == settings


def test_the_peak_of_the_schedule_takes_the_place_of_the_optimizers_rate() -> None:
    done = translated(
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_type": "log"}},
        }
    )
    assert done.settings["learning_rate"] == "0.001"
    assert (done.settings["schedule"], done.settings["warmup_steps"]) == ("constant", "1000")
    assert remark_of(done, "optimizer.params.lr") == "the schedule's scheduler.params.warmup_max_lr takes its place"
    assert remark_of(done, "scheduler.params.warmup_type") == "the warm-up is linear here"


def test_the_cosine_ends_where_deepspeeds_does() -> None:
    params: dict[str, Any] = {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_type": "linear"}
    done = translated({"scheduler": {"type": "WarmupCosineLR", "params": params}})
    expected = {"schedule": "cosine", "num_steps": "100", "warmup_steps": "10", "min_lr_ratio": "0.0001"}
    assert done.settings == expected
    done = translated({"scheduler": {"type": "WarmupCosineLR", "params": params | {"cos_min_ratio": 0.1}}})
    assert done.settings == expected | {"min_lr_ratio": "0.1"}


def test_the_length_of_the_run_is_asked_for_where_the_file_does_not_give_it() -> None:
    for steps, key in ((100, "model, data"), ("auto", "model, data, num_steps")):
        done = translated({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": steps}}})
        assert done.notes[-1].key == key
        assert ("--num_steps" in done.notes[-1].remark) == (steps == "auto")


def test_a_warm_up_without_its_peak_has_the_optimizers() -> None:
    done = translated({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}})
    assert done.settings == {"schedule": "constant", "warmup_steps": "10"}
    assert remark_of(done, "scheduler.params.warmup_max_lr").startswith("DeepSpeed takes 0.001")


# Precision and sharding


@pytest.mark.parametrize(
    ("tree", "settings"),
    [
        ({"fp16": {"enabled": True}}, {"mixed_precision": "true", "mp_dtype": "float16"}),
        ({"bfloat16": {"enabled": True}}, {"mixed_precision": "true", "mp_dtype": "bfloat16"}),
        ({"fp16": {"enabled": False}}, {"mixed_precision": "false"}),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": "auto"}}, {}),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": True}}, {"mixed_precision": "true", "mp_dtype": "bfloat16"}),
        ({"zero_optimization": {"stage": 0}}, {"sharding_strategy": "ddp"}),
        ({"zero_optimization": {"stage": 1}}, {"sharding_strategy": "zero2"}),
        ({"zero_optimization": True}, {"sharding_strategy": "zero2"}),
        ({"zero_optimization": {"stage": 3, "cpu_offload": False}}, {"sharding_strategy": "fsdp"}),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 8}},
            {"sharding_strategy": "hsdp", "hsdp_group_size": "8"},
        ),
        ({"activation_checkpointing": {"number_checkpoints": 4}}, {"fsdp_activation_checkpointing": "true"}),
        ({"activation_checkpointing": {"partition_activations": False}}, {}),
        ({"compile": {"deepcompile": True}}, {"use_torch_compile": "true"}),
        ({"steps_per_print": float("inf")}, {"report_interval": "0"}),
        ({"tensorboard": {"enabled": False}}, {"tracker": "none"}),
        ({"wandb": {"enabled": False, "project": "p"}}, {"tracker": "none"}),
        (
            {"tensorboard": {"enabled": True, "output_path": "l"}},
            {"tracker": "tensorboard", "tracker_dir": "l/DeepSpeedJobName"},
        ),
        ({"flops_profiler": {"enabled": False, "profile_step": 1}}, {}),
        ({"tensor_parallel": {"autotp_size": 0}, "sequence_parallel_size": 1, "pipeline": {"stages": "auto"}}, {}),
    ],
)
def test_a_key_becomes(tree: dict[str, Any], settings: dict[str, str]) -> None:
    assert translated(tree).settings == settings


def test_auto_is_what_the_settings_here_say() -> None:
    done = translated({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}})
    assert remark_of(done, "optimizer.params.lr").endswith("fill in: give --learning_rate, or leave it open")
    assert remark_of(done, "optimizer.params.betas").endswith("fill in: give --adam_beta2, or keep 0.95")
    assert "learning_rate" not in done.settings
    assert "adam_beta2" not in done.settings


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_about_speed_or_memory_is_left_out_with_its_reason(group: str) -> None:
    tree: Any = {"anything": 1}
    for part in reversed(group.split(".")):
        tree = {part: tree}
    done = translated(tree)
    assert [note.remark for note in done.notes if note.key.startswith(group)] == [GROUPS[group]]


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"train_batch_size": "many"}, "train_batch_size: many: a whole number from 1 on is needed"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: 0: a whole number from 1 on is needed"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type: Lamb: of DeepSpeed's optimizers Adam, AdamW, SGD and Muon"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type: OneBitAdam: of DeepSpeed's optimizers"),
        ({"optimizer": {"params": {"betas": 0.9}}}, "optimizer.params.betas: 0.9: two numbers are needed"),
        ({"optimizer": {"params": {"amsgrad": True}}}, "optimizer.params.amsgrad: true: there is no AMSGrad"),
        ({"optimizer": {"params": {"bias_correction": False}}}, "optimizer.params.bias_correction: false: Adam"),
        ({"optimizer": {"params": {"dampening": 0.1}}}, "optimizer.params.dampening: 0.1: momentum is not dampened"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type: OneCycle: of DeepSpeed's schedules WarmupLR"),
        ({"fp16": {"enabled": "maybe"}}, "fp16.enabled: maybe: true or false is needed"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled: true: bf16.enabled is true, too"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: 4: a stage from 0 to 3 is needed"),
        ({"amp": {"enabled": True}}, "amp.enabled: true: Apex is not there"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled: true: give bf16.enabled"),
        ({"elasticity": {"enabled": True}}, "elasticity.enabled: true: give train_batch_size in its place"),
        ({"progressive_layer_drop": {"enabled": True}}, "progressive_layer_drop.enabled: true: no layers are dropped"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.enabled: true: the length of sequences"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency.enabled: true: data is neither sorted nor dropped"),
        (
            {"tensor_parallel": {"autotp_size": 4}},
            "tensor_parallel.autotp_size: 4: there is no tensor parallelism here",
        ),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size: 2: there is no sequence parallelism here"),
        ({"pipeline": {"stages": 2}}, "pipeline.stages: 2: there is no pipeline parallelism here"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention.mode: fixed: attention is dense"),
        (
            {"compression_training": {"pruning": {"shared": {"enabled": True}}}},
            "compression_training.pruning.shared.enabled: true: weights are not compressed",
        ),
        (
            {"zero_optimization": {"zero_quantized_gradients": True}},
            "zero_optimization.zero_quantized_gradients: true: gradients are not quantised",
        ),
        (
            {"zero_optimization": {"zero_quantized_weights": True}},
            "zero_optimization.zero_quantized_weights: true: weights are not quantised",
        ),
    ],
)
def test_what_cannot_be_translated_is_named(tree: dict[str, Any], problem: str) -> None:
    assert problem in problem_of(tree)
