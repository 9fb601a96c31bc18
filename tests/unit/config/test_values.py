"""One setting's value: accepted texts by type, limits, and the text that reads back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Le, Lt

from pretraining.config.fields import PartOfRun, PositiveFloat, PositiveInt, Time, Units, setting, settings_of
from pretraining.config.values import limit_problem, parse_ranges, parse_value
from pretraining.durations import Duration
from pretraining.errors import ConfigError


@dataclass(frozen=True)
class Example:
    """One setting of each kind."""

    text: str = setting("", "a text")
    path: str | None = setting(None, "a path")
    count: PositiveInt = setting(1, "a count")
    maybe: int | None = setting(None, "a count or not")
    rate: Annotated[float, Ge(0), Lt(1)] = setting(0.5, "a rate")
    ratio: Annotated[float, Le(1)] = setting(0.5, "a ratio")
    factor: PositiveFloat = setting(1.0, "a factor")
    on: bool = setting(False, "a switch")
    perhaps: bool | None = setting(None, "a switch or not")
    length: Annotated[Duration, Units(("steps", "tokens"))] = setting(Duration(1, "steps"), "a length")
    every: Duration | None = setting(None, "an interval")
    kind: Literal["one", "two_three"] = setting("one", "a kind", aliases={"uno": "one"})
    kinds: tuple[Literal["one", "two_three"], ...] = setting((), "kinds")
    part: PartOfRun | None = setting(None, "a part of the run")
    time: Time | None = setting(None, "a time")
    own_options: tuple[str, ...] = setting((), "key=value")
    names: tuple[str, ...] = setting((), "names")
    shares: tuple[float, ...] = setting((), "shares")


SETTINGS = settings_of(Example)


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("text", "none", "none"),
        ("text", " a=b, c ", " a=b, c "),
        ("path", "none", None),
        ("path", "", None),
        ("rate", "5%", 0.05),
        ("ratio", " 12.5% ", 0.125),
        ("part", "3%", Duration(3, "percent")),
        ("time", "24:00:00", Duration(86400, "seconds")),
        ("time", "1-12:30:05", Duration(131405, "seconds")),
        ("time", "1-02:00", Duration(93600, "seconds")),
        ("own_options", "betas=(0.9,0.99),on=true,[1]", ("betas=(0.9,0.99)", "on=true", "[1]")),
        ("own_options", ["betas=(0.9", "0.99)", "x=[1", "2]"], ("betas=(0.9,0.99)", "x=[1,2]")),
        ("names", "a(1,b)", ("a(1", "b)")),
        ("count", "5_000", 5000),
        ("count", "1e6", 1_000_000),
        ("count", "8.0", 8),
        ("maybe", "-3", -3),
        ("rate", "1e-3", 0.001),
        ("rate", ".25", 0.25),
        ("ratio", "-1_0.5", -10.5),
        *[("on", word, True) for word in ("True", "TRUE", "1", "yes", " on ")],
        *[("on", word, False) for word in ("false", "False", "0", "no", "off")],
        ("perhaps", "none", None),
        ("length", "5Btok", Duration(5_000_000_000, "tokens")),
        ("every", "30min", Duration(1800, "seconds")),
        ("kind", "UNO", "one"),
        ("kind", "Two-Three", "two_three"),
        ("kinds", "one,TWO-THREE", ("one", "two_three")),
        ("names", "[a, 'b', \"c\"]", ("a", "b", "c")),
        ("names", "(a,b)", ("a", "b")),
        ("names", "lang=en/dataset=x,y", ("lang=en/dataset=x", "y")),
        ("names", "[]", ()),
        ("names", "", ()),
        ("names", None, ()),
        ("names", ["a,b", "c"], ("a,b", "c")),
        ("shares", "1,2.5", (1.0, 2.5)),
    ],
)
def test_a_text_parses_to_this_value(name: str, raw: Any, value: object) -> None:
    parsed = parse_value(SETTINGS[name], raw)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("text", ["a"], "a text is needed, not a list"),
        ("count", "abc", "a whole number is needed, as 5_000"),
        ("count", "1.5", "a whole number is needed"),
        ("count", "0", "the smallest value is 1"),
        ("count", "1e30", "it must be below 2^63"),
        ("rate", "fast", "a number is needed, as 5_000"),
        ("rate", "nan", "a number is needed"),
        ("rate", "1e999", "a finite number is needed"),
        ("rate", "-0.1", "the smallest value is 0"),
        ("rate", "1", "it must be below 1"),
        ("ratio", "1.1", "the largest value is 1"),
        ("factor", "0", "it must be above 0"),
        ("on", "maybe", "true or false is needed"),
        ("length", "soon", "'soon' is not a duration"),
        ("length", "5B", "write 1000 (steps), 5_000_000tok or 5Btok (k, M, B, T multiply); at most 10^18"),
        ("time", "5B", "write 90s, 30min, 2h or 23h30min; at most 10^18"),
        ("length", "2ep", "epochs are not allowed here, give steps or tokens"),
        *(("part", text, "A part of the run is written 3%") for text in ("0.03", "3e-2", "3percent", "3 pct")),
        ("time", "24:00", "'24:00' is not a duration"),
        ("time", "1:61:00", "is not a duration"),
        ("count", "5%", "a whole number is needed"),
        ("shares", "5%", "a number is needed"),
        ("kind", "on", "not known (did you mean one?), use one of one, two_three"),
        ("kinds", "one,x", "not known"),
        ("names", "a,,b", "an empty item"),
        ("shares", "1,x", "a number is needed"),
    ],
)
def test_unreadable_text_gives_an_error_with_the_expected_type(name: str, raw: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_value(SETTINGS[name], raw)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("text", 3, "a text is needed"),
        ("count", 2.0, "a whole number is needed"),
        ("count", True, "a whole number is needed"),
        ("on", 1, "true or false is needed"),
        ("maybe", [], "a whole number is needed"),
        ("ratio", 10**400, "a finite number is needed"),
        ("factor", 10**30, None),
        ("maybe", None, None),
    ],
)
def test_a_value_of_a_file_is_checked_for_its_type(name: str, value: object, problem: str | None) -> None:
    assert limit_problem(SETTINGS[name], value) == problem


def test_ranges_include_both_ends_and_may_be_one_number() -> None:
    assert parse_ranges("flag", ["3-7", "5", "0-0", "5-"], smallest=0) == [(3, 7), (5, 5), (0, 0), (5, 5)]


@pytest.mark.parametrize("text", ["", "-", "7-3", "-1", "a-b", "1-2-3", "1.5", f"1-{10**18 + 1}", "0-2"])
def test_an_invalid_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_ranges("flag", ["5", text], smallest=1)
    assert refused.value.settings == ("flag",)
