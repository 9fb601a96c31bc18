"""Rows of a table: one key of another system, the setting that it becomes, and the conversion of its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from pretraining.config.plugins import TOKEN_SUFFIXES
from pretraining.durations import parse_number
from pretraining.files import entries_of, is_folder

Conversion = Callable[[str], str | Mapping[str, str]]


class NotALlamaError(ValueError):
    """A value that makes the model different from a Llama."""


class Key(NamedTuple):
    """Meaning of one key.

    Attributes:
        setting: our setting; "" if `convert` returns settings by name, or if there is none.
        convert: function of the key's text; the text of a ValueError is the error message.
        remark: difference to the other system.
    """

    setting: str = ""
    convert: Conversion = str
    remark: str = ""


def renamed(above: str = "", /, **settings: str) -> dict[str, Key]:
    """Return rows of keys that are settings under another name; the keys are prefixed with `above`."""
    return {f"{above}{key}": Key(setting) for key, setting in settings.items()}


def only(*values: str, reason: str) -> Key:
    """Return the row of a key for which a Llama has only these values."""
    number = parse_number(values[0])

    def convert(text: str) -> str:
        if text.strip().lower() not in values and (number is None or parse_number(text) != number):
            raise NotALlamaError(reason)
        return ""

    return Key(convert=convert, remark="as here")


def tracked(setting: str) -> Key:
    """Return the row of a name at Weights & Biases."""
    return Key(setting, lambda text: {setting: text, "tracker": "wandb"})


WEIGHT_DECAY = Key("weight_decay", remark="not of norms and embeddings")
RATE_OF_MUON = "updates are 0.2 x sqrt(width) times as long as of plain Muon: choose a smaller one"
FLOAT32 = {"mixed_precision": "false"}
BFLOAT16, FLOAT16 = ({"mixed_precision": "true", "mp_dtype": name} for name in ("bfloat16", "float16"))


# Conversions


def words(**known: str | Mapping[str, str]) -> Conversion:
    """Return a conversion by a table of words in any case."""

    def convert(text: str) -> str | Mapping[str, str]:
        if text.strip().lower() not in known:
            raise ValueError(f"must be one of {', '.join(known)}")
        return known[text.strip().lower()]

    return convert


dtype = words(bfloat16=BFLOAT16, float16=FLOAT16, float32=FLOAT32)
"""Conversion of a dtype: mixed precision in 16 bits, or float32."""


def tokens(text: str) -> str:
    """Return a length in tokens."""
    return text if text.endswith("tok") else f"{text}tok"


def pair(text: str) -> Mapping[str, str]:
    """Return the two decays of Adam's moments."""
    items = text.strip("[]()").split(",")
    if len(items) != 2:
        raise ValueError("must be two numbers")
    return {"adam_beta1": items[0].strip(), "adam_beta2": items[1].strip()}


def context(text: str) -> Mapping[str, str]:
    """Return the model's context, and the same sequence length."""
    return {"max_position_embeddings": text, "seq_length": text}


def schedule(text: str) -> Mapping[str, str]:
    """Return a schedule that ends at zero, unless it is constant."""
    name = text.strip().lower()
    return {"schedule": name} | ({} if name == "constant" else {"min_lr_ratio": "0"})


def width(text: str, multiple: int = 256) -> Mapping[str, str]:
    """Return the model's width, and a feed-forward width of 8/3 of it.

    Three matrices of this width match two matrices of 4 x the model's width.
    """
    number = parse_number(text)
    if number is None or number.denominator != 1 or number < 1:
        raise ValueError("must be a whole number, at least 1")
    return {"hidden_size": text, "intermediate_size": str(-(-8 * int(number) // (3 * multiple)) * multiple)}


def folder_of_data(text: str) -> Mapping[str, str]:
    """Return the settings for a folder that is a dataset or holds datasets; a start reports a missing folder."""
    folder = Path(text)
    is_dataset = is_folder(folder) and any(path.suffix in TOKEN_SUFFIXES for path in entries_of(folder))
    return {"data_path": str(folder.parent), "datasets": folder.name} if is_dataset else {"data_path": text}


def decimal(number: Fraction) -> str:
    """Return a fraction as a decimal number, as short as a float's."""
    return str(number.numerator) if number.denominator == 1 else repr(float(number))
