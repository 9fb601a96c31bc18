"""The command line: every spelling of a flag, and every mistake, all reported at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.config.command_line import assign, read_words
from pretraining.config.fields import required, setting, values_of
from pretraining.config.read import load_train_config, read
from pretraining.config.recipe_files import load_config, settings_in
from pretraining.config.training import TrainConfig
from pretraining.durations import Duration
from pretraining.errors import ConfigError
from pretraining.tools.command_settings import ExportConfig, ListConfig

DUMMY = {"use_dummy_dataset": "true"}


def resolve(root: type[Any], words: Sequence[str], settings: Mapping[str, Any] | None = None) -> Any:
    """Return the settings that a command gets."""
    return read(root, [*read_words(root, words), *assign(settings or {})]).config


def value_of(name: str, *arguments: str) -> object:
    """Return one setting of a training run, on generated data unless the arguments name data."""
    source = [] if any(re.search("data.path|use.dummy", word) for word in arguments) else ["--data_path=d"]
    return values_of(load_train_config([*source, *arguments]))[name]


def problems_of(*words: str, **settings: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        load_train_config(words, settings)
    return error.value.problems


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--learning_rate=3e-5"], "learning_rate", 3e-5),
        (["--learning-rate=3e-5"], "learning_rate", 3e-5),
        (["--learning_rate", "3e-5"], "learning_rate", 3e-5),
        (["--optimizer.learning_rate=3e-5"], "learning_rate", 3e-5),
        (["learning_rate=3e-5"], "learning_rate", 3e-5),
        (["optimizer.learning_rate=3e-5"], "learning_rate", 3e-5),
        (["seed=1", "seed=2"], "seed", 2),
        (["--run.Seed", "1", "--num_workers=0", "--SEED=3", "seed=2"], "seed", 2),
        (["--mixed_precision=true", "--nomixed_precision"], "mixed_precision", False),
        (["--no-mixed-precision", "--mixed_precision"], "mixed_precision", True),
        (["--mixed_precision", "off"], "mixed_precision", False),
        (["--no-mixed-precision"], "mixed_precision", False),
        (["--use-dummy-dataset", "--seed=1"], "use_dummy_dataset", True),
        (["--data_path=1e5"], "data_path", "1e5"),
        (["--data_path=None", "--use_dummy_dataset"], "data_path", None),
        (["--weights=1,2", "--datasets=a,b"], "weights", (1.0, 2.0)),
        (["--sharding_strategy=zero0"], "sharding_strategy", "ddp"),
        (["--mp_dtype=fp16"], "mp_dtype", "float16"),
        (["--mp_dtype=BF16"], "mp_dtype", "bfloat16"),
        (["--max_tokens=5B"], "num_steps", Duration(5_000_000_000, "tokens")),
        (["--num_steps=9", "--max_tokens=5B"], "num_steps", Duration(5_000_000_000, "tokens")),
        (["--max_tokens=5B", "num_steps=7", "--max-tokens=5B", "num_steps=9"], "num_steps", Duration(9, "steps")),
        (["--keep_last=2", "--save_total_limit=4"], "keep_last", 4),
        (["--run.max_tokens=5ktok"], "num_steps", Duration(5000, "tokens")),
        (["max_tokens=5k", "--num_steps=5ktok"], "num_steps", Duration(5000, "tokens")),
        (["--report_to=none"], "tracker", ()),
        (["--local-rank=3", "--seed=4"], "seed", 4),
        (["--bol_token=None", "--eol_token=none"], "bos_token", None),
        ([], "seed", 2023),
    ],
)
def test_a_spelling_gives_this_value(arguments: list[str], name: str, value: object) -> None:
    assert value_of(name, *arguments) == value


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--learning_rat=1"], "did you mean learning_rate?"),
        (["--lr=1"], "did you mean learning_rate?"),
        (["--recipes=demo"], "did you mean recipe?"),
        (["--eol_token=3"], "--eol_token is not known"),
        (["--model.seed=1"], "did you mean seed?"),
        (["--seed=x"], "--seed=x"),
        *(([word], "has no value") for word in ("--data_path", "--max_tokens", "--noseed")),
        (["--recipe"], "--recipe has no value"),
        (["demo"], "'demo' sets nothing"),
        (["mine.yaml"], "recipe mine.yaml cannot be read: No such file"),
        (["seed=1", "mine.yaml"], "'mine.yaml' sets nothing"),
        (["--max_tokens=2ep"], "--max_tokens=2ep"),
        (["demo.yaml", "--recipe=demo"], "recipe=demo.yaml and --recipe=demo"),
        (["--recipe=demo,,demo"], "--recipe=demo,,demo"),
        (["--data_path=~nobody_of_that_name/a"], "~nobody_of_that_name"),
        (["--recipe=~nobody_of_that_name/a.yaml"], "~nobody_of_that_name"),
    ],
)
def test_an_error_names_the_argument_and_the_remedy(arguments: list[str], problem: str) -> None:
    if not {"--recipe", "--data_path"} & {argument.partition("=")[0] for argument in arguments}:
        arguments = [*arguments, "--use_dummy_dataset=true", "--ckpt_save_path=runs/a"]
    [found] = problems_of(*arguments)
    assert problem in found


def test_one_error_has_all_problems_once() -> None:
    problems = problems_of(
        "stray", learning_rat="1", seed="x", weights="1,2", recipe="demo", num_steps="0", hsdp_group_size="two"
    )
    beginnings = ["'stray'", "--learning_rat", "--seed=x", "--hsdp_group_size=two", "--num_steps=0", "--weights=1.0,2"]
    assert len(problems) == 6 and all(map(str.startswith, problems, beginnings))
    assert len(problems_of(recipe="missing.yaml,nowhere.json,demo")) == 2


def test_the_last_word_for_a_setting_counts_and_one_path_of_two_is_not_dropped() -> None:
    words = ["first.yaml", "--recipe=a.yaml", "--unknown=1", "other.key=2", "--config", "b.yaml", "--unknown=3"]
    kept = [(each.name, each.raw) for each in read_words(TrainConfig, words)]
    unknown = [("unknown", "1"), ("other.key", "2"), ("config", "b.yaml"), ("unknown", "3")]
    assert kept == [("recipe", "first.yaml"), *unknown]
    kept = [(each.name, each.raw) for each in read_words(ExportConfig, ["--format=hf", "runs/x", "out", "--format=pt"])]
    assert kept == [("ckpt_load_path", "runs/x"), ("output_path", "out"), ("format", "pt")]
    assert resolve(ExportConfig, ["runs/x"], {"output_path": "out"}) == resolve(ExportConfig, ["runs/x", "out"])
    with pytest.raises(ConfigError, match="'more' sets nothing"):
        resolve(ExportConfig, ["runs/x", "out", "more"])


def test_two_values_from_python_are_refused() -> None:
    [problem] = problems_of(num_steps="10", max_tokens="5B", use_dummy_dataset="true")
    assert "--num_steps=10 and --max_tokens=5B" in problem


def test_an_existing_path_with_a_comma_is_one_recipe(tmp_path: Path) -> None:
    path = tmp_path / "a,b.yaml"
    path.write_text("use_dummy_dataset: true\nseed: 5")
    assert load_train_config([], {"recipe": str(path)}).run.seed == 5
    assert len(problems_of(recipe=f"{path},demo")) == 2


def test_later_recipes_win_and_flags_win_over_all(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.json"
    first.write_text("use_dummy_dataset: true\nseed: 1\nbatch_size: 11\nlearning_rate: 1e-1")
    second.write_text('{"run": {"seed": 2}, "batch_size": 12}')
    config = load_train_config([], {"config": f"{first},{second}", "batch_size": "13"})
    assert config.optimizer.learning_rate == 0.1  # from the first
    assert config.run.seed == 2  # from the second
    assert config.batch.batch_size == 13  # from the command line
    assert config.data.seq_length == 4096  # default
    longer = load_train_config([], {"recipe": "demo", "max_tokens": "1M"})  # a recipe's num_steps, by its alias
    assert longer.run.num_steps == Duration(10**6, "tokens")


@dataclass(frozen=True)
class Flat:
    """Settings of a small command."""

    output_path: str = required("where to write")
    count: int = setting(3, "how many")


def test_the_first_word_may_be_a_path_alone(tmp_path: Path) -> None:
    (tmp_path / "lr=3").mkdir()
    for path in ("runs/a", str(tmp_path / "lr=3")):
        assert resolve(ListConfig, [path, "json=true"]) == ListConfig(path, json=True)
    assert resolve(ListConfig, ["run_path=a"]) == ListConfig("a")
    with pytest.raises(ConfigError, match="'runs/a' sets nothing"):
        resolve(Flat, ["runs/a", "output_path=x"])


def test_a_tilde_in_a_path_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.yaml").write_text("seed: 7\neval_datasets: [~/b, c]\nsample_prompt: ~/x\n")
    config = load_train_config([], DUMMY | {"recipe": "~/a.yaml", "ckpt_save_path": "~/runs/a"})
    assert (config.run.seed, config.checkpoint.ckpt_save_path) == (7, f"{tmp_path}/runs/a")
    assert config.evaluation.eval_datasets == (f"{tmp_path}/b", "c")
    assert config.evaluation.sample_prompt == "~/x"


def test_a_variable_in_a_path_is_expanded_once_where_a_user_typed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {"HOME": "/home/me", "BUCKET": "box", "OWN": "$BUCKET", "AT_HOME": "~/x", "HERE": str(tmp_path)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "$BUCKET").mkdir()
    recipe = "data_path: $BUCKET-1/${BUCKET}\neval_datasets: [$OWN/a, b]\nsample_prompt: $BUCKET\n"
    (tmp_path / "a.yaml").write_text(recipe)
    words = ["ckpt_mirror_path=s3://$BUCKET/x", "ckpt_load_path=$AT_HOME"]
    config = load_train_config(words, {"recipe": "$HERE/a.yaml"})
    assert (config.data.data_path, config.evaluation.sample_prompt) == ("box-1/box", "$BUCKET")
    assert config.evaluation.eval_datasets == ("$BUCKET/a", "b")  # not twice
    assert (config.checkpoint.ckpt_mirror_path, config.checkpoint.ckpt_load_path) == ("s3://box/x", "/home/me/x")
    literal = ("$BUCKET", "${a:b}/x", "$1/$", "$(BUCKET)")  # it exists; it is no variable
    assert [load_train_config([f"data_path={each}"]).data.data_path for each in literal] == list(literal)
    with pytest.raises(ConfigError, match=r"data_path=\$\{NOPE\}/x: the variable NOPE is not set"):
        load_train_config(["data_path=${NOPE}/x"])


def test_a_dollar_in_a_runs_record_is_a_letter(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "config.yaml"
    path.write_text("data:\n  data_path: /data/$NOPE\ncheckpoint:\n  ckpt_save_path: runs/a\n")
    assert load_train_config([], {"recipe": str(path)}).data.data_path == "/data/$NOPE"
    assert load_config(path).data.data_path == settings_in(path.read_text(), "a record").data.data_path == "/data/$NOPE"
    (tmp_path / "checkpoints").rmdir()  # now it is a recipe
    with pytest.raises(ConfigError, match="the variable NOPE is not set"):
        load_train_config([], {"recipe": str(path)})


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--warmup_ratio=0.03", "did you mean warmup_steps?"),
        ("--dropout=0.1", "dropout is not supported"),
        ("--attn_pdrop=0.1", "dropout is not supported"),
        ("--label_smoothing=0.1", "label smoothing is not supported"),
        ("--tensor_parallel_size=2", "tensor parallelism is not supported"),
        ("--num_experts=8", "mixtures of experts are not supported"),
        ("--freeze_layers=2", "frozen parameters are not supported"),
    ],
)
def test_names_that_users_look_for_get_the_way_on(argument: str, said: str) -> None:
    name, _, value = argument.removeprefix("--").partition("=")
    with pytest.raises(ConfigError) as error:
        load_train_config([], DUMMY | {name: value})
    assert str(error.value) == f"--{name} is not known: {said}"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "output_path"),
        (["--output_path"], "output_path"),
        (["--run.count=3", "--output_path=x"], "run"),
        (["--max_tokens=3", "--output_path=x"], "max_tokens"),  # alias of a setting that this command lacks
    ],
)
def test_a_flat_command_refuses_missing_and_unknown_settings(words: list[str], named: str) -> None:
    assert resolve(Flat, ["count=4", "--output-path=x", "--local-rank=0"]) == Flat("x", 4)
    with pytest.raises(ConfigError) as error:
        resolve(Flat, words)
    assert len(error.value.problems) == 1 and error.value.settings[0] == named


@given(
    st.lists(st.text(max_size=20), max_size=5), st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=5)
)
def test_any_text_gives_a_configuration_or_a_config_error(words: list[str], settings: dict[str, str]) -> None:
    try:
        load_train_config(words, settings | DUMMY)
    except ConfigError as error:
        assert error.problems
