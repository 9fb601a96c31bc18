"""The fields of errors, which other tests check instead of sentences."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from pretraining.errors import ConfigError, DataError


def test_an_error_names_the_place_before_the_problem() -> None:
    error = DataError("no tokens", path="/data/a.arrow", row=3)
    assert (str(error), error.path, error.row) == ("/data/a.arrow, row 3: no tokens", Path("/data/a.arrow"), 3)
    assert str(DataError("empty", path="/data")) == "/data: empty"
    assert (DataError("no data").path, DataError("no data").row) == (None, None)


def test_an_error_of_another_process_keeps_what_it_is_about() -> None:
    error = pickle.loads(pickle.dumps(DataError("no tokens", path="/data/a.arrow", row=3)))
    assert (str(error), error.path, error.row) == ("/data/a.arrow, row 3: no tokens", Path("/data/a.arrow"), 3)


def test_settings_are_the_flags_that_a_message_names() -> None:
    error = ConfigError(["--batch_size=0: at least 1", "--weights=1,2 (see `--datasets`) of /a/b--c"])
    assert error.settings == ("batch_size", "weights", "datasets")
    assert error.problems == ("--batch_size=0: at least 1", "--weights=1,2 (see `--datasets`) of /a/b--c")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("--data_path=s3://KEY:SE/CRET@bucket/run: no", "--data_path=s3://***@bucket/run: no"),
        ("('gs://SECRET@bucket/run')", "('gs://***@bucket/run')"),
        ("https:/me:SECRET@host/x is lost", "https:/***@host/x is lost"),
        ("s3://b/run?secret_key=SECRET&region=x: no", "s3://b/run?***: no"),
        ("s3://b/run?endpoint_override=http://me:SECRET@host", "s3://***@host"),
        ("abfss://box:SECRET@account/run", "abfss://box:***@account/run"),
        ("abfss://box@account/run?sig=SECRET is lost", "abfss://box@account/run?*** is lost"),
        ("file:///home/me@work/run, abfss://box@account/run", "file:///home/me@work/run, abfss://box@account/run"),
        (
            "/home/me@work/a?b=c: s3://bucket/run: lost. Mail me@work",
            "/home/me@work/a?b=c: s3://bucket/run: lost. Mail me@work",
        ),
    ],
)
def test_no_error_shows_the_credentials_of_an_address(given: str, shown: str) -> None:
    error = ConfigError([given, "another"])
    assert error.problems == (shown, "another") and shown in str(error)
    assert str(DataError("is lost", path=given)) == f"{shown}: is lost"
