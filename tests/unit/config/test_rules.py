"""Rules over several settings: each refuses its combination, and accepts others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pretraining.config.fields import build, settings_of
from pretraining.config.read import check_config, load_train_config
from pretraining.config.rules import find_problems, ineffective_settings
from pretraining.config.training import (
    DataConfig,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    checkpointed_blocks,
)
from pretraining.config.values import parse_value
from pretraining.errors import ConfigError

SETTINGS = settings_of(TrainConfig)


def config_of(*flags: str) -> TrainConfig:
    """Return a run with these settings, unchecked, on generated data unless they name data."""
    given = dict(flag.split("=", 1) for flag in flags)
    source = {} if {"data_path", "use_dummy_dataset"} & given.keys() else {"data_path": "d"}
    return build(TrainConfig, {name: parse_value(SETTINGS[name], text) for name, text in (source | given).items()})


SAMPLING = ("sample_at_evaluations=true", "held_out_fraction=0.1")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["data_path=none"], "data_path"),
        (["datasets=a,b", "weights=1"], "weights"),
        (["weights=1"], "weights"),
        (["datasets=a,b", "weights=1,-0.5"], "weights"),
        (["datasets=a,b", "weights=0,0"], "weights"),
        (["token_dtype=uint16", "file_type=npy"], "token_dtype"),
        (["skip_samples=9-7"], "skip_samples"),
        (["use_profiler=true", "profile_steps=10-12,9-7"], "profile_steps"),
        (["profile_steps=10-12"], "profile_steps"),
        (["profile_interval=100"], "profile_interval"),
        (["best_by=web"], "best_by"),
        (["early_stopping_evaluations=3"], "early_stopping_evaluations"),
        (["early_stopping_evaluations=3", "held_out_fraction=0.1", "eval_interval=0"], "early_stopping_evaluations"),
        (["eval_only=true"], "eval_only"),
        (["eval_only=true", "eval_datasets=b", "data_path=none", "held_out_fraction=0.1"], "held_out_fraction"),
        (["eval_only=true", "eval_datasets=b", "ckpt_save_path=none"], "eval_only"),
        (["sample_at_evaluations=true", "tokenizer_path=t"], "sample_at_evaluations"),
        ([*SAMPLING, "use_dummy_dataset=true"], "sample_at_evaluations"),
        ([*SAMPLING, "tokenizer_path=t", "sample_tokens=0"], "sample_at_evaluations"),
        (["dry_run=true", "eval_only=true", "held_out_fraction=0.1"], "dry_run"),
        (["max_rollbacks=2", "max_skipped_steps=0"], "max_rollbacks"),
        (["replica_check_interval=100", "sharding_strategy=zero2"], "replica_check_interval"),
        (["hsdp_group_size=4"], "hsdp_group_size"),
        (["num_steps=0tok"], "num_steps"),
        (["weights_only=true"], "weights_only"),
        (["init_from=scratch", "ckpt_load_path=a"], "init_from"),
        (["init_from=scratch", "resume_from_checkpoint=a"], "init_from"),
        (["ckpt_load_path=b", "resume_from_checkpoint=a"], "resume_from_checkpoint"),
        (["ckpt_format=full", "async_save=true"], "ckpt_format"),
        (["mixed_precision=false", "mp_dtype=float16"], "mp_dtype"),
        (["float8=rowwise", "mixed_precision=false"], "float8"),
        (["float8=rowwise", "mp_dtype=float16"], "float8"),
        (["tracker=wandb,my.OWN:Tracker", "tracker_run_id=a"], "tracker_run_id"),
        (["tracker=tensorboard", "tracker_run_name=a"], "tracker_run_name"),
        (["tracker=wandb,wandb"], "tracker"),
        (["ckpt_save_path=none", "keep_last=3", "tracker=none"], "keep_last"),
        (["ckpt_save_path=none", "use_profiler=true", "tracker=none"], "use_profiler"),
        (["ckpt_save_path=none"], "tracker"),
        (["optimizer_options=momentum=0.9"], "optimizer_options"),
        (["optimizer=sgd", "adam_beta1=0.8"], "adam_beta1"),
        (["muon_ns_steps=3"], "muon_ns_steps"),
        (["model_variant=gpt"], "model_variant"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags: list[str], named: str) -> None:
    [problem] = find_problems(config_of(*flags))
    assert problem.names[0] == named


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["use_dummy_dataset=true"],
        ["datasets=a,b", "weights=1,3"],
        ["seq_length=100000"],  # longer than the variant's context
        ["hsdp_group_size=4", "sharding_strategy=hsdp_zero2"],
        ["checkpoint_interval=0"],
        ["weights_only=true", "ckpt_load_path=runs/a"],
        ["ckpt_save_path=none", "tracker=none"],
        ["tracker=none", "tracker_run_id=a"],
        ["tracker=tensorboard,mlflow", "tracker_run_id=a"],
    ],
)
def test_settings_that_fit_pass(flags: list[str]) -> None:
    assert find_problems(config_of(*flags)) == []


def test_a_problem_about_a_setting_that_could_not_be_parsed_is_dropped() -> None:
    config = config_of("hsdp_group_size=4")
    assert find_problems(config, {"sharding_strategy"}) == []
    assert len(find_problems(config, {"seed"})) == 1


@pytest.mark.parametrize(
    ("data", "beginnings"),
    [
        ({"held_out_fraction": 1.5}, ["--held_out_fraction=1.5"]),
        ({"strip_tokens": (3, -1)}, ["--strip_tokens=3,-1"]),
        ({"weights": "heavy", "datasets": ("a",)}, ["--weights=heavy"]),  # the rule could not compare these
        ({"min_length": 0, "use_dummy_dataset": False}, ["--min_length=0", "no data"]),
    ],
)
def test_a_configuration_made_in_python_is_checked_like_flags(data: dict[str, Any], beginnings: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(TrainConfig(data=DataConfig(**{"use_dummy_dataset": True, **data})))
    assert len(error.value.problems) == len(beginnings)
    assert all(map(str.startswith, error.value.problems, beginnings))


def test_a_configuration_made_in_python_is_converted_and_completed_like_flags() -> None:
    model = ModelConfig(rope_scaling=(8, 1, 4, 8192), attention_bias=True)  # type: ignore[arg-type]
    run = RunConfig(num_steps="5Btok")  # type: ignore[arg-type]
    made = check_config(TrainConfig(model=model, run=run, data=DataConfig(data_path="d", datasets=["a,b"])))  # type: ignore[arg-type]
    assert (made.model.rope_scaling, made.model.attention_bias) == (("8", "1", "4", "8192"), "true")
    assert (str(made.run.num_steps), made.data.datasets) == ("5Btok", ("a,b",))
    made = check_config(TrainConfig(data=DataConfig(use_dummy_dataset=True)))
    assert made.checkpoint.ckpt_save_path is None and made.report.tracker == () and check_config(made) == made


@pytest.mark.parametrize(
    "selective", ["0", "-1", "3/2", "2.5", "1/0", "1/", "some", "", "1/3/5", "1e99999999", "13", "1/32"]
)
def test_a_selection_of_no_blocks_is_refused(selective: str) -> None:
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
        (["data_path=d", "min_lr_ratio=0.2", "schedule=mine:schedule"], []),
        (["data_path=d", "eval_interval=100"], ["eval_interval"]),
        (["data_path=d", "eval_interval=0"], []),
        (["data_path=d", "eval_interval=100", "held_out_fraction=5%"], []),
        (
            ["data_path=d", "optimizer=muon", "muon_adam_weight_decay=0.1", "tie_word_embeddings=true"],
            ["muon_adam_weight_decay"],
        ),
    ],
)
def test_a_setting_without_effect_is_listed(flags: list[str], named: list[str]) -> None:
    """Users flip one flag to measure speed, or the cost of checkpointing."""
    found = ineffective_settings(load_train_config(flags))
    assert [ConfigError(remark).settings[0] for remark in found] == named


def test_annealing_replaces_the_schedule_of_a_recipe_and_refuses_a_typed_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = tmp_path / "wsd.yaml"
    recipe.write_text("use_dummy_dataset: true\nschedule: wsd\nstable_steps: 10\nmin_lr_ratio: 0.2\n")
    caplog.set_level("INFO")
    flags = [f"recipe={recipe}", "training_stage=annealing"]
    assert load_train_config(flags).schedule == ScheduleConfig(training_stage="annealing", min_lr_ratio=0.2)
    assert [line.partition(": ")[2].partition(":")[0] for line in caplog.messages] == ["schedule", "stable_steps"]
    with pytest.raises(ConfigError, match="leave it out, or --schedule"):
        load_train_config([*flags, "schedule=constant"])


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        (
            ["model_variant=tiny", "intermediate_size=1000", "seq_length=100"],
            ["--seq_length=100 / 16 = 6.25", "--intermediate_size=1000 / 16 = 62.5"],
        ),
        (
            ["hidden_size=72", "num_attention_heads=9", "num_key_value_heads=3", "intermediate_size=64"],
            ["--hidden_size=72 / 16 = 4.5", "--num_key_value_heads x head size=24 / 16 = 1.5"],
        ),
        (["hidden_size=40", "num_attention_heads=5"], []),  # a checkpoint may change them
        (
            ["model_variant=tiny", "seq_length=48", "context_parallel_size=2"],  # each rank multiplies 24 tokens
            ["--seq_length / 2 ranks=24 / 16 = 1.5"],
        ),
    ],
)
def test_matrices_that_do_not_fit_float8_are_refused(flags: list[str], problems: list[str]) -> None:
    found = find_problems(config_of("float8=rowwise", *flags))
    assert [part in problem.text for part, problem in zip(problems, found, strict=True)] == [True] * len(problems)
