"""From an input to a dataset folder that training reads."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.tools.prepare.prepare_files import contents, json_lines, packed, prepare_config, rows

from pretraining.data.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
from pretraining.errors import DataError, PretrainError
from pretraining.tools.command_settings import PrepareConfig
from pretraining.tools.prepare import console, documents, encode, token_files, units
from pretraining.tools.prepare import prepare as run
from pretraining.tools.prepare.console import suggested_variant, training_flags
from pretraining.tools.prepare.prepare import prepare
from pretraining.tools.prepare.records import PrepareCounts

CaptureFixture = pytest.CaptureFixture[str]

TEXTS = [
    f"Document {n} of a small test. The end of text {END_OF_TEXT} is text here: ümlaut.\n" * (n + 1) for n in range(9)
]


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
    """A folder of text files and a place for the output."""
    for number, document in enumerate(TEXTS):
        (tmp_path / "texts" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        (tmp_path / f"texts/{number % 2}/{number}.txt").write_text(document)
    return prepare_config(tmp_path, "texts", num_workers=2)


def table_config(tmp_path: Path, values: list[object], kind: pa.DataType | None = None) -> PrepareConfig:
    """A Parquet file with a column `ids`."""
    pq.write_table(pa.table({"ids": pa.array(values, kind)}), tmp_path / "table.parquet")
    return prepare_config(tmp_path, "table.parquet", text_field="ids")


def test_every_document_is_a_row_that_decodes_to_its_text(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = prepare(config)
    tokenizer = load_tokenizer(config.output_path)
    found = rows(summary.folder)
    assert [tokenizer.decode(row) for row in found] == TEXTS[0::2] + TEXTS[1::2]
    assert not any(0 in row for row in found), "the end-of-text token is the reader's to add"
    assert (summary.documents, summary.tokens) == (9, sum(map(len, found)))
    assert summary.characters == sum(map(len, TEXTS))
    assert summary.text_bytes == sum(len(document.encode()) for document in TEXTS)
    assert sorted(contents(Path(config.output_path))) == [
        "texts/.inputs.json",
        "texts/.part_000000_000000.arrow.documents",
        "texts/part_000000_000000.arrow",
        "texts/prepare.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for module in (encode, documents):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", 64)
    assert rows(prepare(replace(config, dataset="in_pieces")).folder) == found


TRAINED = train_tokenizer(TEXTS, 300)


@settings(max_examples=40)
@given(
    texts=st.lists(st.text(max_size=30), max_size=15).filter(any),
    name=st.sampled_from(["a.jsonl", "a.jsonl.gz", "a.ndjson.zst", "a.parquet"]),
    sizes=st.tuples(st.sampled_from([1, 60, 10**6]), st.integers(1, 40), st.sampled_from([1, 7, 10**6])),
)
def test_any_text_is_decoded_from_its_tokens(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], name: str, sizes: tuple[int, int, int]
) -> None:
    unit_bytes, batch, tokens_per_file = sizes
    root = tmp_path_factory.mktemp("round")
    if name == "a.parquet":
        pq.write_table(pa.table({"text": texts}), root / name, row_group_size=3)
    else:
        (root / name).write_bytes(packed(name, json_lines(texts)))
    TRAINED.save(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "UNIT_BYTES", unit_bytes)
        patch.setattr(encode, "BATCH_CHARACTERS", batch)
        patch.setattr("os.fsync", lambda descriptor: None)
        config = prepare_config(root, name, tokenizer_path=str(root), tokens_per_file=tokens_per_file, num_workers=1)
        summary = prepare(config)
    assert [TRAINED.decode(row) for row in rows(summary.folder)] == [document for document in texts if document]
    assert summary.empty_documents == texts.count("")


def test_the_output_is_the_same_bytes_on_any_number_of_threads_and_in_any_place(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 100)
    monkeypatch.setattr(units, "UNIT_BYTES", 1500)
    outputs = []
    for workers in (None, 3):
        there = tmp_path / f"out{workers}"
        prepare(replace(config, output_path=str(there), num_workers=workers, tokens_per_file=150))
        outputs.append(contents(there))
    assert len(outputs[0]) > 5 and "texts/part_000001_000001.arrow" in outputs[0]
    assert outputs[0] == outputs[1]


def test_the_second_call_finds_everything_done(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: CaptureFixture
) -> None:
    first = prepare(config)
    before = contents(Path(config.output_path))
    monkeypatch.setattr(run, "encode_units", pytest.fail)
    monkeypatch.setattr(units, "read_part", pytest.fail)
    caplog.set_level(logging.INFO, "pretraining")
    capsys.readouterr()
    assert prepare(replace(config, num_workers=1)) == first
    assert "already prepared" in caplog.text
    printed = capsys.readouterr().out
    assert "--sep_token=0" in printed and "  separator  '<|endoftext|>' (0)\n" in printed
    assert "--vocab_size" not in printed, "training takes the tokenizer's, rounded up"
    assert contents(Path(config.output_path)) == before


def stored_type(folder: Path) -> pa.DataType:
    return pa.ipc.open_file(str(folder / "part_000000_000000.arrow")).schema.field("tokens").type.value_type


def test_a_given_tokenizer_is_kept_beside_the_data_and_shared_by_the_datasets_of_a_root(
    config: PrepareConfig, tmp_path: Path
) -> None:
    definition = json.loads(TRAINED.definition)
    definition["model"]["vocab"]["far"] = 65_536
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    given_tokenizer = load_tokenizer(tmp_path)
    summary = prepare(replace(config, tokenizer_path=str(tmp_path)))
    assert load_tokenizer(config.output_path).sha256 == given_tokenizer.sha256
    assert rows(summary.folder)[0] == given_tokenizer.encode(TEXTS[0])
    assert (summary.vocab_size, stored_type(summary.folder)) == (65_537, pa.uint32())  # it needs four bytes
    assert "--bos_token=7" in training_flags(summary, begin_of_text=7)
    (tmp_path / "second.txt").write_text("entirely different words")
    second = prepare(replace(config, input_path=(str(tmp_path / "second.txt"),)))
    assert rows(second.folder) == [given_tokenizer.encode("entirely different words")]


def test_a_tokenizer_that_appears_in_the_root_stops_the_dataset(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_manifest = run.manifest

    def late(*args: Any) -> str:
        train_tokenizer(["other"], 300).save(tmp_path / "out")
        return make_manifest(*args)

    with monkeypatch.context() as patch:
        patch.setattr(run, "manifest", late)
        with pytest.raises(DataError, match="another process wrote another tokenizer") as error:
            prepare(config)
    assert error.value.path == tmp_path / "out/tokenizer.json"
    assert prepare(config).vocab_size == load_tokenizer(tmp_path / "out").vocab_size


# Token ids


DOCUMENTS: list[object] = [[5, 6, 7], None, [], [8] * 20, [300]]
KEPT = [[5, 6, 7], [8] * 20, [300]]


@pytest.mark.parametrize(
    ("kind", "vocab_size", "stored"),
    [
        *((pa.int16(), None, pa.uint16()), (pa.int64(), 1 << 16, pa.uint16())),
        *((pa.int64(), (1 << 16) + 1, pa.uint32()), (pa.uint32(), None, pa.uint32())),
    ],
    ids=str,
)
def test_token_ids_are_taken_as_they_are_and_need_no_tokenizer(
    tmp_path: Path, kind: pa.DataType, vocab_size: int | None, stored: pa.DataType, capsys: CaptureFixture
) -> None:
    config = replace(table_config(tmp_path, DOCUMENTS, pa.list_(kind)), vocab_size=vocab_size)
    summary = prepare(config)
    assert "without --sep_token" in capsys.readouterr().out
    assert rows(summary.folder) == KEPT
    assert (summary.documents, summary.empty_documents, summary.vocab_size) == (3, 2, vocab_size or 301)
    assert not (tmp_path / "out/tokenizer.json").exists()
    assert stored_type(summary.folder) == stored and prepare(config) == summary


def test_token_ids_in_a_root_with_a_tokenizer_are_of_that(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    TRAINED.save(tmp_path / "out")
    with pytest.raises(DataError, match="is 300, but ids go from 0 to 299"):
        prepare(table_config(tmp_path, DOCUMENTS))
    summary = prepare(table_config(tmp_path, DOCUMENTS[:4]))
    assert (summary.vocab_size, summary.end_of_text, summary.tokenizer) == (300, 0, TRAINED.sha256)


def test_files_and_their_record_batches_end_at_the_first_document_past_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "BATCH_TOKENS", 10)
    documents: list[object] = [[1] * length for length in (3, 12, 1, 1, 4, 9, 20, 1)]
    folder = prepare(replace(table_config(tmp_path, documents), tokens_per_file=28)).folder
    tables = [pa.ipc.open_file(str(path)).read_all() for path in sorted(folder.glob("*.arrow"))]
    assert [[len(chunk) for chunk in table["tokens"].chunks] for table in tables] == [[2, 4], [1, 1]]


def test_ids_of_files_with_different_types_use_the_widest_type(tmp_path: Path) -> None:
    """The first file's type alone would have given 65,535."""
    for name, kind, ids in (("a", pa.uint16(), [[1, 2]]), ("b", pa.int32(), [[70_000]]), ("c", pa.uint16(), [[3]])):
        pq.write_table(pa.table({"ids": pa.array(ids, pa.list_(kind))}), tmp_path / f"{name}.parquet")
    summary = prepare(prepare_config(tmp_path, "*.parquet", text_field="ids", dataset="all"))
    assert rows(summary.folder) == [[1, 2], [70_000], [3]]
    assert (summary.vocab_size, stored_type(summary.folder)) == (70_001, pa.uint32())
    assert "--vocab_size=70016" in training_flags(summary, None), "no tokenizer gives it; rounded up, it is faster"


