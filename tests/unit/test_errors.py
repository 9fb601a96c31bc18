"""The fields of errors, which other tests check instead of sentences."""

from __future__ import annotations

import pickle
from pathlib import Path

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
