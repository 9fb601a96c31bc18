"""Recipes: what may stand in them, what is wrong with them, and the resolved configuration as one."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from annotated_types import Ge, Le, Lt
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pretraining.config.command_line import load_train_config
from pretraining.config.fields import Setting, build, settings_of
from pretraining.config.recipes import dump_config, load_config, read_recipe, shipped_recipes
from pretraining.config.settings_files import LARGEST_FILE_BYTES, parse_tree
from pretraining.config.training import TrainConfig
from pretraining.config.values import NONE_WORDS
from pretraining.config.variants import resolve_shape
from pretraining.errors import ConfigError
from pretraining.progress import Duration


def recipe(folder: Path, text: str, name: str = "a.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems_of(path: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        load_config(path)
    return tuple(problem.replace(path, "FILE") for problem in error.value.problems)


YAML_TEXT = """
# flat and by section, one beside the other
learning_rate: 1e-3
optimizer:
  weight_decay: 0
  adam-beta1: .8
report:
data: {datasets: [a, b], weights: [1, 2.5], data_path: 1e5}
deterministic: on
seed: 010
num_steps: 5Btok
checkpoint_interval: 500
tracker: []
tokenizer_path: ~
"""

JSON_TEXT = """
{"learning_rate": 1e-3, "optimizer": {"weight_decay": 0, "adam-beta1": 0.8}, "report": null,
 "data": {"datasets": ["a", "b"], "weights": [1, 2.5], "data_path": "1e5"}, "deterministic": true, "seed": 10,
 "num_steps": "5Btok", "checkpoint_interval": 500, "tracker": [], "tokenizer_path": null}
