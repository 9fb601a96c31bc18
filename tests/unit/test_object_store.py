"""A folder in a store: its objects, and addresses; the store is a folder on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from object_store import ObjectStore, running_store

from pretraining.config.read import load_train_config
from pretraining.errors import PathError
from pretraining.files import address_problem, is_file, is_folder, parse_address
from pretraining.object_store import Store, StoreError, StorePath, location, text_of


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


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with running_store() as store:
        yield store


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1).filter(
    lambda name: name not in (".", "..")
)


@given(st.lists(NAMES, min_size=1, max_size=3), st.sampled_from(["", "?region=here"]))
@example(["lr#1"], "")
@example(["a?b=c"], "")
@example(["what?"], "?region=here")
@example(["a%2Fb", "a b", "50%"], "")
def test_every_character_of_a_name_stands_for_itself(names: list[str], query: str) -> None:
    place = StorePath("gs://bucket", "/".join(names), query[1:])
    for given_place in (place, StorePath("gs://bucket", "") / names[0]):
        again = location(text_of(given_place))
        assert isinstance(again, StorePath)
        assert (again.key, again.query) == (given_place.key, given_place.query)
    on_disk = Path("/", *names)
    assert location(parse_address(f"file://{str(on_disk).replace('%', '%25')}").text) == on_disk


@pytest.mark.parametrize(
    ("address", "place", "query"),
    [
        ("s3://bucket/run#1", "s3://bucket/run#1", ""),
        ("S3://bucket//a//b.arrow/", "s3://bucket/a/b.arrow", ""),
        ("s3://bucket/x#y?region=here", "s3://bucket/x#y", "region=here"),
        ("s3://bucket/really?", "s3://bucket/really", ""),
        ("file:///data/lr#1", "file:///data/lr#1", ""),
        ("file:///data/a%20b", "file:///data/a b", ""),
    ],
)
def test_an_address_has_one_reading(address: str, place: str, query: str) -> None:
    parsed = parse_address(address)
    assert (parsed.place, parsed.query) == (place, query) and parse_address(parsed.text) == parsed


@pytest.mark.parametrize("address", ["file://data/x", "s3://bucket/a/../b"])
def test_an_address_that_would_mean_something_else_is_refused(address: str) -> None:
    assert address_problem(address) is not None


def test_the_endpoint_of_the_environment_is_part_of_the_place_unless_the_address_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = StorePath(*parse_address("s3://bucket/x"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert parse_address("s3://bucket/x").query == "endpoint_override=http://minio:9000"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://r2.example")
    of_service = StorePath(*parse_address("s3://bucket/x"))
    assert of_service.query == "endpoint_override=https://r2.example" and of_service.identity != plain.identity
    assert parse_address("s3://bucket/x?endpoint_override=own:1").query == "endpoint_override=own:1"
    assert parse_address("gs://bucket/x").query == "" and parse_address("file:///x").query == ""
    given_paths = ["ckpt_mirror_path=s3://bucket/runs/mine", "data_path=s3://bucket/x", "ckpt_save_path=run"]
    config = load_train_config(given_paths)  # it stands in config.yaml
    assert config.data.data_path == "s3://bucket/x?endpoint_override=https://r2.example"
    assert config.checkpoint.ckpt_mirror_path == "s3://bucket/runs/mine?endpoint_override=https://r2.example"


def test_a_store_is_reached_at_the_endpoint_of_the_environment(
    server: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put("here/a?b #1%2F", b"content")
    endpoint = parse_address(server.address("")).parameters["endpoint_override"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{endpoint}")
    bucket = parse_address(server.address("")).bucket
    place = location(f"{bucket}/here") / "a?b #1%2F"
    assert isinstance(place, StorePath) and place.ask(lambda store: store.read(place.key)) == b"content"


def test_a_missing_bucket_is_named_and_an_empty_object_may_stand_for_a_folder(server: ObjectStore) -> None:
    address = parse_address(server.address("tokens"))
    with pytest.raises(PathError, match="there is no such bucket"):
        Store(address._replace(bucket="s3://nobucket").text).sizes()
    server.put("marked/web", b"")
    server.put("marked/web/1.arrow", b"x")
    folder = location(server.address("marked/web"))
    assert is_folder(folder) and not is_file(folder)
