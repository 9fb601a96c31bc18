"""A main file, the groups that its `defaults:` choose from, and choices on the command line, made one tree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pretraining.config.foreign.config_groups import MOST_FILES, compose
from pretraining.config.foreign.translation import Source
from pretraining.config.settings_files import parse_tree
from pretraining.errors import ConfigError

SECTIONS = ("optimizer", "train")
SAID = {"optimizer": ("optimizer.name", ("adamw", "sgdm"))}


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder / "config.yaml"


def composed(folder: Path, files: Mapping[str, str], **overrides: str) -> Source:
    path = write(folder, files)
    content = path.read_text()
    given = {name.replace("__", "/"): value for name, value in overrides.items()}
    source = Source("config.yaml", path, content, parse_tree(content, "config.yaml"), given)
    return compose(source, SECTIONS, SAID)[0]


def tree_of(folder: Path, files: Mapping[str, str], **overrides: str) -> dict[str, Any]:
    return dict(composed(folder, files, **overrides).tree)


def problem_of(folder: Path, files: Mapping[str, str], **overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        composed(folder, files, **overrides)
    return str(error.value).replace(f"{folder}/", "")


OPTIMIZERS = {
    "optimizer/adamw.yaml": "name: adamw\nlr: 1\nbeta1: 0.9\n",
    "optimizer/sgdm.yaml": "lr: 2\n",
}


def test_a_groups_file_lands_under_the_groups_name(tmp_path: Path) -> None:
    files = {"config.yaml": "defaults:\n  - optimizer: adamw\nseed: 3\n", **OPTIMIZERS}
    assert tree_of(tmp_path, files) == {"optimizer": {"name": "adamw", "lr": "1", "beta1": "0.9"}, "seed": "3"}


def test_an_argument_chooses_another_file_which_names_itself(tmp_path: Path) -> None:
    files = {"config.yaml": "defaults:\n  - optimizer: adamw\n", **OPTIMIZERS}
    source = composed(tmp_path, files, optimizer="sgdm", seed="4")
    assert source.tree == {"optimizer": {"lr": "2", "name": "sgdm"}}
    assert source.overrides == {"seed": "4"}


def test_an_argument_may_choose_nothing(tmp_path: Path) -> None:
    files = {"config.yaml": "defaults:\n  - optimizer: adamw\n", **OPTIMIZERS}
    assert tree_of(tmp_path, files, optimizer="null") == {}


def test_an_optimizer_that_has_no_file_is_left_to_our_own_setting(tmp_path: Path) -> None:
    files = {"config.yaml": "defaults:\n  - optimizer: adamw\n", **OPTIMIZERS}
    assert composed(tmp_path, files, optimizer="muon").overrides == {"optimizer": "muon"}


@pytest.mark.parametrize("content", ["max_steps: 5\n", "train:\n  max_steps: 5\n", "# @package train\nmax_steps: 5\n"])
def test_a_file_beside_lands_under_its_name_with_or_without_it(tmp_path: Path, content: str) -> None:
    files = {"config.yaml": "defaults:\n  - train\n", "train.yaml": content}
    assert tree_of(tmp_path, files) == {"train": {"max_steps": "5"}}


@pytest.mark.parametrize(
    ("name", "content"),
    [("base", "train: {seed: 1}\n"), ("train", "# about\n\n# @package _global_\ntrain: {seed: 1}\n")],
)
def test_a_file_of_several_sections_lands_at_the_top(tmp_path: Path, name: str, content: str) -> None:
    files = {"config.yaml": f"defaults: [{name}]\n", f"{name}.yaml": content}
    assert tree_of(tmp_path, files) == {"train": {"seed": "1"}}


@pytest.mark.parametrize(
    ("defaults", "lr"),
    [("[optimizer: adamw]", "9"), ("[optimizer: adamw, _self_]", "9"), ("[_self_, optimizer: adamw]", "1")],
)
def test_a_files_own_lines_come_where_self_stands_or_last(tmp_path: Path, defaults: str, lr: str) -> None:
    files = {"config.yaml": f"defaults: {defaults}\noptimizer: {{lr: 9}}\n", **OPTIMIZERS}
    assert tree_of(tmp_path, files)["optimizer"]["lr"] == lr


NESTED = {
    "config.yaml": "defaults: [optimizer: adamw]\n",
    "optimizer/adamw.yaml": "defaults: [base, schedule: linear]\nschedule: {lr: 5}\n",
    "optimizer/base.yaml": "eps: 1e-8\n",
    "optimizer/schedule/linear.yaml": "lr: 1\nwarmup: 2\n",
    "optimizer/schedule/cosine.yaml": "end: 3\n",
}


def test_a_groups_file_has_defaults_of_its_own(tmp_path: Path) -> None:
    assert tree_of(tmp_path, NESTED) == {
        "optimizer": {"eps": "1e-8", "schedule": {"lr": "5", "warmup": "2"}, "name": "adamw"}
    }


def test_an_argument_chooses_inside_a_group(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, NESTED, optimizer__schedule="cosine")
    assert tree["optimizer"]["schedule"] == {"end": "3", "lr": "5"}


@pytest.mark.parametrize(
    ("defaults", "tree"),
    [
        ("[{optimizer: null}]", {}),
        ("[{optional optimizer: lion}]", {}),
        ("[{/optimizer: sgdm}]", {"optimizer": {"lr": "2", "name": "sgdm"}}),
        ("[{optimizer: [adamw, sgdm]}]", {"optimizer": {"name": "adamw", "lr": "2", "beta1": "0.9"}}),
        ("[{override hydra/launcher: joblib}]", None),
        ("[{hydra/launcher: joblib}, hydra/x]", {}),
        ("null", {}),
    ],
)
def test_other_forms_of_a_default(tmp_path: Path, defaults: str, tree: dict[str, Any] | None) -> None:
    files = {"config.yaml": f"defaults: {defaults}\n", **OPTIMIZERS}
    if tree is None:
        assert "a choice is changed where it is made" in problem_of(tmp_path, files)
    else:
        assert tree_of(tmp_path, files) == tree


def test_each_key_knows_its_file_and_line(tmp_path: Path) -> None:
    source = composed(tmp_path, NESTED)
    origins = {key: source.origin_of(key) for key in ("optimizer.schedule.lr", "optimizer.schedule.warmup")}
    assert [Path(origin.name).name for origin, _ in origins.values()] == ["adamw.yaml", "linear.yaml"]
    assert [source.line_of(key) for key in origins] == [2, 2]


@pytest.mark.parametrize(
    ("files", "overrides", "problem"),
    [
        ({"config.yaml": "defaults: train\n"}, {}, "config.yaml: defaults: a list is needed"),
        ({"config.yaml": "defaults: [[a]]\n"}, {}, "config.yaml: defaults: ['a']: write `- group: name` or `- name`"),
        (
            {"config.yaml": "defaults: [optimizer: lion]\n", **OPTIMIZERS},
            {},
            "config.yaml: defaults: optimizer: lion: optimizer/lion.yaml is not there; optimizer has adamw, sgdm",
        ),
        ({"config.yaml": "defaults: [train]\n"}, {}, "config.yaml: defaults: train: train.yaml is not there"),
        ({"config.yaml": "defaults: [../x]\n"}, {}, "config.yaml: defaults: ../x: ../x.yaml is not there"),
        (
            {"config.yaml": "defaults: [optimizer@other: adamw]\n", **OPTIMIZERS},
            {},
            "config.yaml: defaults: optimizer@other: adamw: a group's file lands under the group's name: write "
            "optimizer: adamw",
        ),
        (
            {"config.yaml": "defaults: [override optimizer: adamw]\n", **OPTIMIZERS},
            {},
            "config.yaml: defaults: override optimizer: adamw: a choice is changed where it is made: write "
            "optimizer=adamw on the command line",
        ),
        (
            {"config.yaml": "defaults:\n- optimizer: ???\n", **OPTIMIZERS},
            {},
            "config.yaml: defaults: optimizer must be chosen: write optimizer=… on the command line (",
        ),
        (
            {"config.yaml": "defaults: [train]\n", "train.yaml": "", **OPTIMIZERS},
            {"optimizer": "sgdm"},
            "optimizer=sgdm: no `defaults:` choose from",
        ),
        (
            {"config.yaml": "defaults: [model: a]\n", "model/a.yaml": ""},
            {"model": "b"},
            "model=b: model/b.yaml is not there; ",
        ),
        ({"config.yaml": "defaults: [train]\n", "train.yaml": "- 1\n"}, {}, "train.yaml holds no settings"),
        (
            {"config.yaml": "defaults: [train]\n", "train.yaml": "defaults: [train]\n"},
            {},
            "train.yaml: defaults lead to",
        ),
    ],
)
def test_what_cannot_be_composed_is_named(
    tmp_path: Path, files: dict[str, str], overrides: dict[str, str], problem: str
) -> None:
    assert problem_of(tmp_path, files, **overrides).startswith(problem)


def test_no_more_files_are_read_than_a_composition_has(tmp_path: Path) -> None:
    files = {f"a{number}.yaml": f"defaults: [a{number + 1}]\n" for number in range(MOST_FILES + 1)}
    assert "more than 100 files" in problem_of(tmp_path, {"config.yaml": "defaults: [a0]\n", **files})
