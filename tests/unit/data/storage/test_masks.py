"""A column that masks tokens is named at a start and by `verify`, with the setting that removes padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.data.token_files import opened

from pretraining.cli import main
from pretraining.config.training import DataConfig
from pretraining.data.dataset import warn_about_datasets
from pretraining.data.storage.doubts import ROWS_AT_ONCE, describe_masks

PAD, SEP = 3, 7
LENGTHS = [5, 12, 12, 8]


def padded(length: int, at_front: bool = False) -> tuple[list[int], list[int]]:
    """Token ids of a row of 12, and its mask."""
    ids, ones = list(range(20, 20 + length)), [1] * length
    pads = 12 - length
    return ([PAD] * pads + ids, [0] * pads + ones) if at_front else (ids + [PAD] * pads, ones + [0] * pads)


def write(path: Path, columns: dict[str, Any], as_stream: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    with (pa.ipc.new_stream if as_stream else pa.ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table)


def said(root: Path, caplog: pytest.LogCaptureFixture, **settings: Any) -> str:
    caplog.clear()
    config = DataConfig(data_path=str(root), col_name="input_ids", seq_length=8, sep_token=SEP, **settings)
    warn_about_datasets(opened(config), config)
    return caplog.text


@pytest.mark.parametrize("as_stream", [False, True])
@pytest.mark.parametrize("at_front", [False, True])
def test_padding_is_named_with_strip_tokens_which_removes_it(
    at_front: bool, as_stream: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [padded(length, at_front) for length in LENGTHS]
    columns = {"input_ids": [ids for ids, _ in rows], "attention_mask": [mask for _, mask in rows]}
    write(tmp_path / "web/x.arrow", columns, as_stream)
    text = said(tmp_path, caplog)
    assert "x.arrow: its column 'attention_mask' masks 22.9% of the tokens" in text
    assert f"train with --strip_tokens={PAD}, which removes padding" in text
    config = DataConfig(data_path=str(tmp_path), col_name="input_ids", seq_length=8, strip_tokens=(PAD,))
    assert opened(config).datasets[0].index.documents["tokens"].tolist() == LENGTHS
    assert "masks" not in said(tmp_path, caplog, strip_tokens=(PAD,))


def test_masked_prompts_are_named_although_no_setting_reads_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [[20, 21, 22, 23, 24], [30, 31, 32]]
    write(tmp_path / "web/x.arrow", {"input_ids": ids, "labels": [[-100, -100, -100, 23, 24], [30, 31, 32]]})
    text = said(tmp_path, caplog)
    assert "'labels' masks 37.5%" in text and "no setting reads" in text and "strip" not in text


@pytest.mark.parametrize(
    "columns",
    [
        {"attention_mask": [[1, 1, 1], [1, 1]]},
        {"labels": [[20, 21, 22], [23, 24]]},
        {"labels": [0, 1]},  # of a classification
        {"labels": [["a"], ["b"]]},
        {"attention_mask": [[0], [0]]},  # of other lengths
        {"length": [[0, 0, 0], [0, 0]]},
    ],
)
def test_columns_that_mask_nothing_are_not_named(
    columns: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "web/x.arrow", {"input_ids": [[20, 21, 22], [23, 24]], **columns})
    assert said(tmp_path, caplog) == ""


def test_types_that_libraries_write_are_read() -> None:
    rows = [padded(length) for length in LENGTHS]
    ids, masks = [ids for ids, _ in rows], [mask for _, mask in rows]
    for kind in (pa.list_(pa.int8()), pa.large_list(pa.int64()), pa.list_(pa.int8(), 12), pa.list_(pa.bool_())):
        values = [[bool(each) for each in mask] for mask in masks] if kind.value_type == pa.bool_() else masks
        batch = pa.record_batch({"tokens": pa.array(ids), "attention_mask": pa.array(values, kind)})
        assert "22.9%" in (describe_masks([batch.slice(2), batch.slice(0, 2)], "tokens") or ""), kind
    with_null = pa.record_batch({"tokens": [*ids, None], "attention_mask": [*masks, None]})
    assert "22.9%" in (describe_masks([with_null], "tokens") or "")


def test_verify_looks_at_all_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = [padded(12)] * (ROWS_AT_ONCE + 5)
    rows = [*whole, padded(4)]
    write(tmp_path / "web/a.arrow", {"input_ids": [ids for ids, _ in whole], "attention_mask": [m for _, m in whole]})
    write(tmp_path / "web/b.arrow", {"input_ids": [ids for ids, _ in rows], "attention_mask": [m for _, m in rows]})
    assert "masks" not in said(tmp_path, caplog)
    main(["verify", f"data_path={tmp_path}", "col_name=input_ids"])
    assert "b.arrow: its column" in caplog.text
    assert "(1 of 2 files)" in caplog.text
    caplog.clear()
    main(["verify", f"data_path={tmp_path}", "col_name=input_ids", f"strip_tokens={PAD}"])
    assert "its column" not in caplog.text


@pytest.mark.parametrize("kind", ["parquet", "arrow", "hub"])
def test_prepare_names_the_masks_of_tables(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [padded(length) for length in LENGTHS]
    table = pa.table({"text": ["a"] * 4, "input_ids": [ids for ids, _ in rows], "attention_mask": [m for _, m in rows]})
    (tmp_path / "in").mkdir()
    if kind == "arrow":
        write(tmp_path / "in/x.arrow", {name: table[name] for name in table.column_names})
    else:
        pq.write_table(table, tmp_path / "in/x.parquet")
    source = f"hf_dataset={tmp_path / 'in'}" if kind == "hub" else f"input_path={tmp_path / 'in'}"
    command = ["prepare", source, f"output_path={tmp_path / 'out'}", "dataset=web", "text_field=input_ids"]
    main([*command, "vocab_size=100"])
    assert "its column 'attention_mask' masks 22.9% of the tokens" in caplog.text
    assert f"--strip_tokens={PAD}" in caplog.text
    caplog.clear()
    main([*command, "vocab_size=100"])  # nothing is prepared again
    assert "its column" not in caplog.text
