"""How a setting is declared: a dataclass field with its help and limits."""

from __future__ import annotations

import dataclasses
import types
from dataclasses import MISSING, dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pretraining.progress import Duration

RUN_LENGTH = ("steps", "tokens", "epochs")
INTERVAL = ("steps", "tokens", "epochs", "seconds")


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    units: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field with its help and the limits that parsing enforces.

    Args:
        default: the value without a flag or a recipe; left out, one must be given.
        help: what the flag does, in a sentence.
        units: of a `Duration`: which of steps, tokens, epochs, seconds are meaningful.
        choices: the only values allowed, in canonical spelling: lower case, underscores (any case and dashes are
            accepted).
        minimum: the smallest number allowed.
        maximum: the largest number allowed.
        below: a number that the value must stay under.
    """
    limits = {"units": units, "choices": choices, "minimum": minimum, "maximum": maximum, "below": below}
    return dataclasses.field(default=default, metadata={"help": help, **limits})


# TODO(merge): was pretraining.config.fields
# What a dataclass of settings asks for: name, section, type, default, help and limits of every one.
#
# A root is either a dataclass of section dataclasses (`TrainConfig`) or a flat one (a command with few settings);
# fields
# made with `setting()` carry help and limits. Everything that handles settings by name (flags, recipes, help, dumps)
# works on the table that `settings_of` returns, so a new field is known everywhere at once.

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """One setting of a root.

    Attributes:
        name: unique over all sections.
        section: the field of the root that holds it; "" in a flat root.
        base: str, int, float, bool or Duration.
        optional: whether None is a value.
        many: whether the value is a tuple of `base`.
        default: the value without a flag or a recipe; MISSING where one must be given.
        help: what it does, in a sentence.
        units: of a duration: the units that are meaningful; empty = all.
        choices: the only values allowed; empty = any.
        minimum: the smallest number allowed.
        maximum: the largest number allowed.
        below: a number that the value must stay under.
    """

    name: str
    section: str
    base: type
    optional: bool
    many: bool
    default: Any
    help: str
    units: tuple[str, ...]
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    below: float | None

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is MISSING


def sections_of(root: type) -> dict[str, type]:
    """Return the section dataclasses of a root by the name of their field; empty for a flat root."""
    hints = get_type_hints(root)
    return {field.name: hints[field.name] for field in dataclasses.fields(root) if _is_section(hints[field.name])}


def settings_of(root: type) -> dict[str, Setting]:
    """Return every setting of a root by name, in the order of declaration.

    Raises:
        TypeError: a field has a type that no text can be parsed into, or two sections share a name (mistakes of the
            dataclass's author).
    """
    settings: dict[str, Setting] = {}
    hints = get_type_hints(root)
    for field in dataclasses.fields(root):
        annotation = hints[field.name]
        if _is_section(annotation):
            default = _default(field)
            found = _settings_in(annotation, field.name, None if default is MISSING else default)
        else:
            found = [_setting(field, annotation, "", _default(field))]
        for setting in found:
            if setting.name in settings:
                raise TypeError(
                    f"{root.__name__} has two settings named {setting.name}: names are unique over all sections"
                )
            settings[setting.name] = setting
    return settings


def build(root: type[T], values: dict[str, Any]) -> T:
    """Make a root from values by setting name; what is not named keeps its default.

    Args:
        root: the dataclass.
        values: parsed values; every required setting is among them.
    """
    settings, sections = settings_of(root), sections_of(root)
    arguments: dict[str, Any] = {}
    of_section: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for name, value in values.items():
        section = settings[name].section
        (of_section[section] if section else arguments)[name] = value
    for field in dataclasses.fields(root):  # type: ignore[arg-type]
        if field.name in sections:
            default, chosen = _default(field), of_section[field.name]
            section_type = sections[field.name]
            arguments[field.name] = (
                section_type(**chosen) if default is MISSING else dataclasses.replace(default, **chosen)
            )
    return root(**arguments)


def values_of(config: Any) -> dict[str, Any]:
    """Return every setting's value by name: the inverse of `build`."""
    return {
        name: getattr(getattr(config, setting.section) if setting.section else config, name)
        for name, setting in settings_of(type(config)).items()
    }


def _is_section(annotation: Any) -> bool:
    """Return whether a field holds a dataclass of settings."""
    return dataclasses.is_dataclass(annotation) and annotation is not Duration


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default, made where it has a factory; MISSING where it has none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _settings_in(section_type: type, section: str, instance: Any) -> list[Setting]:
    """Return the settings of one section, with the defaults of the root's own instance of it where there is one."""
    hints = get_type_hints(section_type)
    return [
        _setting(
            field,
            hints[field.name],
            section,
            _default(field) if instance is None else getattr(instance, field.name),
        )
        for field in dataclasses.fields(section_type)
    ]


def _setting(field: dataclasses.Field[Any], annotation: Any, section: str, default: Any) -> Setting:
    """Read one field."""
    base, optional, many = _read_annotation(annotation, field.name)
    metadata = field.metadata
    return Setting(
        name=field.name,
        section=section,
        base=base,
        optional=optional,
        many=many,
        default=default,
        help=metadata.get("help", ""),
        units=metadata.get("units", ()),
        choices=metadata.get("choices", ()),
        minimum=metadata.get("minimum"),
        maximum=metadata.get("maximum"),
        below=metadata.get("below"),
    )


def _read_annotation(annotation: Any, name: str) -> tuple[type, bool, bool]:
    """Split `X`, `X | None` or `tuple[X, ...]` into (X, optional, many)."""
    optional = many = False
    if get_origin(annotation) in (Union, types.UnionType):
        others = [part for part in get_args(annotation) if part is not type(None)]
        optional = len(others) < len(get_args(annotation))
        annotation = others[0] if len(others) == 1 else None
    if get_origin(annotation) is tuple and get_args(annotation)[1:] == (Ellipsis,):
        many, annotation = True, get_args(annotation)[0]
    if annotation not in (str, int, float, bool, Duration) or (optional and many):
        raise TypeError(
            f"{name}: settings are str, int, float, bool, Duration, one of them | None, or a tuple[…, ...] of one"
        )
    return annotation, optional, many
