"""`pretrain completion bash|zsh`: a script that completes commands, flags and values in a shell.

    settings of every command -> what its value may be (words, a path) -> case patterns of bash, arguments of zsh

The script holds all names, so that no Python starts at a tab. It is of the version that printed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pretraining.config.assignments import RECIPE_NAMES
from pretraining.config.command_line import ACCEPTS
from pretraining.config.commands import TranslateConfig
from pretraining.config.fields import Setting, sections_of, settings_of
from pretraining.config.recipes import shipped_recipes
from pretraining.config.training import TrainConfig
from pretraining.config.variants import VARIANTS

Commands = Mapping[str, tuple[type, str]]
"""The root of a command's settings, and what it does, by its name."""

_BOOLS = ("true", "false")
_LONGEST_HELP = 72


@dataclass(frozen=True)
class Value:
    """What may stand behind a flag.

    Attributes:
        words: some or all of the values.
        is_path: whether it may be a path.
        is_list: whether several may stand there, a comma between them.
        help: of the flag, in a few words.
    """

    words: tuple[str, ...] = ()
    is_path: bool = False
    is_list: bool = False
    help: str = ""


def completion_script(shell: str, commands: Commands) -> str:
    """Returns the script for bash or zsh."""
    return "\n".join((_bash if shell == "bash" else _zsh)(commands))


def values_of_command(root: type) -> dict[str, Value]:
    """Returns the flags of a command, with what may stand behind each."""
    values = {name: _value_of(setting) for name, setting in settings_of(root).items()}
    if issubclass(root, TrainConfig):
        recipe = Value(tuple(shipped_recipes()), is_path=True, is_list=True, help="files of settings")
        values |= dict.fromkeys(RECIPE_NAMES, recipe)
        values |= {name: Value(_BOOLS, help=_shortened(text)) for name, text in ACCEPTS.items()}
    elif root is TranslateConfig:
        values["from"] = values["kind"]
    return values


def _value_of(setting: Setting) -> Value:
    words = setting.choices or (_BOOLS if setting.base is bool else ())
    if setting.name == "model_variant":
        words = tuple(VARIANTS)
    if words and setting.optional:
        words = (*words, "none")
    return Value(words, setting.is_path, setting.many, _shortened(setting.help))


def _shortened(text: str) -> str:
    """Returns the first clause of a help, or as many of its words as there is room for."""
    clause = text.partition(";")[0].partition(". ")[0].partition(": ")[0]
    if len(clause) <= _LONGEST_HELP:
        return clause
    return clause[: _LONGEST_HELP - 2].rpartition(" ")[0] + " …"


def _helps(root: type) -> list[str]:
    """Returns the groups of settings that `--help=` shows one by one."""
    return list(sections_of(root))


# bash

_BASH_HEAD = """\
# Completes `pretrain` in bash: made by `pretrain completion bash`.
_pretrain() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]-}
    local flag= prefix= words= is_path= end=' ' found
    COMPREPLY=()
    if [[ $word == --*=* ]]; then  # where = breaks no words
        flag=${word%%=*} prefix=${word%%=*}= word=${word#*=}
    elif [[ $word == = ]]; then
        flag=$before word=
    elif [[ $before == = ]]; then
        flag=${COMP_WORDS[COMP_CWORD-2]}
    fi
    if (( COMP_CWORD == 1 )); then"""
_BASH_TAIL = """\
    else
        is_path=yes
    fi
    if [[ -n $words ]]; then
        while IFS= read -r found; do
            [[ $found != *= ]] || end=
            COMPREPLY+=("$prefix$found$end")
            [[ $found != *= ]] || end=' '
        done < <(compgen -W "$words" -- "$word")
    fi
    if [[ -n $is_path ]]; then
        while IFS= read -r found; do
            [[ ! -d $found ]] || found=$found/
            COMPREPLY+=("$prefix$found")
        done < <(compgen -f -- "$word")
    fi
}
complete -o nospace -F _pretrain pretrain"""


def _bash(commands: Commands) -> Iterator[str]:
    yield _BASH_HEAD
    yield f'        words="{" ".join(commands)} --help --version"'
    yield "    elif [[ -n $flag ]]; then"
    yield "        flag=${flag#--}"
    yield "        case $command.${flag//-/_} in"
    for value, patterns in _patterns(commands).items():
        yield f"            {'|'.join(patterns)})"
        yield f"                {_bash_value(value)} ;;"
    yield "        esac"
    yield "    elif [[ $word == -* ]]; then"
    yield "        case $command in"
    for flags, names in _grouped({name: _flags(root) for name, (root, _) in commands.items()}).items():
        yield f'            {"|".join(names)}) words="{" ".join(flags)}" ;;'
    yield "        esac"
    for name, word in _first_words(commands):
        yield f"    elif [[ $command == {name} ]]; then"
        yield f'        words="{" ".join(word)}"'
    yield _BASH_TAIL


