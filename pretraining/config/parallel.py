"""How a model is laid out over GPUs, and what is traded for memory and speed: the section `parallel`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from pretraining.config.fields import setting
from pretraining.errors import ConfigError

ALL_BLOCKS = "1"
PER_OPERATION = "op"
FLOAT8_MULTIPLE = 16
_HALF = Fraction(1, 2)


@dataclass(frozen=True)
class ParallelConfig:
    """How parameters, gradients and optimizer state are laid out over GPUs, and what is recomputed to save memory."""

    sharding_strategy: str = setting(
        "fsdp",
        "ddp (zero0): everything everywhere; zero2: gradients and optimizer state sharded; fsdp (zero3): parameters "
        "too; hsdp, hsdp_zero2: the same inside groups that are replicas of each other",
        choices=("ddp", "zero2", "fsdp", "hsdp", "hsdp_zero2"),
    )
    hsdp_group_size: int | None = setting(None, "GPUs a sharding group of hsdp; none = the GPUs of a node", minimum=1)
    mixed_precision: bool | None = setting(
        None,
        "compute in mp_dtype; master weights, optimizer and gradient reduction stay in float32; "
        "none = where the device has units for it (every supported GPU; of CPUs some, for bfloat16)",
    )
    mp_dtype: str = setting(
        "bfloat16",
        "what mixed_precision computes in. bfloat16; float16: for GPUs without bfloat16, with a scale of the loss that "
        "is found on the way, and some updates left out for it",
        choices=("bfloat16", "float16"),
    )
    float8: str | None = setting(
        None,
        "multiply the matrices of the blocks in float8, with a scale for each tensor (tensorwise) or for each row "
        "(rowwise: finer); for large matrices, with use_torch_compile. Needs torchao and GPUs of compute capability "
        "8.9 or more; none = in mp_dtype",
        choices=("tensorwise", "rowwise"),
    )
    low_cpu_fsdp: bool = setting(
        True,
        "make the model without memory, and give it memory and values shard by shard; false = make it whole on every "
        "GPU first: the same weights, for the memory of the whole model in float32",
    )
    fsdp_activation_checkpointing: bool = setting(
        False,
        "keep only what goes into a block, and compute what is inside again in the backward pass: less memory, more "
        "work",
    )
    selective_checkpointing: str = setting(
        ALL_BLOCKS,
        "which blocks fsdp_activation_checkpointing is for. 1: all; k: every k-th; a fraction (1/3, 0.25): so many, "
        "spread evenly; op: all, but what matrix products and attention give is kept, and only the rest computed again",
    )
    use_torch_compile: bool = setting(
        False,
        "compile the blocks of the model, each as a whole graph; works together with activation checkpointing. The "
        "first step then takes from seconds to minutes",
    )


def checkpointed_blocks(selective: str, num_hidden_layers: int) -> list[int]:
    """The blocks whose activations are not kept, numbered from 0.

    Every k-th block is k-1, 2k-1, ... A fraction p takes block i where p x (i + 1), rounded half up, is one more than
    p x i: after any number of blocks, as many were taken as the fraction of them comes to, rounded.

    Args:
        selective: the setting `selective_checkpointing`.
        num_hidden_layers: blocks of the model.

    Raises:
        ConfigError: it is none of the forms, or takes no block of so many.
    """
    if selective == PER_OPERATION:
        return list(range(num_hidden_layers))
    share = _number_in(selective)
    if share >= 1:
        if share > num_hidden_layers:
            raise ConfigError(
                f"--selective_checkpointing={selective} takes one block in {share}, and of {num_hidden_layers}, "
                f"{num_hidden_layers} / {share} = {num_hidden_layers / int(share):.2f}, none: give "
                f"--selective_checkpointing={num_hidden_layers} or less, or --fsdp_activation_checkpointing=false"
            )
        return list(range(int(share) - 1, num_hidden_layers, int(share)))
    taken = [floor(share * count + _HALF) for count in range(num_hidden_layers + 1)]
    if not taken[-1]:
        raise ConfigError(
            f"--selective_checkpointing={selective} of {num_hidden_layers} blocks is {float(share):g} x "
            f"{num_hidden_layers} = {float(share * num_hidden_layers):.2f}, which rounds to none: give a larger "
            "fraction, or --fsdp_activation_checkpointing=false"
        )
    return [block for block in range(num_hidden_layers) if taken[block + 1] > taken[block]]


def checkpointing_problems(parallel: ParallelConfig, num_hidden_layers: int | None) -> Iterator[str]:
    """What is wrong with the settings of activation checkpointing, where the number of blocks is known or not."""
    selective = parallel.selective_checkpointing
    try:
        if selective != PER_OPERATION:
            _number_in(selective)
        if parallel.fsdp_activation_checkpointing and num_hidden_layers is not None:
            checkpointed_blocks(selective, num_hidden_layers)
    except ConfigError as error:
        yield from error.problems
        return
    if not parallel.fsdp_activation_checkpointing and selective != ALL_BLOCKS:
        yield (
            f"--selective_checkpointing={selective} says which blocks --fsdp_activation_checkpointing is for, and that "
            "is off: add --fsdp_activation_checkpointing=true, or leave --selective_checkpointing out"
        )


def precision_problems(parallel: ParallelConfig) -> Iterator[str]:
    """What is wrong with the settings of precision."""
    if parallel.mixed_precision is False and parallel.mp_dtype != "bfloat16":
        yield (
            f"--mp_dtype={parallel.mp_dtype} is what --mixed_precision computes in, and that is off: give "
            "--mixed_precision=true, or leave --mp_dtype out"
        )


def float8_problems(parallel: ParallelConfig, sides: Mapping[str, int]) -> Iterator[str]:
    """What is wrong with the settings of float8.

    Args:
        parallel: the settings.
        sides: of the matrices that are multiplied, by how they come about.
    """
    if parallel.float8 is None:
        return
    if parallel.mixed_precision is False or parallel.mp_dtype != "bfloat16":
        other = "--mixed_precision=false" if parallel.mixed_precision is False else f"--mp_dtype={parallel.mp_dtype}"
        yield (
            f"--float8={parallel.float8} goes with computing all else in bfloat16, and {other} is given: leave one of "
            "them out"
        )
    for origin, side in sides.items():
        if side % FLOAT8_MULTIPLE:
            yield (
                f"--float8={parallel.float8} multiplies matrices whose sides are multiples of {FLOAT8_MULTIPLE}; "
                f"{origin}: {side} / {FLOAT8_MULTIPLE} = {side / FLOAT8_MULTIPLE:g}. Change it, or leave --float8 out"
            )


def _number_in(selective: str) -> Fraction:
    """The number that `selective_checkpointing` holds where it is not "op": k, or a fraction below 1."""
    try:
        number = Fraction(selective)
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    if number <= 0 or (number > 1 and number.denominator > 1):
        raise ConfigError(
            f"--selective_checkpointing={selective}: write 1 for all blocks, k for every k-th (2, 3, ...), a fraction "
            "of them below 1 (1/3, 0.25), or op"
        )
    return number
