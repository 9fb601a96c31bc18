"""The YAML of a training stub: sections dist, dataset, model, optim, lr_scheduler and checkpoint."""

from __future__ import annotations

from pretraining.tools.translate.translation import (
    Rule,
    Translating,
    choice,
    context,
    dtype,
    folder_of_data,
    joint,
    left,
    lowest_rate,
    not_a_llama,
    only,
    pair,
    refuse_model,
    row,
)

WHAT = "one YAML of a training stub (dist, model.hf_config, …)"
NULLS: dict[str, str] = {}
SIGNS = (
    *("dist.sharding_stage", "dist.cpu_only", "dist.backend", "dist.dtype", "model.hf_config"),
    *("lr_scheduler.total_iterations", "lr_scheduler.warmup_iterations", "checkpoint.chkpt_saving_iterations"),
)
_MODEL = "model.hf_config."
_SAME_NAME = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("vocab_size", "rope_theta", "rms_norm_eps", "tie_word_embeddings"),
)
_LLAMA3_RULE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_NO_WINDOW = "attention reaches back to the beginning, without a window"


def _head(translating: Translating, key: str) -> None:
    width, heads = translating.number(f"{_MODEL}hidden_size"), translating.number(f"{_MODEL}num_attention_heads")
    if width and heads and translating.number(key) == width / heads:
        translating.set(key, "hidden_size / num_attention_heads, as here")
    else:
        refuse_model(translating, key, "heads are hidden_size / num_attention_heads wide here")


def _window(translating: Translating, key: str) -> None:
    if translating.is_on(f"{_MODEL}use_sliding_window") is False:
        translating.left(key, "use_sliding_window is false")
    else:
        refuse_model(translating, key, _NO_WINDOW)


def _rope(translating: Translating, key: str) -> None:
    """Settle a part of the scaling of rotary frequencies: Llama 3.1's rule, or none."""
    above, _, name = key.rpartition(".")
    kind = translating.word(f"{above}.rope_type") or translating.word(f"{above}.type")
    if name == "rope_theta":
        translating.set(key, rope_theta=translating.text(key))
    elif kind == "llama3" and name in ("rope_type", "type"):
        rule = [translating.text(f"{above}.{part}") for part in _LLAMA3_RULE]
        if None in rule:
            translating.refuse(key, f"{', '.join(_LLAMA3_RULE)} must stand beside it", "rope_scaling")
        else:
            translating.set(key, rope_scaling=",".join(filter(None, rule)))
    elif kind in ("llama3", "default") or (kind and name not in ("rope_type", "type")):
        translating.left(key, f"of {kind}")
    else:
        refuse_model(translating, key, "rotary frequencies are scaled as Llama 3.1 does it (llama3), or not at all")


def name_of(key: str) -> str:
    """Return the name that the rules have for a key."""
    return key


def combine(translating: Translating) -> None:
    """Make the run's folder, `<directory>/<prefix>.<timestamp>`."""
    directory, prefix = "checkpoint.directory", "checkpoint.prefix"
    if prefix in translating:
        folder = f"{translating.text(directory) or '.'}/{translating.text(prefix)}.{{timestamp}}"
        translating.set(prefix, ckpt_save_path=folder)
        if directory in translating:
            translating.left(directory, "in front of the prefix")
    elif directory in translating:
        translating.set(directory, ckpt_save_path=translating.text(directory))


