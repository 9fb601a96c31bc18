"""Equal documents give equal samples in every format; each format names the faults of its files."""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

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
from pretraining.data.storage.token_format import format_class, load_format
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


def test_datasets_of_several_formats_make_one_run(tmp_path: Path) -> None:
    make_root(tmp_path, web=40)
    write_flat(tmp_path / "code/a.npy", random_documents(40, 1, vocab_size=900))
    config = replace(CONFIG, data_path=str(tmp_path))
    assert [files.file_type for files in list_datasets(config)] == ["npy", "arrow"]
    with loader(config, plan(6)) as made:
        next(made)


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=12), st.sampled_from([1, 3, 1000]))
@example([[]], 1)
@example([[], [], [1]], 1)
def test_the_scan_finds_the_documents_between_separators(documents: list[list[int]], chunk: int) -> None:
    tokens = ended(documents, "<u2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_files, "_TOKENS_AT_ONCE", chunk)
        begins, lengths, _ = find_documents(tokens, SEP)
    pairs = zip(begins.tolist(), lengths.tolist(), strict=True)
    found = [tokens[begin : begin + length].tolist() for begin, length in pairs]
    # Tokens after the last separator are a document too.
    assert found == (documents if documents[-1] else documents[:-1])


def npy_bytes(tokens: Sequence[int]) -> bytes:
    file = BytesIO()
    np.save(file, np.array(tokens, np.uint16))
    return file.getvalue()


WRONG_FILES: dict[str, tuple[str, bytes | np.ndarray | None, Literal["uint16", "uint32"] | None]] = {
    "nothing": ("x.npy", None, None),
    "no array": ("x.npy", b"[1, 2, 3]" * 20, None),
    "an empty file": ("x.npy", b"", None),
    "a cut array": ("x.npy", npy_bytes([1, 2, 3])[:-1], None),
    "more than an array": ("x.npy", npy_bytes([1, 2, 3]) + b"xx", None),
    "objects": ("x.npy", np.array([{}]), None),
    "two dimensions": ("x.npy", np.zeros((2, 3), np.uint16), None),
    "fractions": ("x.npy", np.zeros(3), None),
    "big-endian": ("x.npy", np.zeros(3, ">u2"), None),
    "no header": ("x.bin", bytes(2000), None),
    "no header, short": ("x.bin", bytes(20), None),
    "a header and a type": ("x.bin", header(1, 0), "uint16"),
    "an unknown version": ("x.bin", header(2, 0), None),
    "a header of more": ("x.bin", header(1, 9) + bytes(16), None),
    "a negative header": ("x.bin", header(1, -2), None),
    "half a header": ("x.bin", header(1, 9)[:500], None),
    "half a token": ("x.bin", bytes(2003), "uint16"),
    "no separator": ("x.npy", npy_bytes([7, 3, 7, 7, 3, 1]), None),
}


@pytest.mark.parametrize("wrong", WRONG_FILES)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, wrong: str) -> None:
    name, content, dtype = WRONG_FILES[wrong]
    path = tmp_path / name
    if isinstance(content, np.ndarray):
        np.save(path, content, allow_pickle=True)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        load_format(path.suffix[1:], replace(CONFIG, token_dtype=dtype)).documents(str(path))
    assert raised.value.path == path
    assert ("token_dtype" in raised.value.settings) == (wrong in ("no array", *list(WRONG_FILES)[9:12]))
    assert ("sep_token" in raised.value.settings) == (wrong == "no separator")
    with pytest.raises(ConfigError):  # without a separator
        load_format(path.suffix[1:], replace(CONFIG, sep_token=None))


def test_two_kinds_in_one_dataset_are_refused_and_one_can_be_chosen(tmp_path: Path) -> None:
    write_flat(tmp_path / "web/x.npy", [[1, 2], [3]])
    write_flat(tmp_path / "web/deep/y.bin", [[1]], version=1)
    config = replace(CONFIG, data_path=str(tmp_path))
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


def test_an_existing_run_keeps_reading_megatron_tokens_as_at_its_start(tmp_path: Path) -> None:
    """Such a run has --token_dtype and --sep_token; its files have the fingerprint that they have without an index."""
    write_megatron(tmp_path / "web/a.bin", [[*each, SEP] for each in random_documents(60, vocab_size=900)])
    today = replace(CONFIG, data_path=str(tmp_path), token_dtype="uint16")
    (listing,) = list_datasets(today)
    assert (listing.file_type, listing.paths) == ("bin", ("a.bin",))
    state = loader(today, plan(2)).state_dict()
    (tmp_path / "web/a.idx").unlink()
    loader(today, plan(2)).load_state_dict(state)


def test_an_index_beside_a_single_file_is_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_megatron(tmp_path / f"{name}.bin", random_documents(30, vocab_size=900))
    (listing,) = list_datasets(replace(CONFIG, data_path=str(tmp_path), datasets=("a.bin",), sep_token=None))
    assert (listing.file_type, listing.paths) == ("megatron", ("a.bin", "a.idx"))


WRONG_INDICES: dict[str, tuple[dict[str, Any], str]] = {
    "multimodal": ({"modes": b"\1\2\3"}, "multimodal"),
    "a newer version": ({"version": 2}, "version 2"),
    "fractions": ({"dtype": "<f4"}, "type 7"),
    "fairseq's": ({"magic": b"TNTIDX\0\0"}, "no index of Megatron"),
    "another program's": ({"magic": b"something"}, "no index of Megatron"),
    "more bytes": ({"modes": b"\1\2"}, "truncated or damaged"),
    "borders of a merge": ({"borders": [0, 1, 0, 3]}, "do not cover"),
    "no borders": ({"borders": []}, "do not cover"),
    "a last document left out": ({"borders": [0, 1, 2]}, "do not cover"),
}


