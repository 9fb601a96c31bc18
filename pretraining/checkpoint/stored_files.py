"""Files of a checkpoint: written with their checksum, and compared with the sizes in its manifest."""

from __future__ import annotations

import io
import os
import zlib
from pathlib import Path
from typing import Any

from pretraining.checkpoint.manifest import FileEntry
from pretraining.errors import CheckpointError
from pretraining.files import exists, is_file, lfs_pointer_hint, read_json


def crc32_text(value: int) -> str:
    """Return a CRC-32 as eight hexadecimal digits."""
    return f"{value:08x}"


class ChecksummedFile(io.FileIO):
    """New file, whose checksum is computed while it is written; keeps an error of the disk, which torch would hide."""

    crc32 = 0
    failure: OSError | None = None

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")

    def write(self, content: Any) -> int:
        """Write all bytes of the content."""
        left = memoryview(content)
        self.crc32 = zlib.crc32(left, self.crc32)
        try:
            while left:
                left = left[os.write(self.fileno(), left) :]
        except OSError as error:
            self.failure = error
            raise
        return len(content)

    def finish(self) -> FileEntry:
        """Flush the file to disk; return its size and checksum."""
        os.fsync(self.fileno())
        return FileEntry(self.tell(), crc32_text(self.crc32))


def read_json_of(path: Path, name: str) -> Any:
    """Read a JSON file of a folder; raise a CheckpointError if it cannot be read."""
    try:
        return read_json(path / name)
    except (OSError, ValueError) as error:
        problem = lfs_pointer_hint(path / name) or f"cannot be read as JSON: {error}"
        raise CheckpointError(problem, path=path / name) from None


def size_fault(path: Path, written: FileEntry) -> str | None:
    """Return a message if a file is missing or has another size, else None."""
    if not is_file(path):
        return f"{path} is no file" if exists(path) else f"{path} is missing"
    size = path.stat().st_size
    if size == written.bytes:
        return None
    hint = lfs_pointer_hint(path)
    return f"{path}: {hint}" if hint else f"{path} has {size:,} bytes in place of {written.bytes:,}"
