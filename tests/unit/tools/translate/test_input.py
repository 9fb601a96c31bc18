"""What users write: arguments beside a file, flags that win over it, and mistakes, each one error with its place."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.make_translations import FOLDER
from hypothesis import given
from hypothesis import strategies as st
from unit.tools.translate.loading import load, read_unchecked

from pretraining.api import Trainer
from pretraining.cli import main
from pretraining.config.command_line import assign
from pretraining.config.fields import settings_of, values_of
from pretraining.errors import ConfigError, DataError
from pretraining.tools.command_settings import TranslateConfig
from pretraining.tools.translate.command import translate_file
from pretraining.tools.translate.foreign_files import read_settings
from pretraining.tools.translate.systems import SYSTEMS, translate_all

DUMMY = {"use_dummy_dataset": "true"}
_BETAS = "optimizer.params.betas"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)


def values(*words: str, **flags: str) -> dict[str, str]:
    return {name: str(value) for name, value in values_of(load(words, DUMMY | flags)).items()}


# Files


def test_every_form_of_a_file_is_one_flat_mapping(tmp_path: Path) -> None:
    forms = {
        "a.yaml": "a: {b: 1e-3, c: [1, x]}\nd: null\ne: on\n",
        "a.json": '{"a": {"b": 1e-3, "c": [1, "x"]}, "d": null, "e": "on"}',
    }
    for name, content in forms.items():
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert read_settings(tmp_path / name) == {"a.b": "1e-3", "a.c": "[1, x]", "d": None, "e": "on"}


def test_assignments_are_calculated_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "import os\n'text'\na = 5 * 10**9\nb: float = -a / 4\nc = f'{a}-x'\nd = [1, 'y']\ne = None\nf = True\n"
    )
    assert read_settings(path) == {
        **{"a": "5000000000", "b": "-1250000000.0", "c": "5000000000-x", "d": "[1, y]"},
        **{"e": None, "f": "true"},
    }
    for line in ("open('x')", "x = open('x')", "x = 'a' * 10**9", "x = 1 / 0", "x = " + "[" * 10_000, "x = ("):
        path.write_text(line)
        with pytest.raises(ConfigError) as error:
            read_settings(path)
        assert str(path) in str(error.value)


# A file, its content, and the key that the error names; "" = the file itself
BAD = [
    ("a.json", '{"use_amp": true, "max_seq_len": 8, "learning_rte": 1}', "learning_rte"),
    ("a.json", '{"seed": 1}', ""),  # a recipe already
    ("gone/a.json", None, ""),
    ("a.toml", "max_tokens = 1\n", ""),  # another form
    ("a.py", "zzz = 1\n", ""),  # of no system
    ("a.yaml", "dist: {dtype: float32, backend: gloo}\ntrain: {max_steps: 5, random_seed: 3}", ""),  # of two
    ("a.json", '{"zero_optimization": {"stage": 2}, "gradient_clipping": "x"}', "gradient_clipping"),
    ("a.json", '{"zero_optimization": {"stage": 1}, "steps_per_print": 1}', "zero_optimization.stage"),
    ("a.json", '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "bf16.enabled"),
    ("a.json", '{"fp16": {"enabled": true, "loss_scale": 0}, "gradient_clipping": 1}', "fp16.loss_scale"),
    ("a.json", '{"gradient_clipping": 1, "optimizer": {"type": "Lamb"}}', "optimizer.type"),
    ("a.json", '{"gradient_clipping": 1, "optimizer": {"type": "Adam", "params": {"betas": 1}}}', _BETAS),
    ("a.json", '{"scheduler": {"type": "X", "params": {"warmup_num_steps": 1}}}', "scheduler.type"),
    ("a.json", '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 5}', "train_batch_size"),
    ("a.yaml", "dist: {dtype: int8, backend: gloo}", "dist.dtype"),
    ("a.yaml", "optim: {lr: 1}\nlr_scheduler: {total_iterations: 9, min_lr: 2}", "lr_scheduler.min_lr"),
    ("a.yaml", "model: {hf_config: {hidden_size: 8, hidden_act: gelu}}", "model.hf_config.hidden_act"),
    ("a.yaml", "model: {hf_config: {hidden_size: 8, hidden_act: silu, experts: 1}}", "model.hf_config.experts"),
    ("a.json", '{"use_amp": "perhaps", "max_seq_len": 8}', "use_amp"),
    ("a.json", '{"use_amp": true, "max_seq_len": 8, "optimizer": "lamb"}', "optimizer"),
    ("a.json", '{"training": {"use_amp": true, "seed": 3}, "seed": 4}', "seed"),
    ("a.json", '{"d_model": 64, "n_heads": 4}', "d_model"),
    ("a.json", '{"use_deepspeed": true, "deepspeed_config": "x"}', "deepspeed_config"),
    ("a.yaml", "train: {max_steps: '${x}', random_seed: 3}", "train.max_steps"),
    ("a.yaml", "optimizer: {name: lion, lr_config: {lr: 1}}", "optimizer.name"),
    ("a.yaml", "optimizer: {name: sgdm, beta: x, lr_config: {lr: 1}}", "optimizer.beta"),
    ("a.yaml", "checkpoint: {load: true, save: true}", "checkpoint.load"),
    ("a.yaml", "train: {max_steps: 5}\nmodel: {name: gpt2}", "model.name"),
    ("a.yaml", "train: {max_steps: 5}\nmodel: {dim: x}", "model.dim"),
    ("a.py", "init_from = 'gpt2-xl'\nn_embd = 768\n", "init_from"),
    ("a.py", "max_tokens = 10**6\nwarmup_tokens = 10\nmax_iters = 5\n", "max_iters"),
    ("a.py", "n_embd = 0.5\n", "n_embd"),
    ("a.py", "n_embd = 64\nbatch_size = 0.5\n", "batch_size"),
]


@pytest.mark.parametrize(("name", "content", "key"), BAD)
def test_a_mistake_in_a_file_is_one_error_with_its_place(
    name: str, content: str | None, key: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as error:
        translate_file(TranslateConfig(str(path), output_path=str(tmp_path / "mine.yaml")))
    (problem,) = error.value.problems
    assert str(path) in problem and (not key or f"{path}: {key}: " in problem)
    assert not (tmp_path / "mine.yaml").exists()


def test_unknown_keys_and_other_models_are_ignored_on_request(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"use_amp": true, "learning_rte": 1, "activation": "gelu"}')
    accepts = {"accept_unknown": "true", "accept_llama": "true", "num_steps": "10"}
    assert values(str(path), **accepts) == values(num_steps="10")
    config = TranslateConfig(str(path), accept_llama=True, accept_unknown=True, output_path=str(tmp_path / "a.yaml"))
    translate_file(config)
    assert "learning_rte: 1 " in (tmp_path / "a.yaml").read_text()


# Arguments and flags


@pytest.mark.parametrize(
    ("file", "argument", "setting", "value"),
    [
        ("stub.yaml", "optim.lr=1e-2", "learning_rate", "0.01"),
        ("guide.json", "training.batch_size=4", "global_batch_size", "32"),
        ("guide.json", "resume_from_checkpoint=./checkpoints/checkpoint-7.pt", "resume_from_checkpoint", "7"),
        ("guide.json", "resume_from_checkpoint=a/step_5_ckp", "resume_from_checkpoint", "a/step_5_ckp"),
        ("composed/config.yaml", "optimizer=adamw", "adam_beta2", "0.999"),
        ("composed/config.yaml", "checkpoint.save_steps=[2000]", "checkpoint_steps", "(2000,)"),
        ("composed/config.yaml", "checkpoint.save=false", "checkpoint_interval", "0"),
        ("composed/config.yaml", "checkpoint.num_steps=7", "run_steps", "7"),
        ("composed/config.yaml", "optimizer.lr_config.max_steps=5000", "run_steps", "2000"),
        ("composed/config.yaml", "logging.wandb_project=NAME", "tracker", "('wandb',)"),
        ("tokens.py", "use_scheduler=false", "schedule", "constant"),
        ("tokens.py", "stable_tokens=0", "schedule", "cosine"),
        ("tokens.py", "max_tokens=5_000_000", "num_steps", "5Mtok"),
    ],
)
def test_a_flag_of_the_other_system_sets_its_key(file: str, argument: str, setting: str, value: str) -> None:
    path, _, text = argument.partition("=")
    plain = {"num_steps": "500"} if "steps" not in argument and "max_tokens" not in argument else {}
    plain = {"ckpt_save_path": "run", **plain}
    assert values(file, argument, **plain)[setting] == value
    assert values(file, **plain, **{path: text})[setting] == value


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        ("tokens.py", {"model_variant": "tiny"}, {"hidden_size": "None", "intermediate_size": "None"}),
        ("tokens.py", {"grad_accum_steps": "2"}, {"global_batch_size": "None", "batch_size": "32"}),
        ("tokens.py", {"optimizer": "adamw"}, {"muon_adam_learning_rate": "None"}),
        ("tokens.py", {"ckpt_load_path": "x"}, {"init_from": "auto"}),
        ("stub.yaml", {"use_dummy_dataset": "no"}, {"eval_datasets": "('path/to/eval',)"}),
        ("tokens.py", {"tracker": "wandb,tensorboard"}, {"tracker_project_name": "large"}),
        ("tokens.py", {"data_path": "mine"}, {"datasets": "()", "sep_token": "None", "file_type": "auto"}),
        ("guide.json", {"data_path": "mine", "num_steps": "9"}, {"datasets": "()", "eval_datasets": "()"}),
        ("guide.json", {"held_out_fraction": "0.5", "num_steps": "9"}, {"eval_datasets": "()"}),
    ],
)
def test_a_flag_overrides_the_setting_that_it_replaces(
    file: str, flags: Mapping[str, str], expected: Mapping[str, str]
) -> None:
    found = values(file, **{"ckpt_save_path": "run", **flags})
    assert expected.items() <= found.items()


def test_a_folder_with_token_files_is_a_dataset_in_the_folder_above(tmp_path: Path) -> None:
    (tmp_path / "c4").mkdir()
    (tmp_path / "c4" / "a.arrow").touch()
    (tmp_path / "a.yaml").write_text(f"dist: {{backend: gloo}}\ndataset: {{path_train: {tmp_path}/c4}}\n")
    made = read_unchecked(str(tmp_path / "a.yaml")).values
    assert (made["data_path"], made["datasets"]) == (str(tmp_path), ("c4",))


def test_without_mixed_precision_a_files_type_has_no_effect(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("dist: {dtype: float16, backend: gloo}")
    assert values(str(tmp_path / "a.yaml"))["mp_dtype"] == "float16"
    assert values(str(tmp_path / "a.yaml"), mixed_precision="false")["mp_dtype"] == "bfloat16"


PREPARE = "prepare it first"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", '{"max_length": 64, "use_amp": false}', {"mixed_precision": "False"}),
        ("a.json", '{"gradient_clipping": 1, "optimizer": {"type": "Adam"}}', {"optimizer": "adamw"}),
        ("a.json", '{"train_batch_size": 8, "bf16": {"enabled": "auto"}}', {"mixed_precision": "None"}),
        ("a.json", '{"train_batch_size": 8, "bf16": {"enabled": false}}', {"mixed_precision": "False"}),
        ("a.json", '{"scheduler": {"type": "WarmupLR"}, "gradient_clipping": 2}', {"warmup_steps": "None"}),
        (
            "a.json",
            '{"optimizer": {"params": {"lr": 1}}, "scheduler": {"type": "WarmupDecayLR", "params":'
            ' {"warmup_max_lr": 2, "warmup_num_steps": 3, "warmup_min_lr": 0, "total_num_steps": 9}}}',
            {"learning_rate": "2.0", "schedule": "linear", "min_lr_ratio": "0.0", "num_steps": "9"},
        ),
        ("a.json", '{"use_amp": false, "pack_sequences": false}', {"document_mask": "True", "packing": "best_fit"}),
        ("a.json", '{"use_amp": true, "pack_sequences": true}', {"packing": "greedy"}),
        ("a.json", '{"use_amp": true, "amp_dtype": "float16"}', {"mixed_precision": "None", "mp_dtype": "float16"}),
        ("a.json", '{"use_amp": true, "lr_scheduler": "linear"}', {"schedule": "linear", "min_lr_ratio": "0.0"}),
        ("a.json", '{"use_deepspeed": false, "deepspeed_config": "gone"}', {"mixed_precision": "None"}),
        ("a.yaml", "optimizer: {name: rmsprop, beta: 0.8, lr_config: {lr: 1}}", {"rms_alpha": "0.8"}),
        ("a.yaml", "model: {dim: 64, name: 7b}\ntrain: {max_steps: 4}", {"model_variant": "7b"}),
        (
            "a.yaml",
            "optimizer: {name: sgdm, lr_config: {lr: 1, schedule: constant, max_steps: 9}}\ntrain: {max_steps: 5}",
            {"learning_rate": "0.1", "num_steps": "5", "run_steps": "None"},
        ),
        (
            "a.py",
            "out_dir = 'x'\ninit_from = 'resume'\nresume_ckpt_fname = 'step_5.pt'\n",
            {"resume_from_checkpoint": "step_5"},
        ),
        ("a.py", "n_embd = 768\nbatch_size = 12\n", {"global_batch_size": "12"}),
        ("a.py", "vocab_size = 65\ndataset = 'x'\nn_embd = 768\n", {"sep_token": "None"}),  # its tokens are characters
        ("a.py", "n_embd = 768\ndtype = 'float32'\n", {"mixed_precision": "False"}),
    ],
)
def test_a_file_keeps_the_meaning_of_its_own_system(
    name: str, content: str, expected: Mapping[str, str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    assert expected.items() <= values(str(tmp_path / name)).items()


@pytest.mark.parametrize(
    ("named", "split", "there", "expected", "said"),
    [
        ("prep", "prep", "prep/train/a.arrow prep/dataset_dict.json", {"eval_datasets": ("data/prep_prep",)}, PREPARE),
        ("books.txt", "validation", "books.txt", {"held_out_fraction": 0.01}, "a file has no splits: 1% of its"),
        ("web", "validation", "web/a", {"eval_datasets": ("data/web_validation",)}, "--split=validation --dataset=w"),
        ("a/b", "validation", "a/c", {"eval_datasets": ("data/b_validation",)}, "--hf_split=validation --dataset=b_va"),
    ],
)
def test_the_data_of_a_guide_are_prepared_and_its_validation_never_its_training_text(
    named: str, split: str, there: str, expected: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with contextlib.chdir(tmp_path):
        for file in map(Path, there.split()):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("text")
        data = {"dataset_name": named, "validation_split": split, "preprocessing_num_workers": 3}
        Path("a.json").write_text(json.dumps({"use_amp": True, **data}))
        found = read_unchecked("a.json").values
        translate_file(TranslateConfig("a.json", output_path="a.yaml"))
        lines = Path("a.yaml").read_text().splitlines()
    assert expected.items() <= found.items() and ("held_out_fraction" in found) == ("eval_datasets" not in found)
    commands = [line for line in lines if PREPARE in line]
    assert any(said in line for line in lines) and all("--num_workers=3" in command for command in commands)
    assert len(commands) == bool(said)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["learning_rate=1", "optimizer.lr_config.lr=2"], "learning_rate"),
        (["max_tokens=5B", "train.max_steps=2"], "run lengths"),
        (["train.max_step=2"], "train.max_step is not known"),
        (["optimizer.lr_config.lrr=2"], "optimizer.lr_config.lrr is not known"),
        (["foo.bar=2"], "foo.bar"),
        *(([f"{word}=3"], "did you mean batch_size?") for word in ("data.batch_sze", "data.batch_size")),
        (["stub.yaml", "optim.lrr=1"], "optim.lrr is not known"),
        (["composed/config.yaml", "model=large"], "composed/model/large.yaml"),
        (["composed/config.yaml", "optimizer.beta=0.5", "optimizer=adamw"], "adamw"),
        (["tokens.py", "use_scheduler=perhaps"], "use_scheduler"),
    ],
)
def test_a_mistake_in_arguments_is_one_error_with_a_remedy(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        values(*words)
    assert len(error.value.problems) == 1 and named in error.value.problems[0]


def test_dotted_arguments_work_without_a_file(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    found = values("optimizer=sgdm", "optimizer.lr_config.lr=1.0", "train.max_steps=100", "optimizer.beta=0.8")
    assert (found["optimizer"], found["learning_rate"], found["momentum"]) == ("sgdm", "0.2", "0.8")
    assert "(composed)" in caplog.text
    project = "logging.wandb_project=mine", "train.max_steps=5"
    assert values(*project, ckpt_save_path="runs/x")["tracker"] == "('wandb',)"
    assert values(*project, tracker="none")["tracker"] == "()"
    found = values("optimizer.lr_config.schedule=linear", "optimizer.learning_rate=2", "min_lr_ratio=0.3")
    assert (found["schedule"], found["learning_rate"], found["min_lr_ratio"]) == ("linear", "2.0", "0.3")
    found = values("optimizer=adamw", "optimizer.lr_config.lr=1", "optimizer.lr_config.warmup=3")
    assert (found["schedule"], found["weight_decay"], found["adam_beta2"]) == ("linear", "0.0", "0.999")
    made = read_unchecked("checkpoint.load_path=a", "train.random_seed=4")
    assert (made.values["ckpt_load_path"], made.values["seed"]) == ("a", 4)
    assert made.chosen["ckpt_load_path"].where == "checkpoint.load_path=a"


COMPOSITIONS = {
    "- optimizer: lion": "optimizer/lion.yaml",
    "- override optimizer: adamw": "override optimizer",
    "- [a]": "['a']",
    "- {optimizer: null}": "",
    "- empty": "",
    "- list": "list.yaml has no names",
}


@pytest.mark.parametrize("entry", COMPOSITIONS)
def test_the_forms_of_a_default(entry: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"defaults:\n  {entry}\ntrain: {{max_steps: 5}}\n")
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "list.yaml").write_text("[1]")
    if not COMPOSITIONS[entry]:
        assert values(str(tmp_path / "config.yaml"))["num_steps"] == "5"
        return
    with pytest.raises(ConfigError) as error:
        values(str(tmp_path / "config.yaml"))
    assert COMPOSITIONS[entry] in str(error.value)


def test_a_files_own_lines_apply_at_self_or_last(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("max_steps: 1\n")
    for defaults, steps in (("[train]", "5"), ("[train, _self_]", "5"), ("[_self_, train]", "1")):
        (tmp_path / "config.yaml").write_text(f"defaults: {defaults}\ntrain: {{max_steps: 5}}\n")
        assert values(str(tmp_path / "config.yaml"))["num_steps"] == steps


# Anything


TEXTS = st.sampled_from(
    ["", "0", "1", "-1", "1e99", "0.5", "nan", "true", "auto", "adamw", "cosine", "[1, x]", "a/b", "${x}"]
)


@pytest.mark.parametrize("kind", SYSTEMS)
@given(data=st.data())
def test_no_mapping_gives_a_traceback(kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    keys = st.sampled_from([key.removesuffix(".*") for key in SYSTEMS[kind].rows] + ["zzz", "seed"])
    nested: st.SearchStrategy[Any] = st.dictionaries(st.sampled_from("ab"), TEXTS) | st.lists(TEXTS)
    tree = data.draw(st.dictionaries(keys, TEXTS | st.none() | nested, max_size=12))
    suffix = ".py" if kind == "nanogpt" else ".json"
    path = tmp_path_factory.mktemp("any") / f"a{suffix}"
    assignments = "\n".join(f"{key} = {value!r}" for key, value in tree.items() if not isinstance(value, dict))
    path.write_text(assignments if kind == "nanogpt" else json.dumps(tree))
    arguments = data.draw(st.dictionaries(keys, TEXTS, max_size=3))
    accepts = {"accept_llama": True, "accept_unknown": True}
    chosen = data.draw(st.sampled_from([kind, None]))
    try:
        translate_all(assign({"recipe": [str(path)], **accepts, **arguments}), chosen)
    except ConfigError as error:
        assert error.problems


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--accept_llama=true"], "--accept_llama"),
        (["stub.yaml", "--accept_unknown=perhaps"], "--accept_unknown=perhaps"),
        (["stub.yaml", "--optim.lr=1", "--learning_rate=2"], "two values for learning_rate"),
    ],
)
def test_a_flag_for_other_systems_without_a_use_is_refused(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        values(*words)
    assert len(error.value.problems) == 1 and named in error.value.problems[0]
    assert settings_of(TranslateConfig)["kind"].choices == tuple(SYSTEMS)


def test_a_flag_replaces_a_value_that_cannot_be_translated(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 5}')
    assert read_unchecked(str(tmp_path / "a.json"), "--global_batch_size=40").values["global_batch_size"] == 40


# Flags and words without a file


@pytest.mark.parametrize(("name", "value"), [("test", "3"), ("epochs", "3"), ("max_steps", "3"), ("logging", "x")])
def test_a_plain_flag_is_ours_or_an_error_without_names_of_other_systems(name: str, value: str) -> None:
    for more in ({}, {"train.max_steps": "5"}):
        with pytest.raises(ConfigError) as error:
            values(**{name: value}, **more)
        assert f"--{name} is not known" in str(error.value) and "train." not in str(error.value)


# Of the five systems


def test_a_step_to_load_in_the_run_that_is_saved_is_the_step_to_resume_from() -> None:
    words = ["optimizer=adamw", "train.max_steps=20", "checkpoint.save_path=runs/x"]
    found = values(*words, "checkpoint.load_path=./runs/x/iter_10.json")
    assert (found["resume_from_checkpoint"], found["ckpt_load_path"]) == ("10", "None")
    found = values(*words, "checkpoint.load_path=runs/y/iter_10.json")
    assert found["resume_from_checkpoint"] == "None"
    assert found["ckpt_load_path"] == "runs/y/checkpoints/step_10_ckp"


SMALL = {"d_model": 256, "n_heads": 4, "n_layers": 4, "d_ff": 1024, "max_seq_len": 512}


def test_a_rule_that_settings_of_another_system_break_names_their_file_and_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**SMALL, "d_model": 255}))
    with pytest.raises(ConfigError) as error:
        values(str(path))
    assert f"{path}: d_model: 255; {path}: n_heads: 4" in str(error.value)


@pytest.mark.parametrize(
    ("named", "split", "config", "wanted"),
    [
        ("web", "test", "en", "--input_path=web --split=test --output_path=data"),
        ("web", "train", None, "--input_path=web --output_path=data"),
        ("web/*.jsonl", "test", None, "'--input_path=web/*.jsonl' --dataset=text --split=test --output_path=data"),
        ("web/test.jsonl", "test", "en", "--input_path=web/test.jsonl --output_path=data"),
        ("a/b", "test", "en", "--hf_dataset=a/b --hf_config=en --hf_split=test --output_path=data"),
    ],
)
def test_the_split_of_a_guide_is_the_one_that_its_command_reads(
    named: str, split: str, config: str | None, wanted: str, tmp_path: Path
) -> None:
    with contextlib.chdir(tmp_path):
        Path("web").mkdir()
        for name, count in (("train", 3), ("test", 2)):
            Path(f"web/{name}.jsonl").write_text('{"text": "words"}\n' * count)
        data = {"dataset_name": named, "dataset_split": split, "dataset_config": config}
        Path("a.json").write_text(json.dumps({"use_amp": True, "num_epochs": 1, **data}))
        with pytest.raises(DataError, match=r"there is no data yet in data\. Prepare it, then") as error:
            Trainer.from_recipe("a.json")
        command = str(error.value).splitlines()[-1].strip()
        assert command == f"pretrain prepare {wanted}"
        if not named.startswith("a/"):
            main([*shlex.split(command)[1:], "--vocab_size=257"])
            (prepared,) = Path("data").glob("*/prepare.json")
            assert json.loads(prepared.read_text())["documents"] == (2 if split == "test" else 3)


def test_a_flag_that_wins_over_a_file_leaves_its_value_out_of_the_table(tmp_path: Path) -> None:
    Path(tmp_path / "a.yaml").write_text(
        "dist: {dtype: float32}\ndataset: {path_train: /data/train.csv, batch_size: 2}\n"
        "lr_scheduler: {total_iterations: 10}\n"
    )
    output, typed = tmp_path / "b.yaml", assign({"data_path": "mine", "batch_size": "4", "schedule": "linear"})
    translate_file(TranslateConfig(str(tmp_path / "a.yaml"), output_path=str(output)), typed)
    lines = {" ".join(line.split()) for line in output.read_text().splitlines()}
    assert "# dataset.path_train: /data/train.csv (--data_path wins)" in lines
    assert "# dataset.batch_size: 2 (--batch_size wins)" in lines
    assert "# lr_scheduler.total_iterations: 10 num_steps=10 min_lr_ratio=0 (--schedule wins)" in lines


def test_documents_that_are_not_packed_there_are_padded_here(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"use_amp": true, "num_epochs": 1, "pack_sequences": false}')
    translate_file(TranslateConfig(str(tmp_path / "a.json"), output_path=str(tmp_path / "b.yaml")))
    assert "(whole documents side by side, padded at the end, without" in (tmp_path / "b.yaml").read_text()


def test_characters_without_a_separator_are_one_document_after_the_way_on_of_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.chdir(tmp_path):
        Path("data/x").mkdir(parents=True)
        for name in ("train", "val"):
            (np.arange(2000) % 65).astype(np.uint16).tofile(f"data/x/{name}.bin")
        Path("a.py").write_text("dataset = 'x'\nvocab_size = 65\nn_embd = 32\nn_layer = 1\nn_head = 2\n")
        flags = ["train", "a.py", "block_size=16", "batch_size=2", "max_tokens=64", "dry_run=true"]
        for more in ([], ["sep_token=9999", "--vocab_size=10000"], ["sep_token=65", "--vocab_size=66"]):
            with pytest.raises(SystemExit):
                main([*flags, *more])
            way_on = "append an id that it does not hold (docs/coming-from.md)"
            assert way_on in capsys.readouterr().err
        for name in ("train", "val"):
            with Path(f"data/x/{name}.bin").open("ab") as file:
                np.array([65], np.uint16).tofile(file)
        main([*flags, "sep_token=65", "--vocab_size=66"])
        assert "1 dataset, 2,001 tokens" in capsys.readouterr().out
