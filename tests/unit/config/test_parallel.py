"""Which blocks are checkpointed, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import pytest

from pretraining.config.command_line import load_train_config
from pretraining.config.parallel import ParallelConfig, checkpointed_blocks, checkpointing_problems
from pretraining.config.variants import VARIANTS
from pretraining.errors import ConfigError


@pytest.mark.parametrize(
    ("selective", "blocks"),
    [
        ("1", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("op", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("2", [1, 3, 5, 7]),
        ("3", [2, 5]),
        ("8", [7]),
        ("1/3", [1, 4, 7]),
        ("1/2", [0, 2, 4, 6]),
        ("0.5", [0, 2, 4, 6]),
        ("2/3", [0, 2, 3, 5, 6]),
        ("3/4", [0, 1, 3, 4, 5, 7]),
        ("1/16", [7]),
    ],
)
def test_blocks_are_every_kth_or_a_fraction_spread_evenly(selective: str, blocks: list[int]) -> None:
    assert checkpointed_blocks(selective, 8) == blocks


def test_a_fraction_takes_its_share_of_any_first_blocks_to_half_a_block() -> None:
    for share in (Fraction(1, 7), Fraction(2, 5), Fraction(5, 6)):
        taken = checkpointed_blocks(str(share), 80)
        for count in range(81):
            assert abs(sum(block < count for block in taken) - share * count) <= Fraction(1, 2)


FORMS = "write 1 for all blocks, k for every k-th (2, 3, ...), a fraction of them below 1 (1/3, 0.25), or op"


@pytest.mark.parametrize("selective", ["0", "-1", "3/2", "2.5", "1/0", "some", "", "1/3/5"])
def test_what_is_no_number_of_blocks_is_refused(selective: str) -> None:
    parallel = ParallelConfig(fsdp_activation_checkpointing=True, selective_checkpointing=selective)
    assert list(checkpointing_problems(parallel, None)) == [f"--selective_checkpointing={selective}: {FORMS}"]


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


def test_a_selection_without_checkpointing_is_refused() -> None:
    with pytest.raises(ConfigError, match="add --fsdp_activation_checkpointing=true, or leave"):
        load_train_config(["use_dummy_dataset=true", "selective_checkpointing=op"])


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
