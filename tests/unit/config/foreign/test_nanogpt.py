"""nanoGPT's files of settings, and a descendant's that count in tokens: each key, and what whole files start."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT

from pretraining.config.command_line import load_train_config
from pretraining.config.commands import TranslateConfig
from pretraining.config.foreign import nanogpt
from pretraining.config.foreign.kinds import translate
from pretraining.config.foreign.translation import FILLED_IN, Note, Source, Translation
from pretraining.config.settings_files import parse_tree
from pretraining.data.evaluation_sets import find_evaluation_folders
from pretraining.data.storage.dataset_files import list_datasets
from pretraining.errors import ConfigError
from pretraining.optim.horizon import resolve_horizon
from pretraining.optim.schedules import LearningRate
from pretraining.progress import Duration, TokenSchedule
from pretraining.tools.translate import translate as translate_command

GPT2 = """
# config for training GPT-2 (124M) on 1 node of 8 GPUs
wandb_log = True
wandb_project = 'owt'
wandb_run_name='gpt2-124M'

# 12 batch size * 1024 block size * 5 gradaccum * 8 GPUs = 491,520
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8

max_iters = 600000
lr_decay_iters = 600000

eval_interval = 1000
eval_iters = 200
log_interval = 10

weight_decay = 1e-1
"""
BABY = """
import time

out_dir = 'out-baby'
eval_interval = 250
eval_iters = 200
always_save_checkpoint = False
dataset = 'books'
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256
n_layer = 6
n_head = 6
n_kv_head = 2
n_embd = 384
dropout = 0.0
bias = False
vocab_size = 50304
seed = 7
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = max_iters
min_lr = learning_rate / 10
beta1 = 0.8
beta2 = 0.99
grad_clip = 0.5
warmup_iters = 100
decay_lr = True
init_from = 'scratch'
eval_only = False
device = 'cuda:1'
dtype = 'float16'
backend = 'nccl'
compile = False
"""
TOKENS = """
out_dir = 'out_c4'
init_from = 'scratch'              # 'scratch' or 'resume'
resume_ckpt_fname = ""
log_interval_tokens = 100_000
val_interval_tokens = 250_000
checkpoint_interval_tokens = 500_000
eval_iters = 152
wandb_log = True
wandb_project = 'large'
wandb_run_name = f"{out_dir}"
train_data_file = 'data/c4/train_shuffled_1024.bin'
val_data_file = 'data/c4/val.bin'
block_size = 1024
total_tokens = None
checkpoint_token_pos = 0
branch_seed = -1
branch_window_size_tokens = 100000000
batch_size = 32
gradient_accumulation_steps = 2
max_tokens = 2_000_000
optimizer_type = "muon"
learning_rate = 1e-3
weight_decay = 0.01
lr_muon_adam = 3e-4
wd_muon_adam = 0.1
beta1 = 0.9
beta2 = 0.95
grad_clip = None
use_scheduler = True
warmup_tokens = 500_000
stable_tokens = 1_000_000
min_lr_factor = 0.2
ignore_fused = True
compile_model = True
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def translated(content: str, flags: Mapping[str, str] | None = None, accept_llama: bool = False) -> Translation:
    source = Source("a.py", None, content, parse_tree(content, "a.py", ".py"), flags or {})
    return translate(source, ".py", accept_llama=accept_llama)


def notes_of(translation: Translation) -> dict[str, Note]:
    return {note.key: note for note in translation.notes}


def problem_of(content: str) -> str:
    with pytest.raises(ConfigError) as error:
        translated(content)
    return str(error.value)


