"""Settings that a new run takes from prepare.json beside its data: the ends of documents, and the tokenizer.

A resumed run takes what its checkpoint recorded. A prepare.json of an older version lacks the begin-of-text token, and
a run on it has none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import MANIFEST_FILE
from pretraining.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from pretraining.errors import ConfigError, DataError
from pretraining.files import exists, is_file, read_json, read_object
from pretraining.text import list_some

log = logging.getLogger(__name__)

TokenSetting = Literal["sep_token", "bos_token"]
_RECORDS: dict[TokenSetting, str] = {"sep_token": "end_of_text", "bos_token": "begin_of_text"}
_MOST_NAMED = 12


def prepared_token(name: TokenSetting, config: DataConfig, eval_datasets: Iterable[str] = ()) -> int | None:
    """Return and log the token that the prepare.json files record for a setting; None without any.

    Raises:
        ConfigError: the files name different tokens.
        DataError: a prepare.json is unreadable.
    """
    found: dict[str, int] = {}
    for place in _places(config, eval_datasets):
        path = place / MANIFEST_FILE
        try:
            # Only the separator must be known: a damaged file is no reason to stop a run that names its own.
            recorded = read_json(path)["tokenizer"] if name == "sep_token" else _recorded(place)
            token = recorded["end_of_text"] if name == "sep_token" else recorded.get("begin_of_text")
            if token is not None and (not isinstance(token, int) or token < 0):
                raise ValueError(f"{token!r} is not a token id")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"is unreadable ({type(error).__name__}: {error}), but should name a token of all documents. "
                f"Prepare the dataset again, or give --{name}",
                path=path,
            ) from error
        if token is not None:
            found[str(place)] = token
    if len(set(found.values())) > 1:
        named = ", ".join(f"{folder}: {token}" for folder, token in found.items())
        ends = "end" if name == "sep_token" else "begin"
        raise ConfigError(f"datasets {ends} documents with different tokens ({named}): give --{name}")
    token = next(iter(found.values()), None)
    if token is not None:
        folders = list_some(list(found), _MOST_NAMED)
        log.info("%-11s %s, the %s of %s in %s", name, token, _RECORDS[name], MANIFEST_FILE, folders)
    return token


def prepared_tokenizer(
    config: DataConfig, eval_datasets: Iterable[str] = (), most_entries: int | None = None
) -> str | None:
    """Return and log the folder of the tokenizer that encoded the prepared data; None without one.

    Args:
        most_entries: rows of the embedding, if they are known; a larger tokenizer is not taken.
    """
    hashes = {place: _recorded(place).get("sha256") for place in _places(config, eval_datasets)}
    encoded = {place: sha256 for place, sha256 in hashes.items() if sha256 is not None}
    if len(set(encoded.values())) > 1:
        log.warning("datasets were encoded by different tokenizers: %s", list_some(list(encoded), _MOST_NAMED))
        return None
    for place, sha256 in encoded.items():
        root = place.parent
        if not exists(root / TOKENIZER_FILE):
            continue
        problem = ""
        try:
            tokenizer = load_tokenizer(root)
            if tokenizer.sha256 != sha256:
                problem = f"{root / TOKENIZER_FILE} is not the one that encoded {place}"
            elif most_entries is not None and not tokenizer.fits(most_entries):
                problem = f"that of {root} has {tokenizer.vocab_size:,} entries, and the model {most_entries:,}"
        except DataError as error:
            problem = str(error)
        if problem:
            log.warning("no tokenizer is used: %s", problem)
            return None
        log.info("tokenizer   %s, that of %s in %s", root, MANIFEST_FILE, list_some(list(encoded), _MOST_NAMED))
        return str(root)
    return None


def _places(config: DataConfig, eval_datasets: Iterable[str]) -> list[Path]:
    """Return the folders of datasets that may have a prepare.json, those to train on first."""
    places = [Path(folder).expanduser() for folder in eval_datasets]
    if config.data_path is not None:
        root = Path(config.data_path).expanduser()
        prepared = (path.parent for path in sorted(root.glob(f"[!.]*/{MANIFEST_FILE}")))
        places = [*([root / name.strip("/") for name in config.datasets] or prepared), *places]
    return [place.parent if is_file(place) else place for place in places]


def _recorded(place: Path) -> dict[str, Any]:
    tokenizer = read_object(place / MANIFEST_FILE).get("tokenizer")
    return tokenizer if isinstance(tokenizer, dict) else {}
