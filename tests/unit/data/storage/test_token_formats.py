"""Equal documents give equal samples in every format; each format names the faults of its files."""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.data.token_files import (
    FLAT,
    SEP,
    ended,
    header,
    loader,
    make_root,
    plan,
    random_documents,
    rows,
    write_documents,
    write_flat,
    write_megatron,
)

from pretraining.config.training import DataConfig, Packing
from pretraining.data.storage import flat_files
from pretraining.data.storage.dataset_files import list_datasets
from pretraining.data.storage.flat_files import find_documents
from pretraining.data.storage.token_format import load_format
from pretraining.errors import ConfigError, DataError

CONFIG = DataConfig(seq_length=24, sep_token=SEP, logical_shards=4, num_workers=0)


@pytest.mark.parametrize(("kind", "packing"), list(zip(FLAT, ["stream", "best_fit"] * 6, strict=False)))
def test_the_same_documents_are_the_same_samples_in_every_format(tmp_path: Path, kind: str, packing: Packing) -> None:
    suffix, options, changes = FLAT[kind]
    for number in range(3):
        # Empty documents inside, and none at the end, which an array of tokens cannot tell from no document.
        documents = [*random_documents(30, number, vocab_size=900), [], [5, 6], [], [1]]
        write_documents(tmp_path / f"arrow/web/{number}.arrow", documents)
        write_flat(tmp_path / f"flat/web/{number}{suffix}", documents, **options)
    common = replace(CONFIG, packing=packing, strip_tokens=(5,))
    expected = loader(replace(common, data_path=str(tmp_path / "arrow")), plan(6))
    found = loader(replace(common, data_path=str(tmp_path / "flat"), **changes), plan(6))
    for _ in range(40):  # more than a pass
        assert rows(next(found)) == rows(next(expected))


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=12), st.sampled_from([1, 3, 1000]))
@example([[]], 1)
@example([[], [], [1]], 1)
def test_the_scan_finds_the_documents_between_separators(documents: list[list[int]], chunk: int) -> None:
    tokens = ended(documents, "<u2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_files, "_TOKENS_AT_ONCE", chunk)
        begins, lengths = find_documents(tokens, SEP)
    pairs = zip(begins.tolist(), lengths.tolist(), strict=True)
    found = [tokens[begin : begin + length].tolist() for begin, length in pairs]
    # Tokens after the last separator are a document too.
    assert found == (documents if documents[-1] else documents[:-1])


def npy_bytes(tokens: Sequence[int]) -> bytes:
    file = BytesIO()
    np.save(file, np.array(tokens, np.uint16))
    return file.getvalue()


def tokens_of(dtype: str) -> bytes:
    return np.random.default_rng(1).integers(0, 900, 1000).astype(dtype).tobytes()


RAW, POINTER = {"token_dtype": "uint16"}, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n"
NO_HEADER = {"token_dtype": "uint16", "file_type": "npy_raw"}
OTHER_TYPE, AS_16, AS_32, AS_64 = "--token_dtype", *({"token_dtype": f"uint{bits}"} for bits in (16, 32, 64))
PULL = "git lfs pull"
# name and content of a file, settings, what the error says
REFUSED: list[tuple[str, bytes | np.ndarray | None, dict[str, Any], str]] = [
    ("x.npy", None, {}, ""),
    ("x.npy", b"[1, 2, 3]" * 20, {}, "no NumPy header"),
    ("x.npy", b"[1, 2, 3]" * 20, {}, OTHER_TYPE),
    ("x.npy", b"", {}, ""),
    ("x.npy", npy_bytes([1, 2, 3])[:-1], {}, ""),
    ("x.npy", npy_bytes([1, 2, 3]) + b"xx", {}, ""),
    ("x.npy", npy_bytes([1, 2, 3]), NO_HEADER, "two datasets"),
    ("x.npy", np.array([{}]), {}, ""),
    ("x.npy", np.zeros((2, 3), np.uint16), {}, ""),
    ("x.npy", np.zeros(3), {}, ""),
    ("x.npy", np.zeros(3, ">u2"), {}, ""),
    ("x.npy", npy_bytes([7, 3, 7, 7, 3, 1]), {}, f"no sep_token={SEP}"),
    ("x.bin", bytes(2000), {}, OTHER_TYPE),
    ("x.bin", bytes(20), {}, OTHER_TYPE),
    ("x.bin", header(1, 0), RAW, OTHER_TYPE),
    ("x.bin", header(2, 0), {}, ""),
    ("x.bin", header(1, 9) + bytes(16), {}, ""),
    ("x.bin", header(1, -2), {}, ""),
    ("x.bin", header(1, 9)[:500], {}, ""),
    ("x.bin", bytes(2003), RAW, ""),
    ("x.bin", tokens_of("uint16"), AS_32 | {"sep_token": 70_000}, "no sep_token=70000"),
    ("x.bin", tokens_of("uint16"), AS_32 | {"sep_token": 70_000}, "--token_dtype=uint16"),
    ("x.bin", tokens_of("uint32"), AS_16 | {"sep_token": 70_000}, "--token_dtype=uint32"),
    *(("x.npy", tokens_of(kind), {}, f"--token_dtype={kind}") for kind in ("uint16", "uint32", "uint64")),
    *(("x.bin", tokens_of(kind), {}, f"--token_dtype={kind}") for kind in ("uint16", "uint32", "uint64")),
    *(("x.bin", tokens_of(kind)[: 4 * 333], AS_64, f"--token_dtype={kind}") for kind in ("uint16", "uint32")),
    *(("x.bin", tokens_of(kind)[: 4 * 333], AS_64, "no whole number of tokens") for kind in ("uint16", "uint32")),
    *((name, POINTER, RAW, PULL) for name in ("x.arrow", "x.npy", "x.bin")),
    *((f"x.{kind[:5]}", POINTER, RAW | {"file_type": kind}, PULL) for kind in ("npy_raw", "arrow_stream")),
]


@pytest.mark.parametrize(("name", "content", "changes", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes | np.ndarray | None, changes: dict[str, Any], words: str
) -> None:
    path, config = tmp_path / name, replace(CONFIG, **changes)
    if isinstance(content, np.ndarray):
        with path.open("wb") as file:
            np.save(file, content, allow_pickle=True)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        load_format(changes.get("file_type", path.suffix[1:]), config).documents(str(path))
    assert raised.value.path == path and words in str(raised.value)
    named = set(raised.value.settings) & {"sep_token", "token_dtype"}
    assert ("sep_token" in named) == ("sep_token" in words or "sep_token" in changes)
    assert words or not named


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("npy", {"sep_token": None}, ""),
        ("bin", {"sep_token": None}, ""),
        ("npy_raw", {}, "token_dtype"),
        *((name, {}, f"--file_type={name}") for name in ("no_such_module:Format", "json:NoSuchName", "json:loads")),
        ("pathlib:PurePath", {}, "--file_type=pathlib:PurePath"),
    ],
)
def test_a_format_that_cannot_be_or_lacks_a_setting_is_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_format(kind, replace(CONFIG, **changes))
    assert words in str(raised.value)


