"""The format of Megatron-LM: tokens in `x.bin`, and the index `x.idx` with their type and their documents.

    x.idx   magic, version, type of tokens, number of sequences, number of document borders
            tokens of each sequence (int32), its first byte in x.bin (int64)
            document borders: sequences before each document, then all (int64)
            of multimodal data: a mode per sequence (int8), which is refused

A document is one sequence or several adjacent ones. Both files belong to the dataset's listing; `x.idx` has no
documents of its own. Source: `megatron/core/datasets/indexed_dataset.py` of Megatron-LM.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from pretraining.config.training import DataConfig
from pretraining.data.storage.token_format import DocumentLayout, as_tokens, beginning_of, read_bytes
from pretraining.errors import DataError
from pretraining.files import Location, exists

MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}
"""Integer types by their code in the index; 6 and 7 are fractions."""
_PLAIN = "To read the tokens alone, give --token_dtype and --sep_token"


class MegatronFormat:
    """Pairs of `x.bin` and `x.idx`. With `--token_dtype`, `.bin` files are read without the index."""

    suffix, ending, identity = ".bin", b"", "megatron"
    companion = ".idx"

    def __init__(self, config: DataConfig) -> None:
        pass

    @staticmethod
    def accepts(path: Location, config: DataConfig) -> bool:
        """Return whether a `.bin` file has an index of this kind, and the settings do not name the type of tokens."""
        beginning = beginning_of(path.with_suffix(MegatronFormat.companion), len(MAGIC))
        return config.token_dtype is None and beginning == MAGIC

    def documents(self, path: str) -> DocumentLayout:
        """Find the documents of a file; see `TokenFormat`. An index has none."""
        index = Path(path).with_suffix(self.companion)
        code, lengths, offsets = _read_index(str(index))
        if path == str(index):
            if not exists(pair := index.with_suffix(self.suffix)):
                raise DataError("is missing, but its index is there: copy it, or remove the index", path=pair)
            none = np.zeros(0, dtype=np.int64)
            return DocumentLayout(none, none, 1, np.zeros(0, dtype=np.uint8))
        content = read_bytes(path)
        kind = np.dtype(f"<{code}")
        ends = offsets + lengths * kind.itemsize
        if len(ends) and int(ends.max()) > len(content):
            row = int(np.argmax(ends > len(content)))
            raise DataError(
                f"its index {index.name} has a document up to byte {int(ends[row]):,}, but the file has "
                f"{len(content):,}: one of the two files is truncated, or from another run",
                path=path,
                row=row,
            )
        tokens = as_tokens(content, kind.itemsize, signed=kind.kind == "i")
        return DocumentLayout(offsets, lengths, kind.itemsize, tokens)


def _read_index(path: str) -> tuple[str, np.ndarray, np.ndarray]:
    """Return the type of tokens, and tokens and first byte of each document.

    Raises:
        DataError: the index is missing or damaged, or of another version.
    """
    content = read_bytes(path)
    if content[: len(MAGIC)].tobytes() != MAGIC or len(content) < _HEADER.size:
        raise DataError(f"no index of Megatron: truncated or damaged. {_PLAIN}", path=path)
    _, version, code, sequences, borders = _HEADER.unpack(content[: _HEADER.size].tobytes())
    if version != 1 or code not in _TYPES:
        raise DataError(
            f"an index of version {version} with type {code} of tokens; only version 1 with integers is read", path=path
        )
    size = _HEADER.size + sequences * 12 + borders * 8
    if len(content) != size:
        raise DataError(
            f"truncated or damaged, or of multimodal data: {sequences:,} sequences and {borders:,} borders take "
            f"{size:,} bytes, but it has {len(content):,}",
            path=path,
        )
    return _TYPES[code], *_documents(
        path, content[_HEADER.size :].tobytes(), sequences, np.dtype(_TYPES[code]).itemsize
    )


def _documents(path: str, content: bytes, sequences: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and first byte of each document, from the three tables of an index."""
    lengths = np.frombuffer(content, "<i4", sequences).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", sequences, 4 * sequences)
    borders = np.frombuffer(content, "<i8", offset=12 * sequences)
    ends = pointers + lengths * width
    if (lengths < 0).any() or (pointers < 0).any() or (pointers % width).any():
        raise DataError("damaged: a sequence has a negative length or place", path=path)
    if not len(borders) or borders[0] != 0 or borders[-1] != sequences or (np.diff(borders) < 0).any():
        raise DataError(
            f"its document borders do not cover its {sequences:,} sequences, as after a merge by an old version: "
            f"write the data again. {_PLAIN}",
            path=path,
        )
    inside = np.ones(sequences, dtype=bool)  # sequences that continue a document
    inside[borders[:-1][np.diff(borders) > 0]] = False
    apart = np.flatnonzero(inside[1:] & (pointers[1:] != ends[:-1]))
    if len(apart):
        raise DataError(f"sequences {apart[0]} and {apart[0] + 1} are of one document, but lie apart", path=path)
    tokens_before = np.concatenate(([0], np.cumsum(lengths)))
    starts = np.append(pointers, 0)[borders[:-1]]  # a document without sequences has no place
    return np.diff(tokens_before[borders]), starts
