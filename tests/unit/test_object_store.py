"""A folder in a store: its objects, and addresses; the store is a folder on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretraining.files import address_problem
from pretraining.object_store import Store, StoreError, StorePath


def test_objects_are_read_whole_in_pieces_and_by_ranges(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/store")
    assert store.sizes() == {} and store.info("a/b").size is None and store.read("a/b") is None
    store.write("a/b", [b"0123", b"456789"])
    assert store.sizes() == {"a/b": 10} and store.info("a/b").size == 10
    assert store.read("a/b") == b"".join(store.read_pieces("a/b")) == b"0123456789"
    opened = store.open("a/b")
    assert opened is not None and store.read_at("a/b", opened[0], 3, 4) == b"3456"
    with pytest.raises(StoreError, match="the answer has 2 of 4 bytes from byte 8 on"):
        store.read_at("a/b", opened[0], 8, 4)
    store.remove("a")
    store.remove("a")
    assert store.sizes() == {}
    assert store.open("a/b") is None and StorePath(f"file://{tmp_path}", "store/a/b").tag() == 0
    with pytest.raises(StoreError):
        list(store.read_pieces("a/b"))


HANGING = """
import socket, sys, threading
from pretraining.launch.program import run_as_program
from pretraining.object_store import Store, exit_without_waiting

server = socket.create_server(("127.0.0.1", 0))
query = f"scheme=http&region=here&endpoint_override=127.0.0.1:{server.getsockname()[1]}"
threading.Thread(target=Store(f"s3://bucket/run?{query}").read, args=("a",), daemon=True).start()
server.accept()  # never answered

def command():
    exit_without_waiting()
    sys.exit(75)

run_as_program(command)
"""


def test_a_process_exits_while_a_store_does_not_answer() -> None:
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    done = subprocess.run([sys.executable, "-c", HANGING], env=environment, timeout=60, check=False)
    assert done.returncode == 75


@pytest.mark.parametrize(
    ("address", "is_refused"),
    [
        ("s3://bucket/run", False),
        ("s3://bucket/run?region=eu-west-1", False),
        ("abfss://container@account.dfs.core.windows.net/run", False),
        ("s3://id:secret@bucket/run", True),
        ("s3://bucket/run?secret_key=x", True),
        ("s3://bucket/run?endpoint_override=http://me:word@host", True),
        ("abfss://container@account.dfs.core.windows.net/run?sig=x", True),
        ("abfss://container:password@account.dfs.core.windows.net/run", True),
    ],
)
def test_an_address_holds_no_credentials(address: str, is_refused: bool) -> None:
    assert (address_problem(address) is not None) == is_refused


@pytest.mark.parametrize("address", ["foo://bucket/x", "s3://bucket/x?color=red", "s3://id:secret@bucket/x"])
def test_an_address_that_cannot_be_used_is_one_error_without_its_secrets(address: str) -> None:
    with pytest.raises(StoreError) as caught:
        Store(address)
    assert "secret" not in str(caught.value)
