"""Files whose checksum is computed while they are written."""

from __future__ import annotations

import io
import os
import zlib
from pathlib import Path
from typing import Any

from pretraining.checkpoint.manifest import FileEntry


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