def test_the_suggested_model_suits_the_tokens() -> None:
    suggested = {tokens: suggested_variant(tokens, 32000) for tokens in (400_000, 3_000_000_000, 10**12)}
    assert list(suggested.values()) == ["tiny", "125m", "1b"]  # of 400,000, none has 20 per parameter


# What goes wrong


Change = Callable[[PrepareConfig, Path], PrepareConfig]


def written(name: str, content: str, **paths: str) -> Change:
    """Return a change that writes a file, and one of settings to paths in the folder."""

    def change(config: PrepareConfig, folder: Path) -> PrepareConfig:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
        values: dict[str, Any] = {key: str(folder / path) for key, path in paths.items()}
        return replace(config, **values | ({"input_path": (values["input_path"],)} if "input_path" in paths else {}))

    return change


def other_tokenizer(config: PrepareConfig, folder: Path) -> PrepareConfig:
    train_tokenizer(["other"], 300).save(folder)
    return replace(config, tokenizer_path=str(folder / "tokenizer.json"))


def changed(change: Callable[[Path], object]) -> Change:

    def apply(config: PrepareConfig, folder: Path) -> PrepareConfig:
        change(folder / "out/texts")
        return config

    return apply


FILE = "part_000000_000000.arrow"
WAYS_OUT, OLD = {"dataset", "output_path"}, '{"format_version": 0}'
# Other settings for a finished dataset, or what became of it; the path below the output and the settings in the error
REFUSED_LATER: list[tuple[Change, str, set[str]]] = [
    (written("texts/more.txt", "more"), "texts", WAYS_OUT),
    (lambda config, _: replace(config, tokens_per_file=7), "texts", WAYS_OUT),
    (lambda config, _: replace(config, vocab_size=258), "tokenizer.json", {"vocab_size", "output_path"}),
    (other_tokenizer, "tokenizer.json", {"tokenizer_path", "output_path"}),
    (changed(lambda folder: (folder / "prepare.json").write_text("{")), "texts/prepare.json", WAYS_OUT),
    (changed(lambda folder: (folder / "prepare.json").write_text(OLD)), "texts/prepare.json", WAYS_OUT),
    (changed(lambda folder: (folder / FILE).unlink()), f"texts/{FILE}", WAYS_OUT),
    (changed(lambda folder: (folder.parent / "tokenizer.json").unlink()), "texts", WAYS_OUT),
    (changed(lambda folder: train_tokenizer(["other"], 300).save(folder.parent)), "texts", WAYS_OUT),
]


