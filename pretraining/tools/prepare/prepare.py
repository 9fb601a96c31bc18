"""Text, or token ids of other tools, to token files: what `pretrain prepare` does.

    settings --find_input--> units --encode, each on its own--> token files --merge--> dataset

The units of the input are shared out between the processes of the job: process r of n takes units r, r + n, … Each unit
gives token files of its own, in a hidden work folder, and a record of them; after an interruption the same call goes on
where its complete files end. Rank 0 trains the tokenizer. When all records are there it writes prepare.json and renames
the work folder into place: a dataset folder is there completely or not at all, and no file that was not made here is
ever changed or removed.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from pretraining.config.commands import PrepareConfig
from pretraining.config.rules import check_config
from pretraining.data.tokenizer import Tokenizer
from pretraining.errors import DataError
from pretraining.files import flush_folder, output_errors
from pretraining.launch.layout import ProcessLayout
from pretraining.launch.machine import usable_cores
from pretraining.text import count_of
from pretraining.tools.prepare.console import encoding_progress, print_summary
from pretraining.tools.prepare.encode import encode_units
from pretraining.tools.prepare.encoders import choose_encoder
from pretraining.tools.prepare.records import (
    Encoding,
    PrepareSummary,
    UnitRecord,
    WorkFolder,
    counts_of,
    describe_differences,
    read_finished,
    read_summary,
    write_manifest,
)
from pretraining.tools.prepare.team import Team
from pretraining.tools.prepare.token_files import Counts, token_dtype
from pretraining.tools.prepare.units import Input, find_input
from pretraining.tools.prepare.vocabulary import find_tokenizer, keep_tokenizer, trained_tokenizer

log = logging.getLogger(__name__)


def prepare(config: PrepareConfig, layout: ProcessLayout | None = None) -> PrepareSummary:
    """Makes a dataset of token files, and a tokenizer where there is none.

    A call on a finished dataset with the same settings returns at once. In a job of several processes all return when
    the dataset is there; rank 0 prints what is in it.

    Args:
        layout: None = the only process.

    Raises:
        ConfigError: the settings contradict each other.
        DataError: the input or the tokenizer cannot be read, the output cannot be written, the dataset is there
            already with other settings, or another process of the job has failed.
    """
    check_config(config)
    work = WorkFolder(Path(config.output_path).expanduser(), config.dataset_name)
    rank, size = (layout.rank, layout.world_size) if layout else (0, 1)
    threads = config.num_workers or _cores_of_this_process(layout)
    with output_errors(work.root), Team(work.root / f".{config.dataset_name}.team", rank, size) as team:
        if rank == 0:
            return _lead(config, work, team, threads)
        return _follow(config, work, team, threads)


@dataclass
class _Plan:
    """What all processes of the job do."""

    found: Input
    encoding: Encoding
    work: WorkFolder

    def read_records(self) -> list[UnitRecord]:
        return [self.work.read_record(unit, self.encoding) for unit in self.found.units]


def _lead(config: PrepareConfig, work: WorkFolder, team: Team, threads: int) -> PrepareSummary:
    """Rank 0: decides what is to be done, does its share, and puts the whole together."""
    began = time.monotonic()
    found = find_input(config)
    tokenizer = find_tokenizer(config, work.root)
    finished = read_finished(work.dataset, found.settings, tokenizer)
    if finished is not None:
        work.remove()
        team.publish("plan", None)
        log.info("%s is prepared already: nothing to do.", work.dataset)
        print_summary(finished)
        return finished

    if tokenizer is None and found.token_type is None:
        tokenizer = trained_tokenizer(config, found, work)
    work.create()
    if tokenizer is not None:
        tokenizer.save(work.path)
    plan = _Plan(found, _encoding(config, found, tokenizer), work)
    earlier = plan.read_records()
    team.publish("plan", {"settings": found.settings, "encoding": asdict(plan.encoding)})
    _announce(plan, tokenizer, earlier)
    _encode_share(plan, team, threads)
    _wait_for_all(plan, team)
    records = plan.read_records()
    _merge(config, plan, tokenizer, records)
    team.publish("done", None)
    summary = read_summary(work.dataset)
    print_summary(summary, counts_of(records) - counts_of(earlier), time.monotonic() - began)
    return summary


def _follow(config: PrepareConfig, work: WorkFolder, team: Team, threads: int) -> PrepareSummary:
    """Any other process: does its share of what rank 0 has decided."""
    published = team.receive("plan")
    if published is not None:
        found = find_input(config)
        differences = describe_differences(published["settings"], found.settings)
        if differences:
            raise DataError(
                "this process was started with other settings than rank 0, or sees other input (rank 0 has it, this "
                "process asks for it):\n" + "\n".join(differences)
            )
        _encode_share(_Plan(found, Encoding(**published["encoding"]), work), team, threads)
        team.receive("done")
    return read_summary(work.dataset)


def _encode_share(plan: _Plan, team: Team, threads: int) -> None:
    """Encodes the units of this process that are not finished; rank 0 shows its progress."""
    mine = slice(team.rank, None, team.size)
    share, records = plan.found.units[mine], plan.read_records()[mine]
    left = [unit for unit, record in zip(share, records, strict=True) if not record.finished]
    who = f" (rank {team.rank} of {team.size})" if team.size > 1 else ""
    progress = encoding_progress(sum(unit.size for unit in share), counts_of(records).input_bytes, who)
    with progress if team.rank == 0 else nullcontext(lambda counts: None) as shown:

        def report(counts: Counts) -> None:
            shown(counts)
            team.check()

        encode_units(left, plan.encoding, plan.work, threads, report)


def _wait_for_all(plan: _Plan, team: Team) -> None:
    """Waits until the units of other processes are done."""
    left = deque(plan.found.units)

    def all_there() -> bool:
        while left and plan.work.read_record(left[0], plan.encoding).finished:
            left.popleft()
        return not left

    def what() -> str:
        number = left[0].number
        return f"unit {number} of {len(plan.found.units)}, which rank {number % team.size} encodes"

    team.wait(all_there, what)


def _merge(config: PrepareConfig, plan: _Plan, tokenizer: Tokenizer | None, records: Sequence[UnitRecord]) -> None:
    """Makes the dataset of what all units gave."""
    work = plan.work
    if not counts_of(records).documents:
        work.remove()
        named = config.hf_dataset or ", ".join(config.input_path)
        raise DataError(f"{named}: no document has any text, there is nothing to train on")
    names = {file.name for record in records for file in record.files}
    for leftover in {path.name for path in work.files.iterdir()} - names:  # of other settings, or half written
        (work.files / leftover).unlink()
    largest_token = max(record.largest_token for record in records)
    vocab_size = tokenizer.vocab_size if tokenizer else config.vocab_size or largest_token + 1
    write_manifest(work.files, plan.found.settings, tokenizer, vocab_size, plan.encoding.dtype, records)
    if tokenizer is not None:
        keep_tokenizer(work.root, tokenizer)
    work.files.rename(work.dataset)
    flush_folder(work.root)
    work.remove()


def _encoding(config: PrepareConfig, found: Input, tokenizer: Tokenizer | None) -> Encoding:
    """How units become tokens."""
    if tokenizer is not None:
        vocabulary = tokenizer.vocab_size
    elif config.vocab_size is not None:
        vocabulary = config.vocab_size
    else:  # only the data itself tells, so files are as wide as its own type asks for
        vocabulary = 1 << 16 if str(found.token_type) in ("uint8", "int8", "uint16", "int16") else 1 << 32
    return Encoding(
        text_field=config.text_field,
        tokens_per_file=config.tokens_per_file,
        dtype=token_dtype(vocabulary).name,
        tokenizer=None if tokenizer is None else tokenizer.sha256,
        encoder=choose_encoder(tokenizer, config.encoder) if tokenizer and found.token_type is None else None,
        largest_vocabulary=vocabulary,
    )


def _announce(plan: _Plan, tokenizer: Tokenizer | None, earlier: Sequence[UnitRecord]) -> None:
    """Says what begins now."""
    found = plan.found
    verb = "Encoding" if found.token_type is None else "Copying the token ids of"
    using = "" if tokenizer is None else f" with a tokenizer of {tokenizer.vocab_size:,} entries"
    size = f" ({found.size / 1e6:,.1f} MB)" if found.size else ""
    log.info("%s", f"{verb} {count_of(found.settings['input_files'], 'file')}{size} into {plan.work.dataset}{using}.")
    before = counts_of(earlier)
    if before.documents:
        finished = sum(record.finished for record in earlier)
        log.info(
            "Going on with an interrupted call: %s documents are there, %s of %s units are complete.",
            *(f"{count:,}" for count in (before.documents, finished, len(earlier))),
        )


def _cores_of_this_process(layout: ProcessLayout | None) -> int:
    """The cores that it may run on; where these are the whole machine's, it shares them with the others there."""
    cores = usable_cores()
    if layout is not None and cores == os.cpu_count():
        return max(cores // layout.local_world_size, 1)
    return cores
