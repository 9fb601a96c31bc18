"""An S3 server on loopback, and a proxy in front of it that cuts, refuses and delays.

with ObjectStore() as store:
    store.address("runs/a")                        # for --ckpt_mirror_path
    store.fault(b"PUT /bucket", "503", times=4)    # of the requests that contain this, the next four are refused
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow.fs

BUCKET = "bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "not-to-be-seen",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_ANSWER = b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_ANSWERS = {"503": b"503 Slow Down", "403": b"403 Forbidden"}


@contextmanager
def running_store() -> Iterator[ObjectStore]:
    """Run a server, with its credentials in the environment."""
    before = dict(os.environ)
    os.environ.update(CREDENTIALS)
    with ObjectStore() as store:
        yield store
    os.environ.clear()
    os.environ.update(before)


class ObjectStore:
    """A context: the server, with one empty bucket."""

    def __enter__(self) -> ObjectStore:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self._upstream = self._server.get_host_and_port()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._faults: list[list[Any]] = []
        self.met = 0  # faults so far
        self.sent_bytes = 0  # to clients of the proxy
        threading.Thread(target=self._accept, daemon=True).start()
        self.files = pyarrow.fs.S3FileSystem(
            access_key="test",
            secret_key="test",
            scheme="http",
            endpoint_override=f"127.0.0.1:{self._upstream[1]}",
            allow_bucket_creation=True,
            request_timeout=60,
        )
        self.files.create_dir(BUCKET)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._server.stop()

    def address(self, path: str) -> str:
        """The address of a folder, through the proxy."""
        endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        return f"s3://{BUCKET}/{path}?scheme=http&endpoint_override={endpoint}"

    def fault(self, pattern: bytes, action: str, times: int) -> None:
        """Spoil the next requests that contain a pattern: "503", "403", "cut" (in the middle), "away", "slow"."""
        self._faults.append([pattern, action, times])

    def heal(self) -> None:
        """Spoil nothing from now on."""
        self._faults.clear()

    def upload(self, folder: Path, path: str) -> str:
        """Copy a folder of a disk, hidden files too, but no indices; return its address."""
        for file in folder.rglob("*"):
            if file.is_file() and ".index" not in file.parts:
                self.put(f"{path}/{file.relative_to(folder).as_posix()}", file.read_bytes())
        return self.address(path)

    def put(self, name: str, content: bytes) -> None:
        """Write an object."""
        with self.files.open_output_stream(f"{BUCKET}/{name}") as stream:
            stream.write(content)

    def names(self, path: str) -> set[str]:
        """Every object in a folder."""
        selector = pyarrow.fs.FileSelector(f"{BUCKET}/{path}", recursive=True, allow_not_found=True)
        found = self.files.get_file_info(selector)
        return {each.path.removeprefix(f"{BUCKET}/{path}/") for each in found if each.is_file}

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._upstream)
                for source, target, is_client in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pump, args=(source, target, is_client), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_client: bool) -> None:
        with suppress(OSError), source, target:
            while chunk := source.recv(2**16):
                action = self._action_for(chunk) if is_client else None
                self.sent_bytes += 0 if is_client else len(chunk)
                if action == "slow":
                    time.sleep(0.5)
                    action = None
                if action in _ANSWERS:
                    source.sendall(_ANSWER % _ANSWERS[action])
                    return
                if action == "cut":
                    target.sendall(chunk[: len(chunk) // 2])
                if action is not None:
                    source.shutdown(socket.SHUT_RDWR)
                    target.shutdown(socket.SHUT_RDWR)
                    return
                target.sendall(chunk)

    def _action_for(self, chunk: bytes) -> str | None:
        for fault in self._faults:
            if fault[0] in chunk and fault[2] > 0:
                fault[2] -= 1
                self.met += 1
                return str(fault[1])
        return None