@pytest.mark.parametrize(("change", "path", "named"), REFUSED_LATER, ids=range(len(REFUSED_LATER)))
def test_a_finished_dataset_that_is_asked_for_otherwise_or_has_changed_is_refused(
    config: PrepareConfig, tmp_path: Path, change: Change, path: str, named: set[str]
) -> None:
    prepare(config)
    config = change(config, tmp_path)
    before = contents(tmp_path / "out")
    with pytest.raises(DataError) as error:
        prepare(config)
    assert error.value.path == tmp_path / "out" / path
    assert set(error.value.settings) == named
    assert contents(tmp_path / "out") == before


def ids_of(kind: pa.DataType, value: int, **settings: Any) -> Change:
    """Return a change to a table with a wrong token in its second row."""
    return lambda config, folder: replace(table_config(folder, [[1], [1, 2, value]], pa.list_(kind)), **settings)


def mixed(*names: str) -> Change:
    """Return a change to a table of ids and one of texts, in an order."""

    def change(config: PrepareConfig, folder: Path) -> PrepareConfig:
        pq.write_table(pa.table({"ids": ["text", "more"]}), folder / "words.parquet")
        return replace(
            table_config(folder, [[1]]), input_path=tuple(str(folder / name) for name in names), dataset="both"
        )

    return change


