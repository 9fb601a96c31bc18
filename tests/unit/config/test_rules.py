"""Rules over several settings: each one refuses what it is about, and lets the rest pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pretraining.config.command_line import load_train_config
from pretraining.config.commands import DoctorConfig, PlanConfig
from pretraining.config.fields import build, settings_of
from pretraining.config.rules import RULES, check_config, find_problems, remarks
from pretraining.config.training import DataConfig, RunConfig, TrainConfig
from pretraining.config.variants import VARIANTS
from pretraining.errors import ConfigError
from pretraining.progress import Duration


def duration(text: str) -> Duration:
    return Duration.parse(text)


def config_of(**values: Any) -> TrainConfig:
    source = {} if "data_path" in values or "use_dummy_dataset" in values else {"data_path": "d"}
    return build(TrainConfig, source | values)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"data_path": None}, "no data: give --data_path, --use_dummy_dataset=true or --recipe=demo"),
        (
            {"device": "cuda", "backend": "gloo"},
            "--backend=gloo is for CPUs, and --device=cuda asks for GPUs, which talk by NCCL: leave one of them out",
        ),
        (
            {"device": "cpu", "backend": "nccl"},
            "--backend=nccl is for GPUs, and --device=cpu asks for CPUs, which talk by gloo: leave one of them out",
        ),
        (
            {"datasets": ("a", "b"), "weights": (1.0,)},
            "1 weights for 2 datasets: --weights=1.0 needs one for each of --datasets=a,b, in the same order",
        ),
        ({"weights": (1.0,)}, "--weights=1.0 are proportions of nothing: give --datasets, in the same order"),
        (
            {"datasets": ("a", "b"), "weights": (1.0, -0.5)},
            "--weights=1.0,-0.5: number 2 is -0.5, and proportions are at least 0",
        ),
        (
            {"datasets": ("a", "b"), "weights": (0.0, 0.0)},
            "--weights=0.0,0.0 leave every dataset out: give one of them more than 0",
        ),
        (
            {"use_dummy_dataset": True, "data_path": None, "eval_interval": Duration(1, "epochs")},
            "--eval_interval=1ep counts passes over a dataset, and made-up data has no end: give steps or tokens",
        ),
        (
            {"best_by": "web"},
            "--best_by=web needs documents to evaluate on: give --held_out_fraction=0.01 or --eval_datasets=<folders>",
        ),
        (
            {"early_stopping_evaluations": 3},
            "--early_stopping_evaluations=3 needs documents to evaluate on: give --held_out_fraction=0.01 or "
            "--eval_datasets=<folders>",
        ),
        (
            {"sample_at_evaluations": True, "tokenizer_path": "tokenizer"},
            "--sample_at_evaluations=true needs documents to evaluate on: give --held_out_fraction=0.01 or "
            "--eval_datasets=<folders>",
        ),
        (
            {"sample_at_evaluations": True, "held_out_fraction": 0.1},
            "--sample_at_evaluations=true needs the tokenizer of the data: give --tokenizer_path",
        ),
        (
            {
                **{"sample_at_evaluations": True, "held_out_fraction": 0.1, "tokenizer_path": "tokenizer"},
                "sample_tokens": 0,
            },
            "--sample_at_evaluations=true with --sample_tokens=0 asks for samples of nothing: change one",
        ),
        (
            {"eval_only": True},
            "--eval_only=true needs documents to evaluate on: give --held_out_fraction=0.01 or "
            "--eval_datasets=<folders>",
        ),
        (
            {"eval_only": True, "eval_datasets": ("books",), "data_path": None, "held_out_fraction": 0.1},
            "--held_out_fraction=0.1 is a share of the documents in --data_path: give it, too, or "
            "--held_out_fraction=0",
        ),
        (
            {"early_stopping_evaluations": 3, "held_out_fraction": 0.1, "eval_interval": Duration(0, "steps")},
            "--early_stopping_evaluations=3 looks at evaluations on the way, and --eval_interval=0 has one at the end "
            "alone: change one",
        ),
        ({"datasets": ("a", "b", "a")}, "--datasets=a,b,a names a 2 times; give it once, with a larger weight"),
        (
            {"max_rollbacks": 2, "max_skipped_steps": 0},
            "--max_rollbacks=2 happen after --max_skipped_steps updates left out in a row, and 0 is never: give "
            "--max_skipped_steps=20, or --max_rollbacks=0",
        ),
        (
            {"replica_check_interval": Duration(100, "steps"), "sharding_strategy": "zero2"},
            "--replica_check_interval=100 compares copies of the weights, and zero2 keeps one, in pieces: give "
            "--replica_check_interval=0, or --sharding_strategy=ddp or hsdp",
        ),
        (
            {"use_profiler": True, "profile_steps": ("10-12", "9-7")},
            "profile_steps=10-12,9-7: write the first and the last step of each range, numbered from 1, as in "
            "--profile_steps=10-12,1000-1002",
        ),
        (
            {"file_type": "parquet", "data_path": None, "use_dummy_dataset": True},
            "--file_type=parquet: training does not read Parquet. Make token files of it first: "
            "pretrain prepare --input_path=<its folder> --output_path=<folder>",
        ),
        (
            {"hang_timeout": Duration(10**18, "seconds")},
            "--hang_timeout=1000000000000000000s is more than a year: give less, or --hang_timeout=0s, which is never",
        ),
        (
            {"profile_steps": ("10-12",)},
            "--profile_steps=10-12 needs --use_profiler=true: give it, or leave the steps out",
        ),
        (
            {"profile_interval": Duration(100, "steps")},
            "--profile_interval=100 needs --use_profiler=true: give it, or leave it out",
        ),
        (
            {"sep_token": 32000, "model_variant": "7b"},
            "--sep_token=32000 is outside a vocabulary of 32000 (0 to 31999): change --sep_token or --vocab_size",
        ),
        (
            {"bos_token": 32000, "model_variant": "7B"},
            "--bos_token=32000 is outside a vocabulary of 32000 (0 to 31999): change --bos_token or --vocab_size",
        ),
        (
            {"sep_token": 5, "vocab_size": 5},
            "--sep_token=5 is outside a vocabulary of 5 (0 to 4): change --sep_token or --vocab_size",
        ),
        (
            {"global_batch_size": 4, "grad_accum_steps": 8},
            "--grad_accum_steps=8 micro-batches cannot share --global_batch_size=4 sequences, even on one GPU: give "
            "--grad_accum_steps=4 or less, or leave it out to have it derived",
        ),
        (
            {"num_steps": duration("0tok")},
            "--num_steps=0 trains nothing: give steps (1000), tokens (5Btok) or epochs (2ep)",
        ),
        (
            {"num_steps": duration("100"), "warmup_steps": duration("200")},
            "--warmup_steps=200 is longer than --num_steps=100: shorten the warm-up or lengthen the run",
        ),
        (
            {"num_steps": duration("1ep"), "warmup_steps": duration("2ep")},
            "--warmup_steps=2ep is longer than --num_steps=1ep: shorten the warm-up or lengthen the run",
        ),
        (
            {"num_steps": duration("10"), "warmup_steps": duration("1Mtok"), "global_batch_size": 4, "seq_length": 100},
            "--warmup_steps=1Mtok (2500 steps of 4 x 100 tokens) is longer than --num_steps=10: shorten the warm-up or "
            "lengthen the run",
        ),
        (
            {"num_steps": duration("1ktok"), "warmup_steps": duration("9"), "global_batch_size": 4, "seq_length": 100},
            "--warmup_steps=9 is longer than --num_steps=1ktok (3 steps of 4 x 100 tokens): shorten the warm-up or "
            "lengthen the run",
        ),
        (
            {"hsdp_group_size": 4},
            "--hsdp_group_size=4 needs --sharding_strategy=hsdp or hsdp_zero2, which shard inside groups; fsdp has no "
            "groups. Change one or leave --hsdp_group_size out",
        ),
        (
            {"weights_only": True},
            "--weights_only=true begins with the weights of another run, and --ckpt_load_path names none: give it, or "
            "leave --weights_only out",
        ),
        (
            {"mixed_precision": False, "mp_dtype": "float16"},
            "--mp_dtype=float16 is what --mixed_precision computes in, and that is off: give --mixed_precision=true, "
            "or leave --mp_dtype out",
        ),
        ({"ckpt_save_path": ""}, "--ckpt_save_path is empty: name the run's folder"),
        ({"col_name": ""}, "--col_name is empty: name the column that holds the token ids"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, Any], problem: str) -> None:
    assert find_problems(config_of(**values)) == [problem]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"use_dummy_dataset": True},
        {"datasets": ("a", "b")},
        {"datasets": ("a", "b"), "weights": (1.0, 3.0)},
        {"sep_token": 31999},
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


def test_all_problems_of_the_model_are_told() -> None:
    assert len(find_problems(config_of(num_attention_heads=30, num_key_value_heads=7))) == 2


def test_a_separator_is_not_checked_against_a_model_that_a_checkpoint_may_name() -> None:
    assert find_problems(config_of(sep_token=100_000)) == []
    assert find_problems(config_of(weights_only=True, ckpt_load_path="runs/a")) == []


def test_a_separator_is_checked_even_where_the_heads_are_wrong() -> None:
    assert len(find_problems(config_of(model_variant="7b", num_attention_heads=30, sep_token=32000))) == 2


def test_an_unknown_variant_has_no_vocabulary_to_check() -> None:
    assert len(find_problems(config_of(model_variant="gpt", sep_token=10**6))) == 1


def test_a_rule_is_left_out_where_a_setting_that_it_reads_could_not_be_read() -> None:
    config = config_of(num_steps=duration("100"), warmup_steps=duration("200"))
    assert find_problems(config, {"num_steps"}) == []
    assert len(find_problems(config, {"seed"})) == 1


@pytest.mark.parametrize("root", [PlanConfig, DoctorConfig])
def test_commands_that_need_no_data_take_recipes_of_epochs(root: type) -> None:
    assert find_problems(root(run=RunConfig(num_steps=Duration(3, "epochs")))) == []


def test_rules_read_settings_that_exist() -> None:
    assert [rule for rule in RULES if not rule.reads <= set(settings_of(rule.root))] == []


def test_a_configuration_made_in_python_is_checked_like_flags() -> None:
    check_config(TrainConfig(data=DataConfig(use_dummy_dataset=True)))
    wrong = TrainConfig(data=DataConfig(held_out_fraction=1.5), run=RunConfig(num_steps=1000))  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as error:
        check_config(wrong)
    assert error.value.problems == (
        "held_out_fraction=1.5: it must be below 1",
        "num_steps=1000: a duration, as Duration.parse makes it, is needed",
        "no data: give --data_path, --use_dummy_dataset=true or --recipe=demo",
    )


def test_a_problem_of_one_value_keeps_its_rules_silent() -> None:
    config = config_of(vocab_size=-1, sep_token=3)
    with pytest.raises(ConfigError, match=r"^vocab_size=-1: the smallest value is 2$"):
        check_config(config)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"bos_token": -1}, "bos_token=-1: the smallest value is 0"),
        ({"strip_tokens": (3, -1)}, "strip_tokens=3,-1: the smallest value is 0"),
        ({"strip_tokens": (1.5,)}, "strip_tokens=1.5: a whole number is needed"),
        ({"min_length": 0}, "min_length=0: the smallest value is 1"),
    ],
)
def test_what_cannot_be_done_to_documents_is_refused(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}$"):
        check_config(TrainConfig(data=DataConfig(use_dummy_dataset=True, **data)))


def test_changing_a_checked_configuration_can_be_checked_again() -> None:
    config = config_of()
    check_config(config)
    check_config(replace(config, run=replace(config.run, seed=1)))


# Activation checkpointing and float8


FORMS = "write 1 for all blocks, k for every k-th (2, 3, ...), a fraction of them below 1 (1/3, 0.25), or op"


@pytest.mark.parametrize("selective", ["0", "-1", "3/2", "2.5", "1/0", "1/", "some", "", "1/3/5", "1e99999999"])
def test_what_is_no_number_of_blocks_is_refused(selective: str) -> None:
    config = config_of(fsdp_activation_checkpointing=True, selective_checkpointing=selective)
    assert find_problems(config) == [f"--selective_checkpointing={selective}: {FORMS}"]


@pytest.mark.parametrize(
    ("selective", "problem"),
    [
        (
            "13",
            "--selective_checkpointing=13 takes one block in 13, and of 12, 12 / 13 = 0.92, none: give "
            "--selective_checkpointing=12 or less, or --fsdp_activation_checkpointing=false",
        ),
        (
            "1/32",
            "--selective_checkpointing=1/32 of 12 blocks is 0.03125 x 12 = 0.38, which rounds to none: give a larger "
            "fraction, or --fsdp_activation_checkpointing=false",
        ),
    ],
)
def test_a_selection_that_takes_no_block_is_refused(selective: str, problem: str) -> None:
    flags = ["use_dummy_dataset=true", "fsdp_activation_checkpointing=true", f"selective_checkpointing={selective}"]
    for model in ("model_variant=125m", "num_hidden_layers=12"):
        with pytest.raises(ConfigError) as error:
            load_train_config([*flags, model])
        assert error.value.problems == (problem,)
    load_train_config(flags)  # a checkpoint may have more blocks


def test_a_setting_that_another_one_leaves_without_an_effect_is_a_remark() -> None:
    """So that one flag can be flipped: to measure speed, or to see what checkpointing costs."""
    flags = ["use_dummy_dataset=true", "data_path=d", "datasets=a,b", "weights=1,2", "selective_checkpointing=op"]
    assert remarks(load_train_config(flags)) == [
        "use_dummy_dataset=true: tokens are made up, and data_path=d, datasets=a,b, weights=1.0,2.0 not read",
        "selective_checkpointing=op has no effect: fsdp_activation_checkpointing, whose blocks it chooses, is off",
    ]
    assert remarks(load_train_config(["use_dummy_dataset=true"])) == []
    checkpointing = ["fsdp_activation_checkpointing=true", "selective_checkpointing=op", "data_path=d"]
    assert remarks(load_train_config(checkpointing)) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["schedule=constant"], ["min_lr_ratio=0.2 has no effect: schedule=constant has an end of its own"]),
        (
            ["training_stage=annealing"],
            ["min_lr_ratio=0.2 has no effect: training_stage=annealing has an end of its own"],
        ),
        (["schedule=linear"], []),
        (["schedule=mine:schedule"], []),
    ],
)
def test_an_end_of_the_learning_rate_that_no_schedule_reads_is_a_remark(flags: list[str], said: list[str]) -> None:
    assert remarks(load_train_config(["use_dummy_dataset=true", "min_lr_ratio=0.2", *flags])) == said


@pytest.mark.parametrize(("flags", "is_said"), [([], True), (["tokenizer_path=t"], False)])
def test_a_prompt_for_no_sample_is_a_remark(flags: list[str], is_said: bool) -> None:
    found = remarks(load_train_config(["data_path=d", "sample_prompt=def", *flags]))
    assert (
        found
        == ["sample_prompt has no effect: samples of text need tokenizer_path, and sample_tokens above 0"] * is_said
    )


def test_float8_is_refused_where_only_cpus_train() -> None:
    with pytest.raises(ConfigError, match="--float8=rowwise needs a GPU, and --device=cpu leaves those alone"):
        load_train_config(["use_dummy_dataset=true", "device=cpu", "float8=rowwise"])


MULTIPLES = "--float8=rowwise multiplies matrices whose sides are multiples of 16"


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        (
            ["model_variant=tiny", "intermediate_size=1000", "seq_length=100"],
            (
                f"{MULTIPLES}; --seq_length=100: 100 / 16 = 6.25. Change it, or leave --float8 out",
                f"{MULTIPLES}; --intermediate_size=1000: 1000 / 16 = 62.5. Change it, or leave --float8 out",
            ),
        ),
        (
            ["model_variant=tiny", "hidden_size=72", "num_attention_heads=9", "num_key_value_heads=3"],
            (
                f"{MULTIPLES}; --hidden_size=72: 72 / 16 = 4.5. Change it, or leave --float8 out",
                f"{MULTIPLES}; --num_key_value_heads=3 x head size 8 = 24: 24 / 16 = 1.5. Change it, or leave "
                "--float8 out",
            ),
        ),
        (
            ["mixed_precision=false"],
            (
                "--float8=rowwise goes with computing all else in bfloat16, and --mixed_precision=false is given: "
                "leave one of them out",
            ),
        ),
        (
            ["mp_dtype=float16"],
            (
                "--float8=rowwise goes with computing all else in bfloat16, and --mp_dtype=float16 is given: leave one "
                "of them out",
            ),
        ),
    ],
)
def test_what_does_not_go_with_float8_is_refused(flags: list[str], problems: tuple[str, ...]) -> None:
    load_train_config(["use_dummy_dataset=true", *[flag for flag in flags if "=false" not in flag]])
    with pytest.raises(ConfigError) as error:
        load_train_config(["use_dummy_dataset=true", "float8=rowwise", *flags])
    assert error.value.problems == problems


def test_matrices_that_a_checkpoint_may_change_are_looked_at_once_they_are_known() -> None:
    flags = ["use_dummy_dataset=true", "float8=tensorwise", "hidden_size=40", "num_attention_heads=5"]
    load_train_config(flags)
    with pytest.raises(ConfigError, match=r"--hidden_size=40: 40 / 16 = 2\.5"):
        load_train_config([*flags, "num_key_value_heads=5", "intermediate_size=64"])


def test_every_variant_can_be_trained_in_float8() -> None:
    for name in VARIANTS:
        load_train_config(["use_dummy_dataset=true", "float8=rowwise", f"model_variant={name}"])
