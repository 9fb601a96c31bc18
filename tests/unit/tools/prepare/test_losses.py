"""Text that a tokenizer cannot encode is counted, and named where it begins."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from unit.tools.prepare.prepare_files import json_lines, prepare_config, rows

from pretraining.cli import main
from pretraining.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from pretraining.errors import DataError
from pretraining.tools.prepare.encode import loss_counter
from pretraining.tools.prepare.prepare import prepare

LETTERS = {letter: number for number, letter in enumerate("abcde ▁")}
BYTES = {f"<0x{byte:02X}>": 100 + byte for byte in range(256)}
ALPHABET = set(pre_tokenizers.ByteLevel.alphabet())


def made(model: models.Model, pre_tokenizer: pre_tokenizers.PreTokenizer | None = None) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(model)
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    return library


def saved(folder: Path, library: tokenizers.Tokenizer) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def losses(tokenizer: Tokenizer, *texts: str) -> list[int] | None:
    count, ids = loss_counter(tokenizer), tokenizer.encode_batch(texts)
    flat = np.array([token for each in ids for token in each], np.uint32)
    return None if count is None else count(texts, flat, np.array([len(each) for each in ids])).tolist()


def words(*known: str) -> dict[str, int]:
    return {word: number for number, word in enumerate(["<unk>", *known])}


def of_bytes(alphabet: set[str]) -> models.Model:
    return models.BPE({letter: number for number, letter in enumerate(sorted(alphabet))}, [])


UNKNOWN = {"<unk>": 50, **LETTERS}
CASES: dict[str, tuple[Callable[[], tokenizers.Tokenizer], list[int] | None]] = {
    "bpe drops": (lambda: made(models.BPE(LETTERS, [])), [0, 2, 3, 0]),
    "metaspace drops": (lambda: made(models.BPE(LETTERS, []), pre_tokenizers.Metaspace()), [0, 2, 3, 0]),
    "bpe unknown": (lambda: made(models.BPE(UNKNOWN, [], unk_token="<unk>")), [0, 2, 3, 0]),
    "bpe fused": (lambda: made(models.BPE(UNKNOWN, [], unk_token="<unk>", fuse_unk=True)), [0, 1, 1, 0]),
    "unigram": (lambda: made(models.Unigram([("<unk>", -9.0), *((each, -1.0) for each in LETTERS)], 0)), [0, 1, 1, 0]),
    "words": (
        lambda: made(models.WordLevel(words("ab", "cd"), unk_token="<unk>"), pre_tokenizers.Whitespace()),
        [0, 1, 1, 0],
    ),
    "word pieces": (
        lambda: made(models.WordPiece(words("ab", "cd", "é"), unk_token="<unk>"), pre_tokenizers.Whitespace()),
        [0, 1, 1, 0],
    ),
    "some bytes": (lambda: made(of_bytes(ALPHABET - {"Ã"}), pre_tokenizers.ByteLevel(False)), [0, 2, 0, 0]),
    "bytes": (lambda: made(of_bytes(ALPHABET), pre_tokenizers.ByteLevel(False)), None),
    "trained here": (lambda: train_tokenizer(["text"], 300).library, None),
    "byte fallback": (lambda: made(models.BPE({**BYTES, **LETTERS}, [], byte_fallback=True)), None),
    "unused bytes": (lambda: made(models.BPE({**BYTES, **LETTERS}, [])), [0, 2, 3, 0]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_each_kind_of_tokenizer_is_counted_in_each_text(tmp_path: Path, name: str) -> None:
    make, wanted = CASES[name]
    assert losses(saved(tmp_path, make()), "ab cd", "ab éñ", "漢字語", "") == wanted


@given(text=st.text(alphabet=st.sampled_from("abc dé漢\n"), max_size=40))
def test_dropped_characters_are_those_that_decoding_does_not_give_back(text: str) -> None:
    library = made(models.BPE(LETTERS, []))
    library.normalizer, library.decoder = normalizers.NFC(), decoders.Fuse()
    tokenizer = Tokenizer(library, library.to_str().encode(), b"{}", None, 9)
    assert losses(tokenizer, text) == [len(text) - len(tokenizer.decode(tokenizer.encode(text)))]


def test_characters_that_a_tokenizer_removes_on_purpose_are_no_loss(tmp_path: Path) -> None:
    library = made(models.BPE(LETTERS, []), pre_tokenizers.Whitespace())
    library.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    assert losses(saved(tmp_path, library), "á B\n\tc", "áx") == [0, 1]


def test_a_tokenizer_without_the_letter_a_and_without_unknown_tokens_is_used(tmp_path: Path) -> None:
    library = made(
        models.WordLevel({"A": 0, "C": 1, "<s>": 2}, unk_token="<unk>"), pre_tokenizers.Split("", "isolated")
    )
    library.add_special_tokens(["<s>"])
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 2)])
    assert saved(tmp_path / "dna", library).begin_of_text == 2
    (tmp_path / "in.txt").write_text("ACCA")
    summary = prepare(prepare_config(tmp_path, "in.txt", tokenizer_path=str(tmp_path / "dna")))
    assert rows(summary.folder) == [[0, 1, 1, 0]]


def test_a_loss_in_a_file_whose_name_is_not_utf_8_is_recorded(tmp_path: Path) -> None:
    saved(tmp_path, made(models.BPE(LETTERS, [])))
    (tmp_path / "\udcff.txt").write_text("aé")
    config = prepare_config(tmp_path, "?.txt", tokenizer_path=str(tmp_path), dataset="odd")
    assert prepare(config).first_loss == prepare(config).first_loss == "\udcff.txt"


def test_the_summary_names_the_first_place_and_above_one_percent_there_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, made(models.BPE(LETTERS, [])))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(json_lines(["abc " * 100]))
    (tmp_path / "in/b.jsonl").write_bytes(json_lines(["cab", "é漢", "aé"]))
    flags = [f"--input_path={tmp_path}/in", f"--tokenizer_path={tmp_path}"]
    main(["prepare", *flags, f"--output_path={tmp_path}/out"])
    lost = "3 of 407 characters have no token (0.7%), the first in b.jsonl, row 2"
    printed = capsys.readouterr().out
    assert f"  lost       {lost}\n" in printed and "(1 empty ones left out)" in printed
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    content = json.loads((tmp_path / "out/in/prepare.json").read_text())
    assert (content["lost"], content["first_loss"]) == (3, "b.jsonl, row 2")
    (tmp_path / "in/a.jsonl").unlink()
    main(["prepare", *flags, f"--output_path={tmp_path}/again"])
    main(["prepare", *flags, f"--output_path={tmp_path}/again"])
    assert caplog.text.count("The tokenizer cannot encode this text: 3 of 7 characters have no token (42.9%)") == 2


def test_unknown_tokens_are_named_and_a_text_that_vanishes_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in.txt").write_text("ab xx cd " * 9)
    config = prepare_config(tmp_path, "in.txt", tokenizer_path=str(tmp_path / "words"))
    saved(tmp_path / "words", CASES["words"][0]())
    summary = prepare(config)
    assert (summary.lost, summary.tokens, summary.first_loss) == (9, 27, "in.txt")
    assert "9 of 27 tokens are '<unk>' (0) (33.3%), the first in in.txt. Use one that encodes bytes." in caplog.text
    saved(tmp_path / "words", made(models.BPE({"q": 0}, [])))
    with pytest.raises(DataError, match="hold only characters that the tokenizer cannot encode: there is nothing"):
        prepare(replace(config, output_path=str(tmp_path / "none")))
    saved(tmp_path / "words", made(models.WordLevel({"ab xx cd": 0}, unk_token="<unk>")))
    with pytest.raises(DataError, match=r"the tokenizer fails on a text \(WordLevel error: Missing"):
        prepare(replace(config, output_path=str(tmp_path / "fails")))
