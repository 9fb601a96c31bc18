"""From an input to a dataset folder that training reads."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.tools.prepare.prepare_files import contents, json_lines, packed, rows

from pretraining.config.commands import PrepareConfig
from pretraining.data.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
from pretraining.errors import ConfigError, DataError
from pretraining.launch.layout import ProcessLayout
from pretraining.tools.prepare import encode, text, units
from pretraining.tools.prepare import prepare as run
from pretraining.tools.prepare.console import training_flags
from pretraining.tools.prepare.inputs import standard_library_files
from pretraining.tools.prepare.prepare import _cores_of_this_process, prepare

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
    return PrepareConfig(input_path=(str(tmp_path / "texts"),), output_path=str(tmp_path / "out"), num_workers=2)


def table_config(tmp_path: Path, values: list[object], kind: pa.DataType | None = None) -> PrepareConfig:
    """A Parquet file with a column `ids`."""
    pq.write_table(pa.table({"ids": pa.array(values, kind)}), tmp_path / "table.parquet")
    return PrepareConfig(
        input_path=(str(tmp_path / "table.parquet"),), output_path=str(tmp_path / "out"), text_field="ids"
    )


def test_every_document_is_a_row_that_decodes_to_its_text(config: PrepareConfig) -> None:
    summary = prepare(config)
    tokenizer = load_tokenizer(config.output_path)
    found = rows(summary.folder)
    assert [tokenizer.decode(row) for row in found] == TEXTS[0::2] + TEXTS[1::2]
    assert not any(0 in row for row in found), "the end-of-text token is the reader's to add"
    assert (summary.documents, summary.tokens) == (9, sum(map(len, found)))
    assert summary.characters == sum(map(len, TEXTS))
    assert summary.text_bytes == sum(len(document.encode()) for document in TEXTS)
    middle = sorted(map(len, found))[4]
    assert summary.median_document_tokens is not None and abs(summary.median_document_tokens - middle) <= middle / 32
    assert sorted(contents(Path(config.output_path))) == [
        "texts/part_000000_000000.arrow",
        "texts/prepare.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


TRAINED = train_tokenizer(TEXTS, 300)


@settings(max_examples=40)
@given(
    texts=st.lists(st.text(max_size=30), max_size=15).filter(any),
    name=st.sampled_from(["a.jsonl", "a.jsonl.gz", "a.ndjson.zst", "a.parquet"]),
    unit_bytes=st.sampled_from([1, 60, 10**6]),
    batch=st.integers(1, 40),
    tokens_per_file=st.sampled_from([1, 7, 10**6]),
)
def test_any_text_comes_back_from_its_tokens(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    name: str,
    unit_bytes: int,
    batch: int,
    tokens_per_file: int,
) -> None:
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
        summary = prepare(
            PrepareConfig(
                input_path=(str(root / name),),
                output_path=str(root / "out"),
                tokenizer_path=str(root),
                tokens_per_file=tokens_per_file,
                num_workers=1,
            )
        )
    assert [TRAINED.decode(row) for row in rows(summary.folder)] == [document for document in texts if document]
    assert summary.empty_documents == texts.count("")


def test_the_output_is_the_same_bytes_on_any_number_of_threads_and_in_any_place(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 100)
    monkeypatch.setattr(units, "UNIT_BYTES", 1500)
    outputs = []
    for workers in (None, 1, 3):
        there = tmp_path / f"out{workers}"
        prepare(replace(config, output_path=str(there), num_workers=workers, tokens_per_file=150))
        outputs.append(contents(there))
    assert len(outputs[0]) > 5 and "texts/part_000001_000001.arrow" in outputs[0]
    assert outputs[0] == outputs[1] == outputs[2]


def test_documents_in_pieces_are_the_same_rows(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare(config)
    monkeypatch.setattr(text, "PIECE_CHARACTERS", 64)
    cut = prepare(replace(config, output_path=str(tmp_path / "cut"), tokenizer_path=config.output_path))
    assert rows(cut.folder) == rows(whole.folder)


def test_inputs_of_many_kinds_are_one_dataset_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "in/deep/er").mkdir(parents=True)
    names = ["a.jsonl.gz", "b.txt.zst", "deep/er/c.ndjson", "deep/d.md"]
    for name in names:
        content = json_lines([name]) if "json" in name else name.encode()
        (tmp_path / "in" / name).write_bytes(packed(name, content))
    pq.write_table(pa.table({"text": ["e.parquet", None]}), tmp_path / "in/e.parquet")
    (tmp_path / "elsewhere.txt").write_text("elsewhere")
    (tmp_path / "in/linked.txt").symlink_to(tmp_path / "elsewhere.txt")
    (tmp_path / "in/deep/loop").symlink_to(tmp_path / "in")
    TRAINED.save(tmp_path)
    summary = prepare(PrepareConfig(input_path=(str(tmp_path / "in"),), output_path=str(tmp_path), dataset="all"))
    found = [TRAINED.decode(row) for row in rows(summary.folder)]
    assert found == [*names[:2], names[3], names[2], "e.parquet", "elsewhere"]
    assert summary.empty_documents == 1


def test_json_lines_with_a_named_field_and_empty_documents(tmp_path: Path, capsys: CaptureFixture) -> None:
    (tmp_path / "news.jsonl.gz").write_bytes(packed("x.gz", json_lines(["first text", "", "second text"], "body")))
    config = PrepareConfig(
        input_path=(str(tmp_path / "news.jsonl.gz"),), output_path=str(tmp_path / "out"), text_field="body"
    )
    summary = prepare(config)
    assert (summary.folder.name, summary.documents, summary.empty_documents) == ("news", 2, 1)
    assert "1 empty ones left out" in capsys.readouterr().out
    with pytest.raises(DataError, match="text_field: it has body, asked for is other"):
        prepare(replace(config, text_field="other"))


def test_the_second_call_finds_everything_done(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: CaptureFixture
) -> None:
    first = prepare(config)
    before = contents(Path(config.output_path))
    monkeypatch.setattr(run, "encode_units", pytest.fail)
    monkeypatch.setattr(units, "read_text", pytest.fail)
    caplog.set_level(logging.INFO, "pretraining")
    capsys.readouterr()
    assert prepare(replace(config, num_workers=1)) == first
    assert "prepared already" in caplog.text
    assert "--sep_token=0" in capsys.readouterr().out
    assert contents(Path(config.output_path)) == before


def change_text(config: PrepareConfig) -> PrepareConfig:
    Path(config.input_path[0], "more.txt").write_text("more")
    return config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_text, r"input_files: it has 9, asked for is 10(.|\n)*delete"),
        (lambda config: replace(config, tokens_per_file=7), "tokens_per_file: it has 100000000, asked for is 7"),
        (
            lambda config: replace(config, vocab_size=258),
            r"--vocab_size=258, but .* has \d+ entries.*share one tokenizer",
        ),
    ],
)
def test_another_configuration_for_a_finished_dataset_is_refused(
    config: PrepareConfig, change: Callable[[PrepareConfig], PrepareConfig], message: str
) -> None:
    prepare(config)
    before = contents(Path(config.output_path))
    with pytest.raises(DataError, match=message):
        prepare(change(config))
    assert contents(Path(config.output_path)) == before


def test_datasets_of_a_root_share_its_tokenizer_and_are_shown_together(
    config: PrepareConfig, tmp_path: Path, capsys: CaptureFixture
) -> None:
    prepare(config)
    before = (tmp_path / "out/tokenizer.json").read_bytes()
    (tmp_path / "second.txt").write_text("entirely different words")
    capsys.readouterr()
    second = prepare(replace(config, input_path=(str(tmp_path / "second.txt"),)))
    assert (tmp_path / "out/tokenizer.json").read_bytes() == before
    assert load_tokenizer(tmp_path / "out").decode(rows(second.folder)[0]) == "entirely different words"
    _, table = capsys.readouterr().out.split("All datasets in")
    assert [line.split()[0] for line in table.splitlines()[1:4]] == ["dataset", "second", "texts"]
    train_tokenizer(["other"], 300).save(tmp_path)
    with pytest.raises(DataError, match="is another tokenizer than"):
        prepare(replace(config, tokenizer_path=str(tmp_path / "tokenizer.json")))


def test_a_given_tokenizer_is_used_and_kept_beside_the_data(config: PrepareConfig, tmp_path: Path) -> None:
    given_tokenizer = train_tokenizer(TEXTS, 270)
    (tmp_path / "given").mkdir()
    given_tokenizer.save(tmp_path / "given")
    summary = prepare(replace(config, tokenizer_path=str(tmp_path / "given")))
    assert load_tokenizer(config.output_path).sha256 == given_tokenizer.sha256
    assert rows(summary.folder)[0] == given_tokenizer.encode(TEXTS[0])


def test_a_large_vocabulary_takes_four_bytes_a_token(config: PrepareConfig, tmp_path: Path) -> None:
    definition = json.loads(TRAINED.definition)
    definition["model"]["vocab"]["far"] = 65_536
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    summary = prepare(replace(config, tokenizer_path=str(tmp_path / "tokenizer.json")))
    assert summary.vocab_size == 65_537
    table = pa.ipc.open_file(str(summary.folder / "part_000000_000000.arrow"))
    assert table.schema.field("tokens").type == pa.list_(pa.uint32())


def test_a_tokenizer_that_comes_to_the_root_in_the_meantime_stops_the_dataset(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = run._wait_for_all

    def late(*args: Any) -> None:
        train_tokenizer(["other"], 300).save(tmp_path / "out")
        wait(*args)

    monkeypatch.setattr(run, "_wait_for_all", late)
    with pytest.raises(DataError, match=r"another tokenizer has come to .*Start the same command again"):
        prepare(config)
    monkeypatch.undo()
    assert prepare(config).vocab_size == load_tokenizer(tmp_path / "out").vocab_size


# Token ids


DOCUMENTS: list[object] = [[5, 6, 7], None, [], [8] * 20, [300]]
KEPT = [[5, 6, 7], [8] * 20, [300]]


@pytest.mark.parametrize(
    ("kind", "stored"),
    [(pa.uint16(), pa.uint16()), (pa.int16(), pa.uint16()), (pa.int64(), pa.uint32()), (pa.uint32(), pa.uint32())],
    ids=str,
)
def test_token_ids_are_taken_as_they_are_and_need_no_tokenizer(
    tmp_path: Path, kind: pa.DataType, stored: pa.DataType, capsys: CaptureFixture
) -> None:
    config = table_config(tmp_path, DOCUMENTS, pa.list_(kind))
    summary = prepare(config)
    shown = capsys.readouterr().out
    assert rows(summary.folder) == KEPT
    assert (summary.documents, summary.empty_documents, summary.vocab_size) == (3, 2, 301)
    assert "no tokenizer here to name an end-of-text token" in shown
    assert training_flags(summary)[-1] == "--vocab_size=301" and "--tokenizer_path" not in shown
    assert not (tmp_path / "out/tokenizer.json").exists()
    table = pa.ipc.open_file(str(summary.folder / "part_000000_000000.arrow"))
    assert table.schema.field("tokens").type == pa.list_(stored)
    assert prepare(config) == summary
    with pytest.raises(DataError, match="vocab_size: it has None, asked for is 400"):
        prepare(replace(config, vocab_size=400))


def test_token_ids_with_a_named_vocabulary_take_two_bytes_and_are_checked(tmp_path: Path) -> None:
    config = table_config(tmp_path, DOCUMENTS, pa.list_(pa.int64()))
    with pytest.raises(DataError, match=r"parquet, row 4: token 0 of the document is 300, but ids go from 0 to 299: g"):
        prepare(replace(config, vocab_size=300))
    summary = prepare(replace(config, vocab_size=301))
    table = pa.ipc.open_file(str(summary.folder / "part_000000_000000.arrow"))
    assert table.schema.field("tokens").type == pa.list_(pa.uint16())


@pytest.mark.parametrize(("kind", "value"), [(pa.int16(), -1), (pa.int64(), -5), (pa.int64(), 1 << 32)], ids=str)
def test_numbers_that_are_no_token_ids_are_named(tmp_path: Path, kind: pa.DataType, value: int) -> None:
    config = table_config(tmp_path, [[1], [1, 2, value]], pa.list_(kind))
    with pytest.raises(DataError, match=rf"row 1: token 2 of the document is {value}, but .* --vocab_size"):
        prepare(config)


def test_token_ids_in_a_root_with_a_tokenizer_are_checked_against_it(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    TRAINED.save(tmp_path / "out")
    with pytest.raises(DataError, match=r"is 300, but ids go from 0 to 299: they were made by another tokenizer"):
        prepare(table_config(tmp_path, DOCUMENTS))
    summary = prepare(table_config(tmp_path, DOCUMENTS[:4]))
    assert (summary.vocab_size, summary.end_of_text, summary.tokenizer) == (300, 0, TRAINED.sha256)


def test_a_tokenizer_is_not_trained_beside_token_ids_of_another_one(config: PrepareConfig, tmp_path: Path) -> None:
    ids = prepare(table_config(tmp_path, DOCUMENTS))
    with pytest.raises(DataError, match=r"table holds token ids of a tokenizer that is not in .*--tokenizer_path"):
        prepare(config)
    TRAINED.save(tmp_path)
    prepare(replace(config, tokenizer_path=str(tmp_path)))
    assert prepare(table_config(tmp_path, DOCUMENTS)) == ids, "what is finished stays so"


def test_text_and_token_ids_are_not_mixed(tmp_path: Path) -> None:
    table_config(tmp_path, [[1]])
    pq.write_table(pa.table({"ids": ["text", "more"]}), tmp_path / "words.parquet")
    inputs = [str(tmp_path / name) for name in ("table.parquet", "words.parquet")]
    config = PrepareConfig(dataset="both", output_path=str(tmp_path / "out"), text_field="ids")
    with pytest.raises(DataError, match=r"words\.parquet, row 0: 'ids' holds text here, but token ids in other"):
        prepare(replace(config, input_path=tuple(inputs)))
    with pytest.raises(DataError, match=r"table\.parquet, row 0: 'ids' holds token ids here, but text in other"):
        prepare(replace(config, input_path=tuple(reversed(inputs))))


def test_tables_without_any_value_go_with_token_ids(tmp_path: Path) -> None:
    table_config(tmp_path, [[1]])
    pq.write_table(pa.table({"ids": [None]}), tmp_path / "zero.parquet")
    inputs = (str(tmp_path / "table.parquet"), str(tmp_path / "zero.parquet"))
    config = PrepareConfig(input_path=inputs, dataset="both", output_path=str(tmp_path / "out"), text_field="ids")
    assert prepare(config).empty_documents == 1


# What goes wrong


def test_a_folder_made_by_others_is_left_alone(config: PrepareConfig, tmp_path: Path) -> None:
    (tmp_path / "out/texts").mkdir(parents=True)
    (tmp_path / "out/texts/shard.arrow").write_text("theirs")
    with pytest.raises(DataError, match="was not made by `pretrain prepare`"):
        prepare(config)
    assert contents(tmp_path / "out") == {"texts/shard.arrow": b"theirs"}


def test_an_output_that_cannot_be_written_is_named(config: PrepareConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"file.* cannot be written: Not a directory.*--output_path"):
        prepare(replace(config, output_path=str(tmp_path / "file/out")))


def test_an_output_without_permission_is_named(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(run, "find_tokenizer", lambda config, root: closed(root / "tokenizer.json"))
    with pytest.raises(DataError, match=r"out/tokenizer\.json: cannot be written: Permission denied.*--output_path"):
        prepare(config)


def test_text_without_any_text_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"a\.txt: no document has any text"):
        prepare(PrepareConfig(input_path=(str(tmp_path / "a.txt"),), output_path=str(tmp_path / "out")))
    assert not list((tmp_path / "out").iterdir())


def test_a_document_too_long_for_a_row_is_named(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "LARGEST_DOCUMENT_TOKENS", 10)
    with pytest.raises(DataError, match=r"\.txt: a document has more than 10 tokens.*Split it"):
        prepare(config)


def test_contradicting_settings_are_refused_first() -> None:
    with pytest.raises(ConfigError, match="no text to prepare"):
        prepare(PrepareConfig())


def test_the_standard_library_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = standard_library_files()[:3]
    monkeypatch.setattr(units, "standard_library_files", lambda: few)
    summary = prepare(PrepareConfig(source="stdlib", output_path=str(tmp_path), vocab_size=512))
    assert (summary.folder, summary.documents, summary.vocab_size) == (tmp_path / "stdlib", 3, 512)
    assert load_tokenizer(tmp_path).decode(rows(summary.folder)[0]) == few[0].path.read_text(encoding="utf-8")


def test_processes_of_a_node_share_its_cores_unless_they_are_bound_to_some(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ProcessLayout(0, 8, 0, 4, "torchrun", "", 0)
    monkeypatch.setattr(run, "usable_cores", lambda: 16)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert (_cores_of_this_process(None), _cores_of_this_process(layout)) == (16, 4)
    assert _cores_of_this_process(replace(layout, local_world_size=99)) == 1
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert _cores_of_this_process(layout) == 16
