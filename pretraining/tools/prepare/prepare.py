"""Text, or token ids of other tools, to token files: what `pretrain prepare` does.

    settings --find_input--> units --encode, each on its own--> token files --finish--> dataset

Process r of n takes units r, r + n, …, so that no claims are needed. Rank 0 decides the encoding, trains the tokenizer
if there is none, and writes both into a hidden work folder. Each unit gives token files of its own there, and last a
done file; after an interruption the same call goes on with the units that have none. The process that finds all done
writes prepare.json and renames the work folder's files into place: a dataset folder is there completely or not at all,
and no file that was not made here is ever changed or removed.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, overload

from pretraining.config.commands import PrepareConfig
from pretraining.config.rules import check_config
from pretraining.data.storage.dataset_files import MANIFEST_FILE
from pretraining.data.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Tokenizer, load_tokenizer
from pretraining.errors import DataError, PretrainError
from pretraining.files import exists, flush_folder, output_errors, write_atomic, write_flushed
from pretraining.launch.layout import ProcessLayout
from pretraining.launch.machine import usable_cores
from pretraining.text import count_of
from pretraining.tools.prepare.console import Progress, print_summary
from pretraining.tools.prepare.encode import choose_encoder, encode_units
from pretraining.tools.prepare.records import (
    Counts,
    Encoding,
    PrepareSummary,
    UnitRecord,
    WorkFolder,
    manifest,
    read_finished,
    read_object,
    read_summary,
)
from pretraining.tools.prepare.units import Input, Unit, find_input
from pretraining.tools.prepare.vocabulary import find_tokenizer, trained_tokenizer

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
PLAN_SECONDS = 1800.0
"""How long other processes wait for rank 0, which may train a tokenizer for some minutes."""


@overload
def prepare(config: PrepareConfig, layout: None = None) -> PrepareSummary: ...
@overload
def prepare(config: PrepareConfig, layout: ProcessLayout | None) -> PrepareSummary | None: ...
def prepare(config: PrepareConfig, layout: ProcessLayout | None = None) -> PrepareSummary | None:
    """Make a dataset of token files, and a tokenizer if there is none.

    A call on a finished dataset with the same settings returns at once. In a job of several processes each returns when
    its own share is done; the one that finds the shares of all done puts the dataset together and prints what is in it.

    Args:
        layout: None = the only process.

    Returns:
        The dataset; None if other processes finish it.

    Raises:
        ConfigError: the settings contradict each other.
        DataError: the input or the tokenizer cannot be read, the output cannot be written, or the dataset is there
            already with other settings.
    """
    began = time.monotonic()
    check_config(config)
    rank, size = (layout.rank, layout.world_size) if layout else (0, 1)
    work = WorkFolder(Path(config.output_path).expanduser(), config.dataset_name)
    with output_errors(work.root):
        found = find_input(config)
        tokenizer = find_tokenizer(config, work.root)
        finished = read_finished(work.dataset, found.settings, tokenizer)
        if finished is not None:
            if rank == 0:
                work.remove()
                log.info("%s is prepared already: nothing to do.", work.dataset)
                print_summary(finished)
            return finished
        try:
            return _prepare_share(config, found, tokenizer, work, layout, began)
        except PretrainError as error:
            error.rank = rank or None  # the other processes do not know of it
            raise


@dataclass(frozen=True)
class _Plan:
    """What all processes of the job do; the tokenizer is None if ids are taken as they are, without one."""

    tokenizer: Tokenizer | None
    encoding: Encoding


def _prepare_share(
    config: PrepareConfig,
    found: Input,
    tokenizer: Tokenizer | None,
    work: WorkFolder,
    layout: ProcessLayout | None,
    began: float,
) -> PrepareSummary | None:
    """Encode the units of this process that are not done, and finish the dataset if all others are."""
    rank, size = (layout.rank, layout.world_size) if layout else (0, 1)
    share = found.units[rank::size]
    plan = None
    if share:
        plan = _make_plan(config, found, tokenizer, work) if rank == 0 else _await_plan(config, found, tokenizer, work)
    if plan is None:
        return None
    left = [unit for unit in share if work.read_record(unit, plan.encoding) is None]
    if left and exists(work.dataset / MANIFEST_FILE):  # another process has finished it, and removed the work folder
        return None
    total, left_bytes = (sum(unit.size for unit in units) for units in (share, left))
    title = "encoding" if size == 1 else f"encoding (rank {rank} of {size})"
    progress = Progress(title, total, total - left_bytes)
    _announce(found, plan, work, share, left)
    encode_units(left, plan.encoding, work, config.num_workers or _cores_of_this_process(layout), progress.add)
    records = [work.read_record(unit, plan.encoding) for unit in found.units]
    complete = [record for record in records if record is not None]
    if len(complete) < len(records):
        log.info(
            "%s of %s are done: the process that ends last finishes the dataset. If none does, start the same command "
            "again; all processes need the same settings and see the same input and output.",
            f"{len(complete):,}",
            count_of(len(records), "unit"),
        )
        return None
    summary = _finish(config, found, plan, work, complete)
    if summary is not None:
        print_summary(summary, progress.done, time.monotonic() - began)
    return summary


def _make_plan(config: PrepareConfig, found: Input, tokenizer: Tokenizer | None, work: WorkFolder) -> _Plan:
    """Decide the encoding, with a trained tokenizer if there is none, and write both for the other processes."""
    asked = _asked(config, found, tokenizer)
    earlier = _read_plan(config, found, work, asked)
    if tokenizer is None and found.token_type is None:
        if earlier is not None:
            log.info("Going on with the tokenizer that an interrupted call trained.")
        tokenizer = earlier.tokenizer if earlier else trained_tokenizer(config, found, work.root)
    plan = _Plan(tokenizer, _encoding(config, found, tokenizer, config.encoder))
    work.files.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(work.path)
    sha256, encoder = plan.encoding.tokenizer, plan.encoding.encoder
    write_atomic(work.plan, json.dumps({"asked": asked, "tokenizer": sha256, "encoder": encoder}))
    return plan


def _await_plan(config: PrepareConfig, found: Input, tokenizer: Tokenizer | None, work: WorkFolder) -> _Plan | None:
    """Wait for the plan of rank 0; None if the dataset has been finished meanwhile."""
    asked = _asked(config, found, tokenizer)
    deadline = time.monotonic() + PLAN_SECONDS
    while (plan := _read_plan(config, found, work, asked)) is None and not exists(work.dataset / MANIFEST_FILE):
        if time.monotonic() > deadline:
            raise DataError(
                f"rank 0 has begun nothing with these settings and this input within {PLAN_SECONDS:.0f} s. Start all "
                "processes together and with the same flags; all must see the same input and --output_path",
                path=work.plan,
            )
        time.sleep(POLL_SECONDS)
    return plan


def _asked(config: PrepareConfig, found: Input, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return all that a plan depends on, as JSON reads it again."""
    sha256 = None if tokenizer is None else tokenizer.sha256
    return {**found.settings, "vocab_size": config.vocab_size, "tokenizer": sha256, "encoder": config.encoder}


