"""The JSON of the training guide: each of its keys, flat and in sections, and what the whole of it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pretraining.config.command_line import load_train_config
from pretraining.config.foreign.kinds import translate
from pretraining.config.foreign.translation import Source, Translation
from pretraining.config.settings_files import parse_tree
from pretraining.errors import ConfigError

MODEL = {
    "vocab_size": 32000,
    "d_model": 256,
    "n_heads": 4,
    "n_layers": 4,
    "d_ff": 1024,
    "max_seq_len": 512,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation": "silu",
    "pre_norm": True,
    "gradient_checkpointing": True,
}
TRAINING = {
    "batch_size": 8,
    "learning_rate": 3e-4,
    "weight_decay": 0.01,
    "num_epochs": 3,
    "max_steps": None,
    "lr_scheduler": "cosine",
    "warmup_steps": 100,
    "optimizer": "adamw",
    "gradient_accumulation_steps": 4,
    "use_amp": True,
    "amp_dtype": "float16",
    "max_grad_norm": 0.5,
    "save_steps": 500,
    "eval_steps": 250,
    "logging_steps": 20,
    "checkpoint_dir": "./checkpoints",
    "save_total_limit": 3,
    "resume_from_checkpoint": "checkpoints/step_500_ckp",
    "report_to": ["tensorboard", "wandb"],
    "world_size": 1,
    "distributed_backend": "nccl",
    "use_deepspeed": False,
    "deepspeed_config": "ds.json",
    "early_stopping_patience": 3,
    "seed": 42,
}
DATA = {
    "dataset_name": "someone/corpus",
    "dataset_config": "en",
    "dataset_split": "train",
    "validation_split": "validation",
    "text_column": "content",
    "max_length": 256,
    "min_length": 10,
    "pack_sequences": True,
    "packing_strategy": "first_fit",
    "preprocessing_num_workers": 4,
}
CONFIG = {"model": MODEL, "training": TRAINING, "data": DATA}
SETTINGS = {
    "vocab_size": "32000",
    "hidden_size": "256",
    "num_attention_heads": "4",
    "num_hidden_layers": "4",
    "intermediate_size": "1024",
    "max_position_embeddings": "512",
    "fsdp_activation_checkpointing": "true",
    "batch_size": "8",
    "learning_rate": "0.0003",
    "weight_decay": "0.01",
    "num_steps": "3ep",
    "schedule": "cosine",
    "min_lr_ratio": "0",
    "warmup_steps": "100",
    "optimizer": "adamw",
    "grad_accum_steps": "4",
    "mixed_precision": "true",
    "mp_dtype": "float16",
    "grad_clip_thresh": "0.5",
    "checkpoint_interval": "500",
    "eval_interval": "250",
    "report_interval": "20",
    "ckpt_save_path": "./checkpoints",
    "keep_last": "3",
    "resume_from_checkpoint": "checkpoints/step_500_ckp",
    "tracker": "tensorboard,wandb",
    "early_stopping_evaluations": "3",
    "seed": "42",
    "data_path": "data",
    "datasets": "corpus",
    "tokenizer_path": "data",
    "sep_token": "0",
    "eval_datasets": "data/corpus_validation",
    "seq_length": "256",
    "min_length": "10",
    "packing": "first_fit",
}
ENOUGH = {"use_amp": True}
"""A key by which the kind is recognised, so that a test has only its own keys besides."""


def translated(
    tree: dict[str, Any],
    path: Path | None = None,
    overrides: dict[str, Any] | None = None,
    accept_llama: bool = False,
) -> Translation:
    content = json.dumps(tree, indent=1)
    source = Source("a.json", path, content, parse_tree(content, "a.json", ".json"), overrides or {})
    return translate(source, ".json", accept_llama=accept_llama)


def settings_of(tree: dict[str, Any], **options: Any) -> dict[str, str]:
    settings = dict(translated(ENOUGH | tree, **options).settings)
    assert settings.pop("mixed_precision") == "true"
    return settings


def remark_of(translation: Translation, key: str) -> str:
    return next(note.remark for note in translation.notes if note.key == key)


@pytest.mark.parametrize("tree", [CONFIG, {**MODEL, **TRAINING, **DATA}], ids=["sections", "flat"])
def test_every_key_is_translated(tree: dict[str, Any]) -> None:
    done = translated(tree)
    assert done.settings == SETTINGS
    assert not [note.key for note in done.notes if "not known" in note.remark]


def test_the_commands_that_prepare_its_text_are_shown() -> None:
    done = translated(CONFIG)
    common = "pretrain prepare --hf_dataset=someone/corpus --hf_config=en"
    assert (
        remark_of(done, "data.dataset_name")
        == f"prepare it first: {common} --text_field=content --vocab_size=32000 --output_path=data"
    )
    assert remark_of(done, "data.validation_split") == (
        f"prepare it, too: {common} --hf_split=validation --text_field=content --dataset=corpus_validation "
        "--output_path=data"
    )


def test_it_is_a_recipe_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    for words, flags in (([str(path)], {}), ([], {"config": str(path)})):
        config = load_train_config(words, flags)
        assert config.model.hidden_size == 256
        assert (config.data.data_path, config.data.datasets) == ("data", ("corpus",))
        assert str(config.run.num_steps) == "3ep"
    made_up = load_train_config([str(path)], {"use_dummy_dataset": "true", "num_steps": "10", "warmup_steps": "1"})
    assert made_up.data.data_path is None
    assert made_up.evaluation.eval_datasets == ()
    assert made_up.data.held_out_fraction == 0.01


def test_a_model_that_is_no_llama_is_refused_or_taken_for_one(tmp_path: Path) -> None:
    model = MODEL | {"dropout": 0.1, "attention_dropout": 0.1, "activation": "gelu", "pre_norm": False}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"model": model}))
    with pytest.raises(ConfigError) as error:
        load_train_config([str(path)])
    assert [problem.split(": ")[1] for problem in error.value.problems] == [
        "model.dropout",
        "model.attention_dropout",
        "model.activation",
        "model.pre_norm",
    ]
    assert all("--accept_llama=true" in problem for problem in error.value.problems)
    config = load_train_config([str(path)], {"accept_llama": "true"})
    assert (config.model.hidden_size, config.model.intermediate_size) == (256, 1024)


@pytest.mark.parametrize(
    ("tree", "settings"),
    [
        ({"max_seq_len": 512}, {"seq_length": "512", "max_position_embeddings": "512"}),
        ({"max_steps": 100, "num_epochs": 3}, {"num_steps": "100"}),
        ({"max_steps": -1, "num_epochs": 0.5}, {"num_steps": "0.5ep"}),
        ({"lr_scheduler": "linear"}, {"schedule": "linear", "min_lr_ratio": "0"}),
        ({"lr_scheduler": "polynomial"}, {"schedule": "polynomial", "min_lr_ratio": "0"}),
        ({"lr_scheduler": "constant"}, {"schedule": "constant"}),
        ({"lr_scheduler": "cosine", "min_lr_ratio": 0.05}, {"schedule": "cosine", "min_lr_ratio": "0.05"}),
        ({"warmup_ratio": 0.03}, {"warmup_steps": "3%"}),
        ({"optimizer": "Adam"}, {"optimizer": "adam"}),
        ({"optimizer": "sgd"}, {"optimizer": "sgd"}),
        ({"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "sgdm", "momentum": "0.9"}),
        (
            {"beta1": 0.8, "adam_beta2": 0.99, "eps": 1e-7},
            {"adam_beta1": "0.8", "adam_beta2": "0.99", "adam_epsilon": "1e-07"},
        ),
        ({"betas": [0.8, 0.99]}, {"adam_beta1": "0.8", "adam_beta2": "0.99"}),
        ({"report_to": []}, {"tracker": "none"}),
        ({"report_to": "none"}, {"tracker": "none"}),
        ({"report_to": ["wandb"], "run_name": "a"}, {"tracker": "wandb", "tracker_run_name": "a"}),
        ({"report_to": ["wandb"], "wandb_project": "a"}, {"tracker": "wandb", "tracker_project_name": "a"}),
        ({"report_to": "tensorboard", "run_name": "a"}, {"tracker": "tensorboard"}),
        ({"save_total_limit": 0}, {"keep_last": "none"}),
        ({"resume_from_checkpoint": True}, {}),
        ({"pack_sequences": True}, {"packing": "greedy"}),
        ({"pack_sequences": False, "packing_strategy": "greedy"}, {"packing": "best_fit", "document_mask": "true"}),
        ({"device": "cpu"}, {"device": "cpu"}),
        ({"compile": True}, {"use_torch_compile": "true"}),
        ({"num_workers": 2}, {"num_workers": "2"}),
        ({"logging_dir": "logs"}, {"tracker_dir": "logs"}),
        ({"n_kv_heads": 2, "rope_theta": 5e5}, {"num_key_value_heads": "2", "rope_theta": "500000.0"}),
        ({"tie_embeddings": True}, {"tie_word_embeddings": "true"}),
        ({"bias": False}, {}),
        ({"tie_weights": True}, {"tie_word_embeddings": "true"}),
        ({"norm_eps": 1e-5}, {"rms_norm_eps": "1e-05"}),
        ({"learning_rate": 1e-3, "min_lr": 1e-4}, {"learning_rate": "0.001", "min_lr_ratio": "0.1"}),
        ({"min_lr": 1e-4, "min_lr_ratio": 0.2}, {"min_lr_ratio": "0.2"}),
        (
            {"learning_rate": 1e-3, "min_lr": 1e-4, "lr_scheduler": "cosine"},
            {"learning_rate": "0.001", "min_lr_ratio": "0.1", "schedule": "cosine"},
        ),
        ({"label_smoothing": 0.0, "ema_decay": 0, "use_ema": False, "loss": "cross_entropy"}, {}),
        ({"positional_encoding": "rope", "norm": "rmsnorm", "qk_norm": False, "num_experts": 1}, {}),
    ],
)
def test_a_key_becomes(tree: dict[str, Any], settings: dict[str, str]) -> None:
    assert settings_of(tree) == settings


@pytest.mark.parametrize(
    ("tree", "settings"),
    [
        ({"use_amp": False, "amp_dtype": "float16"}, {"mixed_precision": "false"}),
        ({"amp_dtype": "torch.bfloat16"}, {"mixed_precision": "true", "mp_dtype": "bfloat16"}),
        ({"use_amp": True, "amp_dtype": "fp16"}, {"mixed_precision": "true", "mp_dtype": "float16"}),
    ],
)
def test_amp_is_mixed_precision(tree: dict[str, Any], settings: dict[str, str]) -> None:
    assert translated(tree).settings == settings


@pytest.mark.parametrize(
    "line",
    [
        {"positional_encoding": "learned"},
        {"norm": "layernorm"},
        {"norm_type": "layernorm"},
        {"qk_norm": True},
        {"num_experts": 8},
        {"sliding_window": 256},
        {"resid_dropout": 0.1},
        {"rope_scaling": 4},
    ],
)
def test_another_model_is_refused_until_a_llama_is_accepted(line: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^a.json:3: {next(iter(line))}: .*--accept_llama=true"):
        settings_of(line)
    assert settings_of(line, accept_llama=True) == {}


@pytest.mark.parametrize("line", [{"label_smoothing": 0.1}, {"ema_decay": 0.999}, {"amsgrad": True}, {"loss": "focal"}])
def test_another_training_is_refused(line: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^a.json:3: {next(iter(line))}: .*take it out"):
        settings_of(line, accept_llama=True)


def test_the_lowest_rate_is_a_share_of_the_rate_on_the_command_line() -> None:
    tree = {"learning_rate": 1e-3, "min_lr": 1e-4}
    assert settings_of(tree, overrides={"learning-rate": "2e-3"})["min_lr_ratio"] == "0.05"
    with pytest.raises(ConfigError, match=r"min_lr: 0\.0001: a learning rate from 0 to learning_rate is needed"):
        settings_of({"min_lr": 1e-4})


def test_the_feed_forward_is_four_times_as_wide_unless_given() -> None:
    done = translated({"d_model": 256, "n_heads": 4, "n_layers": 4})
    assert done.settings["intermediate_size"] == "1024"
    assert done.notes[-1].given == "d_ff: (not given)"


def test_sizes_that_are_missing_are_named_unless_the_command_line_gives_them() -> None:
    with pytest.raises(ConfigError, match=r"a.json:2: d_model: 256: n_layers of this model are missing: add them"):
        translated({"d_model": 256, "n_heads": 4, "d_ff": 1024})
    tree = {"d_model": 256, "n_heads": 4}
    assert translated(tree, overrides={"model.num_hidden_layers": "4"}).settings["hidden_size"] == "256"
    assert "intermediate_size" not in translated(tree, overrides={"model-variant": "tiny"}).settings


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (
            {"lr_scheduler": "step"},
            "a.json:3: lr_scheduler: step: one of cosine, linear, constant, polynomial is needed",
        ),
        ({"optimizer": "lamb"}, "a.json:3: optimizer: lamb: one of adamw, adam, sgd"),
        ({"amp_dtype": "int8"}, "a.json:3: amp_dtype: int8: float16 or bfloat16 is needed"),
        ({"bias": True}, "a.json:3: bias: true: a Llama has no biases"),
        ({"gradient_checkpointing": "often"}, "a.json:3: gradient_checkpointing: often: true or false is needed"),
        ({"warmup_ratio": 3}, "a.json:3: warmup_ratio: 3: a number from 0 to 1 is needed"),
        (
            {"seed": 1, "training": {"seed": 2}},
            "two values for seed, 1 and 2: a.json:3: seed: 1 and a.json:5: training.seed: 2: keep one",
        ),
    ],
)
def test_what_cannot_be_translated_is_named(tree: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        translated(ENOUGH | tree)
    assert str(error.value).startswith(problem)


# DeepSpeed beside it


def with_deepspeed(folder: Path, deepspeed: dict[str, Any], **training: Any) -> Translation:
    (folder / "ds.json").write_text(json.dumps(deepspeed, indent=1))
    tree = {"training": {"use_deepspeed": True, "deepspeed_config": "ds.json", **training}}
    return translated(tree, folder / "config.json")


def test_the_deepspeed_file_that_it_names_is_read_with_it(tmp_path: Path) -> None:
    done = with_deepspeed(
        tmp_path,
        {
            "train_micro_batch_size_per_gpu": "auto",
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": "auto"}},
            "steps_per_print": 2000,
        },
        batch_size=4,
        learning_rate=0.0003,
        use_amp=False,
        logging_steps=10,
    )
    assert done.settings == {
        "batch_size": "4",
        "learning_rate": "0.0003",
        "report_interval": "10",
        "mixed_precision": "true",
        "mp_dtype": "bfloat16",
        "sharding_strategy": "zero2",
        "optimizer": "adamw",
    }
    name = str(tmp_path / "ds.json")
    assert f"{name}: zero_optimization.stage: 2" in [note.given for note in done.notes]
    assert any(line.startswith(f"  {name}: bf16.enabled: true") for line in done.table())
    assert done.note_of("sharding_strategy").line == 7


def test_what_the_two_give_differently_is_named_with_both_places(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        with_deepspeed(tmp_path, {"gradient_clipping": 0.5}, max_grad_norm=1.0)
    assert str(error.value) == (
        "two values for grad_clip_thresh, 1.0 and 0.5: a.json:5: training.max_grad_norm: 1.0 and "
        f"{tmp_path}/ds.json:2: gradient_clipping: 0.5: keep one"
    )


def test_a_problem_of_the_deepspeed_file_is_one_of_both(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ds.json:3: zero_optimization.stage: 7: a stage from 0 to 3 is needed"):
        with_deepspeed(tmp_path, {"zero_optimization": {"stage": 7}})


def test_a_value_of_the_deepspeed_file_that_no_setting_takes_is_named_there(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{\n"gradient_clipping": "tight"}')
    path = tmp_path / "config.json"
    path.write_text('{"use_deepspeed": true, "deepspeed_config": "ds.json"}')
    with pytest.raises(ConfigError, match=r"ds.json:2: gradient_clipping: tight: a number is needed"):
        load_train_config([str(path)], {"use_dummy_dataset": "true"})


def test_a_deepspeed_file_that_is_not_there_or_holds_nothing_is_named(tmp_path: Path) -> None:
    tree = {"use_deepspeed": True, "deepspeed_config": "ds.json"}
    with pytest.raises(ConfigError, match=r"a.json:3: deepspeed_config: ds.json: there is no such file"):
        translated(tree, tmp_path / "config.json")
    (tmp_path / "ds.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"ds.json holds no settings"):
        translated(tree, tmp_path / "config.json")


def test_a_deepspeed_configuration_may_stand_in_the_file_itself() -> None:
    tree = {"training": {"deepspeed_config": {"zero_optimization": {"stage": 3}}}}
    assert translated(ENOUGH | tree).settings["sharding_strategy"] == "fsdp"
    tree["training"]["use_deepspeed"] = False  # type: ignore[assignment]
    assert "sharding_strategy" not in translated(ENOUGH | tree).settings
