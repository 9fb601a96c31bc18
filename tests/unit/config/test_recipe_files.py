"""Recipes: allowed content, mistakes, and the resolved configuration as a recipe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pretraining.config.fields import Setting, build, settings_of
from pretraining.config.read import load_train_config, read_values
from pretraining.config.recipe_files import dump_config, read_recipe, settings_in, shipped_recipes
from pretraining.config.settings_files import LARGEST_FILE_BYTES, parse_tree
from pretraining.config.training import TrainConfig
from pretraining.config.values import NONE_WORDS
from pretraining.durations import Duration
from pretraining.errors import ConfigError


def recipe(folder: Path, text: str, name: str = "a.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def load(path: str) -> TrainConfig:
    """Return the settings of a recipe, without checks of rules."""
    reader = read_values(TrainConfig, read_recipe(path))
    if reader.problems:
        raise ConfigError(reader.problems)
    return build(TrainConfig, reader.values)


def problems_of(path: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        load(path)
    return tuple(problem.replace(path, "FILE") for problem in error.value.problems)


YAML_TEXT = """
# flat and by section, one beside the other
learning_rate: 1e-3
optimizer:
  weight_decay: 0
  adam-beta1: .8
report:
schedule: cosine
data: {datasets: [a, b], weights: [1, 2.5], data_path: 1e5}
deterministic: on
seed: 010
num_steps: 5Btok
checkpoint_interval: 500
tracker: []
tokenizer_path: ~
"""

JSON_TEXT = """
{"learning_rate": 1e-3, "optimizer": {"weight_decay": 0, "adam-beta1": 0.8}, "report": null, "schedule": "cosine",
 "data": {"datasets": ["a", "b"], "weights": [1, 2.5], "data_path": "1e5"}, "deterministic": true, "seed": 10,
 "num_steps": "5Btok", "checkpoint_interval": 500, "tracker": [], "tokenizer_path": null}