def test_datasets_of_several_formats_make_one_run_but_a_dataset_has_one_unless_it_is_chosen(tmp_path: Path) -> None:
    make_root(tmp_path / "several", web=40)
    write_flat(tmp_path / "several/code/a.npy", random_documents(40, 1, vocab_size=900))
    several = replace(CONFIG, data_path=str(tmp_path / "several"))
    assert [files.file_type for files in list_datasets(several)] == ["npy", "arrow"]
    next(loader(several, plan(6)))
    write_flat(tmp_path / "web/x.npy", [[1, 2], [3]])
    write_flat(tmp_path / "web/deep/y.bin", [[1]], version=1)
    config = replace(CONFIG, data_path=str(tmp_path), datasets=("web",))
    with pytest.raises(DataError) as raised:
        list_datasets(config)
    assert raised.value.path == tmp_path / "web" and raised.value.settings == ("file_type",)
    assert list_datasets(replace(config, file_type="bin"))[0].paths == ("deep/y.bin",)


def test_megatron_documents_and_their_type_come_from_the_index_and_need_no_separator(tmp_path: Path) -> None:
    sequences = [*random_documents(30, 3, vocab_size=900), [], [1]]
    write_megatron(tmp_path / "megatron/web/a.bin", sequences, "<i4", borders=[0, 0, 1, 3, 4, *range(6, 33)])
    documents = [[], sequences[0], sequences[1] + sequences[2], sequences[3], sequences[4] + sequences[5]]
    write_documents(tmp_path / "arrow/web/a.arrow", documents + sequences[6:])
    plain = replace(CONFIG, sep_token=None)
    found, expected = (
        loader(replace(plain, data_path=str(tmp_path / kind)), plan(4)) for kind in ("megatron", "arrow")
    )
    for _ in range(40):
        assert rows(next(found)) == rows(next(expected))
    write_megatron(tmp_path / "megatron/web/a.bin", [*sequences, [2]], "<i4")
    with pytest.raises(DataError, match=r"other files.*a\.(bin|idx)"):  # the index belongs to the data, too
        loader(replace(plain, data_path=str(tmp_path / "megatron")), plan(4)).load_state_dict(found.state_dict())