def test_every_key_of_nanogpt_is_translated() -> None:
    done = translated(BABY)
    assert done.settings == {
        "ckpt_save_path": "out-baby",
        "eval_interval": "250",
        "checkpoint_interval": "250",
        "keep_last": "1",
        "eval_batches": "200",
        "batch_size": "64",
        "global_batch_size": "64",
        "seq_length": "256",
        "max_position_embeddings": "256",
        "num_hidden_layers": "6",
        "num_attention_heads": "6",
        "num_key_value_heads": "2",
        "hidden_size": "384",
        "intermediate_size": "1024",
        "tie_word_embeddings": "true",
        "vocab_size": "50304",
        "seed": "7",
        "learning_rate": "0.001",
        "num_steps": "5000",
        "schedule": "cosine",
        "warmup_steps": "100",
        "min_lr_ratio": "0.1",
        "adam_beta1": "0.8",
        "adam_beta2": "0.99",
        "grad_clip_thresh": "0.5",
        "init_from": "scratch",
        "eval_only": "false",
        "device": "cuda",
        "mixed_precision": "true",
        "mp_dtype": "float16",
        "use_torch_compile": "false",
        "data_path": "data/books",
        "datasets": "train.bin",
        "eval_datasets": "data/books/val.bin",
        "file_type": "bin",
        "token_dtype": "uint16",
        "sep_token": "50256",
    }
    assert not [note.key for note in done.notes if "not known" in note.remark or FILLED_IN in note.remark]


def test_every_key_of_a_descendant_that_counts_tokens_is_translated() -> None:
    done = translated(TOKENS)
    model = {"hidden_size": "480", "intermediate_size": "1280", "num_hidden_layers": "8", "num_attention_heads": "12"}
    assert done.settings == {
        **model,
        "tie_word_embeddings": "true",
        "vocab_size": "50304",
        "ckpt_save_path": "out_c4",
        "init_from": "scratch",
        "report_interval": "100000tok",
        "eval_interval": "250000tok",
        "checkpoint_interval": "500000tok",
        "ckpt_name": "tokens",
        "eval_batches": "76",
        "tracker": "wandb",
        "tracker_project_name": "large",
        "tracker_run_name": "out_c4",
        "data_path": "data/c4",
        "datasets": "train_shuffled_1024.bin",
        "eval_datasets": "data/c4/val.bin",
        "file_type": "bin",
        "token_dtype": "uint16",
        "sep_token": "50256",
        "seq_length": "1024",
        "max_position_embeddings": "1024",
        "batch_size": "32",
        "global_batch_size": "64",
        "num_steps": "2000000tok",
        "optimizer": "muon",
        "learning_rate": "0.001",
        "weight_decay": "0.01",
        "muon_adam_learning_rate": "0.0003",
        "muon_adam_weight_decay": "0.1",
        "adam_beta1": "0.9",
        "adam_beta2": "0.95",
        "grad_clip_thresh": "0",
        "schedule": "wsd",
        "decay_shape": "cosine",
        "warmup_steps": "500000tok",
        "stable_steps": "1000000tok",
        "min_lr_ratio": "0.2",
        "use_torch_compile": "true",
    }
    notes = notes_of(done)
    assert not [note.key for note in done.notes if "not known" in note.remark]
    assert notes["n_embd"].remark.startswith(FILLED_IN)
    assert "4.4 times those of torch.optim.Muon" in notes["learning_rate"].remark
    assert notes["total_tokens"].remark == "not given"


@pytest.mark.parametrize("content", [GPT2, BABY, TOKENS], ids=["gpt2", "baby", "tokens"])
def test_whole_files_are_recipes_as_they_stand(folder: Path, content: str) -> None:
    (folder / "mine.py").write_text(content)
    for config in (load_train_config(["mine.py"]), load_train_config([], {"recipe": "mine.py"})):
        assert config.data.token_dtype == "uint16"
        assert config.model.tie_word_embeddings


def test_train_pys_own_values_hold_where_a_file_is_silent() -> None:
    done = translated(GPT2)
    expected = {
        "hidden_size": "768",
        "num_hidden_layers": "12",
        "num_attention_heads": "12",
        "intermediate_size": "2048",
        "vocab_size": "50304",
        "ckpt_save_path": "out",
        "learning_rate": "6e-4",
        "warmup_steps": "2000",
        "min_lr_ratio": "0.1",
        "global_batch_size": "480",
        "eval_batches": "5",
        "datasets": "train.bin",
        "data_path": "data/openwebtext",
    }
    assert expected.items() <= done.settings.items()
    assert notes_of(done)["warmup_iters"] == Note("warmup_iters", "2000", {"warmup_steps": "2000"}, FILLED_IN, None)


