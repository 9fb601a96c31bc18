"""The fields of a pipeline with composed configs: each of its keys, and what a whole folder of them starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pretraining.config.command_line import load_train_config
from pretraining.config.fields import values_of
from pretraining.config.foreign.composed import TABLE, knows
from pretraining.config.foreign.kinds import translate
from pretraining.config.foreign.translation import Source, Translation
from pretraining.config.settings_files import parse_tree
from pretraining.errors import ConfigError
from pretraining.progress import Duration

CONF = {
    "config.yaml": """
defaults:
  - dataset: text
  - model: small
  - optimizer: adamw
  - train
  - logging
  - checkpoint
  - experimental
  - _self_
random_seed: 7
hydra:
  run: {dir: "outputs/${now:%H}"}
""",
    "dataset/text.yaml": "name: text\nbatch_size: 4\ntotal_batch_size: 8\nshuffle_buffer_size: 1000\n",
    "model/small.yaml": "name: llama\ndim: 64\nnum_heads: 4\nnum_blocks: 2\ncontext_length: 32\ngpt_dropout: 0\n",
    "optimizer/adamw.yaml": """
name: adamw
defaults:
  - lr_config: linear
lr_config: {lr: 1e-3}
beta1: 0.9
beta2: 0.999
eps: 1e-8
weight_decay: 0.1
use_nesterov: False
""",
    "optimizer/sgdm.yaml": "defaults:\n  - lr_config: linear\nlr_config: {lr: 0.1}\nbeta: 0.9\nweight_decay: 0.0\n",
    "optimizer/lr_config/linear.yaml": "schedule: linear\nlr: 3e-4\nwarmup: null\nconst: null\nmax_steps: null\n",
    "optimizer/lr_config/cosine.yaml": "lr: null\nwarmup: null\nmax_steps: null\n",
    "train.yaml": "max_steps: 2000\ngradient_clip_val: 10.0\nuse_amp: false\nprecision: float16\n",
    "logging.yaml": "logging:\n  wandb_project: null\n  wandb_name: null\n",
    "checkpoint.yaml": """
checkpoint:
  save: False
  load: False
  save_path: null
  save_steps: null
  num_steps: null
  load_path: null
  overwrite_config: False
