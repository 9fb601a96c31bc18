"""Generate the tables of docs/configurations.md from the dataclasses of the settings.

    python scripts/settings_page.py

The text above the mark is written by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pretraining.config.assignments import ALIASES, RECIPE_NAMES  # noqa: E402  # the checkout's own package
from pretraining.config.fields import Setting, settings_of  # noqa: E402
from pretraining.config.help import describe_default, sections_for_readers  # noqa: E402
from pretraining.config.training import TrainConfig  # noqa: E402
from pretraining.config.values import describe_type  # noqa: E402
from pretraining.config.variants import VARIANTS, LlamaShape  # noqa: E402
from pretraining.estimate.costs import parameter_count  # noqa: E402

PAGE = ROOT / "docs" / "configurations.md"
SHORT = {
    **{"whole number": "integer", "true or false": "boolean", ", at least": " ≥", ", at most": ", ≤"},
    **{", below": ", <", ", above": " >"},
    **{f" or {unit}": f", {unit}" for unit in ("tokens", "epochs", "seconds", "percent")},
}
"""Short forms for the table of values, by words of `--help`."""
MARK = "<!-- From here on made by `python scripts/settings_page.py`. -->\n"


def with_new_tables(page: str) -> str:
    """Return docs/configurations.md with new text after its mark."""
    text, mark, _ = page.partition(MARK)
    return "\n".join([text + mark, *_settings_tables(), *_variants_table(), *_aliases_table(), ""])


def _settings_tables() -> Iterator[str]:
    yield "## Settings"
    for section, subject, members in sections_for_readers(TrainConfig):
        yield f"\n### {section}\n\n{subject}\n"
        yield "| setting | values [default] | meaning |\n|---|---|---|"
        for setting in members:
            meaning = setting.help.replace("<", "&lt;")  # Markdown would read a placeholder as HTML
            cells = (f"`{setting.name}`", f"{_values(setting)} [`{describe_default(setting)}`]", meaning)
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _values(setting: Setting) -> str:
    """Return the allowed values, without "none" if it is the default."""
    text = describe_type(setting)
    if setting.choices and all(choice in setting.help for choice in setting.choices):
        text = "see meaning"
    for words, short in SHORT.items():
        text = text.replace(words, short)
    return text.removesuffix(", or none") if setting.default is None else text


def _variants_table() -> Iterator[str]:
    yield (
        "\n## Model variants\n\n"
        "`--model_variant` takes a name in any case; any dimension can be changed under its own name.\n\n"
        "| variant | hidden | heads/kv | layers | feed-forward | context | rope theta | vocabulary | parameters |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for shape in dict.fromkeys(VARIANTS.values()):
        names = [name for name, other in VARIANTS.items() if other == shape]
        yield f"| {', '.join(names)} | {' | '.join(_dimensions(shape))} |"
    yield (
        "\nThe context is what a variant was made for; `seq_length` may be longer or shorter. "
        "The variants llama3.2_1b and llama3.2_3b share the embedding with the head, and scale rotary frequencies by "
        "the llama3 rule."
    )


def _dimensions(shape: LlamaShape) -> Iterator[str]:
    yield str(shape.hidden_size)
    yield f"{shape.num_attention_heads}/{shape.num_key_value_heads}"
    yield str(shape.num_hidden_layers)
    yield str(shape.intermediate_size)
    yield str(shape.max_position_embeddings)
    yield f"{shape.rope_theta:.0f}"
    yield str(shape.vocab_size)
    millions = parameter_count(shape) / 1e6
    yield f"{millions / 1e3:.2f}B" if millions >= 1e3 else f"{millions:.0f}M"


def _aliases_table() -> Iterator[str]:
    """Yield the table of names and values that are accepted besides the canonical ones."""
    yield "\n## Other names\n\n| written | means |\n|---|---|"
    yield f"| `{RECIPE_NAMES[1]}` | {RECIPE_NAMES[0]} |"
    for name, alias in ALIASES.items():
        yield f"| `{name}` | {alias.help.removeprefix('the same as ')} |"
    for name, setting in settings_of(TrainConfig).items():
        for word, meaning in setting.aliases.items():
            yield f"| `{name}={word}` | `{name}={meaning}` |"


if __name__ == "__main__":
    PAGE.write_text(with_new_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
