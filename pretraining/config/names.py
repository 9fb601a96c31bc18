"""Names besides the canonical ones: the table of aliases, and the search for what a misspelt name meant."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pretraining.progress import MULTIPLIERS

# Names that are read as recipes; both mean the same.
RECIPE_NAMES = ("recipe", "config")

# `python -m torch.distributed.launch` hands every process its local rank as a flag; the launch package reads it from
# the environment instead.
IGNORED_NAMES = ("local_rank",)

# Foreign spellings of values, by setting.
VALUE_ALIASES: dict[str, dict[str, str]] = {"sharding_strategy": {"zero0": "ddp", "zero3": "fsdp"}}


@dataclass(frozen=True)
class Alias:
    """A foreign name for a setting.

    Attributes:
        target: the canonical name.
        translate: makes the setting's text from the alias's; raises ValueError with the reason where there is no such
            setting.
        help: what the alias means.
    """

    target: str
    translate: Callable[[str], str]
    help: str


def _tokens(text: str) -> str:
    """Read a number as so many tokens: 5B is 5Btok."""
    text = text.strip()
    if not text.lower().endswith(("tok", "token", "tokens")):
        if text[-1:].isalpha() and text[-1:] not in MULTIPLIERS:
            raise ValueError("it counts tokens, so write 5_000_000_000 or 5B")
        text += "tok"
    return text


def _path(text: str) -> str:
    """Pass a path on; yes and no mean nothing here, since a run found in its own folder is continued anyway."""
    if text.strip().lower() in ("true", "false"):
        raise ValueError(
            "it takes the path of a run or checkpoint; a run found in --ckpt_save_path is continued without a flag"
        )
    return text


ALIASES: dict[str, Alias] = {
    "max_tokens": Alias("num_steps", _tokens, "num_steps in tokens: --max_tokens=5B is --num_steps=5Btok"),
    "report_to": Alias("tracker", str, "the same as tracker"),
    "save_total_limit": Alias("keep_last", str, "the same as keep_last"),
    "resume_from_checkpoint": Alias("ckpt_load_path", _path, "the same as ckpt_load_path"),
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a misspelt or abbreviated one most likely meant, or None where nothing is near."""
    candidates = list(known)
    close = difflib.get_close_matches(name.lower(), candidates, n=1, cutoff=0.6)
    if close:
        return close[0]
    # lr, wd and bs are the initials of what they stand for.
    return next((candidate for candidate in candidates if _initials(candidate) == name.lower()), None)


def _initials(name: str) -> str:
    """Return the first letters of a name's words."""
    return "".join(word[0] for word in name.split("_") if word)
