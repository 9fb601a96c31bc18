"""The YAML of the training stub: each of its keys, and what the whole of it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretraining.config.command_line import load_train_config
from pretraining.config.foreign.kinds import translate
from pretraining.config.foreign.translation import Source, Translation
from pretraining.config.settings_files import parse_tree
from pretraining.errors import ConfigError

CONFIG = """
dist:
  cpu_only: True
  backend: gloo
  dtype: float32
  sharding_stage: zero2
dataset:
  batch_size: 2
  num_workers: 0
  path_train: path/to/train
  path_eval: path/to/eval
model:
  hf_config:
    model_type: llama
    architectures: [LlamaForCausalLM]
    hidden_act: silu
    attention_bias: false
    attention_dropout: 0.0
    hidden_size: 64
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    intermediate_size: 128
    vocab_size: 256
    max_position_embeddings: 32
    rope_theta: 10000.0
    rms_norm_eps: 1e-6
    tie_word_embeddings: false
    use_cache: true
optim:
  lr: 1e-3
  weight_decay: 0.01
  betas: [0.8, 0.9]
  eps: 1e-7
lr_scheduler:
  total_iterations: 100
  warmup_iterations: 10
checkpoint:
  state_dict_type: full
  chkpt_saving_iterations: 20
  directory: runs
  prefix: mine
