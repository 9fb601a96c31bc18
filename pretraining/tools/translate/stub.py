"""Rules for the YAML of a training stub: sections dist, dataset, model, optim, lr_scheduler and checkpoint."""

from __future__ import annotations

from pretraining.config.variants import LLAMA3_FIELDS, SCALING_FIELDS, YARN_OPTIONS
from pretraining.tools.translate import key_rules as rules
from pretraining.tools.translate.key_rules import each, not_a_llama, renamed, row, skip
from pretraining.tools.translate.translation import Rule, System, Translation

_MODEL = "model.hf_config."
_SAME_NAME = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("vocab_size", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "head_dim", "attention_bias", "mlp_bias"),
)


def _defaults(translation: Translation) -> dict[str, str]:
    """Return the stub's defaults: those of torch.optim.AdamW and `LlamaConfig`, float32, no warm-up, no clipping."""
    found = {
        **{"dist.dtype": "float32", "dataset.batch_size": "1", "optim.grad_clip": "0"},
        **{"optim.lr": "1e-3", "optim.weight_decay": "0.01", "optim.betas": "0.9,0.999", "optim.eps": "1e-8"},
        **{"lr_scheduler.warmup_iterations": "0", "lr_scheduler.min_lr": "0"},
    }
    has_model = any(key.startswith(_MODEL) for key in translation.values)
    if has_model and not {"model_variant", "ckpt_load_path"} & translation.flags.keys():
        found |= {f"{_MODEL}max_position_embeddings": "2048", f"{_MODEL}rms_norm_eps": "1e-6"}
    return found


def _combine(translation: Translation) -> None:
    """Set the run's folder, `<directory>/<prefix>.<timestamp>`."""
    directory, prefix = "checkpoint.directory", "checkpoint.prefix"
    if prefix in translation:
        folder = f"{translation.text(directory) or '.'}/{translation.text(prefix)}.{{timestamp}}"
        translation.set(prefix, ckpt_save_path=folder)
        translation.skip(directory, "in front of the prefix")


def _rope(translation: Translation, key: str) -> None:
    """Translate a part of the rotary embedding."""
    above, _, name = key.rpartition(".")
    kind = translation.word(f"{above}.rope_type") or translation.word(f"{above}.type")
    if name == "rope_theta":
        translation.set(key, rope_theta=translation.text(key))
    elif kind in SCALING_FIELDS and name in ("rope_type", "type"):
        prefix, needed = "" if kind == "llama3" else f"{kind}:", SCALING_FIELDS[kind]
        rule = [translation.text(f"{above}.{part}") for part in needed]
        options = {part: translation.text(f"{above}.{part}") for part in YARN_OPTIONS if kind == "yarn"}
        given = [f"{part}={text}".lower() for part, text in options.items() if text is not None]
        if None in rule:
            translation.refuse(key, f"also needs {', '.join(needed)}", "rope_scaling")
        else:
            translation.set(key, rope_scaling=prefix + ",".join([*filter(None, rule), *given]))
    elif kind in (*SCALING_FIELDS, "default") and name in ("rope_type", "type", *YARN_OPTIONS, *LLAMA3_FIELDS):
        translation.skip(key, f"part of {kind}")
    elif kind and name not in ("rope_type", "type"):
        rules.refuse_model(translation, key, f"it has no meaning here for {kind}")
    else:
        rules.refuse_model(translation, key, f"the rotary scaling here is one of {', '.join(SCALING_FIELDS)}")


_IGNORED = skip("not translated: nothing that is learned depends on it")
_IGNORED_OF_MODEL = """
    torch_dtype dtype use_cache bos_token_id pad_token_id transformers_version _name_or_path attn_implementation
    _attn_implementation
"""
_FAMILY = "it is no Llama: give a variant of its family (--model_variant), or start from its folder (--ckpt_load_path)"
_RULES: dict[str, Rule] = {
    "dist.cpu_only": row("device", rules.choice(true="cpu", false="auto", yes="cpu", no="auto")),
    **renamed("dist.", backend="backend", sharding_stage="sharding_strategy"),
    "dist.dtype": row("mp_dtype", rules.dtype),
    **renamed("dataset.", batch_size="batch_size", num_workers="num_workers", path_eval="eval_datasets"),
    "dataset.path_train": row(
        "data_path", rules.folder_of_data, "must be there: --use_dummy_dataset=true makes tokens up"
    ),
    **{f"{_MODEL}{name}": row(name) for name in _SAME_NAME},
    f"{_MODEL}max_position_embeddings": rules.context,
    f"{_MODEL}model_type": not_a_llama("llama", reason=_FAMILY),
    f"{_MODEL}architectures": not_a_llama("LlamaForCausalLM", "[LlamaForCausalLM]", reason=_FAMILY),
    f"{_MODEL}hidden_act": not_a_llama("silu", "swish", reason="a Llama's activation is SiLU"),
    **each("attention_dropout hidden_dropout dropout", rules.NO_DROPOUT, _MODEL),
    f"{_MODEL}pretraining_tp": not_a_llama("1", reason="matrices are whole here"),
    **each("rope_scaling.* rope_parameters.*", _rope, _MODEL),
    f"{_MODEL}initializer_range": rules.INITIAL_WEIGHTS,
    f"{_MODEL}eos_token_id": skip("for generation only; --sep_token sets the token that ends documents in the data"),
    **each(_IGNORED_OF_MODEL, _IGNORED, _MODEL),
    "model.from_scratch": skip("a run in the save path is resumed; --init_from=scratch refuses to"),
    **renamed("optim.", lr="learning_rate", beta1="adam_beta1", beta2="adam_beta2", eps="adam_epsilon"),
    "optim.weight_decay": row("weight_decay", remark=rules.AFTER_DECAY),
    "optim.betas": row("adam_beta1", rules.pair),
    "optim.grad_clip": row("grad_clip_thresh"),
    "lr_scheduler.total_iterations": row("num_steps", lambda text: {"num_steps": text, "schedule": "cosine"}),
    "lr_scheduler.warmup_iterations": row("warmup_steps"),
    "lr_scheduler.min_lr": rules.lowest_rate("optim.lr"),
    "lr_scheduler.scheduler_update_iterations": rules.only("1", reason="the rate changes at every step: write 1"),
    "loss.grad_accum_steps": row("grad_accum_steps"),
    "checkpoint.directory": row("ckpt_save_path"),
    "checkpoint.prefix": rules.combined,
    "checkpoint.state_dict_type": row("ckpt_format", rules.choice(full="full", sharded="sharded")),
    **renamed("checkpoint.", chkpt_saving_iterations="checkpoint_interval", path_chkpt_prev="ckpt_load_path"),
    "checkpoint.preempt_chkpt_saving_iterations": row("preempt_interval"),
    **each("dist.* dataset.* optim.fused logging.*", _IGNORED),
}
SYSTEM = System("one YAML of a training stub (dist, model.hf_config, …)", _RULES, _defaults, _combine)
