"""The settings of `pretrain verify`: which token files or checkpoints are checked, and against what."""

from __future__ import annotations

from dataclasses import dataclass

from pretraining.config.setting import setting
from pretraining.errors import ConfigError


@dataclass(frozen=True)
class VerifyConfig:
    """Read token files or checkpoints wholly and name every fault. The status is 0 only if there is none."""

    ckpt_path: str | None = setting(
        None, "checkpoint to check, or run, of which all are; also as the first word: `pretrain verify runs/a`"
    )
    data_path: str | None = setting(None, "root folder of the datasets to check, as for training")
    datasets: tuple[str, ...] = setting(
        (), "sub-folders of data_path to check, comma list; empty = every sub-folder with token files"
    )
    vocab_size: int | None = setting(
        None,
        "every token must be below it; none = that of the tokenizer in prepare.json, or no check where there is none",
        minimum=1,
    )
    col_name: str = setting("tokens", "column of the token files that holds the token ids")
    num_workers: int | None = setting(None, "threads that read files; none or 0 = one a core", minimum=0)


def check_verify_config(config: VerifyConfig) -> None:
    """Refuse settings that contradict each other.

    Raises:
        ConfigError: with every problem found.
    """
    problems = []
    if config.ckpt_path is None and config.data_path is None:
        problems.append("nothing to check: give a checkpoint or run, as in `pretrain verify runs/a`, or --data_path")
    if config.ckpt_path is not None and config.data_path is not None:
        problems.append(
            f"--ckpt_path={config.ckpt_path} and --data_path={config.data_path} are two things to check: give one"
        )
    elif config.ckpt_path is not None:
        given = [name for name in ("datasets", "vocab_size") if getattr(config, name)]
        problems += [
            f"--{name} is about token files, and --ckpt_path about checkpoints: leave it out" for name in given
        ]
    if problems:
        raise ConfigError(problems)