"""


@pytest.mark.parametrize(("text", "name"), [(YAML_TEXT, "a.yaml"), (YAML_TEXT, "a.yml"), (JSON_TEXT, "a.json")])
def test_a_recipe_and_flags_are_parsed_alike(tmp_path: Path, text: str, name: str) -> None:
    flags = ["learning_rate=1e-3", "weight_decay=0", "adam_beta1=.8", "datasets=a,b", "weights=1,2.5", "data_path=1e5"]
    more = ["deterministic=on", "seed=10", "num_steps=5Btok", "checkpoint_interval=500", "tracker=none"]
    assert load(recipe(tmp_path, text, name)) == load_train_config([*flags, *more])
    assert load(recipe(tmp_path, "run:")) == TrainConfig()


@pytest.mark.parametrize(
    ("text", "name", "part"),
    [
        ("learning_rat: 1", "a.yaml", "learning_rat is not known: did you mean learning_rate?"),
        ("run:\n  seed: {a: 1}", "a.yaml", "run.seed.a is not known"),
        ("seed: null", "a.yaml", "not null"),
        ("datasets: [[a]]", "a.yaml", "a list holds plain values"),
        ("num_steps: 5\nmax_tokens: 5B", "a.yaml", "two run lengths"),
        ("- a\n- b", "a.yaml", "holds no settings"),
        ("a: [1", "a.yaml", "is not valid YAML"),
        ("seed: 1\nseed: 2", "a.yaml", "seed is given twice"),
        ("seed: 1\n? [1]\n: 2", "a.yaml", "line 2"),
        ("{<<: 3}", "a.yaml", "is not valid YAML"),
        ("seed: !!bool xyz", "a.yaml", "is not valid YAML"),
        ("{", "a.json", "is not valid JSON"),
        ('{"seed": 1, "seed": 2}', "a.json", "seed is given twice"),
        ("a: " + "[" * 100_000, "a.yaml", "nested too deep"),
        ("a: &a [*a]", "a.yaml", "nested too deep"),
        (f"skip_samples: [{'1, ' * 2**14}]", "a.yaml", "more than 16,384 values"),
        ("#" * (LARGEST_FILE_BYTES + 1), "a.yaml", "more than 1,048,576 bytes"),
        ("\udcff\udcfe", "a.yaml", "cannot be read"),
    ],
)
def test_an_error_in_a_recipe_names_the_file(tmp_path: Path, text: str, name: str, part: str) -> None:
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    [problem] = problems_of(str(tmp_path / name))
    assert "FILE" in problem and part in problem


def test_a_recipe_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").mkdir()
    for name in ("a.yaml", "b.yaml", "c.yaml"):
        [problem] = problems_of(str(tmp_path / name))
        assert "FILE" in problem
    with pytest.raises(ConfigError, match=r"did you mean demo\?"):
        read_recipe("dmo")


def test_own_keys_override_merged_mappings_and_the_first_merged_mapping_wins() -> None:
    tree = parse_tree(
        "a: &a {learning_rate: 1e-2, weight_decay: 0.5}\nb: &b {weight_decay: 0.2, grad_clip_thresh: &three 3}\n"
        "optimizer: {<<: [*a, *b], learning_rate: 1e-3}\nseed: *three\n'<<': text\n",
        "a.yaml",
    )
    assert tree["optimizer"] == {"learning_rate": "1e-3", "weight_decay": "0.5", "grad_clip_thresh": "3"}
    assert (tree["seed"], tree["<<"]) == ("3", "text")


def test_a_recipe_executes_nothing(tmp_path: Path) -> None:
    target = tmp_path / "made"
    path = recipe(tmp_path, f"data_path: !!python/object/apply:os.mkdir ['{target}']")
    problems_of(path)
    assert not target.exists()


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_can_be_trained_with(name: str) -> None:
    load_train_config([f"recipe={name}"])


def values(setting: Setting) -> st.SearchStrategy[Any]:
    """Generate any value of a setting."""
    one: st.SearchStrategy[Any]
    if setting.choices:
        one = st.sampled_from(setting.choices)
    elif setting.in_bytes:
        one = st.sampled_from(["5GB", "2GiB", "1.5 mb", "100"])
    elif setting.base is str:
        one = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
        if setting.is_path:
            one = one.filter(lambda text: not text.startswith("~"))  # means a home folder, so no configuration has it
        if setting.name.endswith("_options"):  # rules refuse an option with one bracket
            one = one.filter(lambda text: not set("()[]") & set(text))
        if setting.optional:
            one = one.filter(lambda text: text.strip().lower() not in NONE_WORDS)
    elif setting.base is bool:
        one = st.booleans()
    elif setting.base is int:
        one = st.integers(int(setting.limits.get(Ge, 0)), int(setting.limits.get(Le, 2**63 - 1)))
    elif setting.base is float:
        largest = setting.limits.get(Lt, setting.limits.get(Le))
        one = st.floats(
            setting.limits.get(Ge, setting.limits.get(Gt)),
            largest,
            allow_nan=False,
            allow_infinity=False,
            exclude_min=Gt in setting.limits,
            exclude_max=Lt in setting.limits,
        )
    else:
        one = st.builds(Duration, st.integers(0, 10**18), st.sampled_from(setting.units))
    if setting.many:
        return st.lists(one, max_size=3).map(tuple)
    return st.none() | one if setting.optional else one


configs = st.fixed_dictionaries({}, optional={name: values(known) for name, known in settings_of(TrainConfig).items()})


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(configs)
@example({"tokenizer_path": "0\x85"})  # YAML's line breaks, which it would fold into spaces
@example({"datasets": ("a\u2028b", "c")})
def test_a_dumped_configuration_loads_back_equal(chosen: dict[str, Any]) -> None:
    config = build(TrainConfig, chosen)
    assert settings_in(dump_config(config), "a record") == config
