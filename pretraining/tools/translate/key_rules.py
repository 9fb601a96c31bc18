"""Building blocks for the table of a system: rules for one key, and conversions of its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path

from pretraining.config.plugins import TOKEN_SUFFIXES
from pretraining.files import entries_of, exists, is_folder
from pretraining.progress import parse_number
from pretraining.tools.translate.translation import ACCEPT_LLAMA, Rule, Translation, plain


def each(keys: str, rule: Rule, above: str = "") -> dict[str, Rule]:
    """Return one rule for several keys, separated by spaces and prefixed with `above`."""
    return {f"{above}{key}": rule for key in keys.split()}


def renamed(above: str = "", /, **settings: str) -> dict[str, Rule]:
    """Return rules for keys that rename settings; the keys are prefixed with `above`."""
    return {f"{above}{key}": row(setting) for key, setting in settings.items()}


def row(setting: str, convert: Callable[[str], str | Mapping[str, str]] = str, remark: str = "") -> Rule:
    """Make a rule: the key is a setting under another name; a ValueError of `convert` is the error message."""

    def apply(translation: Translation, key: str) -> None:
        try:
            made = convert(translation.text(key) or "")
        except ValueError as error:
            translation.refuse(key, str(error), setting)
        else:
            translation.set(key, remark, **(made if isinstance(made, Mapping) else {setting: made}))

    return apply


def skip(reason: str) -> Rule:
    """Make a rule: the key has no equivalent, and what is learned does not depend on it."""
    return lambda translation, key: translation.skip(key, reason)


def combined(translation: Translation, key: str) -> None:
    """Refuse a key that `combine` handles together with others, and that has no meaning beside the given ones."""
    if not translation.problems:
        translation.refuse(key, "it has no meaning beside the other settings: delete it")


def context(translation: Translation, key: str) -> None:
    """Set the sequence length and the model's context."""
    translation.set(key, seq_length=translation.text(key), max_position_embeddings=translation.text(key))


def only(*values: str, reason: str, refuse: Callable[[Translation, str, str], None] = Translation.refuse) -> Rule:
    """Make a rule: the key may have these values only, because others change what is learned."""
    allowed = {plain(value) for value in values}

    def apply(translation: Translation, key: str) -> None:
        if plain(translation.text(key) or "") in allowed:
            translation.skip(key, "as here")
        else:
            refuse(translation, key, reason)

    return apply


def off(reason: str) -> Rule:
    """Make a rule: the feature of the key does not exist here, so it must be off."""
    return only("false", "no", "off", "none", "auto", "0", reason=f"{reason}: delete it, or write null")


def not_a_llama(*values: str, reason: str) -> Rule:
    """Make a rule: a Llama has only these values; ACCEPT_LLAMA leaves others out."""
    return only(*values, reason=reason, refuse=refuse_model)


def refuse_model(translation: Translation, key: str, reason: str) -> None:
    """Refuse a key that makes the model different from a Llama, unless ACCEPT_LLAMA is set."""
    if ACCEPT_LLAMA in translation.accepts:
        translation.skip(key, f"{reason}; left out because of {ACCEPT_LLAMA}")
    else:
        translation.refuse(key, f"{reason}. --{ACCEPT_LLAMA}=true trains a Llama of the same shape without it")


def when(condition: Callable[[Translation], object], rule: Rule, otherwise: str) -> Rule:
    """Make a rule that applies on a condition; otherwise the key is left out with a reason."""
    return lambda translation, key: (rule if condition(translation) else skip(otherwise))(translation, key)


def lowest_rate(peak_key: str) -> Rule:
    """Make a rule: the key is the final learning rate, which becomes a fraction of the peak."""

    def apply(translation: Translation, key: str) -> None:
        lowest, peak = translation.number(key), translation.number(peak_key, "learning_rate")
        if lowest == 0:
            translation.set(key, min_lr_ratio="0")
        elif lowest is None or not peak or not 0 <= lowest <= peak:
            problem = f"must be a learning rate from 0 to {peak_key.rpartition('.')[2]}"
            translation.refuse(key, problem, "min_lr_ratio")
        else:
            translation.set(key, f"of {decimal(peak)}", min_lr_ratio=decimal(lowest / peak))

    return apply


