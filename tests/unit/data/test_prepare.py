"""From text to a dataset folder that training reads."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from pretraining.config.prepare import PrepareConfig
from pretraining.data import prepare as prepare_module
from pretraining.data import sources
from pretraining.data.corpus import standard_library_files
from pretraining.data.prepare import _training_sample, map_in_order, prepare
from pretraining.data.prepare_progress import LINE_INTERVAL_SECONDS, Encoded, encoding_progress
from pretraining.data.sources import list_files
from pretraining.data.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
from pretraining.errors import ConfigError, DataError

TEXTS = [
    f"Document {n} of a small test. The end of text {END_OF_TEXT} is text here: ümlaut.\n" * (n + 1) for n in range(9)
]


def quiet(line: str) -> None:
    """Show nothing."""


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
    """A folder of text files and a place for the output."""
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        (tmp_path / f"texts/{number % 2}/{number}.txt").write_text(text)
    return PrepareConfig(input_path=(str(tmp_path / "texts"),), output_path=str(tmp_path / "out"), num_workers=2)


def rows(folder: Path) -> list[list[int]]:
    return [
        row
        for path in sorted(folder.glob("*.arrow"))
        for row in pa.ipc.open_file(str(path)).read_all()["tokens"].to_pylist()
    ]


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_every_document_is_a_row_that_decodes_to_its_text(config: PrepareConfig) -> None:
    summary = prepare(config, quiet)
    tokenizer = load_tokenizer(config.output_path)
    found = rows(summary.folder)
    assert [tokenizer.decode(row) for row in found] == TEXTS[0::2] + TEXTS[1::2]
    assert not any(0 in row for row in found), "the end-of-text token is the reader's to add"
    assert (summary.documents, summary.tokens) == (9, sum(map(len, found)))
    assert summary.characters == sum(map(len, TEXTS))
    assert summary.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert sorted(contents(Path(config.output_path))) == [
        "texts/part_000000.arrow",
        "texts/prepare.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_output_is_the_same_bytes_on_any_number_of_threads_and_in_any_place(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "BATCH_CHARACTERS", 100)
    outputs = []
    for workers in (None, 1, 3):
        there = tmp_path / f"out{workers}"
        prepare(replace(config, output_path=str(there), num_workers=workers, tokens_per_file=150), quiet)
        outputs.append(contents(there))
    assert len(outputs[0]) > 5
    assert outputs[0] == outputs[1] == outputs[2]


def test_documents_in_pieces_are_the_same_rows(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare(config, quiet)
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 64)
    cut = prepare(replace(config, output_path=str(tmp_path / "cut"), tokenizer_path=config.output_path), quiet)
    assert rows(cut.folder) == rows(whole.folder)


def test_json_lines_with_a_named_field_and_empty_documents(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"body": text}) + "\n" for text in ["first text", "", "second text"])
    (tmp_path / "news.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    config = PrepareConfig(
        input_path=(str(tmp_path / "news.jsonl.gz"),), output_path=str(tmp_path / "out"), text_field="body"
    )
    summary = prepare(config, quiet)
    assert (summary.folder.name, summary.documents, summary.empty_documents) == ("news", 2, 1)
    assert "1 empty ones left out" in summary.describe()
    with pytest.raises(DataError, match="text_field: it has body, asked for is other"):
        prepare(replace(config, text_field="other"), quiet)


def test_the_second_call_finds_everything_done(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(config, quiet)
    before = contents(Path(config.output_path))
    monkeypatch.setattr(prepare_module, "_encode", pytest.fail)
    monkeypatch.setattr(prepare_module, "read_pieces", pytest.fail)
    lines: list[str] = []
    again = prepare(replace(config, num_workers=1), lines.append)
    assert replace(again, seconds=first.seconds) == first
    assert "prepared already" in lines[0]
    assert "--sep_token=0" in lines[0]
    assert contents(Path(config.output_path)) == before


def test_the_flags_to_train_with_are_shown(config: PrepareConfig) -> None:
    lines: list[str] = []
    summary = prepare(config, lines.append)
    out = config.output_path
    vocabulary = load_tokenizer(out).vocab_size
    flags = f"--data_path={out} --datasets=texts --sep_token=0 --tokenizer_path={out} --vocab_size={vocabulary}"
    assert lines[-1].splitlines()[-1].strip() == flags
    assert "documents/s" in lines[-1]
    assert f"{summary.characters / summary.tokens:.2f} characters a token" in lines[-1]


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
    prepare(config, quiet)
    before = contents(Path(config.output_path))
    with pytest.raises(DataError, match=message):
        prepare(change(config), quiet)
    assert contents(Path(config.output_path)) == before


def test_datasets_of_a_root_share_its_tokenizer(config: PrepareConfig, tmp_path: Path) -> None:
    prepare(config, quiet)
    before = (tmp_path / "out/tokenizer.json").read_bytes()
    (tmp_path / "second.txt").write_text("entirely different words")
    second = prepare(replace(config, input_path=(str(tmp_path / "second.txt"),)), quiet)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == before
    assert load_tokenizer(tmp_path / "out").decode(rows(second.folder)[0]) == "entirely different words"
    train_tokenizer(["other"], 300).save(tmp_path)
    with pytest.raises(DataError, match="is another tokenizer than"):
        prepare(replace(config, tokenizer_path=str(tmp_path / "tokenizer.json")), quiet)


def test_a_given_tokenizer_is_used_and_kept_beside_the_data(config: PrepareConfig, tmp_path: Path) -> None:
    given = train_tokenizer(TEXTS, 270)
    (tmp_path / "given").mkdir()
    given.save(tmp_path / "given")
    summary = prepare(replace(config, tokenizer_path=str(tmp_path / "given")), quiet)
    assert load_tokenizer(config.output_path).sha256 == given.sha256
    assert rows(summary.folder)[0] == given.encode(TEXTS[0])


def test_a_tokenizer_without_an_end_is_said_and_a_large_one_takes_four_bytes(
    config: PrepareConfig, tmp_path: Path
) -> None:
    definition = json.loads(train_tokenizer(TEXTS, 270).definition)
    definition["added_tokens"] = []
    definition["model"]["vocab"]["far"] = 65_536
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    summary = prepare(replace(config, tokenizer_path=str(tmp_path / "tokenizer.json")), quiet)
    assert summary.vocab_size == 65_537
    assert "names no end-of-text token" in summary.describe()
    assert not [flag for flag in summary.training_flags if flag.startswith("--sep_token")]
    table = pa.ipc.open_file(str(summary.folder / "part_000000.arrow"))
    assert table.schema.field("tokens").type == pa.list_(pa.uint32())


def test_a_vocabulary_larger_than_the_text_gives_is_refused_where_it_is_asked_for(config: PrepareConfig) -> None:
    with pytest.raises(DataError, match=r"--vocab_size=5000: .* Give --vocab_size=\d+ or less"):
        prepare(replace(config, vocab_size=5000), quiet)
    assert not contents(Path(config.output_path))
    assert prepare(config, quiet).vocab_size < 5000


def test_what_an_interrupted_call_left_is_redone(config: PrepareConfig, tmp_path: Path) -> None:
    work = tmp_path / "out/.texts.preparing"
    work.mkdir(parents=True)
    (work / "part_000007.arrow").write_text("half")
    (tmp_path / "out/texts").mkdir()
    summary = prepare(config, quiet)
    assert not work.exists()
    assert len(rows(summary.folder)) == 9


def test_a_failure_on_the_way_leaves_nothing(config: PrepareConfig, tmp_path: Path) -> None:
    (tmp_path / "texts/z.txt").write_bytes(b"fine\xff")
    train_tokenizer(TEXTS, 270).save(tmp_path)
    with pytest.raises(DataError, match=r"z\.txt: not UTF-8 at byte 4"):
        prepare(replace(config, tokenizer_path=str(tmp_path)), quiet)
    assert not list((tmp_path / "out").iterdir())


def test_a_folder_made_by_others_is_left_alone(config: PrepareConfig, tmp_path: Path) -> None:
    (tmp_path / "out/texts").mkdir(parents=True)
    (tmp_path / "out/texts/shard.arrow").write_text("theirs")
    with pytest.raises(DataError, match="was not made by `pretrain prepare`"):
        prepare(config, quiet)
    assert contents(tmp_path / "out") == {"texts/shard.arrow": b"theirs"}


def damage_manifest(folder: Path) -> None:
    (folder / "prepare.json").write_text("{")


def outdate_manifest(folder: Path) -> None:
    content = json.loads((folder / "prepare.json").read_text())
    (folder / "prepare.json").write_text(json.dumps({**content, "format_version": 0}))


def empty_manifest(folder: Path) -> None:
    (folder / "prepare.json").write_text('{"format_version": 1}')


def shorten_file(folder: Path) -> None:
    (folder / "part_000000.arrow").write_bytes(b"short")


def remove_file(folder: Path) -> None:
    (folder / "part_000000.arrow").unlink()


def remove_tokenizer(folder: Path) -> None:
    (folder.parent / "tokenizer.json").unlink()


def exchange_tokenizer(folder: Path) -> None:
    train_tokenizer(["other"], 300).save(folder.parent)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_manifest, r"prepare\.json cannot be read \(JSONDecodeError.*delete"),
        (outdate_manifest, "has format 0, this version reads format 1"),
        (empty_manifest, r"prepare\.json cannot be read \(KeyError"),
        (shorten_file, r"part_000000\.arrow has 5 bytes, [\d,]+ bytes were written"),
        (remove_file, r"part_000000\.arrow is gone"),
        (remove_tokenizer, r"tokenizer\.json, with which .* was encoded, is gone"),
        (exchange_tokenizer, "tokenizer: it has"),
    ],
)
def test_a_finished_dataset_that_has_changed_is_refused(
    config: PrepareConfig, damage: Callable[[Path], None], message: str
) -> None:
    damage(prepare(config, quiet).folder)
    with pytest.raises(DataError, match=message):
        prepare(config, quiet)


def test_an_output_that_cannot_be_written_is_named(config: PrepareConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"file.* cannot be written: Not a directory.*--output_path"):
        prepare(replace(config, output_path=str(tmp_path / "file/out")), quiet)


def test_an_output_without_permission_is_named(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(prepare_module, "_find_tokenizer", lambda config, root: closed(root / "tokenizer.json"))
    with pytest.raises(DataError, match=r"out/tokenizer\.json cannot be written: Permission denied.*--output_path"):
        prepare(config, quiet)


def test_a_full_disk_is_one_error_and_leaves_nothing(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pretraining.data.token_writer.TokenWriter._flush", full)
    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        prepare(config, quiet)
    assert not contents(Path(config.output_path))


def test_text_without_any_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="no document has any text"):
        prepare(PrepareConfig(input_path=(str(tmp_path / "a.txt"),), output_path=str(tmp_path / "out")), quiet)


def test_a_document_too_long_for_a_row_is_named(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "LARGEST_DOCUMENT_TOKENS", 10)
    with pytest.raises(DataError, match=r"\.txt: a document has more than 10 tokens.*Split it"):
        prepare(config, quiet)


def test_contradicting_settings_are_refused_first() -> None:
    with pytest.raises(ConfigError, match="no text to prepare"):
        prepare(PrepareConfig(), quiet)


def test_the_standard_library_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = standard_library_files()[:3]
    monkeypatch.setattr(prepare_module, "standard_library_files", lambda: few)
    summary = prepare(PrepareConfig(source="stdlib", output_path=str(tmp_path), vocab_size=512), quiet)
    assert (summary.folder, summary.documents, summary.vocab_size) == (tmp_path / "stdlib", 3, 512)
    assert load_tokenizer(tmp_path).decode(rows(summary.folder)[0]) == few[0].path.read_text(encoding="utf-8")


def test_a_tokenizer_is_trained_on_all_text_or_the_beginning_of_each_file(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = list_files(config.input_path, config.extensions)
    assert sorted(_training_sample(files, "text")) == sorted(TEXTS)
    monkeypatch.setattr(prepare_module, "PIECE_CHARACTERS", 50)
    sample = list(_training_sample(files, "text", characters=220))
    assert [len(text) for text in sample] == [50, 50, 50, 50, 20]
    assert all(any(text.startswith(part) for text in TEXTS) for part in sample)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_keep_the_order_and_never_run_far_ahead(threads: int) -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for item in range(40):
            taken += 1
            yield item

    for done, result in enumerate(map_in_order(lambda item: item * item, items(), threads)):
        assert result == done**2
        assert taken <= done + 2 * threads + 1


def test_an_error_on_a_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        list(map_in_order(lambda item: 1 // item, [1, 0, 1], 2))


def test_without_a_terminal_progress_is_a_line_now_and_then() -> None:
    lines: list[str] = []
    now = 0.0
    with encoding_progress(1000, lines.append, clock=lambda: now, terminal=False) as progress:
        for step in range(1, 5):
            now = step * LINE_INTERVAL_SECONDS / 2
            progress(Encoded(documents=step * 15, tokens=step * 3000, input_bytes=step * 100))
    assert lines == [
        "encoding: 20% of the input, 30 documents (2/s), 6,000 tokens (400/s)",
        "encoding: 40% of the input, 60 documents (2/s), 12,000 tokens (400/s)",
    ]


def test_on_a_terminal_progress_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    with encoding_progress(1000, pytest.fail, terminal=True) as progress:
        progress(Encoded(documents=7, tokens=3000, input_bytes=500))
    assert "7 documents" in screen.getvalue()
