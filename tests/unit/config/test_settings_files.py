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
    "line",
    [
        "from os import path",
        "x = 'a' + str(1)",
        "x = f'{open}'",
        "x = f'{a:>9}'",
        "x = f'{a!r}'",
        "x = f'{[1]}'",
        "x = 'a' + 1",
        "open('x')",
        "x = open('x')",
        "x = torch.cuda",
        "x = [i for i in (1, 2)]",
        "x.y = 1",
        "x = 'a' * 10",
        "x = True + 1",
        "x = -'a'",
        "x = 1 / 0",
        "x = 10**31",
        "x = 2**1000",
        "x = (-8) ** 0.5",
        "x = {**y}",
        "x = b'a'",
        "x = 1 if True else 2",
        "x = (",
    ],
)
def test_anything_else_in_python_is_refused_at_its_line(line: str) -> None:
    assert "line 2" in problem_of(f"a = 1\n{line}\n", ".py")


@pytest.mark.parametrize("suffix", [".py", ".toml", ".json", ".yaml"])
def test_deep_nesting_is_one_error(suffix: str) -> None:
    assert "recipe a" in problem_of(("x = " if suffix in (".py", ".toml") else "") + "[" * 100_000, suffix)


def test_texts_and_lists_that_double_from_line_to_line_end_at_a_bound() -> None:
    assert "line 14: the text is too long" in problem_of("x = 'aaa'\n" + "x = f'{x}{x}'\n" * 30, ".py")
    assert "line 14: the text is too long" in problem_of("x = 'aaa'\n" + "x = x + x\n" * 30, ".py")
    assert "more than 16,384 values" in problem_of("x = 1\n" + "x = [x, x]\n" * 60, ".py")
