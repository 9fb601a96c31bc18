"""Names of a pipeline with composed configs on a command line without any file."""

from __future__ import annotations

from typing import Any

import pytest

from pretraining.config.command_line import load_train_config, value_given, value_on_command_line
from pretraining.config.fields import values_of
from pretraining.errors import ConfigError
from pretraining.progress import Duration

DUMMY = {"use_dummy_dataset": "true"}


def values(*overrides: str, **flags: str) -> dict[str, Any]:
    return values_of(load_train_config(overrides, DUMMY | {name.replace("__", "."): flags[name] for name in flags}))


def problems(*overrides: str, **flags: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        values(*overrides, **flags)
    return error.value.problems


def test_they_are_translated_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    found = values("optimizer=sgdm", "optimizer.lr_config.lr=1.0", "train.max_steps=100")
    assert (found["optimizer"], found["learning_rate"]) == ("sgdm", 1.0)
    assert found["num_steps"] == Duration(100, "steps")
    assert "the command line is read as settings of another system (composed)" in caplog.text
    assert "optimizer.lr_config.lr: 1.0  learning_rate=1.0" in caplog.text
    assert "optimizer: sgdm" not in caplog.text  # ours as it is


def test_flags_are_the_same() -> None:
    assert values(train__max_steps="100", optimizer__lr_config__lr="2") == values(
        "train.max_steps=100", "optimizer.lr_config.lr=2"
    )


def test_a_groups_choice_without_its_file_says_what_is_chosen() -> None:
    found = values("optimizer/lr_config=linear", "dataset=pile")
    assert (found["schedule"], found["min_lr_ratio"]) == ("linear", 0.0)


def test_our_own_dotted_names_keep_their_meaning() -> None:
    found = values("optimizer=rmsprop", "optimizer.momentum=0.5", "optimizer.learning_rate=2", "model.vocab_size=512")
    assert (found["momentum"], found["rms_alpha"], found["learning_rate"], found["vocab_size"]) == (0.5, None, 2.0, 512)


def test_what_follows_from_one_gives_way_to_what_is_said() -> None:
    found = values("optimizer.lr_config.schedule=cosine", "min_lr_ratio=0.3", "--warmup_steps=7")
    assert (found["min_lr_ratio"], found["warmup_steps"]) == (0.3, Duration(7, "steps"))


def test_they_win_over_recipes(tmp_path: Any) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("learning_rate: 5\nmin_lr_ratio: 0.5\n")
    found = values("optimizer.lr_config.lr=1", "optimizer.lr_config.schedule=linear", recipe=str(recipe))
    assert (found["learning_rate"], found["min_lr_ratio"]) == (1.0, 0.0)


def test_options_are_of_the_optimizer_that_is_named_beside_them() -> None:
    assert values("optimizer=sgdm", "optimizer.beta=0.8")["momentum"] == 0.8
    assert "optimizer.beta1=0.8: sgdm does not read it here" in problems("optimizer=sgdm", "optimizer.beta1=0.8")[0]


def test_data_that_they_name_win_over_made_up_tokens_of_a_recipe(tmp_path: Any) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("use_dummy_dataset: true\n")
    config = load_train_config(["dataset.path=d"], {"recipe": str(recipe)})
    assert (config.data.data_path, config.data.use_dummy_dataset) == ("d", False)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["learning_rate=1", "optimizer.lr_config.lr=2"],
            "two values for learning_rate, optimizer.lr_config.lr=2 and learning_rate=1: keep one",
        ),
        (["max_tokens=5B", "train.max_steps=2"], "two run lengths, train.max_steps=2 and max_tokens=5B: keep one"),
        (
            ["train.seed=1", "train.random_seed=2"],
            "two values for seed, 1 and 2: train.seed=1 and train.random_seed=2: keep one",
        ),
        (["train.max_step=2"], "train.max_step is not known: did you mean train.max_steps?"),
        (["trian.max_steps=2"], "trian.max_steps is not known: did you mean train.max_steps?"),
        (["optimizer.lr_config.lrr=2"], "optimizer.lr_config.lrr is not known: did you mean optimizer.lr_config.lr?"),
        (["optimizer.beta3=2"], "optimizer.beta3 is not known: did you mean optimizer.beta?"),
        (["optimizer.learning_rat=2"], "optimizer.learning_rat is not known: did you mean learning_rate?"),
        (["foo.bar=2"], "foo.bar is not known: --help lists every setting"),
        (["train.precision=8"], "train.precision=8: one of bfloat16, float16, float32 is needed"),
        (["+train.seed=2"], "+train.seed=2: what a recipe lacks is added without a sign; write train.seed=2"),
        (["++seed=2"], "++seed=2: what a recipe lacks is added without a sign; write seed=2"),
        (
            ["~optimizer.wrapper"],
            "~optimizer.wrapper: nothing is taken out of a recipe; write optimizer.wrapper=null, or the value that it "
            "should have",
        ),
        (["model@net=small"], "model@net=small: a group's file lands under the group's name; write model=…"),
        (["train.max_steps=${x}"], "train.max_steps=${x}: references are not followed: write the value itself"),
    ],
)
def test_a_mistake_is_told_with_what_to_write(arguments: list[str], problem: str) -> None:
    assert problems(*arguments) == (problem,)


def test_other_commands_read_them_too() -> None:
    assert value_on_command_line("ckpt_load_path", ["checkpoint.load_path=runs/a"], {}) == "runs/a"
    assert value_given("seed", ["train.seed=4"], {}) == 4
