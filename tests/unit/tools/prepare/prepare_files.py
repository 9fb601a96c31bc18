"""Small inputs of `prepare` for tests, and what came of them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from pretraining.tools.commands import PrepareConfig
from pretraining.tools.prepare.documents import Document
from pretraining.tools.prepare.inputs import InputFile, list_files
from pretraining.tools.prepare.prepare import prepare


def one(path: Path, content: bytes | str) -> InputFile:
    """Writes a file, and lists it."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list_files([str(path)], ())[0]


def texts_of(documents: Iterable[Document]) -> list[str]:
    """Return the texts of documents."""
    texts = [""]
    for document in documents:
        assert isinstance(document.content, str)
        texts[-1] += document.content
        texts += [""] * document.is_last_part
    assert texts.pop() == "", "the last part ends a document"
    return texts


def json_lines(texts: Iterable[str], field: str = "text") -> bytes:
    return "".join(json.dumps({field: text}) + "\n" for text in texts).encode()


def packed(name: str, content: bytes) -> bytes:
    """Bytes as a file of that name holds them."""
    if name.endswith(".gz"):
        return gzip.compress(content)
    return pa.Codec("zstd").compress(content, asbytes=True) if name.endswith(".zst") else content


def rows(folder: Path) -> list[list[int]]:
    """All documents of a dataset."""
    return [
        row
        for path in sorted(folder.glob("*.arrow"))
        for row in pa.ipc.open_file(str(path)).read_all()["tokens"].to_pylist()
    ]


def contents(root: str | Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(root)): path.read_bytes() for path in Path(root).rglob("*") if path.is_file()}


def made_elsewhere(config: PrepareConfig, **changes: Any) -> dict[str, bytes]:
    """What an uninterrupted call of one process makes in another place."""
    there = f"{config.output_path}_elsewhere"
    prepare(replace(config, output_path=there, **changes))
    return contents(there)
