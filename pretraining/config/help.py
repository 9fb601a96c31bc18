"""What users read about settings, made from the dataclasses: `--help`, and the tables of docs/configurations.md.

A new or changed setting is in `--help` at once, and in the page after

    python -m pretraining.config.help docs/configurations.md
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from pretraining.config.assignments import ALIASES, RECIPE_NAMES
from pretraining.config.command_line import ACCEPTS
from pretraining.config.fields import Setting, sections_of, settings_of
from pretraining.config.recipes import shipped_recipes
from pretraining.config.training import TrainConfig
from pretraining.config.values import describe_type, did_you_mean, format_value
from pretraining.config.variants import VARIANTS, LlamaShape, parameter_count
from pretraining.errors import ConfigError
from pretraining.progress import Duration

# Beyond this width, lines of prose are hard to read.
_WIDEST = 110
_NARROWEST = 60
_DURATION = "1000 (steps), 5Btok (tokens; k, M, B, T multiply), 2ep (epochs); intervals also 90s, 30min, 2h, 1h30min"
_MARK = "<!-- From here on made by `python -m pretraining.config.help docs/configurations.md`. -->\n"


def help_text(root: type, command: str, purpose: str, width: int | None = None, topic: str | None = None) -> str:
    """Return the text of `--help`: how to call a command, then every setting with its meaning, values and default.

    Groups of settings that the command has besides those of training stand first.

    Args:
        root: the dataclass of the command's settings.
        command: as it is typed: `pretrain train`.
        purpose: what it does, in a few words.
        width: columns to fit into; None = those of the terminal.
        topic: the only section or setting to show, as for `--help=optimizer` or `--help=seed`; None = all.

    Raises:
        ConfigError: there is no such section or setting.
    """
    section = topic if topic is None else topic.lstrip("-").replace("-", "_").lower().rpartition(".")[2]
    groups = [name for name, _, _ in _sections(root) if name]
    columns = shutil.get_terminal_size().columns if width is None else width
    columns = max(_NARROWEST, min(columns, _WIDEST))
    if section is not None and section not in groups:
        section = ALIASES[section].target if section in ALIASES else section
        if section not in settings_of(root):
            hint = did_you_mean(section, [*groups, *settings_of(root)], "did you mean {}? ")
            there = ", ".join(groups) or "none"
            raise ConfigError(f"--help={topic}: there is no such flag or group. {hint}Groups of {command}: {there}")
        return "\n".join(_about(settings_of(root)[section], columns))
    settings = settings_of(root).values()
    flags = {setting.name: f"  --{setting.name}={_placeholder(setting)}  " for setting in settings}
    indent = min(max(len(flag) for flag in flags.values()), columns // 2)
    lines = [] if section is not None else _introduction(root, command, purpose, groups, indent, columns)
    for name, subject, members in _sections(root):
        if section in (None, name):
            lines += ["", *textwrap.wrap(f"{name}: {subject}" if name else subject, columns)]
            for setting in members:
                lines += _entry(flags[setting.name], _explanation(setting), indent, columns)
    if any(setting.base is Duration for setting in settings):
        lines += ["", *_entry("DURATION  ", _DURATION, indent, columns)]
    return "\n".join(lines).lstrip("\n")


def _introduction(
    root: type, command: str, purpose: str, groups: Sequence[str], indent: int, columns: int
) -> list[str]:
    reads_recipes = issubclass(root, TrainConfig)
    usage = f"usage: {command} {'[--recipe=A,B] ' if reads_recipes else ''}[--NAME=VALUE ...]"
    text = "--help=FLAG explains one flag"
    text += f", --help=GROUP one group of them: {', '.join(groups)}" if groups else ""
    lines = [f"{command}: {purpose}", "", usage, "", *textwrap.wrap(text, columns)]
    if reads_recipes:
        text = (
            f"files of settings, YAML or JSON or of another system, or of {', '.join(shipped_recipes())}; later ones "
            "win, flags win over all. A file may be the first word, too"
        )
        lines += ["", *_entry("  --recipe=A,B  ", text, indent, columns)]
        for name, meaning in ACCEPTS.items():
            lines += _entry(f"  --{name}=BOOL  ", f"{meaning} [false]", indent, columns)
    return lines


def with_new_tables(page: str) -> str:
    """Return docs/configurations.md with what follows its mark made again; the text above it is written by hand."""
    text, mark, _ = page.partition(_MARK)
    return "\n".join([text + mark, *_settings_tables(), *_variants_table(), *_aliases_table(), ""])


def _sections(root: type) -> Iterator[tuple[str, str, list[Setting]]]:
    """Yield the name, the subject and the settings of each section; of a flat root, of itself under no name."""
    sections = sections_of(root) or {"": root}
    shared = sections_of(TrainConfig) if root is not TrainConfig else {}
    for section, section_type in sorted(sections.items(), key=lambda item: item[0] in shared):
        subject = (section_type.__doc__ or "").strip().splitlines()[0]
        yield section, subject, [setting for setting in settings_of(root).values() if setting.section == section]


def _about(setting: Setting, columns: int) -> list[str]:
    """Return the lines about one flag: what it does, its default, and which values it takes."""
    flag = f"--{setting.name}={_placeholder(setting)}"
    lines = [
        f"{flag}  (of {setting.section})" if setting.section else flag,
        *textwrap.wrap(_explanation(setting), columns),
    ]
    lines += textwrap.wrap(f"Values: {describe_type(setting)}", columns)
    return lines + (textwrap.wrap(f"DURATION: {_DURATION}", columns) if setting.base is Duration else [])


def _entry(flag: str, text: str, indent: int, columns: int) -> list[str]:
    """Set a flag and its text in two columns; a flag wider than its column gets a line of its own."""
    lines = textwrap.wrap(text, columns - indent, break_on_hyphens=False)
    if len(flag) > indent:
        lines.insert(0, "")
    return [(flag.ljust(indent) + lines[0]).rstrip(), *(" " * indent + line for line in lines[1:])]


def _placeholder(setting: Setting) -> str:
    words = {int: "N", float: "X", bool: "BOOL", Duration: "DURATION", str: "TEXT"}
    return "A,B" if setting.many else words[setting.base]


def _explanation(setting: Setting) -> str:
    """Return a setting's help with its choices, where the help does not name them, and its default."""
    words = [setting.help]
    if any(choice not in setting.help for choice in setting.choices):
        words.append(f"({describe_type(setting)})")
    if setting.default is not None:  # what none means, the help says
        words.append(f"[{_default(setting)}]")
    return " ".join(words)