"""


def translated(content: str) -> Translation:
    return translate(Source("a.yaml", None, content, parse_tree(content, "a.yaml")), ".yaml")


def test_every_key_is_translated() -> None:
    done = translated(CONFIG)
    assert done.settings == {
        "device": "cpu",
        "backend": "gloo",
        "mixed_precision": "false",
        "sharding_strategy": "zero2",
        "batch_size": "2",
        "num_workers": "0",
        "use_dummy_dataset": "true",
        "hidden_size": "64",
        "num_hidden_layers": "2",
        "num_attention_heads": "4",
        "num_key_value_heads": "2",
        "intermediate_size": "128",
        "vocab_size": "256",
        "seq_length": "32",
        "max_position_embeddings": "32",
        "rope_theta": "10000.0",
        "rms_norm_eps": "1e-6",
        "tie_word_embeddings": "false",
        "learning_rate": "1e-3",
        "weight_decay": "0.01",
        "adam_beta1": "0.8",
        "adam_beta2": "0.9",
        "adam_epsilon": "1e-7",
        "num_steps": "100",
        "warmup_steps": "10",
        "ckpt_format": "full",
        "checkpoint_interval": "20",
        "ckpt_save_path": "runs/mine.{timestamp}",
    }
    assert not [note.key for note in done.notes if "not known" in note.remark]


def test_it_is_a_recipe_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "cfg.yaml"
    path.write_text(CONFIG)
    for config in (load_train_config([str(path)]), load_train_config([], {"recipe": str(path)})):
        assert config.optimizer.adam_beta2 == 0.9
        assert config.parallel.sharding_strategy == "zero2"
        assert config.data.use_dummy_dataset


def test_flags_win_over_it_and_data_over_its_placeholder(tmp_path: Path) -> None:
    path = tmp_path / "cfg.yaml"
    path.write_text(CONFIG)
    config = load_train_config([str(path)], {"data_path": "mine", "learning_rate": "0.5"})
    assert (config.data.data_path, config.data.use_dummy_dataset) == ("mine", False)
    assert config.optimizer.learning_rate == 0.5


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        ("bfloat16", {"mixed_precision": "true", "mp_dtype": "bfloat16"}),
        ("float16", {"mixed_precision": "true", "mp_dtype": "float16"}),
    ],
)
def test_half_precision_is_mixed_precision(dtype: str, settings: dict[str, str]) -> None:
    assert translated(f"dist: {{dtype: {dtype}}}").settings == settings


def test_folders_that_are_there_are_trained_on(tmp_path: Path) -> None:
    (tmp_path / "many" / "code").mkdir(parents=True)
    one = tmp_path / "one"
    one.mkdir()
    (one / "a.arrow").touch()
    many = tmp_path / "many"
    done = translated(f"dist: {{dtype: float32}}\ndataset: {{path_train: {many}, path_eval: {one}}}")
    assert done.settings == {"mixed_precision": "false", "data_path": str(many), "eval_datasets": str(one)}
    done = translated(f"dist: {{dtype: float32}}\ndataset: {{path_train: {one}}}")
    assert done.settings == {"mixed_precision": "false", "data_path": str(tmp_path), "datasets": "one"}


LLAMA3 = "{rope_type: llama3, factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, \
original_max_position_embeddings: 8192}"


def of_model(line: str, accept_llama: bool = False) -> Translation:
    """Returns the translation of a model with one line more than hidden_size and num_attention_heads."""
    content = f"model:\n  hf_config:\n    hidden_size: 64\n    num_attention_heads: 4\n    {line}\n"
    source = Source("a.yaml", None, content, parse_tree(content, "a.yaml"))
    return translate(source, ".yaml", accept_llama=accept_llama)


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        (f"rope_scaling: {LLAMA3}", {"rope_scaling": "32.0,1.0,4.0,8192"}),
        (f"rope_scaling: {LLAMA3.replace('rope_type', 'type')}", {"rope_scaling": "32.0,1.0,4.0,8192"}),
        (
            f"rope_parameters: {LLAMA3.replace('{', '{rope_theta: 5e5, ')}",
            {"rope_scaling": "32.0,1.0,4.0,8192", "rope_theta": "5e5"},
        ),
        ("rope_parameters: {rope_type: default, rope_theta: 5e5}", {"rope_theta": "5e5"}),
        ("rope_parameters: {rope_theta: 5e5}", {"rope_theta": "5e5"}),
        ("rope_scaling: null", {}),
        ("head_dim: 16", {}),
        ("head_dim: null", {}),
        ("sliding_window: null", {}),
        ("{sliding_window: 8, use_sliding_window: false}", {}),
        ("mlp_bias: false", {}),
        ("num_experts: 0", {}),
        ("initializer_range: 0.02", {}),
    ],
)
def test_a_config_of_a_llama_is_one_here(line: str, settings: dict[str, str]) -> None:
    lines = line.strip("{}").replace(", use", "\n    use") if line.startswith("{") else line
    done = of_model(lines)
    assert done.settings == {"hidden_size": "64", "num_attention_heads": "4", **settings}
    assert not [note.key for note in done.notes if "not known" in note.remark]


def test_a_scaling_of_rotary_frequencies_reaches_the_run(tmp_path: Path) -> None:
    path = tmp_path / "cfg.yaml"
    path.write_text(CONFIG.replace("rope_theta: 10000.0", f"rope_scaling: {LLAMA3}"))
    assert load_train_config([str(path)]).model.rope_scaling == (32, 1, 4, 8192)


@pytest.mark.parametrize(
    "line",
    [
        "rope_scaling: {rope_type: yarn, factor: 4.0}",
        "rope_scaling: {type: linear, factor: 4.0}",
        "rope_scaling: {rope_type: dynamic, factor: 4.0}",
        "rope_scaling: {factor: 4.0}",
        "rope_scaling: yarn",
        "head_dim: 32",
        "sliding_window: 4096",
        "use_sliding_window: true",
        "attention_bias: true",
        "mlp_bias: true",
        "hidden_act: gelu",
        "num_local_experts: 8",
        "partial_rotary_factor: 0.5",
        "qk_norm: true",
    ],
)
def test_a_config_of_another_model_is_refused_until_a_llama_is_accepted(line: str) -> None:
    with pytest.raises(ConfigError, match=rf"^a.yaml:5: model.hf_config.{line.partition(':')[0]}.*accept_llama"):
        of_model(line)
    assert of_model(line, accept_llama=True).settings == {"hidden_size": "64", "num_attention_heads": "4"}


def test_a_scaling_without_its_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="high_freq_factor and original_max_position_embeddings must stand beside it"):
        of_model("rope_scaling: {rope_type: llama3, factor: 8, low_freq_factor: 1}")


def test_a_directory_without_a_prefix_is_the_runs_folder() -> None:
    assert translated("dist: {}\ncheckpoint: {directory: d, chkpt_saving_iterations: 5}").settings == {
        "ckpt_save_path": "d",
        "checkpoint_interval": "5",
    }


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("dist:\n  dtype: int8", "a.yaml:2: dist.dtype: int8: one of bfloat16, float16, float32 is needed"),
        ("dist:\n  cpu_only: maybe", "a.yaml:2: dist.cpu_only: maybe: one of true, false, yes, no is needed"),
        (
            "model:\n  hf_config:\n    hidden_act: gelu",
            "a.yaml:3: model.hf_config.hidden_act: gelu: a Llama's activation is SiLU",
        ),
        ("model:\n  hf_config:\n    model_type: gpt2", "a.yaml:3: model.hf_config.model_type: gpt2: it is no Llama"),
        (
            "dist: {}\noptim:\n  betas: 0.9\ncheckpoint: {chkpt_saving_iterations: 1}",
            "a.yaml:3: optim.betas: 0.9: two numbers are needed",
        ),
    ],
)
def test_what_cannot_be_translated_is_named(content: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        translated(content)
    assert str(error.value).startswith(problem)


def test_a_value_that_no_setting_takes_is_named_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "cfg.yaml"
    path.write_text("dist:\n  sharding_stage: zero9\n")
    with pytest.raises(ConfigError, match=r"cfg.yaml:2: dist.sharding_stage: zero9: .*one of"):
        load_train_config([str(path)])
