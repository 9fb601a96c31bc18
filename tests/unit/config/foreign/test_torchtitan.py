"""torchtitan's TOML: each of its keys, its defaults and flags, and what a whole file starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pretraining.config.command_line import load_train_config
from pretraining.config.fields import values_of
from pretraining.config.foreign.kinds import recognise, translate
from pretraining.config.foreign.torchtitan import DEFAULTS, FLAVORS, TABLE
from pretraining.config.foreign.translation import Source, Translation
from pretraining.config.settings_files import parse_tree
from pretraining.config.training import ModelConfig
from pretraining.config.variants import RopeScaling, resolve_shape
from pretraining.errors import ConfigError
from pretraining.progress import Duration

FILE = """
[job]
dump_folder = "./outputs"
description = "a Llama"
print_config = true

[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100

[metrics]
log_freq = 5
enable_tensorboard = true
enable_wandb = true
save_tb_folder = "tb"

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = ["float8"]

[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.8
decay_type = "sqrt"
min_lr_factor = 0.1

[training]
local_batch_size = 2
global_batch_size = 64
seq_len = 4096
max_norm = 1.0
steps = 1000
dataset = "c4"
mixed_precision_param = "bfloat16"
seed = 5

[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
tensor_parallel_degree = 1

[checkpoint]
enable = true
folder = "checkpoint"
interval = 250
async_mode = "async"
keep_latest_k = 3

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable = true
components = ["model", "loss"]

[quantize.linear.float8]
recipe_name = "rowwise"
filter_fqns = ["output"]

[validation]
enable = false
steps = 1200

[comm]
train_timeout_seconds = 100
"""


def source_of(content: str) -> Source:
    return Source("a.toml", None, content, parse_tree(content, "a.toml", ".toml"))


def translated(content: str) -> Translation:
    return translate(source_of(content), ".toml", "torchtitan")


def beyond_defaults(content: str) -> dict[str, str]:
    """The settings of the keys of a file, without those of what it leaves out."""
    done = translated(content)
    given = [note for note in done.notes if note.origin == "a.toml"]
    return {name: value for note in given for name, value in note.settings.items()}


def as_toml(key: str, value: str) -> str:
    section, _, name = key.rpartition(".")
    return f"[{section}]\n{name} = {value}\n"


# The whole


def started(path: Path, *overrides: str, **flags: str) -> dict[str, Any]:
    given = {name.replace("__", "."): value for name, value in flags.items()}
    return values_of(load_train_config(overrides, {"recipe": str(path), "use_dummy_dataset": "true", **given}))


def test_a_file_is_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "llama.toml"
    path.write_text(FILE)
    assert recognise(source_of(FILE), ".toml") == ["torchtitan"]
    assert {
        "ckpt_save_path": "./outputs",
        "use_profiler": True,
        "profile_interval": Duration(100, "steps"),
        "report_interval": Duration(5, "steps"),
        "tracker": ("tensorboard", "wandb"),
        "model_variant": "llama3_8b",
        "rope_scaling": (8.0, 1.0, 4.0, 8192.0),
        "float8": "rowwise",
        "optimizer": "adamw",
        "learning_rate": 3e-4,
        "warmup_steps": Duration(200, "steps"),
        "schedule": "wsd",
        "decay_shape": "1-sqrt",
        "decay_steps": Duration(800, "steps"),
        "min_lr_ratio": 0.1,
        "batch_size": 2,
        "global_batch_size": 64,
        "seq_length": 4096,
        "num_steps": Duration(1000, "steps"),
        "mixed_precision": True,
        "seed": 5,
        "sharding_strategy": "hsdp",
        "hsdp_group_size": 4,
        "checkpoint_interval": Duration(250, "steps"),
        "async_save": True,
        "keep_last": 3,
        "fsdp_activation_checkpointing": True,
        "selective_checkpointing": "op",
        "use_torch_compile": True,
        "hang_timeout": Duration(100, "seconds"),
    }.items() <= started(path).items()


def test_every_key_of_the_file_is_accounted_for() -> None:
    assert not [note.key for note in translated(FILE).notes if "not known" in note.remark]


def test_what_a_file_leaves_out_is_its_default_there(tmp_path: Path) -> None:
    path = tmp_path / "llama.toml"
    path.write_text('[job]\ndescription = "nothing"\n')
    values = started(path)
    assert {
        "learning_rate": 8e-4,
        "schedule": "linear",
        "min_lr_ratio": 0.0,
        "warmup_steps": Duration(200, "steps"),
        "num_steps": Duration(10_000, "steps"),
        "batch_size": 8,
        "seq_length": 2048,
        "hidden_size": 256,
        "selective_checkpointing": "2",
    }.items() <= values.items()
    notes = {note.key: note.origin for note in translated(path.read_text()).notes}
    assert {key for key, origin in notes.items() if origin == "torchtitan's defaults"} == set(DEFAULTS)


def test_its_flags_are_read_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "llama.toml"
    path.write_text(FILE)
    values = started(
        path,
        "model.flavor=debugmodel",
        training__steps="100",
        training__local_batch_size="1",
        optimizer__lr="1e-3",
        **{"compile__no-enable": "True", "model__converters": ""},
    )
    assert {
        "hidden_size": 256,
        "num_steps": Duration(100, "steps"),
        "decay_steps": Duration(0, "steps"),
        "warmup_steps": Duration(100, "steps"),
        "batch_size": 1,
        "learning_rate": 1e-3,
        "use_torch_compile": False,
        "float8": None,
    }.items() <= values.items()


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["optimizer.lr=1", "learning_rate=2"],
            "two values for learning_rate, optimizer.lr=1 and learning_rate=2: keep one",
        ),
        (["training.stepz=5"], "training.stepz is not known: did you mean training.steps?"),
        (["training.steps=many"], "training.steps=many: a number is needed"),
    ],
)
def test_a_mistake_in_a_flag_is_named(tmp_path: Path, overrides: list[str], problem: str) -> None:
    path = tmp_path / "llama.toml"
    path.write_text(FILE)
    with pytest.raises(ConfigError) as error:
        started(path, *overrides)
    assert error.value.problems == (problem,)


def test_a_value_that_no_setting_takes_is_named_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "llama.toml"
    path.write_text(FILE.replace('selective_ac_option = "op"', 'selective_ac_option = "oops"'))
    with pytest.raises(ConfigError, match="selective_checkpointing=oops"):
        started(path)


# Each key


SCALED = {"rope_scaling": "8,1,4,8192", "max_position_embeddings": "131072"}
BECOMES: dict[str, tuple[str, dict[str, str]]] = {
    "job.dump_folder": ('"runs/a"', {"ckpt_save_path": "runs/a"}),
    "checkpoint.folder": ('"first"', {"ckpt_save_path": "outputs/first"}),
    "profiling.enable_profiling": ("true", {"use_profiler": "true", "profile_interval": "10"}),
    "profiling.enable_memory_snapshot": ("true", {"memory_snapshot": "true"}),
    "metrics.log_freq": ("5", {"report_interval": "5"}),
    "metrics.enable_tensorboard": ("false", {"tracker": "none"}),
    "metrics.enable_wandb": ("true", {"tracker": "wandb"}),
    "model.flavor": ('"70B"', {"model_variant": "llama3_70b", "vocab_size": "128256", **SCALED}),
    "model.converters": ('["float8"]', {"float8": "tensorwise"}),
    "optimizer.name": ('"Adam"', {"optimizer": "adam"}),
    "optimizer.lr": ("3e-4", {"learning_rate": "3e-4"}),
    "optimizer.beta1": ("0.8", {"adam_beta1": "0.8"}),
    "optimizer.beta2": ("0.99", {"adam_beta2": "0.99"}),
    "optimizer.eps": ("1e-7", {"adam_epsilon": "1e-7"}),
    "optimizer.weight_decay": ("0.01", {"weight_decay": "0.01"}),
    "lr_scheduler.decay_type": ('"cosine"', {"schedule": "cosine"}),
    "lr_scheduler.decay_ratio": ("0.2", {"decay_steps": "2000"}),
    "lr_scheduler.warmup_steps": ("10", {"warmup_steps": "10"}),
    "lr_scheduler.total_steps": ("20000", {"num_steps": "20000"}),
    "lr_scheduler.min_lr_factor": ("0.2", {"min_lr_ratio": "0.2"}),
    "training.steps": ("500", {"num_steps": "500"}),
    "training.local_batch_size": ("4", {"batch_size": "4"}),
    "training.global_batch_size": ("64", {"global_batch_size": "64"}),
    "training.seq_len": ("512", {"seq_length": "512"}),
    "training.max_norm": ("inf", {"grad_clip_thresh": "0"}),
    "training.mixed_precision_param": ('"float32"', {"mixed_precision": "false"}),
    "training.gc_freq": ("10", {"gc_interval": "10"}),
    "training.dataloader.num_workers": ("2", {"num_workers": "2"}),
    "training.seed": ("5", {"seed": "5"}),
    "debug.seed": ("5", {"seed": "5"}),
    "training.deterministic": ("true", {"deterministic": "true"}),
    "debug.deterministic": ("true", {"deterministic": "true"}),
    "parallelism.data_parallel_replicate_degree": ("1", {"sharding_strategy": "fsdp"}),
    "parallelism.data_parallel_shard_degree": ("-1", {"sharding_strategy": "fsdp"}),
    "checkpoint.enable": ("false", {"checkpoint_interval": "0"}),
    "activation_checkpoint.mode": ('"none"', {"fsdp_activation_checkpointing": "false"}),
    "activation_checkpoint.selective_ac_option": ('"3"', {"selective_checkpointing": "3"}),
    "compile.enable": ("true", {"use_torch_compile": "true"}),
    "comm.init_timeout_seconds": ("300", {"first_step_timeout": "300s"}),
    "comm.train_timeout_seconds": ("50", {"hang_timeout": "50s"}),
}
WITH_CHECKPOINTS: dict[str, tuple[str, dict[str, str]]] = {
    "checkpoint.interval": ("50", {"checkpoint_interval": "50"}),
    "checkpoint.async_mode": ('"disabled"', {"async_save": "false"}),
    "checkpoint.keep_latest_k": ("0", {}),
    "checkpoint.load_step": ("100", {"resume_from_checkpoint": "100"}),
    "checkpoint.exclude_from_loading": ('["optimizer"]', {"load_optimizer": "false"}),
    "checkpoint.enable_first_step_checkpoint": ("true", {"checkpoint_steps": "1"}),
    "checkpoint.initial_load_path": ('"hf"', {"ckpt_load_path": "hf", "weights_only": "true"}),
}
CHANGES_NOTHING = dict.fromkeys(
    (
        *("job.description", "job.print_config", "job.save_config_file", "job.config_file"),
        *("job.use_for_integration_test", "profiling.profile_freq", "profiling.save_traces_folder"),
        *("profiling.profiler_active", "profiling.profiler_warmup", "profiling.save_memory_snapshot_folder"),
        *("metrics.disable_color_printing", "metrics.save_tb_folder", "metrics.save_for_all_ranks"),
        *("model.hf_assets_path", "model.tokenizer_path", "model.print_after_conversion"),
        *("optimizer.implementation", "optimizer.early_step_in_backward"),
        *("training.dataset", "training.dataset_path", "training.enable_cpu_offload"),
        *("training.mixed_precision_reduce", "training.gc_debug", "training.debug_moe_force_load_balance"),
        *("debug.deterministic_warn_only", "debug.moe_force_load_balance", "compile.components", "compile.backend"),
        *("memory_estimation.enable", "memory_estimation.disable_fake_mode", "fault_tolerance.enable"),
        *("checkpoint.initial_load_model_only", "checkpoint.initial_load_in_hf"),
        *("checkpoint.initial_load_in_hf_quantized", "checkpoint.last_save_model_only"),
        *("checkpoint.last_save_in_hf", "checkpoint.export_dtype", "checkpoint.create_seed_checkpoint"),
        *("checkpoint.load_only", "checkpoint.enable_ft_dataloader_checkpoints", "validation.enable"),
    ),
    "false",
) | {
    "model.name": '"llama3"',
    "job.custom_config_module": '""',
    "experimental.custom_import": '""',
    "experimental.custom_args_module": '""',
    "training.dtype": '"float32"',
    "comm.mode": '"default"',
}


def _rest() -> list[str]:
    """Keys of families of which all say nothing here."""
    families = (
        *("quantize.", "float8.", "fault_tolerance.", "validation.", "parallelism.", "training.dataloader."),
        *("activation_checkpoint.", "comm."),
    )
    known = BECOMES.keys() | WITH_CHECKPOINTS.keys() | CHANGES_NOTHING.keys()
    return [key for key in TABLE if key not in known and key.startswith(families)]


def test_each_key_of_the_table_is_tested() -> None:
    assert TABLE.keys() == BECOMES.keys() | WITH_CHECKPOINTS.keys() | CHANGES_NOTHING.keys() | set(_rest())


@pytest.mark.parametrize("key", BECOMES)
def test_a_key_becomes_these_settings(key: str) -> None:
    value, settings = BECOMES[key]
    assert beyond_defaults(as_toml(key, value)) == settings


@pytest.mark.parametrize("key", WITH_CHECKPOINTS)
def test_a_key_about_checkpoints_counts_where_they_are_enabled(key: str) -> None:
    value, settings = WITH_CHECKPOINTS[key]
    content = as_toml(key, value)
    assert beyond_defaults(f"{content}enable = true\n") == settings
    assert beyond_defaults(content) == {}


@pytest.mark.parametrize("key", [*CHANGES_NOTHING, *_rest()])
def test_a_key_that_changes_nothing_says_why(key: str) -> None:
    value = CHANGES_NOTHING.get(key, "1" if key.endswith("degree") else '"default"')
    value = "false" if key.endswith("emulate") else value
    if key.endswith("reshard_after_forward"):
        assert beyond_defaults(as_toml(key, '"never"')) == {"sharding_strategy": "zero2"}
        return
    assert beyond_defaults(as_toml(key, value)) == {}
    note = next(note for note in translated(as_toml(key, value)).notes if note.key == key)
    assert note.remark
    assert "not known" not in note.remark


# Keys together


@pytest.mark.parametrize(
    ("content", "settings"),
    [
        (
            '[lr_scheduler]\ndecay_type = "sqrt"\nwarmup_steps = 10\n[training]\nsteps = 100',
            {"schedule": "wsd", "decay_shape": "1-sqrt", "decay_steps": "90", "warmup_steps": "10", "num_steps": "100"},
        ),
        (
            '[lr_scheduler]\ndecay_type = "linear"\ndecay_ratio = 0.95\nwarmup_steps = 10\n[training]\nsteps = 100',
            {"schedule": "wsd", "decay_shape": "linear", "decay_steps": "90", "warmup_steps": "10", "num_steps": "100"},
        ),
        (
            "[lr_scheduler]\nwarmup_steps = 200\ntotal_steps = 100\n[training]\nsteps = 50",
            {"warmup_steps": "100", "num_steps": "100", "run_steps": "50"},
        ),
        (
            "[lr_scheduler]\nwarmup_steps = 1\ntotal_steps = 50\n[training]\nsteps = 50",
            {"warmup_steps": "1", "num_steps": "50"},
        ),
        (
            "[parallelism]\ndata_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 1",
            {"sharding_strategy": "ddp"},
        ),
        (
            "[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 8\n"
            'fsdp_reshard_after_forward = "never"',
            {"sharding_strategy": "hsdp_zero2", "hsdp_group_size": "8"},
        ),
        (
            '[job]\ndump_folder = "out"\n[checkpoint]\nenable = true\nfolder = "second"\n'
            "interval = 5\nkeep_latest_k = 2",
            {"ckpt_save_path": "out/second", "checkpoint_interval": "5", "keep_last": "2"},
        ),
        (
            '[checkpoint]\nenable = true\ninitial_load_path = "a"\n'
            "initial_load_model_only = false\ninitial_load_in_hf = false",
            {"ckpt_load_path": "a", "weights_only": "false"},
        ),
        (
            '[checkpoint]\nenable = true\nexclude_from_loading = ["optimizer", "lr_scheduler", "dataloader"]',
            {"weights_only": "true"},
        ),
        ("[checkpoint]\nenable = true\nexclude_from_loading = []\nload_step = -1", {}),
        (
            '[activation_checkpoint]\nmode = "full"\nselective_ac_option = "2"',
            {"fsdp_activation_checkpointing": "true", "selective_checkpointing": "1"},
        ),
        (
            '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "2"',
            {"fsdp_activation_checkpointing": "true", "selective_checkpointing": "2"},
        ),
        ('[activation_checkpoint]\nmode = "memory_budget"', {}),
        ('[compile]\nenable = true\ncomponents = ["loss"]', {"use_torch_compile": "false"}),
        ("[profiling]\nenable_profiling = false\nprofile_freq = 5", {"use_profiler": "false"}),
        ('[model]\nconverters = ["float8"]\n[float8]\nrecipe_name = "rowwise"', {"float8": "rowwise"}),
        ("[model]\nconverters = []", {}),
        ("[validation]\nenable = true\nfreq = 5\nsteps = 8\nseq_len = 9", {"eval_interval": "5", "eval_batches": "8"}),
        ('[validation]\nenable = true\nsteps = -1\ndataset_path = "nowhere"', {}),
        ("[training]\nmax_norm = 0.5\nglobal_batch_size = -1", {"grad_clip_thresh": "0.5"}),
    ],
)
def test_keys_that_mean_something_together(content: str, settings: dict[str, str]) -> None:
    assert beyond_defaults(content) == settings


def test_checkpoints_have_its_defaults_where_they_are_enabled() -> None:
    settings = translated("[checkpoint]\nenable = true").settings
    assert (settings["checkpoint_interval"], settings["keep_last"]) == ("500", "10")


@pytest.mark.parametrize("flavor", ["8B", "8B_flex", "70B", "debugmodel", "debugmodel_varlen_attn"])
def test_a_flavor_is_a_model_that_can_be_built(tmp_path: Path, flavor: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f'[model]\nflavor = "{flavor}"\n')
    values = started(path)
    model = ModelConfig(**{name: values[name] for name in vars(ModelConfig())})
    assert resolve_shape(model).rope_scaling == RopeScaling(8, 1, 4, 8192)
    assert values["document_mask"] == ("_" in flavor)
    assert set(FLAVORS) == {"8b", "70b", "debugmodel"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('[model]\nname = "qwen3"', "model.name: qwen3: only llama3 is trained here"),
        ('[model]\nflavor = "405B"', "model.flavor: 405B: there is no such variant here; give model.flavor=8B, and"),
        (
            '[model]\nflavor = "7B"',
            "model.flavor: 7B: not a flavor that is known here: did you mean 70b? There are 8B, ",
        ),
        ('[model]\nconverters = ["mx"]', "model.converters: [mx]: mx: float8 is the only converter here, as --float8"),
        (
            '[model]\nconverters = ["float8"]\n[quantize.linear.float8]\nrecipe_name = "rowwise_with_gw_hp"',
            "quantize.linear.float8.recipe_name: rowwise_with_gw_hp: one of tensorwise, rowwise is needed",
        ),
        ("[quantize.linear.float8]\nemulate = true", "quantize.linear.float8.emulate: true: float8 is not emulated"),
        (
            '[optimizer]\nname = "Lion"',
            "optimizer.name: Lion: one of AdamW, Adam is needed, or another one here: give --opt",
        ),
        ('[lr_scheduler]\ndecay_type = "exp"', "lr_scheduler.decay_type: exp: one of linear, cosine, sqrt is needed"),
        (
            "[lr_scheduler]\ntotal_steps = 5\n[training]\nsteps = 10",
            "training.steps: 10: the schedule ends before, lr_scheduler.total_steps=5: give it the same",
        ),
        (
            '[training]\ndtype = "bfloat16"',
            "training.dtype: bfloat16: weights, gradients and optimizer state are",
        ),
        (
            '[training]\nmixed_precision_param = "int8"',
            "training.mixed_precision_param: int8: one of bfloat16, float32",
        ),
        ('[training]\nmax_norm = "much"', "training.max_norm: much: a number is needed"),
        (
            "[parallelism]\ndata_parallel_replicate_degree = 2",
            "parallelism.data_parallel_replicate_degree: 2: the GPUs of a sharding group are needed: write "
            "parallelism.data_parallel_shard_degree = the number of GPUs / 2",
        ),
        (
            '[parallelism]\nfsdp_reshard_after_forward = "sometimes"',
            "parallelism.fsdp_reshard_after_forward: sometimes: one of default, always, never is needed",
        ),
        (
            "[parallelism]\ntensor_parallel_degree = 8",
            "parallelism.tensor_parallel_degree: 8: there is no tensor parallelism here: write 1; weights are sharded",
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 2",
            "parallelism.pipeline_parallel_degree: 2: there is no pipeline",
        ),
        ("[parallelism]\ncontext_parallel_degree = 2", "parallelism.context_parallel_degree: 2: there is no context"),
        ("[parallelism]\nexpert_parallel_degree = 2", "parallelism.expert_parallel_degree: 2: there is no expert"),
        ('[activation_checkpoint]\nmode = "some"', "activation_checkpoint.mode: some: one of none, full, selective is"),
        (
            "[checkpoint]\nenable = true\nload_only = true",
            "checkpoint.load_only: true: a run is always saved at its end",
        ),
        (
            '[checkpoint]\nenable = true\nexclude_from_loading = ["dataloader"]',
            "checkpoint.exclude_from_loading: [dataloader]: optimizer alone, or optimizer,lr_scheduler,dataloader (a",
        ),
        ('[comm]\nmode = "fake_backend"', "comm.mode: fake_backend: processes talk for real: write default"),
        ("[fault_tolerance]\nenable = true", "fault_tolerance.enable: true: torchft is not here; MAX_RESTARTS of"),
        (
            '[experimental]\ncustom_import = "my.module"',
            "experimental.custom_import: my.module: modules are named where",
        ),
        (
            '[job]\ncustom_config_module = "a"',
            "job.custom_config_module: a: settings cannot be added; docs/extending.md",
        ),
    ],
)
def test_what_cannot_be_translated_is_named(content: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        translated(content)
    assert len(error.value.problems) == 1
    assert re.sub(r"a\.toml:\d+: ", "", error.value.problems[0]).startswith(problem)


def test_a_checkpoint_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").touch()
    with pytest.raises(
        ConfigError, match=r"a checkpoint of torchtitan's is not read: make a Hugging Face folder of it"
    ):
        translated(f'[checkpoint]\nenable = true\ninitial_load_path = "{tmp_path}"')


def test_token_files_and_tokenizers_that_are_there_are_taken(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.arrow").touch()
    (tmp_path / "tokenizer.json").touch()
    assert beyond_defaults(
        f'[model]\nhf_assets_path = "{tmp_path}"\n[training]\ndataset_path = "{tmp_path}"\n'
        f'[validation]\nenable = true\ndataset_path = "{tmp_path}/mine"'
    ) == {"tokenizer_path": str(tmp_path), "data_path": str(tmp_path), "eval_datasets": f"{tmp_path}/mine"}
