"""Declaration of settings, and the table of the settings in a dataclass.

A setting is a field of a frozen dataclass. Its annotation gives the allowed values, so mypy checks the default:

    batch_size: PositiveInt = setting(2, "sequences that one GPU takes at once")
    num_steps: RunLength = setting(Duration(1000, "steps"), "length of the run")
    ckpt_format: Literal["sharded", "full"] = setting("sharded", "layout of the files")
    keep_last: PositiveInt | None = setting(None, "newest checkpoints to keep; none = all")
    output_path: str = required("folder to make")

A root is a dataclass of section dataclasses (`TrainConfig`) or a flat dataclass (a command with few settings). Flags,
recipes, help and dumps use the table that `settings_of` returns, so a new field needs no other change.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from pretraining.durations import PERCENT, UNITS, Duration

T = TypeVar("T")

PATH_ENDINGS = ("_path", "_dir")
OTHER_PATHS = ("eval_datasets", "hf_dataset", "paths", "picture", "resume_from_checkpoint")


@dataclass(frozen=True)
class Units:
    """Annotation: the units that a `Duration` setting takes (default: all)."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class InBytes:
    """Annotation: a text that `parse_bytes` reads."""


@dataclass(frozen=True)
class OneOfOr:
    """Annotation: one of these names, or a user-defined `package.module:Name` (`config/plugins.py`)."""

    names: tuple[str, ...]


LIMITS = (Ge, Gt, Le, Lt)
PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
RunLength = Annotated[Duration, Units(("steps", "tokens", "epochs"))]
PartOfRun = Annotated[Duration, Units(("steps", "tokens", "epochs", PERCENT))]
Time = Annotated[Duration, Units(("seconds",))]
ByteSize = Annotated[str, InBytes()]


def setting(default: T, help: str = "", **declared: Any) -> T:
    """Declare a setting, or a section of them.

    Args:
        default: value if neither flag nor recipe sets it.
        help: what the flag does, in one or two sentences.
        declared: attributes of `Setting` from `silent_change` on; for a section only `silent_change`, for all of it.
    """
    return dataclasses.field(default=default, metadata={"help": help, **declared})


def required(help: str, **declared: Any) -> Any:
    """Declare a setting without a default, which the user must give. Arguments are as in `setting`."""
    return dataclasses.field(metadata={"help": help, **declared})


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a root.

    Attributes:
        section: field of the root that holds the setting; "" in a flat root.
        base: str, int, float, bool or Duration.
        optional: whether None is allowed.
        many: whether the value is a tuple of `base`.
        default: MISSING if the user must give a value.
        choices: allowed texts in canonical spelling (lower case, underscores); empty = any text.
        units: allowed units of a duration.
        in_bytes: whether a text is a size in bytes.
        limits: bounds of a number, by `Ge`, `Gt`, `Le` or `Lt`.
        pluggable: whether a user-defined `package.module:Name` is allowed besides `choices`.
        help: what the flag does, in one or two sentences.
        silent_change: whether a resumed run changes it without a message, because it is a path, belongs to one start,
            or another message reports it.
        aliases: other spellings, each with the value that it means.
        per_node: whether nodes may have different values (paths on local disks, numbers of threads); none must be none
            on all nodes. All other settings are equal in the whole job.
        first_word: whether the value may stand alone before the flags: `pretrain verify runs/a`.
        second_word: whether the value may follow that of the first word: `pretrain export runs/a out`.
        may_be_address: whether the path may be an object store address.
        typed_none: value of a typed none, if it means something else than a setting that is not given.
        decides: "documents" if the setting decides the documents of a dataset, and so what its index holds; "samples"
            if it decides only how documents become samples. Neither may change during a run.
    """

    name: str
    section: str
    base: type
    optional: bool
    many: bool
    default: Any
    choices: tuple[str, ...]
    units: tuple[str, ...]
    in_bytes: bool
    limits: Mapping[type, float]
    pluggable: bool
    help: str = ""
    silent_change: bool = False
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    per_node: bool = False
    first_word: bool = False
    second_word: bool = False
    may_be_address: bool = False
    typed_none: Any = None
    decides: Literal["", "documents", "samples"] = ""

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is MISSING

    @property
    def is_path(self) -> bool:
        """Whether the name is that of a path."""
        return self.name.endswith(PATH_ENDINGS) or self.name in OTHER_PATHS


def sections_of(root: type) -> dict[str, type]:
    """Return the section dataclasses of a root by field name; empty for a flat root."""
    return {name: hint for name, hint in get_type_hints(root).items() if _is_section(hint)}


def settings_of(root: type) -> Mapping[str, Setting]:
    """Return every setting of a root by name, in the order of declaration.

    Raises:
        TypeError: a field's type cannot be parsed from text, or two sections share a name (bugs in the dataclass).
    """
    return _settings_of(root)


@cache  # not on `settings_of`: mypy would refuse a dataclass as its argument
def _settings_of(root: type) -> Mapping[str, Setting]:
    settings: dict[str, Setting] = {}
    for setting in _settings_in(root, "", None, silent_change=False):
        if setting.name in settings:
            raise TypeError(f"{root.__name__} has two settings named {setting.name}")
        settings[setting.name] = setting
    return types.MappingProxyType(settings)


def build(root: type[T], values: Mapping[str, Any]) -> T:
    """Build a root from values by setting name, which include every required setting; the rest keep their defaults."""
    settings = settings_of(root)
    arguments: dict[str, Any] = {name: value for name, value in values.items() if not settings[name].section}
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(root)}  # type: ignore[arg-type]
    for section in sections_of(root):
        chosen = {name: value for name, value in values.items() if settings[name].section == section}
        arguments[section] = dataclasses.replace(defaults[section], **chosen)
    return root(**arguments)


def values_of(config: Any) -> dict[str, Any]:
    """Return every setting's value by name: the inverse of `build`."""
    return {
        name: getattr(getattr(config, setting.section) if setting.section else config, name)
        for name, setting in settings_of(type(config)).items()
    }