RATE_OF_MUON = "updates are 0.2 x sqrt(width) times as long as of plain Muon: choose a smaller one"
AFTER_DECAY = "not of norms and embeddings"
NO_BIAS = not_a_llama("false", reason="a Llama has no biases")
NO_DROPOUT = not_a_llama("0", reason="a Llama is trained without dropout")
INITIAL_WEIGHTS = skip("initial weights are those of docs/model.md")


# Conversions of a text


def choice(**words: str | Mapping[str, str]) -> Callable[[str], str | Mapping[str, str]]:
    """Make a conversion by a table of words, whose values stand for themselves; case and dashes do not matter."""
    known = {value: value for value in words.values() if isinstance(value, str)} | words

    def convert(text: str) -> str | Mapping[str, str]:
        word = text.strip().lower().replace("-", "_")
        if word not in known:
            raise ValueError(f"must be one of {', '.join(words)}")
        return known[word]

    return convert


def tokens(text: str) -> str:
    """Return a length in tokens."""
    return text if text.endswith("tok") else f"{text}tok"


def epochs(text: str) -> str:
    """Return a length in passes over the data."""
    return f"{text}ep"


def part_of_run(text: str) -> str:
    """Return a length; a number below 1 is a fraction of the run: 0.03 is 3%."""
    number = parse_number(text)
    return f"{decimal(number * 100)}%" if number is not None and 0 < number < 1 else text


def pair(text: str) -> Mapping[str, str]:
    """Return the two decays of Adam's moments."""
    items = text.strip("[]()").split(",")
    if len(items) != 2:
        raise ValueError("must be two numbers")
    return {"adam_beta1": items[0].strip(), "adam_beta2": items[1].strip()}


_FLOAT32 = {"mixed_precision": "false"}
_BFLOAT16, _FLOAT16 = ({"mixed_precision": "true", "mp_dtype": name} for name in ("bfloat16", "float16"))
dtype = choice(
    **{"bfloat16": _BFLOAT16, "float16": _FLOAT16, "float32": _FLOAT32, "bf16": _BFLOAT16, "fp16": _FLOAT16},
    **{"fp32": _FLOAT32, "bf16_mixed": _BFLOAT16, "16_mixed": _FLOAT16, "half": _FLOAT16, "16": _FLOAT16},
    **{"32": _FLOAT32, "bf16_true": _BFLOAT16, "32_true": _FLOAT32},
    **{"torch.bfloat16": _BFLOAT16, "torch.float16": _FLOAT16},
)
"""Conversion of a dtype: mixed precision in 16 bits, or float32."""


def folder_of_data(text: str) -> Mapping[str, str]:
    """Return the settings for a folder that is a dataset or holds datasets; a start reports a missing folder."""
    folder = Path(text)
    return {"data_path": str(folder.parent), "datasets": folder.name} if _is_dataset(folder) else {"data_path": text}


def holds_tokens(folder: Path) -> bool:
    """Return whether a folder or its sub-folders hold token files; saved Hugging Face datasets do not count."""
    if any(exists(folder / name) for name in ("dataset_dict.json", "dataset_info.json")):
        return False
    return is_folder(folder) and any(map(_is_dataset, (folder, *entries_of(folder))))


def _is_dataset(folder: Path) -> bool:
    return is_folder(folder) and any(path.suffix in TOKEN_SUFFIXES for path in entries_of(folder))


def gated_width(width: Fraction | int, multiple: int) -> int:
    """Return the feed-forward width, 8/3 of `width`: three matrices then match two matrices of 4 x `width`."""
    return -int(-8 * width // (3 * multiple)) * multiple


def describe_gated(width: int, multiple: int) -> str:
    """Return how many parameters a gated feed-forward layer has in place of two matrices of 4 x `width`."""
    ours, theirs = 3 * gated_width(width, multiple), 2 * 4 * width
    return f"three matrices with {ours * width:,} parameters for two of 4 x {width} with {theirs * width:,}"


def decimal(number: Fraction) -> str:
    """Return a fraction as a decimal number, as short as a float's."""
    return str(number.numerator) if number.denominator == 1 else repr(float(number))
