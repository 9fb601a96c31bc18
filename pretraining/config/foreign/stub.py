"""The YAML file of a training stub: sections dist, dataset, model, optim, lr_scheduler and checkpoint.

Its model is a Hugging Face config; its data are paths, which the stub itself never opens: it trains on random tensors.
"""

from __future__ import annotations

from pathlib import Path

from pretraining.config.foreign.translation import Rule, Translating, becomes, betas, left_out, one_of, only
from pretraining.config.plugins import TOKEN_SUFFIXES
from pretraining.files import entries_of, is_folder

SIGNS = (
    *("dist.sharding_stage", "dist.cpu_only", "dist.backend", "dist.dtype", "model.hf_config"),
    *("lr_scheduler.total_iterations", "lr_scheduler.warmup_iterations", "checkpoint.chkpt_saving_iterations"),
)
MODEL = "model.hf_config."
_DIMENSIONS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("vocab_size", "rope_theta", "rms_norm_eps", "tie_word_embeddings"),
)
"""Settings here under the same name."""


def read(translating: Translating) -> None:
    """Translates a file of the stub."""
    _read_dtype(translating)
    _read_data(translating)
    _read_place(translating)
    _read_context(translating)
    translating.apply(TABLE)


def _read_dtype(translating: Translating) -> None:
    dtype = translating.text("dist.dtype")
    if dtype in ("bfloat16", "float16"):
        translating.set("dist.dtype", mixed_precision="true", mp_dtype=dtype)
    elif dtype == "float32":
        translating.set("dist.dtype", mixed_precision="false")
    elif dtype is not None:
        translating.refuse("dist.dtype", "one of bfloat16, float16, float32 is needed")


def _read_data(translating: Translating) -> None:
    """Takes the folders that are there; the stub's placeholders become made-up tokens."""
    key = "dataset.path_train"
    text = translating.text(key)
    if text is not None and is_folder(Path(text)):
        settings = data_settings(Path(text))
        translating.set(key, **settings)
    elif text is not None:
        translating.set(key, "there is no such folder: random tokens, as the stub itself has", use_dummy_dataset="true")
    key = "dataset.path_eval"
    text = translating.text(key)
    if text is not None and is_folder(Path(text)):
        translating.set(key, eval_datasets=text)
    elif text is not None:
        translating.leave_out(key, "there is no such folder: nothing is evaluated")


def data_settings(folder: Path) -> dict[str, str]:
    """Returns the settings for a folder that is a dataset, or that holds datasets."""
    if any(path.suffix in TOKEN_SUFFIXES for path in entries_of(folder)):
        return {"data_path": str(folder.parent), "datasets": folder.name}
    return {"data_path": str(folder)}


def _read_place(translating: Translating) -> None:
    """Makes the stub's `<directory>/<prefix>.<timestamp>`."""
    directory, prefix = translating.text("checkpoint.directory"), translating.text("checkpoint.prefix")
    if prefix is not None:
        translating.set("checkpoint.prefix", ckpt_save_path=f"{directory or '.'}/{prefix}.{{timestamp}}")
        if directory is not None:
            translating.set("checkpoint.directory", "in front of the prefix")
    elif directory is not None:
        translating.set("checkpoint.directory", ckpt_save_path=directory)


def _read_context(translating: Translating) -> None:
    key = MODEL + "max_position_embeddings"
    context = translating.text(key)
    if context is not None:
        translating.set(key, seq_length=context, max_position_embeddings=context)


TABLE: dict[str, Rule] = {
    "dist.cpu_only": one_of("device", {"true": "cpu", "false": "auto", "yes": "cpu", "no": "auto"}),
    "dist.backend": becomes("backend"),
    "dist.sharding_stage": becomes("sharding_strategy"),
    "dataset.batch_size": becomes("batch_size"),
    "dataset.num_workers": becomes("num_workers"),
    **{MODEL + name: becomes(name) for name in _DIMENSIONS},
    MODEL + "model_type": only("llama", reason="it is no Llama"),
    MODEL + "architectures": only("LlamaForCausalLM", reason="it is no Llama"),
    MODEL + "hidden_act": only("silu", "swish", reason="a Llama's activation is SiLU"),
    MODEL + "attention_bias": only("false", reason="a Llama has no biases"),
    MODEL + "mlp_bias": only("false", reason="a Llama has no biases"),
    MODEL + "attention_dropout": only("0", reason="a Llama is trained without dropout"),
    MODEL + "use_cache": left_out("of generation; nothing is cached while training"),
    MODEL + "torch_dtype": left_out("master weights are float32; dist.dtype says what is computed in"),
    "optim.lr": becomes("learning_rate"),
    "optim.weight_decay": becomes("weight_decay"),
    "optim.betas": betas,
    "optim.eps": becomes("adam_epsilon"),
    "lr_scheduler.total_iterations": becomes("num_steps"),
    "lr_scheduler.warmup_iterations": becomes("warmup_steps"),
    "checkpoint.state_dict_type": one_of("ckpt_format", {"full": "full", "sharded": "sharded"}),
    "checkpoint.chkpt_saving_iterations": becomes("checkpoint_interval"),
}
