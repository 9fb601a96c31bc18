"""Rules over several settings: each one refuses what it is about, and lets the rest pass."""

from __future__ import annotations

from typing import Any

import pytest

from pretraining.config.command_line import load_train_config
from pretraining.config.fields import build, settings_of
from pretraining.config.rules import RULES, check_config, find_problems, remarks
from pretraining.config.training import DataConfig, TrainConfig, checkpointed_blocks
from pretraining.config.values import parse_value
from pretraining.config.variants import VARIANTS
from pretraining.errors import ConfigError
from pretraining.progress import Duration


def duration(text: str) -> Duration:
    return Duration.parse(text)


def config_of(**values: Any) -> TrainConfig:
    source = {} if "data_path" in values or "use_dummy_dataset" in values else {"data_path": "d"}
    return build(TrainConfig, source | values)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"data_path": None}, "data_path"),
        ({"device": "cuda", "backend": "gloo"}, "backend"),
        ({"device": "cpu", "backend": "nccl"}, "backend"),
        ({"datasets": ("a", "b"), "weights": (1.0,)}, "weights"),
        ({"weights": (1.0,)}, "weights"),
        ({"datasets": ("a", "b"), "weights": (1.0, -0.5)}, "weights"),
        ({"datasets": ("a", "b"), "weights": (0.0, 0.0)}, "weights"),
        ({"best_by": "web"}, "best_by"),
        ({"early_stopping_evaluations": 3}, "early_stopping_evaluations"),
        ({"sample_at_evaluations": True, "tokenizer_path": "tokenizer"}, "sample_at_evaluations"),
        ({"sample_at_evaluations": True, "held_out_fraction": 0.1}, "sample_at_evaluations"),
        (
            {
                "sample_at_evaluations": True,
                "held_out_fraction": 0.1,
                "tokenizer_path": "tokenizer",
                "sample_tokens": 0,
            },
            "sample_at_evaluations",
        ),
        ({"eval_only": True}, "eval_only"),
        (
            {"eval_only": True, "eval_datasets": ("books",), "data_path": None, "held_out_fraction": 0.1},
            "held_out_fraction",
        ),
        (
            {"early_stopping_evaluations": 3, "held_out_fraction": 0.1, "eval_interval": Duration(0, "steps")},
            "early_stopping_evaluations",
        ),
        ({"max_rollbacks": 2, "max_skipped_steps": 0}, "max_rollbacks"),
        ({"replica_check_interval": Duration(100, "steps"), "sharding_strategy": "zero2"}, "replica_check_interval"),
        ({"use_profiler": True, "profile_steps": ("10-12", "9-7")}, "profile_steps"),
        ({"file_type": "parquet", "data_path": None, "use_dummy_dataset": True}, "file_type"),
        ({"hang_timeout": Duration(10**18, "seconds")}, "hang_timeout"),
        ({"profile_steps": ("10-12",)}, "profile_steps"),
        ({"profile_interval": Duration(100, "steps")}, "profile_interval"),
        ({"global_batch_size": 4, "grad_accum_steps": 8}, "grad_accum_steps"),
        ({"num_steps": duration("0tok")}, "num_steps"),
        ({"num_steps": duration("100"), "warmup_steps": duration("200")}, "warmup_steps"),
        ({"num_steps": duration("1ep"), "warmup_steps": duration("2ep")}, "warmup_steps"),
        (
            {"num_steps": duration("10"), "warmup_steps": duration("1Mtok"), "global_batch_size": 4, "seq_length": 100},
            "warmup_steps",
        ),
        (
            {"num_steps": duration("1ktok"), "warmup_steps": duration("9"), "global_batch_size": 4, "seq_length": 100},
            "warmup_steps",
        ),
        ({"hsdp_group_size": 4}, "hsdp_group_size"),
        ({"weights_only": True}, "weights_only"),
        ({"mixed_precision": False, "mp_dtype": "float16"}, "mp_dtype"),
        ({"ckpt_save_path": ""}, "ckpt_save_path"),
        ({"col_name": ""}, "col_name"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, Any], named: str) -> None:
    [problem] = find_problems(config_of(**values))
    assert ConfigError(problem).settings[0] == named


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"use_dummy_dataset": True},
        {"datasets": ("a", "b")},
        {"datasets": ("a", "b"), "weights": (1.0, 3.0)},
        {"seq_length": 100_000},  # longer than the variant's context
        {"global_batch_size": 4, "grad_accum_steps": 4},
        {"num_steps": duration("100"), "warmup_steps": duration("100")},
        {"num_steps": duration("100"), "warmup_steps": duration("0")},
        {"num_steps": duration("100"), "warmup_steps": duration("1Ttok")},  # not known before the batch is
        {"num_steps": duration("1ep"), "warmup_steps": duration("5000"), "global_batch_size": 4},
        {"num_steps": duration("1ktok"), "warmup_steps": duration("3"), "global_batch_size": 4, "seq_length": 100},
        {"hsdp_group_size": 4, "sharding_strategy": "hsdp"},
        {"hsdp_group_size": 4, "sharding_strategy": "hsdp_zero2"},
        {"checkpoint_interval": duration("0")},
    ],
)
def test_settings_that_fit_pass(values: dict[str, Any]) -> None:
    assert find_problems(config_of(**values)) == []


@pytest.mark.parametrize(
    ("values", "count"),
    [
        ({"weights_only": True, "ckpt_load_path": "runs/a"}, 0),
        ({"model_variant": "gpt"}, 1),
        ({"num_attention_heads": 30, "num_key_value_heads": 7}, 2),
    ],
)
def test_all_problems_of_the_model_are_told(values: dict[str, Any], count: int) -> None:
    assert len(find_problems(config_of(**values))) == count


