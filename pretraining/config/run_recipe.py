"""A run's config.yaml: the record of its last start, and a recipe that continues the run in this folder.

    start     settings, under a comment with the places of this start (`comment_of_start`)
    recipe    `continue_run`: what the recorded settings mean for another start

A run is its folder, wherever that is now. Settings of one start are recorded, but not repeated.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pretraining.config.assignments import Reader, Source
from pretraining.config.recipe_files import RUN_CONFIG_FILE
from pretraining.config.training import TrainConfig
from pretraining.errors import PretrainError
from pretraining.files import exists, is_address, is_local, parse_json, read_file, real_path

log = logging.getLogger(__name__)

_COMMENT = "# Last start: "
_ONE_START = frozenset({"run_steps", "dry_run", "use_profiler", "profile_steps", "profile_interval"})
_LOADED = frozenset({"ckpt_load_path", "weights_only"})
_REQUEST, _TOKENIZER = "resume_from_checkpoint", "tokenizer_path"
_NEEDED = ("data_path", "eval_datasets")
"""Paths that every start reads; others are outputs, or may be names."""


class LastStart(NamedTuple):
    """Real path of the run and working folder of the start that wrote a config.yaml; None = unknown."""

    folder: Path | None = None
    working_folder: Path | None = None


def comment_of_start(run: Path) -> str:
    """Return the line above the settings in config.yaml."""
    return f"{_COMMENT}{json.dumps([str(real_path(run)), str(Path.cwd())])}\n"


def last_start(run: Path) -> LastStart:
    """Return the places of the last start of the run in a folder."""
    with suppress(OSError, ValueError, TypeError):
        first = read_file(run / RUN_CONFIG_FILE).partition(b"\n")[0].decode()
        return LastStart(*map(Path, parse_json(first.partition(_COMMENT)[2])))
    return LastStart()


def continue_run(reader: Reader[TrainConfig], recipe: Source) -> None:
    """Change the settings that a run's config.yaml gives to what they mean for another start; log new places.

    The run is in the folder of the file. Settings of later recipes and flags stay, and other sources change nothing.
    """
    folder = recipe.run
    if folder is None:
        return
    recorded = {name for name, given in reader.chosen.items() if given.source == recipe}
    if "ckpt_save_path" in recorded:
        reader.values["ckpt_save_path"] = str(folder)
    request = reader.values.get(_REQUEST)
    if request is not None and "ckpt_save_path" not in recorded and not _is_of_another_run(request, folder):
        _forget(reader, recorded & {_REQUEST})
    _forget(reader, recorded & (_ONE_START | _replaced_by_given(reader, recorded)))
    names, there = [name for name in reader.chosen if name in recorded], last_start(folder).working_folder
    _find_paths(reader, names, recipe.name, there)


def _forget(reader: Reader[TrainConfig], names: Iterable[str]) -> None:
    for name in names:
        reader.values.pop(name, None), reader.chosen.pop(name, None)


def _is_of_another_run(request: str, folder: Path) -> bool:
    """Return whether a request is a path out of the run's folder, not a step or a name of its own checkpoint."""
    return "/" in request and not real_path(Path(request)).is_relative_to(folder)


def _replaced_by_given(reader: Reader[TrainConfig], recorded: set[str]) -> frozenset[str]:
    """Return the settings of where to start that the user has replaced by another of them."""
    given = {
        name: value for name, value in reader.values.items() if name not in recorded and value not in (None, False)
    }
    if given.get("init_from") == "scratch" or "eval_only" in given:
        return _LOADED | {_REQUEST}
    is_scratch = reader.values.get("init_from") == "scratch"
    replaced = frozenset({"init_from"}) if is_scratch and given.keys() & {_REQUEST, "ckpt_load_path"} else frozenset()
    if _REQUEST in given:
        return replaced | _LOADED
    return replaced | {_REQUEST} if "ckpt_load_path" in given else replaced


def _find_paths(reader: Reader[TrainConfig], names: Iterable[str], recipe: str, there: Path | None) -> None:
    """Find relative paths from the working folder of the last start, if they are not found from this one."""
    has_data = not reader.values.get("use_dummy_dataset")
    for name in names:
        value = reader.values[name]
        if not reader.settings[name].is_path or not value:
            continue
        paths = value if isinstance(value, tuple) else (value,)
        places = [find_path(path, there) for path in paths]
        if has_data and name == _TOKENIZER and is_local(value) and not exists(Path(places[0] or value)):
            _forget(reader, [name])  # the start finds it again, in the data
            continue
        if has_data and None in places and name in _NEEDED:
            text, here = paths[places.index(None)], Path.cwd()
            searched = f"{here}, nor in {there}, the working folder of the last start" if there else here
            reader.problems.append(f"{recipe}: {name}: {text} is not in {searched}: give --{name}")
        texts = tuple(new or path for path, new in zip(paths, places, strict=True))
        if texts != paths:
            log.info("%-11s %s, found from the working folder of the last start", name, ",".join(texts))
            reader.values[name] = texts if isinstance(value, tuple) else texts[0]


def find_path(path: str, there: Path | None) -> str | None:
    """Return a path as it is found from here or there; None = not found. Absolute ones are not looked for."""
    if is_address(path) or Path(path).is_absolute():
        return path
    for place in (path, str(there / path) if there else path):
        with suppress(PretrainError):  # another user's folder
            if exists(Path(place)):
                return place
    return None