""",
    "experimental.yaml": "experimental:\n  use_fast: False\n  probe: {use: False, every: 5}\n",
}


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    for name, content in CONF.items():
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / "conf" / "config.yaml"


def started(conf: Path, *overrides: str) -> dict[str, Any]:
    return values_of(load_train_config(overrides, {"recipe": str(conf), "use_dummy_dataset": "true"}))


def translated(content: str, accept_llama: bool = False) -> Translation:
    return translate(Source("a.yaml", None, content, parse_tree(content, "a.yaml")), ".yaml", "composed", accept_llama)


def settings_of(content: str) -> dict[str, str]:
    return dict(translated(content).settings)


# The whole


def test_a_folder_is_a_recipe(conf: Path) -> None:
    values = started(conf)
    assert {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "seq_length": 32,
        "batch_size": 4,
        "global_batch_size": 8,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "adam_beta2": 0.999,
        "weight_decay": 0.1,
        "schedule": "linear",
        "warmup_steps": Duration(0, "steps"),
        "min_lr_ratio": 0.0,
        "num_steps": Duration(2000, "steps"),
        "grad_clip_thresh": 10.0,
        "mixed_precision": False,
        "seed": 7,
        "checkpoint_interval": Duration(0, "steps"),
        "tracker": (),
    }.items() <= values.items()


def test_arguments_choose_files_and_set_fields(conf: Path) -> None:
    values = started(
        conf,
        "optimizer=sgdm",
        "optimizer/lr_config=cosine",
        "optimizer.lr_config.lr=1.0",
        "optimizer.lr_config.warmup=20",
        "train.max_steps=100",
        "checkpoint.save=True",
        "checkpoint.save_path=runs/mine",
        "checkpoint.save_steps=[10, 50]",
        "logging.wandb_project=P",
        "logging.wandb_name=lr:1.0",
    )
    assert {
        "optimizer": "sgdm",
        "momentum": 0.9,
        "schedule": "cosine",
        "learning_rate": 1.0,
        "warmup_steps": Duration(20, "steps"),
        "num_steps": Duration(100, "steps"),
        "ckpt_save_path": "runs/mine",
        "checkpoint_steps": (10, 50),
        "checkpoint_interval": Duration(0, "steps"),
        "tracker": ("wandb",),
        "tracker_project_name": "P",
        "tracker_run_name": "lr:1.0",
    }.items() <= values.items()


def test_our_own_settings_come_on_top(conf: Path) -> None:
    values = started(conf, "optimizer=muon", "learning_rate=0.02", "--num_steps=5", "report.report_interval=1")
    assert (values["optimizer"], values["learning_rate"]) == ("muon", 0.02)
    assert values["num_steps"] == Duration(5, "steps")
    assert values["adam_beta2"] == 0.95  # the file's is of adamw


def test_naming_the_files_own_optimizer_keeps_its_options(tmp_path: Path) -> None:
    path = tmp_path / "whole.yaml"
    path.write_text("optimizer: {name: sgdm, momentum: 0.5, lr_config: {lr: 1}}\n")
    assert started(path, "optimizer=sgdm")["momentum"] == 0.5
    assert started(path, "optimizer=adamw")["momentum"] is None


def test_a_recipe_of_ours_behind_it_does_not_win_over_its_arguments(conf: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("learning_rate: 0.5\nseed: 1\n")
    config = load_train_config(["optimizer.lr_config.lr=2"], {"recipe": f"{conf},{other}", "use_dummy_dataset": "true"})
    assert (config.optimizer.learning_rate, config.run.seed) == (2.0, 1)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["optimizer.lr_config.lr=1", "learning_rate=2"],
            "two values for learning_rate, optimizer.lr_config.lr=1 and learning_rate=2: keep one",
        ),
        (["train.max_steps=5", "num_steps=6"], "two run lengths, train.max_steps=5 and num_steps=6: keep one"),
        (["train.max_stepz=5"], "train.max_stepz is not known: did you mean train.max_steps?"),
        (["optimizer.lr_config.lr=often"], "optimizer.lr_config.lr=often: a number is needed, as 0.1, 3e-4 or 5_000"),
        (["checkpoint.save_steps=[1"], "checkpoint.save_steps=[1: brackets or quotes do not match"),
        (["model=large"], "model=large: "),
        (["model.gpt_dropout=0.1"], "model.gpt_dropout=0.1: a Llama is trained without dropout. --accept_llama=true"),
    ],
)
def test_a_mistake_in_an_argument_is_named(conf: Path, arguments: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        started(conf, *arguments)
    assert len(error.value.problems) == 1
    assert error.value.problems[0].startswith(problem)


def test_a_name_given_as_argument_and_flag_keeps_one_value(conf: Path) -> None:
    flags = {"recipe": str(conf), "use_dummy_dataset": "true", "train.max_steps": "6"}
    with pytest.raises(ConfigError, match=r"two values for train.max_steps, train.max_steps=5 and --train.max_steps=6"):
        load_train_config(["train.max_steps=5"], flags)


def test_a_bad_value_is_named_with_its_own_file(conf: Path) -> None:
    (conf.parent / "optimizer" / "adamw.yaml").write_text("name: adamw\nbeta1: high\n")
    with pytest.raises(ConfigError, match=r"conf/optimizer/adamw.yaml:2: optimizer.beta1: high: a number is needed"):
        started(conf)


def test_every_key_of_the_folder_is_accounted_for(conf: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    started(conf)
    assert "(composed):" in caplog.text
    assert "not known" not in caplog.text
    assert f"train.max_steps: 2000 num_steps=2000 [{conf.parent}/train.yaml]" in " ".join(caplog.text.split())


# Each key


BECOMES = {
    "optimizer.lr_config.lr": ("0.1", {"learning_rate": "0.1"}),
    "optimizer.lr_config.warmup": ("10", {"warmup_steps": "10"}),
    "optimizer.lr_config.warmup_steps": ("0.05", {"warmup_steps": "5%"}),
    "optimizer.lr_config.power": ("2", {"decay_power": "2"}),
    "optimizer.lr_config.min_lr_ratio": ("0.2", {"min_lr_ratio": "0.2"}),
    "optimizer.lr_config.min_lr_factor": ("0.2", {"min_lr_ratio": "0.2"}),
    "optimizer.lr_config.const": ("5", {"stable_steps": "5"}),
    "optimizer.lr_config.stable_steps": ("5", {"stable_steps": "5"}),
    "optimizer.lr_config.decay": ("5", {"decay_steps": "5"}),
    "optimizer.lr_config.decay_steps": ("0.2", {"decay_steps": "20%"}),
    "optimizer.lr_config.max_steps": ("50", {"num_steps": "50"}),
    "optimizer.lr_config.schedule": (
        "cosine",
        {"schedule": "cosine", "min_lr_ratio": "0", "warmup_steps": "0"},
    ),
    "optimizer.name": ("sgdm", {"optimizer": "sgdm"}),
    "optimizer.lr": ("0.1", {"learning_rate": "0.1"}),
    "optimizer.beta": ("0.8", {"momentum": "0.8"}),
    "optimizer.momentum": ("0.8", {"momentum": "0.8"}),
    "optimizer.beta1": ("0.8", {"adam_beta1": "0.8"}),
    "optimizer.beta2": ("0.8", {"adam_beta2": "0.8"}),
    "optimizer.betas": ("[0.8, 0.9]", {"adam_beta1": "0.8", "adam_beta2": "0.9"}),
    "optimizer.eps": ("1e-7", {"adam_epsilon": "1e-7"}),
    "optimizer.weight_decay": ("0.01", {"weight_decay": "0.01"}),
    "optimizer.nesterov": ("true", {"nesterov": "true"}),
    "optimizer.use_nesterov": ("true", {"nesterov": "true"}),
    "optimizer.alpha": ("0.9", {"rms_alpha": "0.9"}),
    "optimizer.ns_steps": ("6", {"muon_ns_steps": "6"}),
    "optimizer.adam_lr": ("3e-4", {"muon_adam_learning_rate": "3e-4"}),
    "optimizer.adam_wd": ("0.1", {"muon_adam_weight_decay": "0.1"}),
    "optimizer.adam_beta1": ("0.8", {"adam_beta1": "0.8"}),
    "optimizer.adam_beta2": ("0.8", {"adam_beta2": "0.8"}),
    "optimizer.adam_eps": ("1e-7", {"adam_epsilon": "1e-7"}),
    "train.max_steps": ("50", {"num_steps": "50"}),
    "train.gradient_clip_val": ("2", {"grad_clip_thresh": "2"}),
    "train.grad_clip": ("null", {"grad_clip_thresh": "0"}),
    "train.max_grad_norm": ("2", {"grad_clip_thresh": "2"}),
    "train.use_amp": ("true", {"mixed_precision": "true"}),
    "train.precision": ("bf16-mixed", {"mp_dtype": "bfloat16", "mixed_precision": "true"}),
    "train.random_seed": ("3", {"seed": "3"}),
    "train.seed": ("3", {"seed": "3"}),
    "random_seed": ("3", {"seed": "3"}),
    "train.epochs": ("2", {"num_steps": "2ep"}),
    "train.num_epochs": ("2", {"num_steps": "2ep"}),
    "train.batch_size": ("2", {"batch_size": "2"}),
    "train.gradient_accumulation_steps": ("2", {"grad_accum_steps": "2"}),
    "train.accumulate_steps": ("2", {"grad_accum_steps": "2"}),
    "train.log_interval": ("5", {"report_interval": "5"}),
    "train.eval_interval": ("5", {"eval_interval": "5"}),
    "train.eval_steps": ("5", {"eval_interval": "5"}),
    "train.eval_batches": ("5", {"eval_batches": "5"}),
    "train.compile": ("true", {"use_torch_compile": "true"}),
    "train.deterministic": ("true", {"deterministic": "true"}),
    "train.device": ("gpu", {"device": "cuda"}),
    "dataset.path": ("nowhere", {"data_path": "nowhere"}),
    "dataset.data_path": ("nowhere", {"data_path": "nowhere"}),
    "dataset.data_dir": ("nowhere", {"data_path": "nowhere"}),
    "dataset.root": ("nowhere", {"data_path": "nowhere"}),
    "dataset.batch_size": ("2", {"batch_size": "2"}),
    "dataset.total_batch_size": ("8", {"global_batch_size": "8"}),
    "dataset.global_batch_size": ("8", {"global_batch_size": "8"}),
    "dataset.context_length": ("64", {"seq_length": "64"}),
    "dataset.seq_length": ("64", {"seq_length": "64"}),
    "dataset.seq_len": ("64", {"seq_length": "64"}),
    "dataset.dataloader_workers": ("2", {"num_workers": "2"}),
    "dataset.num_workers": ("2", {"num_workers": "2"}),
    "dataset.vocab_size": ("512", {"vocab_size": "512"}),
    "model.name": ("llama3_8b", {"model_variant": "llama3_8b"}),
    "model.dim": ("768", {"hidden_size": "768", "intermediate_size": "2048"}),
    "model.context_length": ("64", {"seq_length": "64", "max_position_embeddings": "64"}),
    "model.num_heads": ("4", {"num_attention_heads": "4"}),
    "model.num_kv_heads": ("2", {"num_key_value_heads": "2"}),
    "model.num_blocks": ("3", {"num_hidden_layers": "3"}),
    "model.num_layers": ("3", {"num_hidden_layers": "3"}),
    **{
        f"model.{name}": ("256", {"intermediate_size": "256"})
        for name in ("intermediate_size", "fc_dim", "ffn_dim", "mlp_dim", "hidden_dim", "d_ff")
    },
    "model.vocab_size": ("512", {"vocab_size": "512"}),
    "model.rope_theta": ("5e5", {"rope_theta": "5e5"}),
    "model.norm_eps": ("1e-6", {"rms_norm_eps": "1e-6"}),
    "model.tie_embeddings": ("true", {"tie_word_embeddings": "true"}),
    "model.tie_weights": ("true", {"tie_word_embeddings": "true"}),
    "logging.wandb_project": ("P", {"tracker_project_name": "P", "tracker": "wandb"}),
    "logging.log_interval": ("5", {"report_interval": "5"}),
    "logging.log_steps": ("5", {"report_interval": "5"}),
    "checkpoint.save": ("false", {"checkpoint_interval": "0"}),
    "checkpoint.save_path": ("runs/a", {"ckpt_save_path": "runs/a"}),
    "checkpoint.save_steps": ("100", {"checkpoint_interval": "100"}),
    "checkpoint.num_steps": ("10", {"run_steps": "10"}),
    "checkpoint.load_path": ("runs/a", {"ckpt_load_path": "runs/a"}),
    "checkpoint.overwrite_optimizer": ("true", {"load_optimizer": "false"}),
    "checkpoint.keep_last": ("3", {"keep_last": "3"}),
    "checkpoint.max_to_keep": ("3", {"keep_last": "3"}),
}
CHANGES_NOTHING = {
    **dict.fromkeys(("optimizer.lr_config.lr1", "optimizer.lr_config.lr2", "optimizer.lr_config.start_steps"), "1"),
    **dict.fromkeys(("optimizer.ns_embedding", "optimizer.ns_head", "optimizer.decouple_weight_decay"), "false"),
    "optimizer.normalize": "global",
    "optimizer.offset_beta": "0",
    "optimizer.wrapper": "off",
    "optimizer.wrapper.name": "no",
    "optimizer.visualize": "true",
    "optimizer.fused": "true",
    **{
        f"optimizer.{name}": "true"
        for name in ("debias_beta1", "debias_beta2", "use_momentum", "use_momentum_state", "use_precond")
    },
    "optimizer.use_precond_state": "true",
    "train.wrap_o2nc": "false",
    "train.random_scaling": "false",
    "train.random_scaling_seed": "1",
    "train.use_importance_sampling": "true",
    **{
        f"dataset.{name}": "1"
        for name in (
            *("name", "tokenizer", "tokenizer_path", "seed", "split", "shift_labels", "use_loadit", "loadit_path"),
            *("loadit_length", "shuffle", "shuffle_buffer_size", "pin_memory", "prefetch", "prefetch_factor"),
            "streaming",
        )
    },
    "model.pad_token": "true",
    "model.rescale_residuals": "true",
    "model.load_pytorch": "false",
    **{f"model.{name}": "0.0" for name in ("dropout", "attn_dropout", "attn_linear_dropout", "transformer_dropout")},
    "model.gpt_dropout": "0",
    **{f"model.{name}": "False" for name in ("bias", "use_bias", "head_bias", "attn_bias", "mlp_bias")},
    "model.activation": "SiLU",
    "model.norm": "rmsnorm",
    "model.positional_embedding": "rope",
    **{
        f"logging.{name}": "1"
        for name in (
            *("wandb_name", "wandb_runid", "wandb_logs_per_sec", "running_stats_window", "log_callback_data"),
            *("log_fn", "store_last_grads", "store_past_grads", "store_last_params", "compute_last_loss"),
            "compute_last_grads",
        )
    },
    "checkpoint.load": "false",
    "checkpoint.load_file": "iter_5.json",
    "checkpoint.overwrite_config": "true",
}


@pytest.mark.parametrize("key", BECOMES)
def test_a_key_becomes_these_settings(key: str) -> None:
    value, settings = BECOMES[key]
    done = translated(as_yaml(key, value))
    assert dict(done.settings) == settings
    assert knows(key)


@pytest.mark.parametrize("key", CHANGES_NOTHING)
def test_a_key_that_changes_nothing_says_why(key: str) -> None:
    done = translated(as_yaml(key, CHANGES_NOTHING[key]))
    assert dict(done.settings) == {}
    assert done.notes[0].remark not in ("", "not given", "not known to the reader of composed files")


def as_yaml(key: str, value: str) -> str:
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(key.split("."))]
    return "\n".join(lines) + f" {value}\n"


def test_each_key_of_the_table_is_tested() -> None:
    ends = {f"optimizer.lr_config.{name}" for name in ("min_lr", "end_lr", "final_lr")}  # with a peak: below
    assert TABLE.keys() == BECOMES.keys() | CHANGES_NOTHING.keys() | ends


# Keys together


@pytest.mark.parametrize(
    ("content", "settings"),
    [
        # The schedule
        (
            "optimizer: {lr_config: {schedule: linear, const: 5, warmup: 2, lr: 1}}",
            {
                "schedule": "trapezoid",
                "stable_steps": "5",
                "warmup_steps": "2",
                "learning_rate": "1",
                "min_lr_ratio": "0",
            },
        ),
        (
            "optimizer: {lr_config: {schedule: trapezoid, decay: null, warmup: 2}}",
            {"schedule": "trapezoid", "decay_steps": "0", "warmup_steps": "2", "min_lr_ratio": "0"},
        ),
        (
            "optimizer: {lr_config: {schedule: constant, lr: 1, const: 0, decay: 5}}",
            {"schedule": "constant", "learning_rate": "1", "warmup_steps": "0"},
        ),
        (
            "optimizer: {lr_config: {schedule: cosine, lr: 2e-3, min_lr: 1e-4, warmup: 1}}",
            {"schedule": "cosine", "learning_rate": "2e-3", "min_lr_ratio": "0.05", "warmup_steps": "1"},
        ),
        (
            "optimizer: {lr_config: {schedule: piecewise_linear, lr1: 1e-3, lr2: 0, start_steps: 100, max_steps: 50, "
            "lr: 1}}",
            {"schedule": "piecewise_linear", "schedule_points": "100:1,150:0", "learning_rate": "1e-3"},
        ),
        ("optimizer: {lr_config: {lr: 2, end_lr: 1}}", {"learning_rate": "2", "min_lr_ratio": "0.5"}),
        ("optimizer: {lr_config: {lr: 2, final_lr: 0}}", {"learning_rate": "2", "min_lr_ratio": "0"}),
        ("optimizer: {lr_config: {schedule: my.module:f}}", {"schedule": "my.module:f"}),
        # Lengths
        (
            "optimizer: {lr_config: {max_steps: 2000}}\ntrain: {max_steps: 100}",
            {"num_steps": "2000", "run_steps": "100"},
        ),
        (
            "optimizer: {lr_config: {max_steps: 2000}}\ntrain: {max_steps: 100}\ncheckpoint: {num_steps: 50}",
            {"num_steps": "2000", "run_steps": "50"},
        ),
        (
            "optimizer: {lr_config: {max_steps: 2000}}\ntrain: {max_steps: 100}\ncheckpoint: {num_steps: 500}",
            {"num_steps": "2000", "run_steps": "100"},
        ),
        ("optimizer: {lr_config: {max_steps: 200}}\ntrain: {max_steps: 1000}", {"num_steps": "200"}),
        ("optimizer: {lr_config: {max_steps: 2e2}}\ntrain: {max_steps: 200}", {"num_steps": "200"}),
        (
            "optimizer: {lr_config: {schedule: constant, max_steps: 200, warmup: 1}}\ntrain: {max_steps: 1000}",
            {"schedule": "constant", "warmup_steps": "1", "num_steps": "1000"},
        ),
        # Optimizers
        ("optimizer: {name: rmsprop, momentum: 0.99}", {"optimizer": "rmsprop", "rms_alpha": "0.99"}),
        ("optimizer: {name: sgdm, momentum: null}", {"optimizer": "sgdm", "momentum": "0"}),
        ("optimizer: {name: adamw, use_nesterov: False, momentum: 0}", {"optimizer": "adamw"}),
        (
            "optimizer: {name: muon, adam_lr: 3e-4}",
            {
                "optimizer": "muon",
                "weight_decay": "0",
                "muon_adam_weight_decay": "0",
                "muon_adam_learning_rate": "3e-4",
            },
        ),
        (
            "optimizer: {name: muon_adamw, weight_decay: 0.1, adam_wd: 0, eps: 1e-8, beta2: null}",
            {"optimizer": "muon", "weight_decay": "0.1", "muon_adam_weight_decay": "0"},
        ),
        ("optimizer: {name: my.module:Lion}", {"optimizer": "my.module:Lion"}),
        (
            "optimizer: {name: nadam, weight_decay: 0.1, decouple_weight_decay: true}",
            {"optimizer": "nadam", "weight_decay": "0.1"},
        ),
        # Checkpoints
        (
            "checkpoint: {save: true, save_path: d, save_steps: [10, 100]}",
            {"ckpt_save_path": "d", "checkpoint_steps": "10,100", "checkpoint_interval": "0"},
        ),
        ("checkpoint: {save: false, save_path: d, save_steps: 5}", {"checkpoint_interval": "0"}),
        (
            "checkpoint: {load: true, load_path: d/iter_10000.json, overwrite_optimizer: false}",
            {"ckpt_load_path": "d/checkpoints/step_10000_ckp", "load_optimizer": "true"},
        ),
        (
            "checkpoint: {load: true, load_path: d, load_file: iter_20.ckpt}",
            {"ckpt_load_path": "d/checkpoints/step_20_ckp"},
        ),
        ("checkpoint: {load: true, load_path: d, load_file: best}", {"ckpt_load_path": "d/best"}),
        ("checkpoint: {load: false, load_path: d, load_file: f}", {}),
        # Others
        ("train: {use_amp: false, precision: float16}", {"mixed_precision": "false"}),
        ("train: {precision: fp32, use_amp: true}", {"mixed_precision": "false"}),
        ("model: {dim: 64, fc_dim: 256}", {"hidden_size": "64", "intermediate_size": "256"}),
        ("model: {dim: wide}", {"hidden_size": "wide"}),
        ("model: {name: Llama2}", {}),
        (
            "logging: {wandb_project: P, wandb_name: N, wandb_runid: 5}",
            {"tracker_project_name": "P", "tracker": "wandb", "tracker_run_name": "N", "tracker_run_id": "5"},
        ),
        # Settings of ours in such a file
        (
            "optimizer: {learning_rate: 1}\ndata_path: d\nSeq-Length: 5",
            {"learning_rate": "1", "data_path": "d", "seq_length": "5"},
        ),
    ],
)
def test_keys_that_mean_something_together(content: str, settings: dict[str, str]) -> None:
    assert settings_of(content) == settings


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("optimizer: {name: soap}", "optimizer.name: soap: not an optimizer here: There are adamw, "),
        ("optimizer: {name: adan}", "optimizer.name: adan: not an optimizer here: did you mean adam? "),
        ("optimizer: {name: sgdm, beta1: 0.9}", "optimizer.beta1: 0.9: sgdm does not read it here: it has mom"),
        ("optimizer: {name: adamw, nesterov: true}", "optimizer.nesterov: true: adamw does not read it here: "),
        ("optimizer: {name: adam, beta: 0.9}", "optimizer.beta: 0.9: adam does not read it here: it has beta1"),
        ("optimizer: {normalize: layer}", "optimizer.normalize: layer: updates are divided by one norm over"),
        ("optimizer: {wrapper: {name: mask}}", "optimizer.wrapper.name: mask: optimizers are not wrapped"),
        (
            "optimizer: {name: muon_adamw, beta2: 0.9}",
            "optimizer.beta2: 0.9: Muon keeps no squares here: write optimizer.beta2=null",
        ),
        (
            "optimizer: {name: rmsprop, weight_decay: 0.1, decouple_weight_decay: true}",
            "optimizer.decouple_weight_decay: true: weight decay beside the update; that of rmsprop is added to "
            "the gradient here: write optimizer.decouple_weight_decay=false, or optimizer.weight_decay=0",
        ),
        (
            "optimizer: {name: nadam, weight_decay: 0.1, decouple_weight_decay: false}",
            "optimizer.decouple_weight_decay: false: weight decay added to the gradient; that of nadam is beside",
        ),
        ("optimizer: {lr_config: {schedule: cosin}}", "optimizer.lr_config.schedule: cosin: not a schedule here: "),
        ("optimizer: {lr_config: {schedule: piecewise_linear, lr1: 1}}", "optimizer.lr_config.schedule: piecewise"),
        ("optimizer: {lr_config: {schedule: cosine, const: 5}}", "optimizer.lr_config.const: 5: cosine has no st"),
        ("optimizer: {lr_config: {min_lr: 5}}", "optimizer.lr_config.min_lr: 5: a share of the peak is needed"),
        (
            "optimizer: {lr_config: {max_steps: 5, min_lr_ratio: 0.1}}\ntrain: {max_steps: 9}",
            "train.max_steps: 9: the schedule ends before, optimizer.lr_config.max_steps=5: give both the same",
        ),
        ("train: {precision: int8}", "train.precision: int8: one of bfloat16, float16, float32 is needed"),
        ("train: {wrap_o2nc: true}", "train.wrap_o2nc: true: conversion of online learners is not here: "),
        ("train: {device: tpu}", "train.device: tpu: one of auto, cuda, gpu, cpu is needed"),
        ("train: {seed: 1}\nrandom_seed: 2", "two values for seed, 1 and 2: train.seed: 1 and "),
        ("checkpoint: {load: true}", "checkpoint.load: true: from where? write checkpoint.load_path=…"),
        ("model: {name: gpt}", "model.name: gpt: a GPT has layer norms, GELU and learned positions, a Llama RM"),
        ("model: {name: mamba}", "model.name: mamba: it is no Llama. --accept_llama=true"),
        ("model: {head_bias: true}", "model.head_bias: true: a Llama has no biases. --accept_llama=true"),
        ("model: {activation: gelu}", "model.activation: gelu: a Llama's activation is SiLU, gated. --accept"),
        ("experimental: {rs: true}", "experimental.rs: true: experiments of that pipeline are not here: "),
        (
            "optimizer: {_target_: torch.optim.AdamW}",
            "optimizer._target_: torch.optim.AdamW: no objects are built from a recipe: name the optimizer in "
            "place of it, as in optimizer.name: adamw, or your own with optimizer=package.module:Class",
        ),
        ("model: {_target_: a.B}", "model._target_: a.B: no objects are built from a recipe: take it out; docs/ext"),
        (
            "train: {max_steps: 5}\noptimizer: {lr_config: {max_steps: '${train.max_steps}'}}",
            "optimizer.lr_config.max_steps: ${train.max_steps}: references are not followed: write the value itself, 5",
        ),
        ("logging: {x: ['a', '${b}']}", "logging.x: [a, ${b}]: references are not followed: write the value it"),
        ("train: {max_steps: '???'}", "train.max_steps: ???: a value must be given: write train.max_steps=…"),
    ],
)
def test_what_cannot_be_translated_is_named(content: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        translated(content)
    assert len(error.value.problems) == 1
    assert re.sub(r"a\.yaml:\d+: ", "", error.value.problems[0]).startswith(problem)


def test_a_flag_wins_over_an_optimizer_that_is_not_here(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("optimizer: {name: lion, lr_config: {lr: 2e-3}}\n")
    flags = {"use_dummy_dataset": "true", "num_steps": "10", "warmup_steps": "1"}
    with pytest.raises(ConfigError, match="lion: not an optimizer here"):
        load_train_config([str(path)], flags)
    assert load_train_config([str(path)], {**flags, "optimizer": "sgdm"}).optimizer.optimizer == "sgdm"
    with pytest.raises(ConfigError, match="lion: not an optimizer here"):
        load_train_config([str(path)], {**flags, "optimizer": "lamb"})


def test_the_rate_at_the_end_is_a_share_of_the_rate_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("optimizer: {lr_config: {lr: 2e-3, min_lr: 1e-4}}\n")
    flags = {"use_dummy_dataset": "true", "num_steps": "10", "warmup_steps": "1"}
    assert load_train_config([str(path)], flags).schedule.min_lr_ratio == 0.05
    assert load_train_config([str(path)], {**flags, "learning_rate": "1e-3"}).schedule.min_lr_ratio == 0.1


def test_what_makes_no_llama_is_left_out_where_one_is_accepted() -> None:
    done = translated("model: {name: gpt, dim: 64, dropout: 0.1}", accept_llama=True)
    assert dict(done.settings) == {"hidden_size": "64", "intermediate_size": "256"}


def test_experiments_that_are_off_tests_and_the_composer_are_left_out() -> None:
    done = translated("experimental: {a: false, b: {use: False, path: x}, c: null}\ntest: {x: 1}\nhydra: {y: '${z}'}")
    assert dict(done.settings) == {}
    assert not [note for note in done.notes if "not known" in note.remark]


def test_folders_and_tokenizers_that_are_there_are_taken(tmp_path: Path) -> None:
    (tmp_path / "data" / "pile").mkdir(parents=True)
    (tmp_path / "data" / "pile" / "a.arrow").touch()
    (tmp_path / "data" / "tokenizer.json").touch()
    data = tmp_path / "data"
    done = settings_of(f"dataset: {{path: {data}, name: pile, tokenizer: {data}}}")
    assert done == {"data_path": str(data), "datasets": "pile", "tokenizer_path": str(data)}
    assert settings_of(f"dataset: {{path: {data / 'pile'}}}") == {"data_path": str(data), "datasets": "pile"}


def test_a_checkpoint_of_that_pipeline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "iter_10.json").touch()
    with pytest.raises(ConfigError, match=r"iter_10\.json is a checkpoint of another system, which is not read"):
        translated(f"checkpoint: {{load_path: {tmp_path}/iter_10.json}}")