def test_a_descendant_without_a_schedule_has_none() -> None:
    done = translated("max_tokens = 10**9\nlog_interval_tokens = 10**6\n")
    assert (done.settings["schedule"], done.settings["warmup_steps"]) == ("constant", "0")
    done = translated("max_tokens = 10**9\nuse_scheduler = False\nwarmup_tokens = 10**6\nstable_tokens = 0\n")
    assert (done.settings["schedule"], done.settings["warmup_steps"]) == ("constant", "0")
    assert notes_of(done)["warmup_tokens"].remark == "use_scheduler is False"


def test_without_a_stable_phase_a_cosine_follows_the_warm_up() -> None:
    done = translated("max_tokens = 10**9\nwarmup_tokens = 10**6\nstable_tokens = 0\n")
    assert done.settings["schedule"] == "cosine"
    assert not {"stable_steps", "decay_shape"} & done.settings.keys()


def test_evaluations_follow_checkpoints_where_nothing_else_is_said() -> None:
    done = translated("checkpoint_interval_tokens = 5_000\n")
    assert done.settings["checkpoint_interval"] == done.settings["eval_interval"] == "5000tok"
    done = translated("checkpoint_interval_tokens = 5_000\neval_interval = 7\nlog_interval = 3\n")
    assert (done.settings["eval_interval"], done.settings["report_interval"]) == ("7", "3")


@pytest.mark.parametrize("content", [GPT2, BABY, TOKENS], ids=["gpt2", "baby", "tokens"])
def test_the_recipe_that_is_made_of_a_file_starts_the_same_run(folder: Path, content: str) -> None:
    (folder / "theirs.py").write_text(content)
    translate_command(TranslateConfig("theirs.py", output_path="mine.yaml"))
    assert load_train_config(["mine.yaml"]) == load_train_config(["theirs.py"])


def rate_of_nanogpt(step: int, warmup: int, end: int, peak: float, smallest: float) -> float:
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / (end - warmup))
    return smallest + 0.5 * (1 + math.cos(math.pi * done)) * (peak - smallest)


@pytest.mark.parametrize(
    ("steps", "warmup", "end"), [(5000, 100, 5000), (5000, 100, 9000), (5000, 0, 3000), (40, 6, 12)]
)
def test_the_learning_rate_is_nanogpts_wherever_its_cosine_ends(
    folder: Path, steps: int, warmup: int, end: int
) -> None:
    (folder / "mine.py").write_text(
        f"max_iters = {steps}\nwarmup_iters = {warmup}\nlr_decay_iters = {end}\nlearning_rate = 1e-3\nmin_lr = 1e-4\n"
    )
    schedule = load_train_config(["mine.py"]).schedule
    assert schedule.schedule == ("cosine" if steps == end else "piecewise_linear")
    horizon = resolve_horizon(schedule, Duration(steps, "steps"), TokenSchedule.steady(1), None)
    rate = LearningRate(schedule.schedule, horizon)
    for step in range(steps):
        assert rate.at(step, 1e-3) == pytest.approx(rate_of_nanogpt(step, warmup, end, 1e-3, 1e-4), abs=2.5e-6)


def test_a_learning_rate_that_does_not_decay_is_constant() -> None:
    done = translated("max_iters = 10\ndecay_lr = False\nwarmup_iters = 5\nlr_decay_iters = 7\nmin_lr = 1e-5\n")
    assert (done.settings["schedule"], done.settings["warmup_steps"]) == ("constant", "0")
    assert not {"min_lr_ratio", "schedule_points"} & done.settings.keys()
    assert {notes_of(done)[key].remark for key in ("warmup_iters", "lr_decay_iters", "min_lr")} == {"decay_lr is False"}