def beside_foreign_ids(config: PrepareConfig, folder: Path) -> PrepareConfig:
    prepare(table_config(folder, DOCUMENTS))
    return config


def asked(**settings: Any) -> Change:
    return lambda config, folder: replace(config, dataset="texts", **settings)


PLAN, LFS = ".texts.preparing/plan.json", "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n"
HUB: dict[str, Any] = {"hf_dataset": "a/b", "input_path": ()}
VOCABULARY, OF_IDS = {"vocab_size"}, {"vocab_size", "tokenizer_path"}
# Settings, the path and the row that the error names, the settings that it names, what it says
REFUSED: list[tuple[Change, str, int | None, set[str], str]] = [
    (ids_of(pa.int16(), -1), "table.parquet", 1, OF_IDS, "is -1, but ids go from 0 to 65535"),
    (ids_of(pa.int64(), 1 << 32), "table.parquet", 1, OF_IDS, "go from 0 to 4294967295"),
    (ids_of(pa.int64(), -1, vocab_size=1 << 16), "table.parquet", 1, OF_IDS, "is -1"),
    (ids_of(pa.int64(), 300, vocab_size=300), "table.parquet", 1, OF_IDS, "go from 0 to 299: write the file again, or"),
    (mixed("table.parquet", "words.parquet"), "words.parquet", 0, set(), ""),
    (mixed("words.parquet", "table.parquet"), "table.parquet", 0, set(), ""),
    (written("out/texts/shard.arrow", "theirs"), "out/texts", None, WAYS_OUT, ""),
    (written("file", "", output_path="file/out"), f"file/out/{PLAN}", None, {"output_path"}, ""),
    (written("empty.txt", "", input_path="empty.txt"), "empty.txt", None, set(), ""),
    (beside_foreign_ids, "out/table", None, {"tokenizer_path", "output_path"}, ""),
    (
        written("tokenizer.json", LFS, tokenizer_path=""),
        "tokenizer.json",
        None,
        set(),
        "it is a Git LFS pointer. Run `git lfs pull`",
    ),
    (asked(hf_split="validation"), "", None, {"hf_split", "hf_dataset", "split"}, ""),
    (asked(split="test", **HUB), "", None, {"split", "hf_dataset", "hf_split"}, ""),
    (asked(split="test", source="stdlib", input_path=()), "", None, {"split", "source"}, ""),
    (asked(text_field=None, **HUB), "", None, {"text_field", "hf_dataset"}, ""),
    (asked(vocab_size=5000), "", None, VOCABULARY, ""),
    (asked(vocab_size=10**12), "", None, VOCABULARY, ""),  # no tokenizer has so many
]


@pytest.mark.parametrize(("change", "path", "row", "named", "words"), REFUSED, ids=range(len(REFUSED)))
def test_settings_that_would_give_wrong_or_no_data_are_refused(
    config: PrepareConfig, tmp_path: Path, change: Change, path: str, row: int | None, named: set[str], words: str
) -> None:
    config = change(config, tmp_path)
    with pytest.raises(PretrainError) as error:
        prepare(config)
    assert (error.value.path, error.value.row) == (tmp_path / path if path else None, row)
    assert set(error.value.settings) == named
    assert re.search(words, str(error.value))
    assert not (tmp_path / "out/texts/prepare.json").exists()


def test_a_document_too_long_for_a_row_is_named(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "LARGEST_DOCUMENT_TOKENS", 10)
    with pytest.raises(DataError, match=r"\.txt: a document here.* more than 10 tokens"):
        prepare(config)


@pytest.mark.parametrize(("total", "share"), [(2000, "60%"), (0, "")])
def test_progress_is_a_line_now_and_then(
    total: int, share: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "pretraining")
    seconds = iter(console.LINE_INTERVAL_SECONDS / 2 * n for n in range(9))
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    progress = console.EncodingProgress("encoding", total, total // 2)
    for _ in range(3):
        progress.add(PrepareCounts(documents=15, tokens=3000, text_bytes=30_000_000, input_bytes=100))
    (line,) = caplog.messages
    assert "6,000 tokens (400/s)" in line and share in line and ("left" in line) == bool(total)