def test_with_a_type_the_tokens_of_megatron_are_read_without_the_index(tmp_path: Path) -> None:
    write_megatron(tmp_path / "web/a.bin", [[*each, SEP] for each in random_documents(60, vocab_size=900)])
    plain = replace(CONFIG, data_path=str(tmp_path), token_dtype="uint16")
    (listing,) = list_datasets(plain)
    assert (listing.file_type, listing.paths) == ("bin", ("a.bin",))
    state = loader(plain, plan(2)).state_dict()
    (tmp_path / "web/a.idx").unlink()
    loader(plain, plan(2)).load_state_dict(state)


def test_an_index_beside_a_single_file_is_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_megatron(tmp_path / f"{name}.bin", random_documents(30, vocab_size=900))
    (listing,) = list_datasets(replace(CONFIG, data_path=str(tmp_path), datasets=("a.bin",), sep_token=None))
    assert (listing.file_type, listing.paths) == ("megatron", ("a.bin", "a.idx"))


def put(at: int, kind: str, value: int) -> Callable[[bytes], bytes]:
    """Return a change of a number in an index."""
    return lambda content: content[:at] + struct.pack(kind, value) + content[at + struct.calcsize(kind) :]


Damage = Callable[[bytes], bytes | None]
WHOLE: Damage = bytes
TWO: dict[str, Any] = {"borders": [0, 2, 3]}
# how an index is written, what becomes of x.idx and of x.bin, the file that the error names, what it says
MEGATRON: list[tuple[dict[str, Any], Damage, Damage, str, str]] = [
    ({"modes": b"\1\2\3"}, WHOLE, WHOLE, "a.idx", "multimodal"),
    ({"version": 2}, WHOLE, WHOLE, "a.idx", "version 2"),
    ({"dtype": "<f4"}, WHOLE, WHOLE, "a.idx", "type 7"),
    ({"magic": b"TNTIDX\0\0"}, WHOLE, WHOLE, "a.idx", "no index of Megatron"),
    ({"magic": b"something"}, WHOLE, WHOLE, "a.idx", "no index of Megatron"),
    ({"modes": b"\1\2"}, WHOLE, WHOLE, "a.idx", "truncated or damaged"),
    ({"borders": [0, 1, 0, 3]}, WHOLE, WHOLE, "a.idx", "do not cover"),
    ({"borders": []}, WHOLE, WHOLE, "a.idx", "do not cover"),
    ({"borders": [0, 1, 2]}, WHOLE, WHOLE, "a.idx", "do not cover"),
    (TWO, put(34, "<l", -1), WHOLE, "a.idx", "negative"),
    (TWO, put(46, "<q", 3), WHOLE, "a.idx", "negative"),
    (TWO, put(54, "<q", 8), WHOLE, "a.idx", "lie apart"),
    (TWO, lambda content: content[:20], WHOLE, "a.idx", "truncated"),
    (TWO, lambda content: None, WHOLE, "a.idx", ""),
    (TWO, WHOLE, lambda content: content[:-2], "a.bin, row 1", "up to byte 12, but the file has 10"),
    (TWO, WHOLE, lambda content: None, "a.bin", "is missing"),
]