def _bash_value(value: Value) -> str:
    parts = []
    if value.is_list:
        parts.append("end=; [[ $word != *,* ]] || { prefix=$prefix${word%,*},; word=${word##*,}; }")
    if value.words:
        parts.append(f'words="{" ".join(value.words)}"')
    if value.is_path:
        parts.append("is_path=yes")
    return "; ".join(parts)


def _patterns(commands: Commands) -> dict[Value, list[str]]:
    """Groups flags by what may stand behind them; a pattern is COMMAND.FLAG, or *.FLAG where it is the same in all."""
    by_flag: dict[str, dict[str, Value]] = {}
    for command, (root, _) in commands.items():
        helps = {"help": Value(tuple(_helps(root)))} if _helps(root) else {}
        for flag, value in {**values_of_command(root), **helps}.items():
            by_flag.setdefault(flag, {})[command] = Value(value.words, value.is_path, value.is_list)
    patterns: dict[Value, list[str]] = {}
    for flag, by_command in by_flag.items():
        is_same = len(set(by_command.values())) == 1
        for command, value in by_command.items():
            pattern = f"*.{flag}" if is_same else f"{command}.{flag}"
            if (value.words or value.is_path) and pattern not in patterns.setdefault(value, []):
                patterns[value].append(pattern)
    return patterns


def _flags(root: type) -> tuple[str, ...]:
    return (*(f"--{name}=" for name in values_of_command(root)), "--help", *(["--help="] if _helps(root) else []))


def _grouped(flags: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, ...], list[str]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, each in flags.items():
        groups.setdefault(each, []).append(name)
    return groups


def _first_words(commands: Commands) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the commands whose first word is one of a few, with these."""
    for name, (root, _) in commands.items():
        for setting in settings_of(root).values():
            if setting.first_word and setting.choices:
                yield name, setting.choices


# zsh

_ZSH_VALUE = """\
_pretrain_value() {  # what kind of value, and words that it may be
    local -a end
    [[ $1 != *list* ]] || { compset -P '*,'; end=(-S '') }
    (( $# == 1 )) || compadd $end -- "${@:2}"
    [[ $1 != *path* ]] || _files $end
}"""


def _zsh(commands: Commands) -> Iterator[str]:
    yield "#compdef pretrain"
    yield "# Completes `pretrain` in zsh: made by `pretrain completion zsh`."
    yield _ZSH_VALUE
    yield "_pretrain() {"
    yield "    local -a commands training own"
    yield "    commands=("
    yield from (f"        {_quoted(f'{name}:{purpose}')}" for name, (_, purpose) in commands.items())
    yield "    )"
    yield "    if (( CURRENT == 2 )); then"
    yield "        _describe -t commands command commands"
    yield "        _arguments '--help[the commands]' '--version[of pretraining, torch and Python]'"
    yield "        return"
    yield "    fi"
    yield "    training=("
    yield from (f"        {spec}" for spec in _specs(values_of_command(TrainConfig)))
    yield "    )"
    yield "    case $words[2] in"
    trains = set(values_of_command(TrainConfig))
    for name, (root, _) in commands.items():
        values = values_of_command(root)
        is_training = issubclass(root, TrainConfig)
        own = {flag: value for flag, value in values.items() if not (is_training and flag in trains)}
        yield f"        {name})"
        yield "            own=("
        yield from (f"                {spec}" for spec in _specs(own))
        yield f"                {_help_spec(root)}"
        yield f"                {_word_spec(root)}"
        yield "            )"
        if is_training:
            yield "            own+=($training)"
        yield "            ;;"
    yield "        *) return 1 ;;"
    yield "    esac"
    yield "    shift words"
    yield "    (( CURRENT-- ))"
    yield "    _arguments $own"
    yield "}"
    yield "if [[ ${funcstack[1]-} == _pretrain ]]; then  # from a folder of $fpath"
    yield '    _pretrain "$@"'
    yield "else"
    yield "    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }"
    yield "    compdef _pretrain pretrain"
    yield "fi"


def _specs(values: Mapping[str, Value]) -> Iterator[str]:
    for name, value in values.items():
        yield _quoted(f"--{name}=-[{_escaped(value.help)}]:value:{_zsh_action(value)}")


def _zsh_action(value: Value) -> str:
    if not value.words and not value.is_path:
        return " "
    kinds = "+".join(filter(None, ("list" * value.is_list, "path" * value.is_path))) or "one"
    return " ".join((" _pretrain_value", kinds, *value.words))  # the blank keeps zsh from adding arguments of its own


def _help_spec(root: type) -> str:
    groups = " ".join(_helps(root))
    return _quoted(f"--help=-[every flag, or those of a group]::group:({groups})" if groups else "--help[every flag]")


def _word_spec(root: type) -> str:
    choices = [word for setting in settings_of(root).values() if setting.first_word for word in setting.choices]
    return _quoted(f"1:word:({' '.join(choices)})" if choices else "*:file:_files")


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in text)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
