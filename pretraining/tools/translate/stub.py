"""The YAML of a training stub: sections dist, dataset, model.hf_config, optim, lr_scheduler and checkpoint."""

from __future__ import annotations

from pretraining.tools.translate import rows
from pretraining.tools.translate.engine import System, Translation
from pretraining.tools.translate.rows import Key, renamed

_MODEL = "model.hf_config."
_SIZES = """
    hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size rope_theta
    rms_norm_eps tie_word_embeddings
"""


def _name_of(key: str) -> str:
    """Return the name of a key; dimensions without a row are this project's settings of the section `model`."""
    return key if key in _ROWS else key.replace(_MODEL, "model.", 1)


def _combine(translation: Translation) -> None:
    """Set the run's folder, `<directory>/<prefix>.<timestamp>`."""
    directory, prefix = "checkpoint.directory", "checkpoint.prefix"
    if prefix in translation:
        folder = f"{translation.text(directory) or '.'}/{translation.text(prefix)}.{{timestamp}}"
        translation.set(prefix, ckpt_save_path=folder)
        translation.set(directory, "in front of the prefix")


_ROWS = {
    "dist.cpu_only": Key("device", rows.words(true="cpu", false="auto")),
    **renamed("dist.", backend="backend", sharding_stage="sharding_strategy"),
    "dist.dtype": Key("mp_dtype", rows.dtype),
    **renamed("dataset.", batch_size="batch_size", num_workers="num_workers", path_eval="eval_datasets"),
    "dataset.path_train": Key("data_path", rows.folder_of_data, "must be there, or --use_dummy_dataset=true"),
    **{f"{_MODEL}{name}": Key(name) for name in _SIZES.split()},
    f"{_MODEL}max_position_embeddings": Key(convert=rows.context),
    f"{_MODEL}hidden_act": rows.only("silu", reason="a Llama's activation is SiLU"),
    "optim.lr": Key("learning_rate"),
    "optim.weight_decay": rows.WEIGHT_DECAY,
    "lr_scheduler.total_iterations": Key(
        "num_steps", lambda text: {"num_steps": text, "schedule": "cosine", "min_lr_ratio": "0"}
    ),
    "lr_scheduler.warmup_iterations": Key("warmup_steps"),
    **renamed("checkpoint.", directory="ckpt_save_path", prefix="ckpt_save_path", state_dict_type="ckpt_format"),
    "checkpoint.chkpt_saving_iterations": Key("checkpoint_interval"),
}
SYSTEM = System("stub", "one YAML of a training stub (dist, model.hf_config, …)", _ROWS, _combine, _name_of)