def write_tokens(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.array([5, 6, 50256] * 10, dtype=np.uint16).tofile(path)


@pytest.mark.parametrize(("content", "file"), [(GPT2, "train.bin"), (TOKENS, "train_shuffled_1024.bin")])
def test_its_folder_of_token_files_is_read_as_it_is_and_a_folder_made_for_one_is_kept(
    folder: Path, content: str, file: str
) -> None:
    for name in ("openwebtext/train", "openwebtext/val", "c4/train_shuffled_1024", "c4/val"):
        write_tokens(folder / f"data/{name}.bin")
    (folder / "mine.py").write_text(content)

    def sets() -> tuple[str, tuple[str, ...], str, tuple[str, ...]]:
        config = load_train_config(["mine.py"])
        (training,) = list_datasets(config.data)
        (evaluation,) = find_evaluation_folders(config.evaluation.eval_datasets, config.data, [training])
        return training.name, training.paths, evaluation.name, evaluation.files.paths

    assert sets() == (file, (file,), "val.bin", ("val.bin",))
    for path in folder.glob("data/*/*.bin"):  # as runs of earlier versions have them
        path.with_suffix("").mkdir()
        (path.with_suffix("") / path.name).symlink_to(path)
    assert sets() == (file[:-4], (file,), "val", ("val.bin",))


def test_a_token_file_alone_in_its_folder_is_a_dataset_already(folder: Path) -> None:
    write_tokens(folder / "data/openwebtext/train.bin")
    done = translated(GPT2)
    assert (done.settings["data_path"], done.settings["datasets"]) == ("data", "openwebtext")
    assert "eval_datasets" not in done.settings
    write_tokens(folder / "data/c4/train/here.bin")
    content = "max_tokens = 1\ntrain_data_file = 'data/c4/train/here.bin'\n"
    assert (translated(content).settings["data_path"], translated(content).settings["datasets"]) == ("data/c4", "train")


@pytest.mark.parametrize("flags", [{"data_path": "mine"}, {"use_dummy_dataset": "true"}])
def test_other_data_of_the_command_line_replaces_all_of_the_files(flags: dict[str, str]) -> None:
    for content, keys in ((BABY, ["dataset"]), (TOKENS, ["train_data_file", "val_data_file"])):
        done = translated(content, flags)
        assert not {"data_path", "datasets", "eval_datasets", "sep_token", "token_dtype"} & done.settings.keys()
        assert all(notes_of(done)[key].remark.startswith("the command line has other data") for key in keys)
    assert ("dataset" in notes_of(translated(GPT2, flags))) == ("data_path" in flags)


def test_a_smaller_vocabulary_has_no_end_of_text_of_gpt2() -> None:
    assert "sep_token" not in translated("n_embd = 64\nvocab_size = 1000\n").settings
    assert "sep_token" not in translated("n_embd = 64\n", {"vocab_size": "1000"}).settings


def test_characters_are_refused_with_the_way_to_token_files(folder: Path) -> None:
    assert problem_of("dataset = 'shakespeare_char'\nn_embd = 64\n").startswith(
        "a.py:1: dataset: shakespeare_char: its tokens are characters"
    )
    (folder / "data/own").mkdir(parents=True)
    (folder / "data/own/meta.pkl").write_bytes(b"never opened")
    assert "pretrain prepare --input_path=data/own/input.txt" in problem_of("dataset = 'own'\nn_embd = 64\n")
    done = translated("dataset = 'own'\nn_embd = 64\n", {"data_path": "data/prepared"})
    assert "vocab_size" not in done.settings


def test_names_of_nanogpt_may_stand_on_the_command_line(folder: Path) -> None:
    (folder / "mine.py").write_text(BABY)
    flags = {"n_layer": "3", "max_iters": "50", "lr_decay_iters": "50", "warmup_iters": "5", "learning_rate": "1e-2"}
    config = load_train_config(["mine.py"], flags)
    assert config.model.num_hidden_layers == 3
    assert (config.run.num_steps, config.schedule.warmup_steps) == (Duration(50, "steps"), Duration(5, "steps"))
    assert (config.optimizer.learning_rate, config.schedule.min_lr_ratio) == (1e-2, 0.01)
    with pytest.raises(ConfigError, match=r"^n_layer=few: a whole number"):
        load_train_config(["mine.py"], {"n_layer": "few"})
    with pytest.raises(ConfigError, match=r"^warmup_iters=long: a number is needed"):
        load_train_config(["mine.py"], {"warmup_iters": "long", "max_iters": "20"})


def test_the_command_line_may_say_model_batch_and_start(folder: Path) -> None:
    done = translated(GPT2, {"model_variant": "tiny"})
    assert "hidden_size" not in done.settings and done.settings["vocab_size"] == "50304"
    done = translated(GPT2 + "init_from = 'gpt2'\n", {"ckpt_load_path": "llama"})
    assert not {"hidden_size", "vocab_size", "sep_token", "init_from"} & done.settings.keys()
    assert "global_batch_size" not in translated(GPT2, {"grad_accum_steps": "2"}).settings
    (folder / "mine.py").write_text(GPT2)
    config = load_train_config(["mine.py"], {"grad_accum_steps": "2", "tracker": "none"})
    assert (config.batch.grad_accum_steps, config.batch.global_batch_size) == (2, None)


def test_the_batch_is_that_of_nanogpt_with_its_flags_beside_the_file(folder: Path) -> None:
    file = "n_layer = 2\nbatch_size = 2\ngradient_accumulation_steps = 2\n"
    (folder / "mine.py").write_text(file)

    def batch(**flags: str) -> tuple[int | None, int | None]:
        config = load_train_config(["mine.py"], {"use_dummy_dataset": "true", **flags})
        return config.batch.batch_size, config.batch.global_batch_size

    assert batch() == (2, 4)
    assert batch(batch_size="4", gradient_accumulation_steps="2") == (4, 8)
    assert batch(batch_size="4") == batch(**{"batch-size": "4"}) == (4, 8)
    assert batch(**{"batch.batch_size": "4"}) == (4, 8)
    assert translated(GPT2, {"batch_size": "8"}).settings["global_batch_size"] == "320"
    with pytest.raises(ConfigError, match="--batch_size=few: a whole number from 1 on is needed"):
        translated(file, {"batch_size": "few"})


def test_it_is_saved_as_often_as_the_command_line_evaluates(folder: Path) -> None:
    (folder / "mine.py").write_text(GPT2)
    config = load_train_config(["mine.py"], {"eval_interval": "50", "tracker": "none"})
    assert config.evaluation.eval_interval == config.checkpoint.checkpoint_interval == Duration(50, "steps")


@pytest.mark.parametrize("file", [GPT2, GPT2 + "dataset = 'books'\n"])
def test_other_data_is_told_what_the_files_data_would_have_set(file: str) -> None:
    def remark(**flags: str) -> str:
        notes = translated(file, {"data_path": "mine", **flags}).notes
        return next(note.remark for note in notes if note.key == "dataset")

    assert "--eval_datasets" in remark() and "--sep_token" in remark()
    assert "--sep_token" not in remark(sep_token="2") and "--eval_datasets" in remark(sep_token="2")
    assert remark(sep_token="2", eval_datasets="held_out") == "the command line has other data"


def test_wandb_is_asked_for_by_its_switch_or_by_a_descendants_names() -> None:
    done = translated("n_embd = 64\nwandb_log = False\nwandb_project = 'a'\nwandb_run_name = 'b'\n")
    assert not [name for name in done.settings if name.startswith("tracker")]
    assert translated("max_tokens = 1\nwandb_run_name = 'b'\n").settings["tracker"] == "wandb"
    done = translated(GPT2, {"tracker": "tensorboard"})
    assert not [name for name in done.settings if name.startswith("tracker")]
    done = translated(GPT2, {"tracker": "wandb,jsonl"})
    assert done.settings["tracker_run_name"] == "gpt2-124M"


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("dtype = 'float32'", {"mixed_precision": "false"}),
        ("dtype = 'bfloat16'", {"mixed_precision": "true", "mp_dtype": "bfloat16"}),
        ("dtype = 'bfloat16'; device = 'cpu'", {"mixed_precision": "false", "device": "cpu"}),
        ("backend = 'gloo'; ignore_fused = True", {}),
        ("init_from = 'resume'", {"init_from": "resume"}),
        ("resume_ckpt_fname = 'a.pt'", {}),
        ("init_from = 'resume'; resume_ckpt_fname = 'tokens(3.07e3)_tloss(10.910)_vloss(10.924)_ckpt.pt'",
         {"init_from": "resume", "resume_from_checkpoint": "tokens(3.07e3)_tloss(10.910)_vloss(10.924)_ckpt"}),
        ("init_from = 'resume'; resume_ckpt_fname = '../b/a.pt'",
         {"init_from": "resume", "resume_from_checkpoint": "out/../b/a"}),
        ("log_interval = 10", {"report_interval": "10"}),
        ("bias = False; dropout = 0.0", {}),
    ],
)  # fmt: skip
def test_single_lines_become_settings(line: str, settings: dict[str, str]) -> None:
    usual = translated("n_embd = 64\n").settings
    done = translated(f"n_embd = 64\n{line}\n").settings
    assert {name: value for name, value in done.items() if usual.get(name) != value} == settings


