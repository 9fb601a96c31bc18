"""Settings that a new run takes from the prepare.json of its data: the ends of documents, and the tokenizer.

    prepare.json of each dataset -> `prepared_token`
    tokenizers of data, weights and --tokenizer_path -> `choose_tokenizer`: one of them; an error if their ids differ

A resumed run takes what its checkpoint recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pretraining.config.run_recipe import find_path, last_start
from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import MANIFEST_FILE, prepared_folders
from pretraining.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from pretraining.errors import ConfigError, DataError
from pretraining.files import Location, as_local, exists, is_address, is_file, read_json, read_object
from pretraining.object_store import location, text_of
from pretraining.text import list_some

log = logging.getLogger(__name__)

TokenSetting = Literal["sep_token", "bos_token"]
_RECORDS: dict[TokenSetting, str] = {"sep_token": "end_of_text", "bos_token": "begin_of_text"}
_MOST_NAMED = 12
KEPT_TOKENIZER = "tokenizer"
"""Folder of a run with its tokenizer, if that is in an object store."""


def prepared_token(name: TokenSetting, config: DataConfig, eval_datasets: Iterable[str] = ()) -> int | None:
    """Return and log the token that the prepare.json files record for a setting; None if they record none.

    Raises:
        ConfigError: the files name different tokens.
        DataError: a prepare.json is unreadable.
    """
    token_of: dict[str, int] = {}
    for place in _places(config, eval_datasets):
        path = place / MANIFEST_FILE
        try:
            token = read_json(path)["tokenizer"][_RECORDS[name]]
            if token is not None and (not isinstance(token, int) or token < 0):
                raise ValueError(f"{token!r} is not a token id")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"is unreadable ({type(error).__name__}: {error}), but should name a token of all documents. "
                f"Prepare the dataset again, or give --{name}",
                path=path,
            ) from error
        if token is not None:
            token_of[str(place)] = token
    if len(set(token_of.values())) > 1:
        named = ", ".join(f"{folder}: {token}" for folder, token in token_of.items())
        ends = "end" if name == "sep_token" else "begin"
        raise ConfigError(f"datasets {ends} documents with different tokens ({named}): give --{name}")
    token = next(iter(token_of.values()), None)
    if token is not None:
        folders = list_some(list(token_of), _MOST_NAMED)
        log.info("%-11s %s, the %s of %s in %s", name, token, _RECORDS[name], MANIFEST_FILE, folders)
    return token


class KnownTokenizer(NamedTuple):
    """A tokenizer of data, weights or a flag.

    Attributes:
        what: words for it.
        tokenizer: None if only its hash is known.
        remedy: what to do if it differs from that of the data.
        problem: why the tokenizer cannot be read, if it should be there.
    """

    what: str
    path: Location
    sha256: str
    tokenizer: Tokenizer | None
    remedy: str
    problem: str = ""


def choose_tokenizer(
    config: DataConfig, eval_datasets: Iterable[str], weights: KnownTokenizer | None = None
) -> str | None:
    """Compare the tokenizers of data, weights and --tokenizer_path; return the path of the one to use, and log it.

    It is the one given, else that of the prepared data, else that of the weights; None if there is none.

    Args:
        weights: tokenizer of the weights to start from; None if unknown.

    Raises:
        ConfigError: token ids differ, and `accept_tokenizer` is false.
        DataError: the tokenizer of --tokenizer_path cannot be read.
    """
    prepared, given = _tokenizers_of_data(config, eval_datasets), config.tokenizer_path
    known = prepared if weights is None else [*prepared, weights]
    if given is not None:
        tokenizer = load_tokenizer(given)
        what = f"that of --tokenizer_path={given}"
        known = [*known, KnownTokenizer(what, location(given), tokenizer.sha256, tokenizer, "Drop the flag")]
    differences = list(_compare(known))
    if differences and not config.accept_tokenizer:
        flag = "or accept it: --accept_tokenizer=true"
        raise ConfigError([f"{difference}. {other.remedy}, {flag}" for other, difference in differences])
    for _, difference in differences:
        log.warning("accepted: %s", difference)
    if given is not None or any(other in prepared for other, _ in differences):
        return given
    for candidate in known:
        if candidate.problem:
            log.warning("no tokenizer is used: %s", candidate.problem)
            return None
        if candidate.tokenizer is not None:
            log.info("tokenizer   %s, %s", candidate.path, candidate.what)
            return as_local(text_of(candidate.path))
    return None


def check_rows(config: DataConfig, rows: int) -> None:
    """Check that a model with this many rows has one for each token of the tokenizer's own vocabulary.

    Tokens that were added to the vocabulary are a log line.

    Raises:
        ConfigError: a token has no row, and `accept_tokenizer` is false.
        DataError: the tokenizer cannot be read.
    """
    tokenizer = None if config.tokenizer_path is None else load_tokenizer(config.tokenizer_path)
    if tokenizer is None or tokenizer.vocab_size <= rows:
        return
    size, fits = tokenizer.vocab_size, tokenizer.fits(rows)
    problem = f"the tokenizer of {config.tokenizer_path} has {size} entries, but the model has {rows} rows"
    if not fits and not config.accept_tokenizer:
        raise ConfigError(
            f"{problem}: the first text with a token beyond them would stop the run. Train with --vocab_size={size} or "
            "more, or accept it: --accept_tokenizer=true"
        )
    (log.info if fits else log.warning)("%s: text with a token beyond them stops the run", problem)


def _compare(known: Sequence[KnownTokenizer]) -> Iterator[tuple[KnownTokenizer, str]]:
    """Yield each tokenizer whose ids differ from the ids of the first one, with the difference."""
    by_hash = {tokenizer.sha256: tokenizer for tokenizer in reversed(known)}  # several may name one tokenizer
    different = [tokenizer for tokenizer in known if by_hash[tokenizer.sha256] is tokenizer]
    for first, other in ((different[0], other) for other in different[1:]):
        if first.tokenizer is None or other.tokenizer is None:
            problem: str | None = f"their hashes differ, and {first.problem or other.problem or 'a file is missing'}"
        else:
            problem = other.tokenizer.difference(first.tokenizer)
        if problem is not None:
            yield other, f"tokenizers differ, {other.what} and {first.what}: {problem}"


def _tokenizers_of_data(config: DataConfig, eval_datasets: Iterable[str]) -> list[KnownTokenizer]:
    """Return the tokenizers that encoded the prepared data, by hash, as they are in the roots of the datasets."""
    places_of: dict[str, list[Location]] = {}
    for place in _places(config, eval_datasets):
        recorded = read_object(place / MANIFEST_FILE).get("tokenizer")
        if isinstance(recorded, dict) and isinstance(sha256 := recorded.get("sha256"), str):
            places_of.setdefault(sha256, []).append(place)
    known = []
    for sha256, places in places_of.items():
        root = next((place.parent for place in places if exists(place.parent / TOKENIZER_FILE)), None)
        what = f"that of {MANIFEST_FILE} in {list_some(places, _MOST_NAMED)}"
        remedy, tokenizer, problem = "Prepare all datasets with one tokenizer", None, ""
        try:
            tokenizer = None if root is None else load_tokenizer(root)
            if root is not None and tokenizer is not None and tokenizer.sha256 != sha256:
                problem, tokenizer = f"{root / TOKENIZER_FILE} is not the one that encoded {places[0]}", None
        except DataError as error:
            problem = str(error)
        known.append(KnownTokenizer(what, root or Path(), sha256, tokenizer, remedy, problem))
    return known


def recorded_tokenizer(config: DataConfig, run: Path | None = None) -> str | None:
    """Return the `tokenizer_path` of a run's settings, found from here or from where the run was started last.

    If it is in an object store, it is the copy in the run's folder.
    """
    path = config.tokenizer_path
    if path is None or run is None:
        return path
    found = find_path(path, last_start(run).working_folder)
    is_elsewhere = found is None or is_address(found) or not exists(Path(found))
    if is_elsewhere and exists(run / KEPT_TOKENIZER / TOKENIZER_FILE):
        return str((run / KEPT_TOKENIZER).absolute())
    return found or path


def keep_tokenizer(config: DataConfig, run: Path) -> None:
    """Keep the tokenizer in the run's folder if it is in an object store, so that later commands need no store."""
    if config.tokenizer_path is not None and is_address(config.tokenizer_path):
        (run / KEPT_TOKENIZER).mkdir(exist_ok=True)
        load_tokenizer(config.tokenizer_path).save(run / KEPT_TOKENIZER)


def _places(config: DataConfig, eval_datasets: Iterable[str]) -> list[Location]:
    """Return the folders of datasets that may have a prepare.json, those to train on first."""
    places = [location(folder) for folder in eval_datasets]
    if config.data_path is not None:
        root = location(config.data_path)
        names = [name.strip("/") for name in config.datasets]
        places = [*([root / name for name in names] or prepared_folders(root)), *places]
    return [place.parent if is_file(place) else place for place in places]
