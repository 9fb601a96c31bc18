"""The settings of the commands that handle checkpoints: `pretrain export`, `import` and `list`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pretraining.config.training import setting
from pretraining.errors import ConfigError

_SIZE_UNITS = {
    **{"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40},
}


@dataclass(frozen=True)
class ExportConfig:
    """Write a checkpoint in a form that other programs read. It takes one process and the memory of one tensor."""

    ckpt_load_path: str = setting(help="checkpoint, or run whose newest one is taken; also as the first word")
    output_path: str = setting(help="folder to make; it appears when it is complete")
    format: str = setting(
        "hf",
        "hf: a folder for AutoModelForCausalLM.from_pretrained; full: four .pt files with weights and optimizer state, "
        "from which training goes on as well",
        choices=("hf", "full"),
    )
    dtype: str = setting(
        "bfloat16",
        "of the weights in the hf form: bfloat16, half the size and what Llama models are published in; float32, the "
        "bits that are trained",
        choices=("bfloat16", "float32"),
    )
    max_shard_size: str = setting("5GB", "largest weight file of the hf form: 500MB, 5GB, 2GiB")
    tokenizer_path: str | None = setting(
        None, "folder or tokenizer.json to put into the hf form; none = the tokenizer_path that the run was given"
    )

    @property
    def max_shard_bytes(self) -> int:
        """`max_shard_size` in bytes.

        Raises:
            ConfigError: it is no size.
        """
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", self.max_shard_size, re.ASCII)
        unit = _SIZE_UNITS.get(match[2].upper()) if match else None
        size = int(float(match[1]) * unit) if match and unit else 0
        if size < 1:
            raise ConfigError(f"--max_shard_size={self.max_shard_size} is no size: write 500MB, 5GB or 2GiB")
        return size


@dataclass(frozen=True)
class ImportConfig:
    """Make a run of a Hugging Face Llama: a checkpoint of step 0 with its weights, in float32."""

    input_path: str = setting(help="folder with config.json and safetensors files; also as the first word")
    ckpt_save_path: str = setting(help="the run's folder; it may not hold a checkpoint yet")


@dataclass(frozen=True)
class ListConfig:
    """Show the checkpoints of a run. Their content is not read: `pretrain verify` does that."""

    run_path: str = setting(help="the run's folder; also as the first word")
    json: bool = setting(False, "one JSON object a checkpoint")
