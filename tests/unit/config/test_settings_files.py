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


def test_toml_is_read_as_the_texts_that_flags_would_have() -> None:
    content = '[training]\nlr = 8e-4\nsteps = 1_000\ncompile = true\nname = "x"\ndims = [1, 2.5]\n'
    assert parse_tree(content, "a", ".toml") == {
        "training": {"lr": "8e-4", "steps": "1000", "compile": "true", "name": "x", "dims": ["1", "2.5"]}
    }


def test_assignments_of_python_are_calculated_and_not_run() -> None:
    content = "\n".join(
        [
            '"""My settings."""',
            "max_tokens = 5 * 10**9  # five billion",
            "name = 'x'",
            "nothing = None",
            "compile: bool = True",
            "declared: int",
            "import time, torch",
            "run = f'{name}-{max_tokens}' + '-a'",
            "block_size = 1024",
            "iterations = max_tokens // (8 * block_size)",
            "learning_rate = 6e-4",
            "min_lr = learning_rate / 10",
            "betas = (0.9, -0.5)",
            "groups = {'a': 1}",
            "same = other = 7 % 4 + 1.5 - 1",
        ]
    )
    assert parse_tree(content, "a.py", ".py") == {
        "max_tokens": "5000000000",
        "name": "x",
        "nothing": None,
        "compile": "true",
        "run": "x-5000000000-a",
        "block_size": "1024",
        "iterations": "610351",
        "learning_rate": "0.0006",
        "min_lr": repr(6e-4 / 10),
        "betas": ["0.9", "-0.5"],
        "groups": {"a": "1"},
        "same": "3.5",
        "other": "3.5",
    }


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from os import path", "line 2 is no assignment"),
        ("x = 'a' + str(1)", "line 2: `str(1)` is neither"),
        ("x = f'{open}'", "line 2: `open` is neither"),
        ("x = f'{a:>9}'", "is neither a literal"),
        ("x = f'{a!r}'", "is neither a literal"),
        ("x = f'{[1]}'", "line 2: `[1]` is no plain value to write into a text"),
        ("x = 'a' + 1", "line 2: `'a'` is no number to calculate with"),
        ("open('x')", "line 2 is no assignment"),
        ("x = open('x')", "line 2: `open('x')` is neither a literal nor arithmetic of literals"),
        ("x = torch.cuda", "line 2: `torch.cuda` is neither"),
        ("x = [i for i in (1, 2)]", "is neither a literal"),
        ("x = unknown", "line 2: `unknown` is neither"),
        ("x.y = 1", "line 2 assigns to no plain name"),
        ("x = 'a' * 10", "line 2: `'a'` is no number to calculate with"),
        ("x = True + 1", "`True` is no number"),
        ("x = -'a'", "`-'a'` is no number"),
        ("x = 1 / 0", "line 2: division by zero"),
        ("x = 10**31", "line 2: the number is too large for a setting"),
        ("x = 2**1000", "line 2: the power is too large for a setting"),
        ("x = (-8) ** 0.5", "line 2: `(-8) ** 0.5` is no number to calculate with"),
        ("x = {**y}", "is neither a literal"),
        ("x = b'a'", "is neither a literal"),
        ("x = 1 if True else 2", "is neither a literal"),
        ("x = (", "was never closed"),
    ],
)
def test_anything_else_in_python_is_refused_at_its_line(line: str, said: str) -> None:
    assert said in problem_of(f"a = 1\n{line}\n", ".py")


@pytest.mark.parametrize("suffix", [".py", ".toml", ".json", ".yaml"])
def test_deep_nesting_is_one_error(suffix: str) -> None:
    assert "recipe a" in problem_of(("x = " if suffix in (".py", ".toml") else "") + "[" * 100_000, suffix)


def test_texts_and_lists_that_double_from_line_to_line_end_at_a_bound() -> None:
    assert "line 14: the text is too long" in problem_of("x = 'aaa'\n" + "x = f'{x}{x}'\n" * 30, ".py")
    assert "line 14: the text is too long" in problem_of("x = 'aaa'\n" + "x = x + x\n" * 30, ".py")
    assert "more than 16,384 values" in problem_of("x = 1\n" + "x = [x, x]\n" * 60, ".py")


def test_a_tag_that_would_build_an_object_is_refused() -> None:
    assert "line 1: tag:yaml.org,2002:python/object/apply:os.system would build an object" in problem_of(
        "a: !!python/object/apply:os.system [true]", ".yaml"
    )