@pytest.mark.parametrize(("options", "index", "tokens", "named", "words"), MEGATRON, ids=range(len(MEGATRON)))
def test_a_megatron_pair_that_is_not_read_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], index: Damage, tokens: Damage, named: str, words: str
) -> None:
    write_megatron(tmp_path / "a.bin", [[1, 2, 3], [4, 5], [6]], **options)
    for name, damage in (("a.idx", index), ("a.bin", tokens)):
        content = damage((tmp_path / name).read_bytes())
        (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as raised:
        load_format("megatron", CONFIG).documents(str(min(tmp_path.iterdir())))
    assert str(raised.value).startswith(f"{tmp_path}/{named}: ") and words in str(raised.value)


KINDS = ("list int64", "list uint16", "large_list int32", "fixed int32", "fixed int64")


@pytest.mark.parametrize("kind", KINDS)
def test_saved_datasets_give_the_samples_of_their_rows(tmp_path: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    layout, token = kind.split()
    rows_saved = [each for each in random_documents(120, 5, vocab_size=900) if each]
    if layout == "fixed":
        rows_saved = [[*each, *range(40)][:24] for each in rows_saved]
    value = datasets.Value(token)
    feature = {
        "list": datasets.List(value),
        "large_list": datasets.LargeList(value),
        "fixed": datasets.List(value, length=24),
    }[layout]
    features = datasets.Features({"text": datasets.Value("string"), "input_ids": feature})
    columns = {"text": ["a"] * len(rows_saved), "input_ids": rows_saved}
    saved = tmp_path / "saved/web"
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(saved, num_shards=3)
    datasets.load_from_disk(saved).map(lambda row: {"input_ids": row["input_ids"][:1]})  # leaves a file there
    assert list(saved.glob("cache-*.arrow"))
    write_documents(tmp_path / "plain/web/x.arrow", rows_saved)
    found = loader(replace(CONFIG, data_path=str(tmp_path / "saved"), col_name="input_ids"), plan(6))
    expected = loader(replace(CONFIG, data_path=str(tmp_path / "plain")), plan(6))
    for _ in range(30):
        assert rows(next(found)) == rows(next(expected))


def test_a_resume_with_another_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    np.array([7, 0, SEP, 0] * 60, np.uint16).tofile(tmp_path / "web/x.bin")
    narrow = replace(CONFIG, data_path=str(tmp_path), token_dtype="uint16")
    state = loader(narrow, plan(2)).state_dict()
    with pytest.raises(DataError, match="token_dtype"):
        loader(replace(narrow, token_dtype="uint32"), plan(2), vocab_size=2**32).load_state_dict(state)


def test_a_user_defined_format_needs_no_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/extending.md").read_text()
    [code] = re.findall(r"```python\n# my_formats.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_formats.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_formats", "failing"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    lines = [f"line {number} of this text" for number in range(40)]
    (tmp_path / "data/web").mkdir(parents=True)
    path = tmp_path / "data/web/x.txt"
    path.write_text("".join(f"{line}\n" for line in lines))
    config = replace(CONFIG, data_path=str(tmp_path / "data"), file_type="my_formats:TextLines")
    write_documents(tmp_path / "arrow/web/x.arrow", [list(line.encode()) for line in lines])
    expected, found = loader(replace(CONFIG, data_path=str(tmp_path / "arrow")), plan(3)), loader(config, plan(3))
    for _ in range(10):
        assert rows(next(found)) == rows(next(expected))
    path.write_text(path.read_text()[:-1] + "x")
    with pytest.raises(DataError) as raised:
        next(loader(config, plan(3)))
    assert raised.value.path == path
    (tmp_path / "failing.py").write_text(
        "from my_formats import TextLines\nclass Format(TextLines):\n    def documents(self, path): 1 / 0\n"
    )
    (tmp_path / "other/web").mkdir(parents=True)
    path.rename(tmp_path / "other/web/x.txt")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        loader(replace(config, data_path=str(tmp_path / "other"), file_type="failing:Format"), plan(1))
