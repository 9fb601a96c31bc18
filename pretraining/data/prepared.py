"""Settings that a new run takes from prepare.json beside its data: the ends of documents, and the tokenizer.

    prepare.json of each dataset -> `prepared_token`, `prepared_tokenizer` -> settings of the run
    tokenizers of data, weights and --tokenizer_path -> `check_tokenizers`: an error if their ids differ

A resumed run takes what its checkpoint recorded. A prepare.json of an older version lacks the begin-of-text token, and
a run on it has none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import MANIFEST_FILE
from pretraining.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
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
    """Return and log the folder of the tokenizer that encoded the prepared data; None without one, or with several.

    Args:
        most_entries: rows of the embedding, if they are known; a larger tokenizer is not taken.
    """
    if any(_differences(_tokenizers_of_data(config, eval_datasets))):
        return None
    encoded = _encoded(config, eval_datasets)
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
        return str(root.absolute())
    return None


class KnownTokenizer(NamedTuple):
    """A tokenizer of data, weights or a flag.

    Attributes:
        what: words for it.
        tokenizer: None if its file is gone, and only its hash is known.
        remedy: what to do if it differs from that of the data.
    """

    what: str
    sha256: str
    tokenizer: Tokenizer | None
    remedy: str


def check_tokenizers(
    config: DataConfig, eval_datasets: Iterable[str], weights: KnownTokenizer | None, rows: int
) -> None:
    """Compare the known tokenizers of a new run, or of an evaluation, and log what differs but in their ids.

    Args:
        weights: tokenizer of the weights to start from; None if unknown.
        rows: rows of the model's embedding.

    Raises:
        ConfigError: ids differ, and `accept_tokenizer` is false.
        DataError: the tokenizer of --tokenizer_path cannot be read.
    """
    known = [*_tokenizers_of_data(config, eval_datasets), *([] if weights is None else [weights])]
    if config.tokenizer_path is not None:
        given = load_tokenizer(config.tokenizer_path)
        known.append(KnownTokenizer(f"--tokenizer_path={config.tokenizer_path}", given.sha256, given, "Drop the flag"))
    problems = list(_differences(known))
    if problems and not config.accept_tokenizer:
        raise ConfigError([f"{each}, or give --accept_tokenizer=true to use both" for each in problems])
    for problem in problems:
        log.warning("--accept_tokenizer=true: %s", problem.partition(". ")[0])
    for other in [] if problems else known[1:]:
        if known[0].tokenizer and other.tokenizer and other.sha256 != known[0].sha256:
            for remark in other.tokenizer.remarks(known[0].tokenizer, rows):
                log.info("tokenizer   %s and %s: %s", other.what, known[0].what, remark)


def _differences(known: Sequence[KnownTokenizer]) -> Iterator[str]:
    """Yield how the ids of tokenizers differ from those of the first one, and the remedy."""
    by_hash = {each.sha256: each for each in reversed(known)}  # several may name one tokenizer
    different = [each for each in known if by_hash[each.sha256] is each]
    for first, other in [(different[0], each) for each in different[1:]]:
        if first.tokenizer is None or other.tokenizer is None:
            problem: str | None = "their hashes differ, and no file is there to compare"
        else:
            problem = other.tokenizer.difference(first.tokenizer)
        if problem is not None:
            yield f"{other.what} and {first.what} differ: {problem}. {other.remedy}"


def _tokenizers_of_data(config: DataConfig, eval_datasets: Iterable[str]) -> list[KnownTokenizer]:
    """Return the tokenizers of the prepared data, by hash; each is that of the root of one of its datasets."""
    places_of: dict[str, list[Path]] = {}
    for place, sha256 in _encoded(config, eval_datasets).items():
        places_of.setdefault(sha256, []).append(place)
    known = []
    for sha256, places in places_of.items():
        roots = dict.fromkeys(place.parent for place in places)
        found = [each for each in map(_readable_tokenizer, roots) if each is not None and each.sha256 == sha256]
        what = f"the tokenizer of the data in {list_some(places, _MOST_NAMED)}"
        tokenizer = found[0] if found else None
        known.append(KnownTokenizer(what, sha256, tokenizer, "Prepare all datasets with one tokenizer"))
    return known


def _readable_tokenizer(root: Path) -> Tokenizer | None:
    try:
        return load_tokenizer(root) if exists(root / TOKENIZER_FILE) else None
    except DataError:
        return None


def recorded_tokenizer(config: DataConfig) -> str | None:
    """Return the `tokenizer_path` of a run's settings.

    Earlier versions recorded a folder beside the data as typed, which must not become a name on the Hub.
    """
    path, data = config.tokenizer_path, config.data_path
    is_beside = path is not None and data is not None and Path(path).is_relative_to(data)
    return str(Path(path).absolute()) if path is not None and is_beside else path


def _encoded(config: DataConfig, eval_datasets: Iterable[str]) -> dict[Path, str]:
    """Return the hash of the tokenizer that encoded each prepared dataset."""
    hashes = {place: _recorded(place).get("sha256") for place in _places(config, eval_datasets)}
    return {place: sha256 for place, sha256 in hashes.items() if isinstance(sha256, str)}


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