def _default(setting: Setting) -> str:
    """Return what holds when nothing is given."""
    return "must be given" if setting.required else format_value(setting.default) or "empty"


def _settings_tables() -> Iterator[str]:
    yield "## Settings"
    for section, subject, members in _sections(TrainConfig):
        yield f"\n### {section}\n\n{subject}\n"
        yield "| setting | default | values | meaning |\n|---|---|---|---|"
        for setting in members:
            meaning = setting.help.replace("<", "&lt;")  # a placeholder, which Markdown would take for an element
            cells = (f"`{setting.name}`", f"`{_default(setting)}`", describe_type(setting), meaning)
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _variants_table() -> Iterator[str]:
    yield (
        "\n## Model variants\n\n"
        "`--model_variant` takes a name in any case; any dimension can be changed under its own name.\n\n"
        "| variant | hidden | heads/kv | layers | feed-forward | context | rope theta | vocabulary | parameters |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for name, shape in VARIANTS.items():
        yield f"| {name} | {' | '.join(_dimensions(shape))} |"
    yield (
        "\nThe context is what a variant was made for; `seq_length` may be longer or shorter. "
        "llama3.2_1b and llama3.2_3b share the embedding with the head and stretch rotary frequencies by the llama3 "
        "rule. medium is 125m, large is 350m."
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
    """Tabulate names and values that are understood besides the canonical ones."""
    yield "\n## Other names\n\n| written | means |\n|---|---|"
    yield f"| `{RECIPE_NAMES[1]}` | the same as {RECIPE_NAMES[0]} |"
    for name, alias in ALIASES.items():
        yield f"| `{name}` | {alias.help} |"
    for name, setting in settings_of(TrainConfig).items():
        for word, meaning in setting.aliases.items():
            yield f"| `{name}={word}` | `{name}={meaning}` |"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_new_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
