"""The kinds of foreign files, and which of them a file is: by its suffix, and by keys that only this kind has."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass

from pretraining.config.foreign import composed, deepspeed, guide, nanogpt, stub, torchtitan, training_arguments
from pretraining.config.foreign.translation import Source, Translating, Translation
from pretraining.config.values import did_you_mean
from pretraining.errors import ConfigError

YAML = (".yaml", ".yml")
JSON = (".json",)
PYTHON = (".py",)
TOML = (".toml",)


@dataclass(frozen=True)
class Kind:
    """A form of files that is understood.

    Attributes:
        what: it is, in a few words.
        suffixes: of its files.
        signs: keys or sections, one of which is in each file of the kind, and in no file of another.
        read: translates a file.
        arguments: names that its users give on the command line, besides the file.
    """

    what: str
    suffixes: tuple[str, ...]
    signs: tuple[str, ...]
    read: Callable[[Translating], None]
    arguments: Collection[str] = ()


KINDS = {
    "stub": Kind("one YAML of a training stub (dist, model.hf_config, …)", YAML, stub.SIGNS, stub.read),
    "guide": Kind("the JSON of a training guide: model, training, data", JSON + YAML, guide.SIGNS, guide.read),
    "deepspeed": Kind("the JSON that DeepSpeed is configured with", JSON, deepspeed.SIGNS, deepspeed.read),
    "training_arguments": Kind(
        "TrainingArguments of Hugging Face's Trainer",
        JSON + YAML,
        training_arguments.SIGNS,
        training_arguments.read,
    ),
    "nanogpt": Kind(
        "Python assignments for nanoGPT's train.py, or a descendant's", PYTHON, nanogpt.SIGNS, nanogpt.read
    ),
    "composed": Kind(
        "a folder of composed configs (defaults, optimizer.lr_config, …)",
        YAML,
        composed.SIGNS,
        composed.read,
        composed.TABLE,
    ),
    "torchtitan": Kind(
        "the TOML of torchtitan 0.2 (job, training, parallelism, …)",
        TOML,
        torchtitan.SIGNS,
        torchtitan.read,
        torchtitan.TABLE,
    ),
}


def recognise(source: Source, suffix: str) -> list[str]:
    """Returns the kinds that a file may be."""
    keys = source.flattened()
    return [
        name
        for name, kind in KINDS.items()
        if suffix in kind.suffixes
        and any(key == sign or key.startswith(f"{sign}.") for sign in kind.signs for key in keys)
    ]


def translate(source: Source, suffix: str, kind: str | None = None, accept_llama: bool = False) -> Translation:
    """Translates a file of settings of another system.

    Args:
        suffix: of the file, with its dot.
        kind: what it is; None = what its keys say.

    Raises:
        ConfigError: it is of no known kind or fits several, holds values that cannot be translated, or no key that the
            kind's reader knows.
    """
    if kind is None:
        kinds = recognise(source, suffix)
        if len(kinds) != 1:
            raise ConfigError(_undecided(source, kinds))
        kind = kinds[0]
    elif kind not in KINDS:
        hint = did_you_mean(kind, KINDS, "did you mean {}? ")
        raise ConfigError(f"--from={kind} is not known: {hint}There are {', '.join(KINDS)}")
    translating = Translating(kind, source, accept_llama)
    KINDS[kind].read(translating)
    translation = translating.finish()
    if translating.understands_nothing():
        keys = ", ".join(note.key for note in translation.unknown[:_SHOWN_KEYS])
        raise ConfigError(
            f"{source.name}: the reader of {kind} files knows none of its keys ({keys}). Say what it is: "
            f"pretrain translate {shlex.quote(source.name)} --from=…, one of {', '.join(KINDS)}"
        )
    return translation


_SHOWN_KEYS = 5


def _undecided(source: Source, kinds: list[str]) -> str:
    if kinds:
        signs = "; ".join(f"{name}: {_signs_in(source, name)}" for name in kinds)
        return (
            f"{source.name} may be {' or '.join(kinds)} ({signs}): say which, "
            f"pretrain translate {shlex.quote(source.name)} --from={kinds[0]} --output_path=mine.yaml, and train "
            "with that recipe; or part the file"
        )
    looked_for = "\n".join(
        f"  {name}: {kind.what}, {' or '.join(kind.suffixes)}, with {', '.join(kind.signs[:4])}"
        for name, kind in KINDS.items()
    )
    return f"{source.name} is of no known kind. These are known, by the keys named:\n{looked_for}"


def _signs_in(source: Source, kind: str) -> str:
    keys = source.flattened()
    found = [sign for sign in KINDS[kind].signs if any(key == sign or key.startswith(f"{sign}.") for key in keys)]
    return ", ".join(found)
