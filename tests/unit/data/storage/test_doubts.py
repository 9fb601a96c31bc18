"""Data that reads well and may not be what its user means is named at the start, and trained on all the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from unit.data.token_files import opened, random_documents, write_documents, write_megatron

from pretraining.config.training import DataConfig
from pretraining.data.dataset import warn_about_datasets
from pretraining.data.storage.token_format import likely_dtype

SEP = 7


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Any:
    def of(root: Path, **settings: Any) -> str:
        caplog.clear()
        config = DataConfig(data_path=str(root), seq_length=8, **settings)
        warn_about_datasets(opened(config), config)
        return caplog.text

    return of


def write_tokens(path: Path, dtype: str, vocab_size: int = 30_000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(3).integers(8, vocab_size, 4000).astype(dtype)
    tokens[::50] = SEP
    tokens.tofile(path)


NAMES: list[tuple[Sequence[str], tuple[str, ...], str | None]] = [
    (("web/train-00000.arrow", "web/validation-00000.arrow", "web/test-00000.arrow"), (), "2 of 3"),
    (("web/train.arrow", "web/val.arrow"), (), "1 of 2"),
    (("web/a.arrow", "web/b.arrow", "web/eval/a.arrow"), ("web",), "1 of 3"),
    (("train/a.arrow", "dev/a.arrow"), (), "1 of 2"),
    (("train/a.arrow", "test/a.arrow"), ("train", "test"), None),  # the user has named both
    (("web/test-0.arrow", "web/test-1.arrow"), (), None),
    (("web/latest.arrow", "web/contest.arrow", "web/evaluated.arrow", "web/part_000000.arrow"), (), None),
]


@pytest.mark.parametrize(("names", "datasets", "count"), NAMES)
def test_files_that_look_like_another_split_are_named(
    tmp_path: Path, warnings: Any, names: Sequence[str], datasets: tuple[str, ...], count: str | None
) -> None:
    for name in names:
        write_documents(tmp_path / name, [[1, 2, SEP], [3, SEP]])
    found = warnings(tmp_path, datasets=datasets)
    assert (f"{count} files look like another split" in found) if count else ("split" not in found)


@pytest.mark.parametrize(("stored", "read"), [("uint32", "uint16"), ("uint16", "uint32"), ("uint64", "uint32")])
@pytest.mark.parametrize("suffix", [".npy", ".bin"])
def test_a_wrong_token_type_is_named_with_the_right_one(
    tmp_path: Path, warnings: Any, suffix: str, stored: str, read: Literal["uint16", "uint32"]
) -> None:
    write_tokens(tmp_path / f"web/x{suffix}", stored)
    sep_token = SEP if stored != "uint16" else int(np.fromfile(tmp_path / f"web/x{suffix}", "<u4")[40])
    assert f"--token_dtype={stored}" in warnings(tmp_path, sep_token=sep_token, token_dtype=read)
    assert "token_dtype" not in warnings(tmp_path, sep_token=SEP, token_dtype=stored)


def test_one_file_of_another_type_among_others_is_named(tmp_path: Path, warnings: Any) -> None:
    for number in range(9):
        write_tokens(tmp_path / f"web/{number}.npy", "uint32" if number == 6 else "uint16")
    assert "web/6.npy: is read as tokens of 2 bytes" in warnings(tmp_path, sep_token=SEP, token_dtype="uint16")


@pytest.mark.parametrize("vocab_size", [5, 300, 30_000, 65_536, 128_256, 262_144])
def test_the_type_of_tokens_is_guessed_from_their_bytes(vocab_size: int) -> None:
    tokens = np.random.default_rng(vocab_size).integers(0, vocab_size, 4000)
    for dtype in ("uint16", "uint32", "uint64"):
        if dtype != "uint16" or vocab_size <= 2**16:
            assert likely_dtype(tokens.astype(dtype).view(np.uint8)) == dtype
    assert likely_dtype(tokens[:10].astype("<u2").view(np.uint8)) is None
    assert likely_dtype(np.zeros(4000, np.uint8)) is None


def test_documents_without_borders_are_named(tmp_path: Path, warnings: Any) -> None:
    documents = [each for each in random_documents(40) if each]
    write_documents(tmp_path / "plain/web/x.arrow", documents)
    write_megatron(tmp_path / "megatron/web/x.bin", documents)
    for kind in ("plain", "megatron"):
        root = tmp_path / kind
        assert ": no token marks" in warnings(root) and "--sep_token" in warnings(root)
        assert not warnings(root, sep_token=SEP) + warnings(root, bos_token=SEP) + warnings(root, document_mask=True)
    for name, marked in (
        ("ends", [[*each, SEP] for each in documents]),
        ("begins", [[SEP, *each] for each in documents]),
    ):
        write_documents(tmp_path / f"{name}/web/x.arrow", marked)
        assert not warnings(tmp_path / name)
    write_documents(tmp_path / "one/web/x.arrow", documents[:1] * 1, kind=pa.list_(pa.uint16()))
    assert not warnings(tmp_path / "one")


def test_a_file_that_is_gone_is_left_to_the_reader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_documents(tmp_path / "web/x.arrow", random_documents(40))
    config = DataConfig(data_path=str(tmp_path), seq_length=8)
    datasets = opened(config)
    (tmp_path / "web/x.arrow").unlink()
    warn_about_datasets(datasets, replace(config, sep_token=None))
    assert not caplog.text