def test_a_rule_is_left_out_where_a_setting_that_it_reads_could_not_be_read() -> None:
    config = config_of(num_steps=duration("100"), warmup_steps=duration("200"))
    assert find_problems(config, {"num_steps"}) == []
    assert len(find_problems(config, {"seed"})) == 1


def test_rules_read_settings_that_exist() -> None:
    assert [rule for rule in RULES if not rule.reads <= set(settings_of(rule.root))] == []


@pytest.mark.parametrize(
    ("data", "beginnings"),
    [
        ({"held_out_fraction": 1.5}, ["held_out_fraction=1.5"]),
        ({"bos_token": -1}, ["bos_token=-1"]),
        ({"strip_tokens": (3, -1)}, ["strip_tokens=3,-1"]),
        ({"strip_tokens": (1.5,)}, ["strip_tokens=1.5"]),
        ({"min_length": 0}, ["min_length=0"]),
        ({"min_length": 0, "use_dummy_dataset": False}, ["min_length=0", "no data"]),
    ],
)
def test_a_configuration_made_in_python_is_checked_like_flags(data: dict[str, Any], beginnings: list[str]) -> None:
    check_config(TrainConfig(data=DataConfig(use_dummy_dataset=True)))
    with pytest.raises(ConfigError) as error:
        check_config(TrainConfig(data=DataConfig(**{"use_dummy_dataset": True, **data})))
    assert [problem.startswith(each) for problem, each in zip(error.value.problems, beginnings, strict=True)] == [
        True
    ] * len(beginnings)


def test_a_problem_of_one_value_keeps_its_rules_silent() -> None:
    with pytest.raises(ConfigError) as error:
        check_config(config_of(vocab_size=-1, sep_token=3))
    assert error.value.problems == ("vocab_size=-1: the smallest value is 2",)


# Activation checkpointing and float8


@pytest.mark.parametrize("selective", ["0", "-1", "3/2", "2.5", "1/0", "1/", "some", "", "1/3/5", "1e99999999"])
def test_what_is_no_number_of_blocks_is_refused(selective: str) -> None:
    [problem] = find_problems(config_of(fsdp_activation_checkpointing=True, selective_checkpointing=selective))
    assert ConfigError(problem).settings == ("selective_checkpointing",)


@pytest.mark.parametrize("selective", ["13", "1/32"])
def test_a_selection_that_takes_no_block_is_refused(selective: str) -> None:
    with pytest.raises(ConfigError) as error:
        checkpointed_blocks(selective, 12)
    assert error.value.settings[0] == "selective_checkpointing"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["use_dummy_dataset=true"], []),
        (
            ["use_dummy_dataset=true", "data_path=d", "selective_checkpointing=op"],
            ["use_dummy_dataset", "selective_checkpointing"],
        ),
        (["data_path=d", "fsdp_activation_checkpointing=true", "selective_checkpointing=op"], []),
        (["data_path=d", "min_lr_ratio=0.2", "schedule=constant"], ["min_lr_ratio"]),
        (["data_path=d", "min_lr_ratio=0.2", "training_stage=annealing"], ["min_lr_ratio"]),
        (["data_path=d", "min_lr_ratio=0.2", "schedule=linear"], []),
        (["data_path=d", "min_lr_ratio=0.2", "schedule=mine:schedule"], []),
        (["data_path=d", "sample_prompt=def"], ["sample_prompt"]),
        (["data_path=d", "sample_prompt=def", "tokenizer_path=t"], []),
    ],
)
def test_a_setting_that_another_one_leaves_without_an_effect_is_a_remark(flags: list[str], named: list[str]) -> None:
    """So that one flag can be flipped: to measure speed, or to see what checkpointing costs."""
    found = remarks(load_train_config(flags))
    assert [ConfigError(remark).settings[0] for remark in found] == named


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        (
            ["model_variant=tiny", "intermediate_size=1000", "seq_length=100"],
            ["--seq_length=100 / 16 = 6.25", "--intermediate_size=1000 / 16 = 62.5"],
        ),
        (
            ["model_variant=tiny", "hidden_size=72", "num_attention_heads=9", "num_key_value_heads=3"],
            ["--hidden_size=72 / 16 = 4.5", "--num_key_value_heads x head size=24 / 16 = 1.5"],
        ),
        (
            ["hidden_size=40", "num_attention_heads=5", "num_key_value_heads=5", "intermediate_size=64"],
            ["40 / 16", "40 / 16"],
        ),
        (["hidden_size=40", "num_attention_heads=5"], []),  # a checkpoint may change them
        (["mixed_precision=false"], ["--mixed_precision=false"]),
        (["mp_dtype=float16"], ["--mp_dtype=float16"]),
        (["device=cpu"], ["--device=cpu"]),
    ],
)
def test_what_does_not_go_with_float8_is_refused(flags: list[str], problems: list[str]) -> None:
    load_train_config(["use_dummy_dataset=true", *[flag for flag in flags if "=false" not in flag]])
    texts = dict(flag.split("=") for flag in ["float8=rowwise", *flags])
    settings = settings_of(TrainConfig)
    found = find_problems(config_of(**{name: parse_value(settings[name], text) for name, text in texts.items()}))
    assert [part in problem for part, problem in zip(problems, found, strict=True)] == [True] * len(problems)


def test_every_variant_can_be_trained_in_float8() -> None:
    for name in VARIANTS:
        load_train_config(["use_dummy_dataset=true", "float8=rowwise", f"model_variant={name}"])