"""


@pytest.mark.parametrize(("text", "name"), [(YAML_TEXT, "a.yaml"), (YAML_TEXT, "a.yml"), (JSON_TEXT, "a.json")])
def test_a_recipe_is_read_like_flags(tmp_path: Path, text: str, name: str) -> None:
    config = load_config(recipe(tmp_path, text, name))
    assert config.optimizer.learning_rate == 0.001
    assert config.optimizer.weight_decay == 0.0
    assert config.optimizer.adam_beta1 == 0.8
    assert config.data.datasets == ("a", "b") and config.data.weights == (1.0, 2.5)
    assert config.data.data_path == "1e5"
    assert config.run.deterministic
    assert config.run.seed == 10
    assert config.run.num_steps == Duration(5_000_000_000, "tokens")
    assert config.checkpoint.checkpoint_interval == Duration(500, "steps")
    assert config.report.tracker == ()
    assert config.data.tokenizer_path is None


@pytest.mark.parametrize("text", ["", "# nothing but a comment", "run:"])
def test_a_recipe_may_set_nothing(tmp_path: Path, text: str) -> None:
    assert load_config(recipe(tmp_path, text)) == TrainConfig()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("learning_rat: 1", "FILE: learning_rat is not known: did you mean learning_rate?"),
        ("model:\n  seed: 1", "FILE: model.seed is not known: seed is a setting of run"),
        ("checkpoint: a", "FILE: checkpoint is not known: it is a section; write checkpoint.<setting>"),
        ("seed: {a: 1}", "FILE: seed.a is not known: --help lists every setting"),
        ("run:\n  seed: {a: 1}", "FILE: run.seed.a is not known: --help lists every setting"),
        ("seed: x", "FILE: seed: x: a whole number is needed, as 5000, 5_000 or 5e3"),
        ("seed: [1, 2]", "FILE: seed: [1, 2]: a whole number is needed, not a list"),
        ("seed: null", "FILE: seed: null: a whole number is needed, not null"),
        ("datasets: [[a]]", "FILE: datasets: a list holds plain values, not lists or mappings"),
        ("num_steps: 5\nmax_tokens: 5B", "two run lengths, FILE: num_steps: 5 and FILE: max_tokens: 5B: keep one"),
        ("seed: 1\nrun: {seed: 2}", "two values for seed, FILE: seed: 1 and FILE: run.seed: 2: keep one"),
        ("just words", "recipe FILE holds no settings: write name: value on each line"),
        ("- a\n- b", "recipe FILE holds no settings: write name: value on each line"),
    ],
)
def test_a_mistake_names_the_file(tmp_path: Path, text: str, problem: str) -> None:
    assert problems_of(recipe(tmp_path, text)) == (problem,)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("a: [1", "a.yaml", "is not valid YAML"),
        ("seed: 1\nseed: 2", "a.yaml", "is not valid YAML: seed stands there twice (mapping from line 1)"),
        ("seed: 1\n? [1]\n: 2", "a.yaml", "line 2: a list or a mapping is no name of a setting"),
        ("? " * 31 + "a", "a.yaml", "line 1: a list or a mapping is no name of a setting"),
        ("seed: *unknown", "a.yaml", "is not valid YAML"),
        ("{", "a.json", "is not valid JSON"),
        ('{"seed": 1, "seed": 2}', "a.json", "is not valid JSON: seed stands there twice"),
        ('{"learning_rate": NaN}', "a.json", "learning_rate: NaN: a number is needed"),
        ("a: " + "[" * 31 + "]" * 31, "a.yaml", "a list holds plain values"),
        ("a: " + "[" * 32 + "]" * 32, "a.yaml", "lists and mappings are nested more than 32 deep"),
        (f"skip_samples: [{'1, ' * 2**14}]", "a.yaml", "written out it holds more than 16,384 values"),
    ],
)
def test_a_file_that_cannot_be_parsed_says_why(tmp_path: Path, text: str, name: str, message: str) -> None:
    assert message in problems_of(recipe(tmp_path, text, name))[0]


def test_a_file_that_is_no_text_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in problems_of(str(path))[0]


def test_merged_mappings_stand_beneath_a_mappings_own_keys_and_the_first_one_counts_most() -> None:
    tree = parse_tree(
        "a: &a {learning_rate: 1e-2, weight_decay: 0.5}\nb: &b {weight_decay: 0.2, grad_clip_thresh: 3}\n"
        "optimizer: {<<: [*a, *b], learning_rate: 1e-3}\none: {<<: *b}\n'<<': text\n",
        "a.yaml",
    )
    assert tree["optimizer"] == {"learning_rate": "1e-3", "weight_decay": "0.5", "grad_clip_thresh": "3"}
    assert tree["one"] == tree["b"] and tree["<<"] == "text"


def test_what_is_merged_has_to_be_a_mapping() -> None:
    with pytest.raises(
        ConfigError, match=r"a\.yaml is not valid YAML: << takes a mapping, or a list of them .* line 1"
    ):
        parse_tree("{<<: 3}", "a.yaml")


def test_a_recipe_may_repeat_itself_by_aliases(tmp_path: Path) -> None:
    settings = read_recipe(str(recipe(tmp_path, "seed: &a 5\nbatch: {batch_size: *a}"))).assignments
    assert [(each.name, each.raw) for each in settings] == [("seed", "5"), ("batch.batch_size", "5")]


def test_what_a_recipe_is_not_read_from_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").mkdir()
    (tmp_path / "c.yaml").write_text("#" * (LARGEST_FILE_BYTES + 1))
    said = ("it is a pipe, not a file", "Is a directory", "it has more than 1,048,576 bytes")
    for name, reason in zip("abc", said, strict=True):
        assert f"cannot be read: {reason}" in problems_of(str(tmp_path / f"{name}.yaml"))[0]


def test_a_recipe_executes_nothing(tmp_path: Path) -> None:
    target = tmp_path / "made"
    path = recipe(tmp_path, f"data_path: !!python/object/apply:os.mkdir ['{target}']")
    problems_of(path)
    assert not target.exists()


def test_a_missing_file_is_named() -> None:
    assert problems_of("nowhere/a.yaml") == ("--recipe=FILE: there is no such file",)


def test_an_unknown_name_lists_the_shipped_recipes() -> None:
    with pytest.raises(ConfigError, match=r"--recipe=dmo is not known: did you mean demo\? Shipped are demo; .*\.json"):
        read_recipe("dmo")


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_can_be_trained_with(name: str) -> None:
    load_train_config([f"recipe={name}"])


def test_the_demo_is_a_small_model_on_its_own_text() -> None:
    config = load_train_config(["recipe=demo"])
    assert config.model.model_variant == "demo" and resolve_shape(config.model).vocab_size == 4096
    assert config.data.seq_length == 256 and config.data.sep_token == 0 and config.data.held_out_fraction > 0
    assert not config.parallel.mixed_precision


def test_a_dump_has_every_setting_in_its_section() -> None:
    tree = yaml.safe_load(dump_config(TrainConfig()))
    expected = {
        section.name: [field.name for field in dataclasses.fields(getattr(TrainConfig(), section.name))]
        for section in dataclasses.fields(TrainConfig)
    }
    assert {section: list(content) for section, content in tree.items()} == expected


def test_a_dump_is_plain_to_read() -> None:
    text = dump_config(load_train_config(["recipe=demo"], {"datasets": "a,b", "checkpoint_interval": "30min"}))
    assert "datasets: [a, b]\n" in text and "checkpoint_interval: 30min\n" in text and "num_steps: 600\n" in text


def values(setting: Setting) -> st.SearchStrategy[Any]:
    """Any value that a setting may have."""
    one: st.SearchStrategy[Any]
    if setting.choices:
        one = st.sampled_from(setting.choices)
    elif setting.base is str:
        one = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
        if setting.is_path:
            one = one.filter(lambda text: not text.startswith("~"))  # read as a home folder: no configuration has it
        if setting.optional:
            one = one.filter(lambda text: text.strip().lower() not in NONE_WORDS)
    elif setting.base is bool:
        one = st.booleans()
    elif setting.base is int:
        one = st.integers(int(setting.limits.get(Ge, 0)), 2**63 - 1)
    elif setting.base is float:
        largest = setting.limits.get(Lt, setting.limits.get(Le))
        one = st.floats(
            setting.limits.get(Ge), largest, allow_nan=False, allow_infinity=False, exclude_max=Lt in setting.limits
        )
    else:
        one = st.builds(Duration, st.integers(0, 10**18), st.sampled_from(setting.units))
    if setting.many:
        return st.lists(one, max_size=3).map(tuple)
    return st.none() | one if setting.optional else one


configs = st.fixed_dictionaries({}, optional={name: values(known) for name, known in settings_of(TrainConfig).items()})


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(configs)
@example({"tokenizer_path": "0\x85"})  # line breaks to YAML, which would fold them into spaces
@example({"datasets": ("a\u2028b", "c")})
def test_a_dumped_configuration_loads_back_equal(tmp_path: Path, chosen: dict[str, Any]) -> None:
    config = build(TrainConfig, chosen)
    assert load_config(recipe(tmp_path, dump_config(config))) == config


def test_a_dump_may_be_turned_into_json(tmp_path: Path) -> None:
    config = load_train_config(["recipe=demo"])
    as_json = json.dumps(yaml.safe_load(dump_config(config)))
    assert load_config(recipe(tmp_path, as_json, "a.json")) == config