def _read_plan(config: PrepareConfig, found: Input, work: WorkFolder, asked: dict[str, Any]) -> _Plan | None:
    """Read a plan of this input and these settings, of this job or of an interrupted one; None if there is none."""
    content = read_object(work.plan)
    if content.get("asked") != asked:
        return None
    tokenizer = None
    if content["tokenizer"] is not None:
        try:
            tokenizer = load_tokenizer(work.path)
        except DataError:  # a failing disk has spoilt it
            return None
        if tokenizer.sha256 != content["tokenizer"]:
            return None
    return _Plan(tokenizer, _encoding(config, found, tokenizer, content["encoder"]))


def _encoding(config: PrepareConfig, found: Input, tokenizer: Tokenizer | None, encoder: Any) -> Encoding:
    """Return how units become tokens."""
    if tokenizer is not None:
        vocabulary = tokenizer.vocab_size
    elif config.vocab_size is not None:
        vocabulary = config.vocab_size
    else:  # only the data itself tells, so files are as wide as its own type asks for
        vocabulary = 1 << 16 if str(found.token_type) in ("uint8", "int8", "uint16", "int16") else 1 << 32
    return Encoding(
        text_field=config.text_field,
        tokens_per_file=config.tokens_per_file,
        largest_vocabulary=vocabulary,
        tokenizer=None if tokenizer is None else tokenizer.sha256,
        encoder=choose_encoder(tokenizer, encoder) if tokenizer and found.token_type is None else None,
    )


