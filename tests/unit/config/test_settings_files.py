"""Files of settings as trees: texts as they are written, nothing executed, one error where one is needed."""

from __future__ import annotations

import pytest

from pretraining.config.settings_files import parse_tree
from pretraining.errors import ConfigError


def problem_of(content: str, suffix: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_tree(content, f"a{suffix}", suffix)
    return str(error.value)


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".yaml", "a: 1e-3\nb: {c: on, d: [1, 010]}\ne: null\nf: true\n"),
        (".json", '{"a": 1e-3, "b": {"c": "on", "d": [1, "010"]}, "e": null, "f": true}'),
    ],
)
def test_scalars_stay_texts(suffix: str, content: str) -> None:
    assert parse_tree(content, "a", suffix) == {
        "a": "1e-3",
        "b": {"c": "on", "d": ["1", "010"]},
        "e": None,
        "f": "true",
    }


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_deep_nesting_is_one_error(suffix: str) -> None:
    assert "recipe a" in problem_of("[" * 100_000, suffix)


def test_a_tag_that_would_build_an_object_is_refused() -> None:
    assert "line 1: tag:yaml.org,2002:python/object/apply:os.system would build an object" in problem_of(
        "a: !!python/object/apply:os.system [true]", ".yaml"
    )