def test_muons_second_optimizer_is_left_out_where_adamw_is_the_only_one() -> None:
    done = translated("optimizer_type = 'adamw'\nlr_muon_adam = 3e-4\nwd_muon_adam = 0.1\n")
    assert done.settings["optimizer"] == "adamw"
    assert not [name for name in done.settings if name.startswith("muon")]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("init_from = 'gpt2-xl'\nn_embd = 64", "a.py:1: init_from: gpt2-xl: GPT-2 is no Llama"),
        ("n_embd = 64\ninit_from = 'best'", "a.py:2: init_from: best: one of scratch, resume is needed"),
        ("n_embd = 64\ndropout = 0.2", "a.py:2: dropout: 0.2: a Llama is trained without dropout. --accept_llama"),
        ("n_embd = 64\nbias = True", "a.py:2: bias: true: a Llama has no biases. --accept_llama"),
        ("n_embd = 'wide'", "a.py:1: n_embd: wide: a number is needed"),
        ("n_embd = 0.5", "a.py:1: n_embd: 0.5: a whole number from 1 on is needed"),
        ("device = 'mps'\nn_embd = 64", "a.py:1: device: mps: one of cuda, cpu is needed"),
        ("dtype = 'int8'\nn_embd = 64", "a.py:1: dtype: int8: one of bfloat16, float16, float32 is needed"),
        ("optimizer_type = 'lion'", "a.py:1: optimizer_type: lion: one of adamw, muon is needed"),
        ("branch_seed = 1\nmax_tokens = 5\neval_iters = 1", "a.py:1: branch_seed: 1: a branch is a new run"),
        (
            "max_iters = 10\nlr_decay_iters = 5",
            "a.py:2: lr_decay_iters: 5: the learning rate comes down after warmup_i",
        ),
        ("max_iters = 10\nmin_lr = 1", "a.py:2: min_lr: 1: it is more than learning_rate=6e-4"),
        ("decay_lr = 'often'\nn_embd = 64", "a.py:1: decay_lr: often: true or false is needed"),
    ],
)
def test_what_cannot_be_translated_is_named(content: str, problem: str) -> None:
    assert problem_of(content).startswith(problem)


