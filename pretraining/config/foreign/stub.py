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
    for section in _ROPE_SECTIONS:
        _read_rope(translating, section)


def _read_dtype(translating: Translating) -> None:
    dtype = translating.text("dist.dtype")
    if dtype in ("bfloat16", "float16"):
        translating.set("dist.dtype", mixed_precision="true", mp_dtype=dtype)
    elif dtype == "float32":
        translating.set("dist.dtype", mixed_precision="false")
    elif dtype is not None:
        translating.refuse("dist.dtype", "one of bfloat16, float16, float32 is needed", "mp_dtype", "mixed_precision")


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


def _read_head(translating: Translating, key: str) -> None:
    """Takes the width of heads where it is the one that a Llama has, hidden_size / num_attention_heads."""
    width, heads = translating.number(MODEL + "hidden_size"), translating.number(MODEL + "num_attention_heads")
    if width is not None and heads and translating.number(key) == width / heads:
        translating.set(key, "hidden_size / num_attention_heads, as here")
    else:
        translating.refuse_unless_accepted(key, "heads are hidden_size / num_attention_heads wide here")


def _read_window(translating: Translating, key: str) -> None:
    if translating.is_true(MODEL + "use_sliding_window") is False:
        translating.leave_out(key, "use_sliding_window is false")
    else:
        translating.refuse_unless_accepted(key, "attention reaches back to the beginning, without a window")


_ROPE_SECTIONS = (MODEL + "rope_scaling", MODEL + "rope_parameters")
"""The mapping about rotary positions, and what transformers 5 calls it."""
_LLAMA3_RULE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""In the order of the setting `rope_scaling`."""


def _read_rope(translating: Translating, section: str) -> None:
    """Translates the scaling of rotary frequencies: Llama 3.1's rule, or none."""
    if not translating.has(section):
        return
    translating.apply({f"{section}.rope_theta": becomes("rope_theta")})
    named = [key for key in (f"{section}.rope_type", f"{section}.type") if key in translating]
    kind = translating.text(named[0]) if named else None
    rule = [f"{section}.{name}" for name in _LLAMA3_RULE]
    missing = [name for name, key in zip(_LLAMA3_RULE, rule, strict=True) if key not in translating]
    others = [key for key in translating.values if key == section or key.startswith(f"{section}.")]
    others = [key for key in others if key in translating and not translating.is_settled(key)]
    if kind == "llama3" and missing:
        translating.refuse(named[0], f"{' and '.join(missing)} must stand beside it")
    elif kind == "llama3":
        translating.set(named[0], rope_scaling=",".join(translating.text(key) or "" for key in rule))
    elif kind == "default":
        translating.set(named[0], "no scaling, as here")
    elif others:
        translating.refuse_unless_accepted(
            (named or others)[0], "rotary frequencies are scaled as Llama 3.1 does it (rope_type llama3), or not at all"
        )
    what = "in rope_scaling" if kind == "llama3" else "of the scaling that is not here"
    for key in others:
        if not translating.is_settled(key):
            translating.leave_out(key, what if key in rule or kind != "llama3" else "the llama3 rule does not read it")


_NORMS_OF_QUERIES = ("qk_norm", "use_qk_norm", "qk_layernorm")
_DTYPE = "master weights are float32; dist.dtype says what is computed in"
_NO_BIAS = "a Llama has no biases"
_OF_GENERATION = "of generation; nothing is cached while training"
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
    **{MODEL + name: only("false", reason=_NO_BIAS) for name in ("attention_bias", "mlp_bias", "bias", "use_bias")},
    MODEL + "head_dim": _read_head,
    MODEL + "sliding_window": _read_window,
    MODEL + "use_sliding_window": only("false", reason="attention reaches back to the beginning, without a window"),
    MODEL + "partial_rotary_factor": only("1", reason="a Llama turns all of a head by its position"),
    **{
        MODEL + name: only("0", reason="a Llama has no experts")
        for name in ("num_local_experts", "num_experts", "n_routed_experts")
    },
    **{MODEL + name: only("false", reason="a Llama does not normalise queries and keys") for name in _NORMS_OF_QUERIES},
    MODEL + "attention_dropout": only("0", reason="a Llama is trained without dropout"),
    MODEL + "pretraining_tp": only("1", reason="matrices are whole here"),
    **{MODEL + name: left_out(_DTYPE) for name in ("torch_dtype", "dtype")},
    MODEL + "initializer_range": left_out("initial weights are those of docs/model.md"),
    MODEL + "use_cache": left_out(_OF_GENERATION),
    **{MODEL + name: left_out(_OF_GENERATION) for name in ("bos_token_id", "pad_token_id", "generation_config")},
    MODEL + "eos_token_id": left_out("of generation; --sep_token says which token ends documents in the data"),
    **{
        MODEL + name: left_out("which program wrote the file, and where")
        for name in ("transformers_version", "_name_or_path", "name_or_path")
    },
    **{
        MODEL + name: left_out("which kernel computes attention: the result is the same")
        for name in ("attn_implementation", "_attn_implementation")
    },
    "optim.lr": becomes("learning_rate"),
    "optim.weight_decay": becomes("weight_decay"),
    "optim.betas": betas,
    "optim.eps": becomes("adam_epsilon"),
    "lr_scheduler.total_iterations": becomes("num_steps"),
    "lr_scheduler.warmup_iterations": becomes("warmup_steps"),
    "checkpoint.state_dict_type": one_of("ckpt_format", {"full": "full", "sharded": "sharded"}),
    "checkpoint.chkpt_saving_iterations": becomes("checkpoint_interval"),
}