_NO_BIAS = not_a_llama("false", reason="a Llama has no biases")
_NO_EXPERTS = not_a_llama("0", reason="a Llama has no experts")
_NO_DROPOUT = not_a_llama("0", reason="a Llama is trained without dropout")
_NO_QK_NORM = not_a_llama("false", reason="a Llama does not normalise queries and keys")
_OF_OTHERS = left("of generation, or about the program that wrote the file")
RULES: dict[str, Rule] = {
    "dist.cpu_only": row("device", choice(true="cpu", false="auto", yes="cpu", no="auto")),
    "dist.backend": row("backend"),
    "dist.dtype": row("mp_dtype", dtype),
    "dist.sharding_stage": row("sharding_strategy"),
    "dist.*": left("how processes start: seeds and weights do not depend on it here"),
    "dataset.batch_size": row("batch_size"),
    "dataset.num_workers": row("num_workers"),
    "dataset.path_train": row("data_path", folder_of_data, "must be there: --use_dummy_dataset=true makes tokens up"),
    "dataset.path_eval": row("eval_datasets"),
    "dataset.*": left("how samples are read ahead"),
    **{f"{_MODEL}{name}": row(name) for name in _SAME_NAME},
    f"{_MODEL}max_position_embeddings": context,
    f"{_MODEL}model_type": not_a_llama("llama", reason="it is no Llama"),
    f"{_MODEL}architectures": not_a_llama("LlamaForCausalLM", "[LlamaForCausalLM]", reason="it is no Llama"),
    f"{_MODEL}hidden_act": not_a_llama("silu", "swish", reason="a Llama's activation is SiLU"),
    **dict.fromkeys((f"{_MODEL}{name}" for name in ("attention_bias", "mlp_bias", "bias", "use_bias")), _NO_BIAS),
    f"{_MODEL}head_dim": _head,
    f"{_MODEL}sliding_window": _window,
    f"{_MODEL}use_sliding_window": not_a_llama("false", reason=_NO_WINDOW),
    f"{_MODEL}partial_rotary_factor": not_a_llama("1", reason="a Llama turns all of a head by its position"),
    **dict.fromkeys(
        (f"{_MODEL}{name}" for name in ("num_local_experts", "num_experts", "n_routed_experts")), _NO_EXPERTS
    ),
    **dict.fromkeys((f"{_MODEL}{name}" for name in ("qk_norm", "use_qk_norm", "qk_layernorm")), _NO_QK_NORM),
    **dict.fromkeys((f"{_MODEL}{name}" for name in ("attention_dropout", "hidden_dropout", "dropout")), _NO_DROPOUT),
    f"{_MODEL}pretraining_tp": not_a_llama("1", reason="matrices are whole here"),
    **dict.fromkeys((f"{_MODEL}rope_scaling.*", f"{_MODEL}rope_parameters.*"), _rope),
    **dict.fromkeys(
        (f"{_MODEL}{name}" for name in ("torch_dtype", "dtype")), left("dist.dtype says what is computed in")
    ),
    f"{_MODEL}initializer_range": left("initial weights are those of docs/model.md"),
    f"{_MODEL}eos_token_id": left("of generation; --sep_token says which token ends documents in the data"),
    **dict.fromkeys((f"{_MODEL}{name}" for name in ("use_cache", "bos_token_id", "pad_token_id")), _OF_OTHERS),
    **dict.fromkeys((f"{_MODEL}{name}" for name in ("generation_config.*", "transformers_version")), _OF_OTHERS),
    **dict.fromkeys((f"{_MODEL}{name}" for name in ("_name_or_path", "name_or_path")), _OF_OTHERS),
    **dict.fromkeys(
        (f"{_MODEL}{name}" for name in ("attn_implementation", "_attn_implementation")),
        left("which kernel computes attention: the result is the same"),
    ),
    "model.from_scratch": left("a run found in the save path is continued; --init_from=scratch refuses one"),
    "optim.lr": row("learning_rate"),
    "optim.weight_decay": row("weight_decay", remark="not of norms and embeddings"),
    "optim.betas": row("adam_beta1", pair),
    "optim.beta1": row("adam_beta1"),
    "optim.beta2": row("adam_beta2"),
    "optim.eps": row("adam_epsilon"),
    "optim.grad_clip": row("grad_clip_thresh"),
    "optim.fused": left("AdamW is always fused: the results are the same"),
    "lr_scheduler.total_iterations": row("num_steps", lambda text: {"num_steps": text, "schedule": "cosine"}),
    "lr_scheduler.warmup_iterations": row("warmup_steps"),
    "lr_scheduler.min_lr": lowest_rate("optim.lr"),
    "lr_scheduler.scheduler_update_iterations": only("1", reason="the learning rate moves with every step: write 1"),
    "loss.grad_accum_steps": row("grad_accum_steps"),
    **joint("checkpoint.directory", "checkpoint.prefix"),
    "checkpoint.state_dict_type": row("ckpt_format", choice(full="full", sharded="sharded")),
    "checkpoint.chkpt_saving_iterations": row("checkpoint_interval"),
    "checkpoint.preempt_chkpt_saving_iterations": row("preempt_interval"),
    "checkpoint.path_chkpt_prev": row("ckpt_load_path"),
    "logging.*": left("reports are in logs/ of the run's folder"),
}
_DEFAULTS = {
    **{"dist.dtype": "float32", "dataset.batch_size": "1", "optim.grad_clip": "0"},
    **{"optim.lr": "1e-3", "optim.weight_decay": "0.01", "optim.betas": "0.9,0.999", "optim.eps": "1e-8"},
    **{"lr_scheduler.warmup_iterations": "0", "lr_scheduler.min_lr": "0"},
}
"""torch.optim.AdamW's own values, float32, no warm-up, no clipping, a cosine down to zero."""


def defaults(_: Translating) -> dict[str, str]:
    """Return what holds where the file is silent."""
    return _DEFAULTS