def _announce(found: Input, plan: _Plan, work: WorkFolder, share: Sequence[Unit], left: Sequence[Unit]) -> None:
    """Log what begins now."""
    verb = "Encoding" if found.token_type is None else "Copying the token ids of"
    using = "" if plan.tokenizer is None else f" with a tokenizer of {plan.tokenizer.vocab_size:,} entries"
    size = f" ({found.size / 1e6:,.1f} MB)" if found.size else ""
    log.info("%s", f"{verb} {count_of(found.settings['input_files'], 'file')}{size} into {work.dataset}{using}.")
    if len(left) < len(share):
        log.info("Going on with an interrupted call: %d of %d units are done.", len(share) - len(left), len(share))


def _finish(
    config: PrepareConfig, found: Input, plan: _Plan, work: WorkFolder, records: Sequence[UnitRecord]
) -> PrepareSummary | None:
    """Make the dataset of all units, and put its tokenizer into the root; None if another process was faster.

    Two processes may find all units done at the same moment. Both write the same bytes, each file by a rename of its
    own; the last rename has one winner.
    """
    if not sum((record.counts for record in records), Counts()).documents:
        work.remove()
        named = config.hf_dataset or ", ".join(config.input_path)
        raise DataError("no document has any text, there is nothing to train on", path=named)
    tokenizer, encoding = plan.tokenizer, plan.encoding
    largest_token = max(record.largest_token for record in records)
    vocab_size = tokenizer.vocab_size if tokenizer else config.vocab_size or largest_token + 1
    try:
        kept = {MANIFEST_FILE, *(file.name for record in records for file in record.files)}
        for leftover in {path.name for path in work.files.iterdir()} - kept:  # of other settings, or half written
            (work.files / leftover).unlink(missing_ok=True)
        with TemporaryDirectory(dir=work.path, ignore_cleanup_errors=True) as own:
            content = manifest(found.settings, tokenizer, vocab_size, encoding.dtype.name, records)
            write_flushed(Path(own, MANIFEST_FILE), content)
            Path(own, MANIFEST_FILE).replace(work.files / MANIFEST_FILE)
            if tokenizer is not None and not exists(work.root / TOKENIZER_FILE):
                tokenizer.save(Path(own))
                for name in (TOKENIZER_CONFIG_FILE, TOKENIZER_FILE):
                    Path(own, name).replace(work.root / name)
        if tokenizer is not None and load_tokenizer(work.root).sha256 != tokenizer.sha256:
            raise DataError(
                "another tokenizer has come there meanwhile, and all datasets of a root share one. Start the same "
                "command again to encode with that one, or give another --output_path",
                path=work.root / TOKENIZER_FILE,
            )
        flush_folder(work.files)
        work.files.rename(work.dataset)
    except OSError:
        if exists(work.dataset / MANIFEST_FILE):
            return None
        raise
    flush_folder(work.root)
    work.remove()
    return read_summary(work.dataset)


def _cores_of_this_process(layout: ProcessLayout | None) -> int:
    """Return the cores that it may run on; it shares a whole machine's with the other processes there."""
    cores = usable_cores()
    if layout is not None and cores == os.cpu_count():
        return max(cores // layout.local_world_size, 1)
    return cores