def test_a_checkpoint_of_nanogpt_itself_is_refused(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out/ckpt.pt").write_bytes(b"")
    content = "n_embd = 64\ninit_from = 'resume'\nresume_ckpt_fname = 'ckpt.pt'\n"
    assert "out/ckpt.pt holds a GPT, which is no Llama and not read" in problem_of(content)


def test_dropout_and_biases_are_left_out_where_a_llama_is_accepted() -> None:
    done = translated("n_embd = 64\ndropout = 0.2\nbias = True\n", accept_llama=True)
    assert "left out, as accept_llama says" in notes_of(done)["dropout"].remark


def test_a_value_that_no_setting_takes_is_named_at_its_line(folder: Path) -> None:
    (folder / "mine.py").write_text("n_embd = 64\nmax_iters = -5\nlr_decay_iters = 4000\n")
    with pytest.raises(ConfigError, match=r"mine.py:2: max_iters: -5: "):
        load_train_config(["mine.py"])


def test_the_feed_forward_has_about_the_parameters_of_gpt2s() -> None:
    for width in (384, 480, 768, 1024, 1600):
        settings = translated(f"n_embd = {width}\n").settings
        assert 3 * int(settings["intermediate_size"]) * width == pytest.approx(8 * width**2, rel=0.02)


def test_signs_are_keys_that_the_reader_knows() -> None:
    assert set(nanogpt.SIGNS) <= nanogpt.TABLE.keys() | nanogpt.TABLE_OF_STEPS.keys() | nanogpt.TABLE_OF_TOKENS.keys()


def test_the_page_names_every_key() -> None:
    page = (ROOT / "docs" / "coming-from-nanogpt.md").read_text(encoding="utf-8")
    keys = nanogpt.TABLE.keys() | nanogpt.TABLE_OF_STEPS.keys() | nanogpt.TABLE_OF_TOKENS.keys()
    assert [key for key in sorted(keys) if not re.search(rf"\b{key}\b", page)] == []
