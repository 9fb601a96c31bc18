"""An input whose files are replaced by others of the same size is another input: refused, or prepared again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from unit.tools.prepare.killed_prepare import prepare_killed
from unit.tools.prepare.prepare_files import contents, json_lines, prepare_config, rows, write_table

from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import DataError
from pretraining.launch.layout import ProcessLayout
from pretraining.tools.commands import PrepareConfig
from pretraining.tools.prepare import records, units
from pretraining.tools.prepare.prepare import prepare
from pretraining.tools.prepare.records import INPUTS_FILE

TEXTS = [f"document {number:03} of an input that changes" for number in range(60)]


WRITERS: dict[str, Callable[[Path, list[str]], object]] = {
    "a.jsonl": lambda path, texts: path.write_bytes(json_lines(texts)),
    "a.csv": lambda path, texts: path.write_text("text\n" + "\n".join(texts)),
    "a.parquet": lambda path, texts: write_table(path, {"text": texts}, 10),
    "a.arrow": lambda path, texts: write_table(path, {"text": texts}, 10),
}


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 600)


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
    """An input of several parts, whose file may change, and one that does not."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/b.jsonl").write_bytes(json_lines(TEXTS[:5]))
    train_tokenizer(TEXTS, 300).save(tmp_path)
    return prepare_config(tmp_path, "in", text_field="text", tokenizer_path=str(tmp_path), num_workers=1)


def exchange(path: Path, texts: list[str], write: Callable[[Path, list[str]], object]) -> None:
    """Rewrite a file with other content of the same size, and with its time."""
    before = path.stat()
    write(path, texts)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGED = [*(text.replace("document", "decument") for text in TEXTS[:10]), *TEXTS[10:]]


@pytest.mark.parametrize("name", WRITERS)
def test_a_changed_input_is_refused_by_name_and_the_old_one_is_prepared(name: str, config: PrepareConfig) -> None:
    path, write = Path(config.input_path[0]) / name, WRITERS[name]
    write(path, TEXTS)
    summary = prepare(config)
    made, size = contents(config.output_path), path.stat().st_size
    exchange(path, CHANGED, write)
    with pytest.raises(DataError, match=rf"other text \(changed in content: {name}\)\. Choose another --dataset"):
        prepare(config)
    (summary.folder / INPUTS_FILE).unlink()
    with pytest.raises(DataError, match="it was prepared from other text"):
        prepare(config)
    write(path, TEXTS)
    assert path.stat().st_size == size
    prepare(config)
    assert {key: value for key, value in contents(config.output_path).items() if INPUTS_FILE not in key} == {
        key: value for key, value in made.items() if INPUTS_FILE not in key
    }


def test_an_input_with_new_times_is_read_once(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(config.input_path[0]) / "a.jsonl"
    path.write_bytes(json_lines(TEXTS))
    prepare(config)
    reads = Mock(side_effect=records.read_content)
    monkeypatch.setattr(records, "read_content", reads)
    counts = []
    for change in (lambda: None, path.touch, lambda: None):
        change()
        prepare(config)
        counts.append(reads.call_count)
    assert counts[0] == 0 and counts[1] == counts[2] > 3


@pytest.mark.parametrize("is_trained", [True, False])
def test_an_interrupted_preparation_encodes_again_what_has_changed(
    is_trained: bool, config: PrepareConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pretraining")
    path, write = Path(config.input_path[0]) / "a.jsonl", WRITERS["a.jsonl"]
    if is_trained:
        config = replace(config, tokenizer_path=None, vocab_size=300)
    write(path, TEXTS)
    assert prepare_killed(config, "after", 12)
    exchange(path, CHANGED, write)
    there = replace(config, output_path=f"{config.output_path}_elsewhere")
    expected = rows(prepare(there).folder)
    assert rows(prepare(config).folder) == expected
    assert is_trained or "a.jsonl has changed since it was encoded: encoding it again" in caplog.text
    assert prepare(config).tokens == sum(map(len, expected))


def test_the_first_process_of_a_job_compares(config: PrepareConfig) -> None:
    path, write = Path(config.input_path[0]) / "a.jsonl", WRITERS["a.jsonl"]
    write(path, TEXTS)
    prepare(config)
    exchange(path, CHANGED, write)
    layouts = [ProcessLayout(rank, 2, rank, 2, "torchrun", "", 0) for rank in range(2)]
    with pytest.raises(DataError, match="other text"):
        prepare(config, layouts[0])
    assert prepare(config, layouts[1]) is not None


def test_a_dataset_of_an_earlier_version_is_read_and_not_compared(config: PrepareConfig) -> None:
    path, write = Path(config.input_path[0]) / "a.jsonl", WRITERS["a.jsonl"]
    write(path, TEXTS)
    summary = prepare(config)
    manifest = summary.folder / "prepare.json"
    record = json.loads(manifest.read_text()) | {"median_document_tokens": 7}
    for name in ("input_content", "marked_documents", "lost", "first_loss"):
        del record[name]
    for entry in record["files"]:
        del entry["crc32"]
    assert record["settings"].pop("special_tokens") == "text"
    manifest.write_text(json.dumps(record))
    (manifest.parent / INPUTS_FILE).unlink()
    exchange(path, CHANGED, write)
    assert prepare(replace(config, special_tokens="text")).tokens == summary.tokens
    with pytest.raises(DataError, match="special_tokens: it has text, requested is ids"):
        prepare(replace(config, special_tokens="ids"))


def test_a_local_hugging_face_dataset_is_compared(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    root = Path(config.input_path[0])
    shutil.rmtree(root)
    root.mkdir()
    write = WRITERS["a.jsonl"]
    for number in range(3):
        write(root / f"train-{number}.jsonl", TEXTS[number * 20 : number * 20 + 20])
    hub = replace(config, input_path=(), hf_dataset=str(root), dataset="hub")
    prepare(hub)
    prepare(hub)
    exchange(root / "train-1.jsonl", [text.replace("d", "D") for text in TEXTS[20:40]], write)
    with pytest.raises(DataError, match="it was prepared from other text"):
        prepare(hub)
