"""prepare.json: what a prepared dataset folder holds and what it was made from.

It is written last, so a folder that has it is whole. It says nothing of when, where and how fast the dataset was made:
the same input gives the same file.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretraining.data.prepare_progress import Encoded
from pretraining.data.token_writer import COLUMN, TokenFile
from pretraining.data.tokenizer import TOKENIZER_FILE, Tokenizer
from pretraining.errors import DataError

MANIFEST_FILE = "prepare.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class PrepareSummary:
    """A prepared dataset.

    Attributes:
        folder: of the dataset, in the root that training takes as data_path; the root has the tokenizer.
        documents, tokens: in the token files.
        empty_documents: of the input, without any text; they are in no file.
        characters, text_bytes: of the text, the bytes in UTF-8.
        files, token_bytes: token files and their size on disk.
        vocab_size, end_of_text: of the tokenizer; the end-of-text token is None where it has none.
        seconds: that it took; None where the dataset was there already.
    """

    folder: Path
    documents: int
    empty_documents: int
    tokens: int
    characters: int
    text_bytes: int
    files: int
    token_bytes: int
    vocab_size: int
    end_of_text: int | None
    seconds: float | None

    @property
    def training_flags(self) -> list[str]:
        """The flags that train on this dataset."""
        flags = [f"--data_path={self.folder.parent}", f"--datasets={self.folder.name}"]
        if self.end_of_text is not None:
            flags.append(f"--sep_token={self.end_of_text}")
        return [*flags, f"--tokenizer_path={self.folder.parent}", f"--vocab_size={self.vocab_size}"]

    def describe(self) -> str:
        """The summary that is shown to users, a few lines."""
        empty = f" ({self.empty_documents:,} empty ones left out)" if self.empty_documents else ""
        lines = [
            f"  documents  {self.documents:,}{empty}",
            f"  tokens     {self.tokens:,} ({self.characters / max(self.tokens, 1):.2f} characters a token)",
            f"  text       {self.text_bytes / 1e6:,.1f} MB",
            f"  written    {self.token_bytes / 1e6:,.1f} MB in {self.files:,} files below {self.folder}",
        ]
        if self.seconds is not None:
            seconds = max(self.seconds, 1e-9)
            lines.append(
                f"  time       {self.seconds:,.1f} s ({self.documents / seconds:,.0f} documents/s, "
                f"{self.tokens / seconds:,.0f} tokens/s)"
            )
        if self.end_of_text is None:
            lines.append(
                "  The tokenizer names no end-of-text token: choose a --sep_token, or documents follow each other "
                "without a mark."
            )
        lines.append("Train on it with:")
        lines.append("  " + " ".join(shlex.quote(flag) for flag in self.training_flags))
        return "\n".join(lines)


def write_manifest(
    folder: Path,
    settings: Mapping[str, Any],
    tokenizer: Tokenizer,
    counts: Encoded,
    files: Sequence[TokenFile],
    dtype: str,
) -> None:
    """Write prepare.json, aside and renamed.

    Args:
        folder: with the token files in it.
        settings: what the content depends on besides the tokenizer; an equal call has equal ones.
        tokenizer: that encoded it.
        counts: of what was read and written.
        files: the token files.
        dtype: of a token.
    """
    content = {
        "format_version": FORMAT_VERSION,
        "settings": dict(settings),
        "tokenizer": {
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end_of_text,
        },
        "column": COLUMN,
        "dtype": dtype,
        "documents": counts.documents,
        "empty_documents": counts.empty_documents,
        "tokens": counts.tokens,
        "characters": counts.characters,
        "text_bytes": counts.text_bytes,
        "files": [asdict(file) for file in files],
    }
    aside = folder / f".{MANIFEST_FILE}.tmp"
    with aside.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(folder / MANIFEST_FILE)


def read_finished(
    folder: Path, settings: Mapping[str, Any], tokenizer: Tokenizer | None, seconds: float | None = None
) -> PrepareSummary | None:
    """Look for a finished dataset made with the same settings. Reads names and sizes only.

    Args:
        folder: of the dataset.
        settings: as for `write_manifest`.
        tokenizer: to be used; None where the root has none and none is given.
        seconds: for the summary.

    Returns:
        its summary; None where the folder is not there, or empty.

    Raises:
        DataError: the folder holds something else, was made with other settings, or has changed since.
    """
    file = folder / MANIFEST_FILE
    start_over = f"Choose another --dataset or --output_path, or delete {folder} to prepare it anew"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format_version"] != FORMAT_VERSION:
            raise DataError(
                f"{file} has format {content['format_version']}, this version reads format {FORMAT_VERSION}. "
                f"{start_over}"
            )
        made = {**content["settings"], "tokenizer": content["tokenizer"]["sha256"]}
        token_files = [TokenFile(**entry) for entry in content["files"]]
        summary = PrepareSummary(
            folder=folder,
            files=len(token_files),
            token_bytes=sum(token_file.bytes for token_file in token_files),
            seconds=seconds,
            vocab_size=content["tokenizer"]["vocab_size"],
            end_of_text=content["tokenizer"]["end_of_text"],
            **{name: content[name] for name in ("documents", "empty_documents", "tokens", "characters", "text_bytes")},
        )
    except (FileNotFoundError, NotADirectoryError):
        if folder.is_dir() and not any(folder.iterdir()):
            return None
        if folder.exists() or folder.is_symlink():
            raise DataError(
                f"{folder} is there already and was not made by `pretrain prepare` (it has no {MANIFEST_FILE}). "
                "It is left as it is: choose another --dataset or --output_path"
            ) from None
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read ({type(error).__name__}: {error}). {start_over}") from error

    if not (folder.parent / TOKENIZER_FILE).exists() or tokenizer is None:
        raise DataError(
            f"{folder.parent / TOKENIZER_FILE}, with which {folder} was encoded, is gone. Put it back, or delete "
            f"{folder} to prepare it anew"
        )
    wanted = {**settings, "tokenizer": tokenizer.sha256}
    differences = [
        f"  {name}: it has {made.get(name)}, asked for is {value}"
        for name, value in wanted.items()
        if made.get(name) != value
    ]
    if differences:
        raise DataError(
            "\n".join([f"{folder} was prepared from other text or with other settings:", *differences, start_over])
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