@pytest.mark.parametrize("wrong", WRONG_INDICES)
def test_an_index_that_is_not_read_is_refused_by_name(tmp_path: Path, wrong: str) -> None:
    options, message = WRONG_INDICES[wrong]
    write_megatron(tmp_path / "a.bin", [[1, 2, 3], [4, 5], [6]], **options)
    for name in ("a.bin", "a.idx"):
        with pytest.raises(DataError, match=message) as raised:
            load_format("megatron", CONFIG).documents(str(tmp_path / name))
        assert raised.value.path == tmp_path / "a.idx"


def test_damage_of_a_megatron_pair_is_named(tmp_path: Path) -> None:
    path, index = tmp_path / "a.bin", tmp_path / "a.idx"
    read = partial(load_format("megatron", CONFIG).documents, str(path))
    write_megatron(path, [[1, 2, 3], [4, 5], [6]], borders=[0, 2, 3])
    content = index.read_bytes()
    for at, value, message in ((34, -1, "negative"), (46, 3, "negative"), (54, 8, "lie apart")):
        kind = "<l" if at < 46 else "<q"
        index.write_bytes(content[:at] + struct.pack(kind, value) + content[at + struct.calcsize(kind) :])
        with pytest.raises(DataError, match=message):
            read()
    index.write_bytes(content[:20])
    with pytest.raises(DataError, match="truncated"):
        read()
    index.write_bytes(content)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match="up to byte 12, but the file has 10") as raised:
        read()
    assert (raised.value.path, raised.value.row) == (path, 1)
    index.unlink()
    with pytest.raises(DataError) as raised:
        read()
    assert raised.value.path == index
    path.unlink()
    index.write_bytes(content)
    with pytest.raises(DataError, match="is missing") as raised:
        load_format("megatron", CONFIG).documents(str(index))
    assert raised.value.path == path


def test_arrays_with_and_without_a_header_do_not_mix(tmp_path: Path) -> None:
    np.arange(40, dtype="<u2").tofile(tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", np.arange(40, dtype="<u2"))
    with pytest.raises(DataError, match="two datasets"):
        load_format("npy_raw", replace(CONFIG, token_dtype="uint16")).documents(str(tmp_path / "b.npy"))
    with pytest.raises(DataError, match=r"no NumPy header.*--token_dtype"):
        load_format("npy", CONFIG).documents(str(tmp_path / "a.npy"))
    with pytest.raises(ConfigError, match="token_dtype"):
        load_format("npy_raw", CONFIG)


@pytest.mark.parametrize("suffix", ["npy", "bin"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
@pytest.mark.parametrize("vocab_size", [200, 30_000, 250_000])
def test_a_file_without_a_header_names_the_type_that_fits(
    tmp_path: Path, suffix: str, dtype: str, vocab_size: int
) -> None:
    if vocab_size > 2**16 and dtype == "uint16":
        return
    path = tmp_path / f"x.{suffix}"
    np.random.default_rng(1).integers(0, vocab_size, 1001).astype(dtype).tofile(path)
    with pytest.raises(DataError, match=f"--token_dtype={dtype}"):
        load_format(suffix, CONFIG).documents(str(path))
    kind = "npy_raw" if suffix == "npy" else "bin"
    if dtype != "uint64":
        with pytest.raises(DataError, match=f"no whole number of tokens.*--token_dtype={dtype}"):
            load_format(kind, replace(CONFIG, token_dtype="uint64")).documents(str(path))


@pytest.mark.parametrize(("stored", "read"), [("uint16", "uint32"), ("uint32", "uint16")])
def test_a_separator_that_another_type_hides_names_the_type(
    tmp_path: Path, stored: str, read: Literal["uint16", "uint32"]
) -> None:
    np.random.default_rng(1).integers(0, 900, 1000).astype(stored).tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match=rf"no sep_token=70000.*--token_dtype={stored}"):
        load_format("bin", replace(CONFIG, token_dtype=read, sep_token=70_000)).documents(str(tmp_path / "x.bin"))


@pytest.mark.parametrize("name", ["x.arrow", "x.npy", "x.bin"])
def test_a_git_lfs_pointer_is_named_as_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n")
    config = replace(CONFIG, token_dtype="uint16")
    for kind in {"arrow": ["arrow", "arrow_stream"], "npy": ["npy", "npy_raw"], "bin": ["bin"]}[name[2:]]:
        with pytest.raises(DataError, match="git lfs pull") as raised:
            load_format(kind, config).documents(str(path))
        assert raised.value.path == path


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


@pytest.mark.parametrize("file_type", ["no_such_module:Format", "json:NoSuchName", "json:loads", "pathlib:PurePath"])
def test_a_class_that_cannot_be_imported_or_is_no_format_is_named(file_type: str) -> None:
    with pytest.raises(ConfigError, match=f"--file_type={file_type}[: ]"):
        format_class(file_type)


def test_a_failing_user_defined_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = "class Format:\n    suffix, title, ending, identity = '.x', 'x', b'', 'x'\n    def __init__(self, _): pass\n"
    (tmp_path / "failing.py").write_text(f"{head}    def documents(self, path): 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "failing", raising=False)
    (tmp_path / "data/web").mkdir(parents=True)
    (tmp_path / "data/web/a.x").write_text("text")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        loader(replace(CONFIG, data_path=str(tmp_path / "data"), file_type="failing:Format"), plan(1))


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
    monkeypatch.delitem(sys.modules, "my_formats", raising=False)
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