def _is_section(annotation: Any) -> bool:
    return dataclasses.is_dataclass(annotation) and annotation is not Duration


def _settings_in(holder: type, section: str, instance: Any, silent_change: bool) -> list[Setting]:
    """List the settings of a root or a section; an instance gives the defaults of a section."""
    settings = []
    hints = get_type_hints(holder, include_extras=True)
    for field in dataclasses.fields(holder):
        default = field.default if instance is None else getattr(instance, field.name)
        silent = silent_change or field.metadata.get("silent_change", field.name.endswith(PATH_ENDINGS))
        if not section and _is_section(hints[field.name]):
            settings += _settings_in(hints[field.name], field.name, default, silent)
        else:
            declared = {**field.metadata, "silent_change": silent}
            read = _read_annotation(hints[field.name], field.name)
            settings.append(Setting(name=field.name, section=section, default=default, **declared, **read))
    return settings


def _read_annotation(annotation: Any, name: str) -> dict[str, Any]:
    """Parse `X`, `X | None` or `tuple[X, ...]`, where X may be a `Literal`, or `Annotated` with limits or units."""
    optional = many = False
    extras: list[Any] = []
    choices: tuple[str, ...] = ()
    if get_origin(annotation) in (Union, types.UnionType):
        others = [part for part in get_args(annotation) if part is not type(None)]
        optional = len(others) < len(get_args(annotation))
        annotation = others[0] if len(others) == 1 else None
    if get_origin(annotation) is tuple and get_args(annotation)[1:] == (Ellipsis,):
        many, annotation = True, get_args(annotation)[0]
    if get_origin(annotation) is Annotated:
        annotation, *extras = get_args(annotation)
    if get_origin(annotation) is Literal and all(isinstance(choice, str) for choice in get_args(annotation)):
        annotation, choices = str, get_args(annotation)
    if annotation not in (str, int, float, bool, Duration) or (optional and many):
        raise TypeError(f"{name}: text cannot be parsed into this type")
    plugins = next((extra.names for extra in extras if isinstance(extra, OneOfOr)), None)
    units = next((extra.names for extra in extras if isinstance(extra, Units)), UNITS)
    return {
        "base": annotation,
        "optional": optional,
        "many": many,
        "choices": choices if plugins is None else plugins,
        "pluggable": plugins is not None,
        "units": units if annotation is Duration else (),
        "in_bytes": any(isinstance(extra, InBytes) for extra in extras),
        "limits": {type(extra): dataclasses.astuple(extra)[0] for extra in extras if isinstance(extra, LIMITS)},
    }
