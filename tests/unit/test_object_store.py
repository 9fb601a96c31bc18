"""A folder in a store: its objects, and addresses; the store is a folder on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretraining.files import address_problem
from pretraining.object_store import Store, StoreError


def test_objects_are_read_whole_in_pieces_and_by_ranges(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/store")
    assert store.sizes() == {} and store.size("a/b") is None and store.read("a/b") is None
    store.write("a/b", [b"0123", b"456789"])
    assert store.sizes() == {"a/b": 10} and store.size("a/b") == 10
    assert store.read("a/b") == b"".join(store.read_pieces("a/b")) == b"0123456789"
    assert store.read_range("a/b", 3, 4) == b"3456" and store.read_range("a/b", 8, 4) == b"89"
    store.remove("a")
    store.remove("a")
    assert store.sizes() == {}
    with pytest.raises(StoreError):
        store.read_range("a/b", 0, 1)
    with pytest.raises(StoreError):
        list(store.read_pieces("a/b"))


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
