"""prepare.json: what a prepared dataset folder holds and what it was made from.

It is written last, so a folder that has it is whole. It says nothing of when, where and how fast the dataset was made:
the same input gives the same file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretraining.data.tokenizer import TOKENIZER_FILE, Tokenizer
from pretraining.errors import DataError
from pretraining.tools.prepare.encoding_progress import Counts
from pretraining.tools.prepare.writer import COLUMN, TokenFile, write_aside

MANIFEST_FILE = "prepare.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class PrepareSummary:
    """A prepared dataset.

    Attributes:
        folder: of the dataset, in the root that training takes as data_path; the root has the tokenizer.
        documents, tokens: in the token files.
        empty_documents: of the input, without any text; they are in no file.
        characters, text_bytes: of the text, the bytes in UTF-8; 0 where the input was token ids.
        median_document_tokens: about, within 3 per cent; None where an older release made it.
        files, token_bytes: token files and their size on disk.
        tokenizer: hash of the tokenizer; None where token ids came without one.
        vocab_size: every id is below it.
        end_of_text: token that ends a document; None where there is none.
    """

    folder: Path
    documents: int
    empty_documents: int
    tokens: int
    characters: int
    text_bytes: int
    median_document_tokens: int | None
    files: int
    token_bytes: int
    tokenizer: str | None
    vocab_size: int
    end_of_text: int | None


def write_manifest(
    folder: Path,
    settings: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    vocab_size: int,
    counts: Counts,
    median_document_tokens: int,
    files: Sequence[TokenFile],
    dtype: str,
) -> None:
    """Write prepare.json, aside and renamed.

    Args:
        folder: with the token files in it.
        settings: what the content depends on besides the tokenizer; an equal call has equal ones.
        tokenizer: that encoded it; None where the input was token ids of an unknown one.
        vocab_size: every id is below it.
        counts: of what was read and written.
        median_document_tokens: about.
        files: the token files.
        dtype: of a token.
    """
    content = {
        "format_version": FORMAT_VERSION,
        "settings": dict(settings),
        "tokenizer": {
            "sha256": None if tokenizer is None else tokenizer.sha256,
            "vocab_size": vocab_size,
            "end_of_text": None if tokenizer is None else tokenizer.end_of_text,
        },
        "column": COLUMN,
        "dtype": dtype,
        "documents": counts.documents,
        "empty_documents": counts.empty_documents,
        "tokens": counts.tokens,
        "median_document_tokens": median_document_tokens,
        "characters": counts.characters,
        "text_bytes": counts.text_bytes,
        "files": [asdict(file) for file in files],
    }
    write_aside(folder / MANIFEST_FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_summary(folder: Path) -> PrepareSummary:
    """What a dataset's prepare.json says.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        DataError: it cannot be read.
    """
    return _read(folder)[0]


def read_summaries(root: Path) -> list[PrepareSummary]:
    """All datasets in a root that have a prepare.json, by name.

    Raises:
        DataError: one cannot be read.
    """
    folders = sorted(path.parent for path in root.glob(f"*/{MANIFEST_FILE}"))
    return [read_summary(folder) for folder in folders if not folder.name.startswith(".")]


def read_finished(folder: Path, settings: Mapping[str, Any], tokenizer: Tokenizer | None) -> PrepareSummary | None:
    """Look for a finished dataset made with the same settings. Reads names and sizes only.

    Args:
        folder: of the dataset.
        settings: as for `write_manifest`.
        tokenizer: to be used; None where the root has none and none is given.

    Returns:
        its summary; None where the folder is not there, or empty.

    Raises:
        DataError: the folder holds something else, was made with other settings, or has changed since.
    """
    try:
        summary, made, token_files = _read(folder)
    except (FileNotFoundError, NotADirectoryError):
        if folder.is_dir() and not any(folder.iterdir()):
            return None
        if folder.exists() or folder.is_symlink():
            raise DataError(
                f"{folder} is there already and was not made by `pretrain prepare` (it has no {MANIFEST_FILE}). "
                "It is left as it is: choose another --dataset or --output_path"
            ) from None
        return None
    wanted = dict(settings)
    if summary.tokenizer is not None:
        if not (folder.parent / TOKENIZER_FILE).exists() or tokenizer is None:
            raise DataError(
                f"{folder.parent / TOKENIZER_FILE}, with which {folder} was encoded, is gone. Put it back, or delete "
                f"{folder} to prepare it anew"
            )
        wanted["tokenizer"], made["tokenizer"] = tokenizer.sha256, summary.tokenizer
    differences = describe_differences(made, wanted)
    if differences:
        raise DataError(
            "\n".join(
                [
                    f"{folder} was prepared from other text or with other settings:",
                    *differences,
                    _way_out(folder),
                ]
            )
        )
    for token_file in token_files:
        path = folder / token_file.name
        size = path.stat().st_size if path.exists() else None
        if size != token_file.bytes:
            now = "is gone" if size is None else f"has {size:,} bytes"
            raise DataError(
                f"{path} {now}, {token_file.bytes:,} bytes were written. Delete {folder} and prepare it anew"
            )
    return summary


def describe_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """A line for each setting that is not the same."""
    return [
        f"  {name}: it has {there.get(name)}, asked for is {value}"
        for name, value in here.items()
        if there.get(name) != value
    ]


def _read(folder: Path) -> tuple[PrepareSummary, dict[str, Any], list[TokenFile]]:
    """Summary, settings and files."""
    file = folder / MANIFEST_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format_version"] != FORMAT_VERSION:
            raise DataError(
                f"{file} has format {content['format_version']}, this version reads format {FORMAT_VERSION}. "
                f"{_way_out(folder)}"
            )
        token_files = [TokenFile(**entry) for entry in content["files"]]
        summary = PrepareSummary(
            folder=folder,
            files=len(token_files),
            token_bytes=sum(token_file.bytes for token_file in token_files),
            tokenizer=content["tokenizer"]["sha256"],
            vocab_size=content["tokenizer"]["vocab_size"],
            end_of_text=content["tokenizer"]["end_of_text"],
            median_document_tokens=content.get("median_document_tokens"),
            **{name: content[name] for name in ("documents", "empty_documents", "tokens", "characters", "text_bytes")},
        )
        return summary, dict(content["settings"]), token_files
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read ({type(error).__name__}: {error}). {_way_out(folder)}") from error


def _way_out(folder: Path) -> str:
    return f"Choose another --dataset or --output_path, or delete {folder} to prepare it anew"
