"""The settings of `pretrain verify`: which token files are checked, and against what."""

from __future__ import annotations

from dataclasses import dataclass

from pretraining.config.setting import setting


@dataclass(frozen=True)
class VerifyConfig:
    """Read token files wholly and name every fault. The status is 0 only if there is none."""

    data_path: str = setting(help="root folder of the datasets, as for training")
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
