"""Small inputs of `prepare` for tests, and what came of them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pretraining.launch.layout import ProcessLayout
from pretraining.tools.command_settings import PrepareConfig
from pretraining.tools.prepare.documents import Document
from pretraining.tools.prepare.formats import recognise
from pretraining.tools.prepare.packed_files import InputFile
from pretraining.tools.prepare.prepare import prepare
from pretraining.tools.prepare.token_files import TokenWriter
from pretraining.tools.prepare.units import Part, read_part


def prepare_config(root: Path, inputs: str = "in.jsonl", **changes: Any) -> PrepareConfig:
    """Return a call that reads a file or a folder of a root and writes into its folder `out`."""
    return PrepareConfig(**{"input_path": (str(root / inputs),), "output_path": str(root / "out"), **changes})


def one(path: Path, content: bytes | str) -> InputFile:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return recognise(path, path.name, path.stat().st_size)


def read(file: InputFile, field: str = "text", begin: int = 0, end: int | None = None) -> list[Document]:
    """Return the documents of a file, or of a range of it; a bad record is an error."""
    return list(read_part(Part(file, begin, end, file.size), field))


def texts_of(documents: Iterable[Document]) -> list[str]:
    texts = [""]
    for document in documents:
        assert isinstance(document.content, str)
        texts[-1] += document.content
        texts += [""] * document.is_last_part
    assert texts.pop() == "", "the last part ends a document"
    return texts


def json_lines(texts: Iterable[str], field: str = "text") -> bytes:
    return "".join(json.dumps({field: text}) + "\n" for text in texts).encode()


def packed(name: str, content: bytes | str) -> bytes:
    """Return bytes as a file of that name holds them."""
    content = content.encode() if isinstance(content, str) else content
    packers: dict[str, Callable[[bytes], bytes]] = {
        **{".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress},
        **{".zst": by_arrow("zstd"), ".lz4": by_arrow("lz4")},
    }
    return packers.get(Path(name).suffix, bytes)(content)


def by_arrow(codec: str) -> Callable[[bytes], bytes]:
    def pack(content: bytes) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, codec) as stream:
            stream.write(content)
        return bytes(sink.getvalue())

    return pack


def write_table(path: Path, columns: pa.Table | dict[str, Any], rows: int, as_stream: bool = False) -> None:
    """Write a Parquet or an Arrow file with so many rows in a part."""
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path, compression="none", use_dictionary=False, row_group_size=rows)
        return
    with (pa.ipc.new_stream if as_stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def rows(folder: Path) -> list[list[int]]:
    return [
        row
        for path in sorted(folder.glob("*.arrow"))
        for row in pa.ipc.open_file(str(path)).read_all()["tokens"].to_pylist()
    ]


def contents(root: str | Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in Path(root).rglob("*") if path.is_file()}


def made_elsewhere(config: PrepareConfig, **changes: Any) -> dict[str, bytes]:
    """Return the files that an uninterrupted call makes in another place."""
    there = f"{config.output_path}_elsewhere"
    prepare(replace(config, output_path=there, **changes))
    return contents(there)


# prepare in a process that is killed, without any chance to tidy up, at a chosen moment


def prepare_killed(config: PrepareConfig, moment: str, number: int, layout: ProcessLayout | None = None) -> bool:
    """Return whether `prepare` was killed `before` or `after` a file got its name or while `writing`, the nth time."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(config, moment, number, layout))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def _run(config: PrepareConfig, moment: str, number: int, layout: ProcessLayout | None) -> None:
    seen = 0

    def killing(original: Callable[..., Any], when: str) -> Callable[..., Any]:
        def patched(*args: Any) -> Any:
            nonlocal seen
            seen += when == moment or (moment == "after" and when == "before")
            if seen == number and moment in ("before", "writing"):
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args)
            if seen == number and moment == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return patched

    for name in ("replace", "rename"):
        setattr(Path, name, killing(getattr(Path, name), "before"))
    TokenWriter._flush = killing(TokenWriter._flush, "writing")  # type: ignore[method-assign]
    prepare(config, layout)
