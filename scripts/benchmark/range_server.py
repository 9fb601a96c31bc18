"""A server of files that speaks as much of S3 as reading needs: sizes and tags, ranges, listings.

    python -m scripts.benchmark.range_server /data/benchmark        prints its port; the bucket is the folder

moto, the server of the tests, loads a whole object for each range.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

MOST_KEYS = 1000


class Handler(BaseHTTPRequestHandler):
    """Answers to one client; `/<bucket>/<name>` is a file in the served folder."""

    protocol_version = "HTTP/1.1"
    wbufsize = 2**16
    folder: Path
    names: dict[str, int]

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if "list-type" in query:
            self._list(query)
        else:
            self._answer(with_content=True)

    def _answer(self, *, with_content: bool) -> None:
        name = unquote(urlsplit(self.path).path).split("/", 2)[2:]
        if not any(name):  # the bucket
            self._send(b"")
            return
        try:
            with (self.folder / "/".join(name)).open("rb") as file:
                status = os.fstat(file.fileno())
                begin, end = 0, status.st_size
                asked = self.headers.get("Range")
                if asked is not None:
                    first, last = asked.removeprefix("bytes=").split("-")
                    begin, end = int(first), min(int(last or end) + 1, end)
                self.send_response(206 if asked is not None else 200)
                self.send_header("Content-Length", str(end - begin))
                self.send_header("ETag", f'"{status.st_mtime_ns:x}-{status.st_size:x}"')
                self.send_header("Last-Modified", self.date_time_string(int(status.st_mtime)))
                if asked is not None:
                    self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{status.st_size}")
                self.end_headers()
                self.wfile.flush()
                while with_content and begin < end:
                    begin += os.sendfile(self.connection.fileno(), file.fileno(), begin, end - begin)
        except (FileNotFoundError, IsADirectoryError):
            self._send(b"", 404)

    def _list(self, query: dict[str, str]) -> None:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        most, delimiter = int(query.get("max-keys", MOST_KEYS)), query.get("delimiter", "")
        found: dict[str, int | None] = {}
        for name, size in self.names.items():
            if name.startswith(prefix) and name > after:
                inner = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
                found[prefix + inner[0] + delimiter if inner[1] else name] = None if inner[1] else size
        kept = sorted(found)[:most]
        rows = [
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            if found[name] is None
            else f"<Contents><Key>{escape(name)}</Key><Size>{found[name]}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name in kept
        ]
        more = f"<NextContinuationToken>{escape(kept[-1])}</NextContinuationToken>" if len(found) > most else ""
        is_cut = str(len(found) > most).lower()
        self._send(
            f'<?xml version="1.0"?><ListBucketResult><KeyCount>{len(kept)}</KeyCount><IsTruncated>{is_cut}'
            f"</IsTruncated>{more}{''.join(rows)}</ListBucketResult>".encode()
        )

    def _send(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def main() -> None:
    folder = Path(sys.argv[1])
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    Handler.folder = folder
    Handler.names = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
