"""Text, or token ids of other tools, to token files: what `pretrain prepare` does.

    settings --find_input--> units --encode, each on its own--> token files --merge--> dataset

The units of the input are shared out between the processes of the job: process r of n takes units r, r + n, … Each unit
gives token files of its own, in a hidden work folder, and a record of them; a call that was interrupted is gone on with
where its whole files end. Rank 0 trains the tokenizer, and when all records are there, writes prepare.json and renames
the work folder into place: a dataset folder is there whole or not at all, and no file that was not made here is ever
changed or removed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import reduce
from pathlib import Path

from pretraining.config.commands import PrepareConfig
from pretraining.config.rules import check_config
from pretraining.data.threads import usable_cores
from pretraining.data.tokenizer import Tokenizer, load_tokenizer
from pretraining.errors import DataError
from pretraining.launch.layout import ProcessLayout
from pretraining.tools.prepare.encoding_progress import Counts, encoding_progress
from pretraining.tools.prepare.records import (
    PrepareSummary,
    describe_differences,
    read_finished,
    read_summaries,
    read_summary,
    write_manifest,
)
from pretraining.tools.prepare.summary import describe, describe_all, describe_training
from pretraining.tools.prepare.team import Team
from pretraining.tools.prepare.units import Input, find_input
from pretraining.tools.prepare.vocabulary import find_tokenizer, keep_tokenizer, trained_tokenizer
from pretraining.tools.prepare.work import Encoding, UnitRecord, WorkFolder
from pretraining.tools.prepare.workers import encode_units
from pretraining.tools.prepare.writer import output_errors, token_dtype

Show = Callable[[str], None]


def prepare(config: PrepareConfig, show: Show = print, layout: ProcessLayout | None = None) -> PrepareSummary:
    """Make a dataset of token files, and a tokenizer where there is none.

    An identical call on a finished dataset finds it and returns at once. In a job of several processes all of them
    return when the dataset is there.

    Args:
        config: what to read and where to write.
        show: prints a line for the user; only rank 0 does.
        layout: which process of a job this is; None = the only one.

    Returns:
        what is in the dataset.

    Raises:
        ConfigError: the settings contradict each other.
        DataError: the input or the tokenizer cannot be read, the output cannot be written, the dataset is there
            already with other settings, or another process of the job has failed.
    """
    check_config(config)
    root = Path(config.output_path).expanduser()
    rank, size = (layout.rank, layout.world_size) if layout else (0, 1)
    threads = config.num_workers or _cores_of_this_process(layout)
    with output_errors(root), Team(root / f".{config.dataset_name}.team", rank, size) as team:
        if rank == 0:
            return _lead(config, root, team, threads, show)
        return _follow(config, root, team, threads)


def _lead(config: PrepareConfig, root: Path, team: Team, threads: int, show: Show) -> PrepareSummary:
    """Rank 0: decide what is to be done, do its share, and put the whole together."""
    began = time.monotonic()
    folder, work = root / config.dataset_name, WorkFolder(root, config.dataset_name)
    found = find_input(config)
    settings = _settings(config, found)
    tokenizer = find_tokenizer(config, root)
    finished = read_finished(folder, settings, tokenizer)
    if finished is not None:
        work.remove()
        team.publish("plan", None)
        show(f"{folder} is prepared already: nothing to do.")
        _show_dataset(finished, describe(finished), show)
        return finished

    if tokenizer is None and found.token_type is None:
        tokenizer = trained_tokenizer(config, found, root, work, show)
    work.create()
    if tokenizer is not None:
        tokenizer.save(work.path)
    encoding = _encoding(config, found, tokenizer)
    earlier = [work.read_record(unit, encoding.key(unit)) for unit in found.units]
    team.publish("plan", {"settings": settings, "encoding": asdict(encoding)})
    show(_announcement(found, folder, tokenizer, earlier))
    _encode_share(found, encoding, tokenizer, work, team, threads, show)
    records = _wait_for_all(found, encoding, work, team)
    summary = _merge(config, found, encoding, tokenizer, records, work, folder)
    team.publish("done", None)
    done = _counts_of(records) - _counts_of(earlier)
    _show_dataset(summary, describe(summary, done, time.monotonic() - began), show)
    return summary


def _follow(config: PrepareConfig, root: Path, team: Team, threads: int) -> PrepareSummary:
    """Any other process: do its share of what rank 0 has decided."""
    plan = team.receive("plan")
    if plan is not None:
        found = find_input(config)
        differences = describe_differences(plan["settings"], _settings(config, found))
        if differences:
            problem = (
                "this process was started with other settings than rank 0, or sees other input (rank 0 has it, this "
                "process asks for it):"
            )
            raise DataError("\n".join([problem, *differences]))
        work, encoding = WorkFolder(root, config.dataset_name), Encoding(**plan["encoding"])
        tokenizer = None if encoding.tokenizer is None else load_tokenizer(work.path)
        _encode_share(found, encoding, tokenizer, work, team, threads, show=None)
        team.receive("done")
    return read_summary(root / config.dataset_name)


def _encode_share(
    found: Input,
    encoding: Encoding,
    tokenizer: Tokenizer | None,
    work: WorkFolder,
    team: Team,
    threads: int,
    show: Show | None,
) -> None:
    """Encode the units of this process, as far as they are not done; progress is shown where there is a `show`."""
    share = found.units[team.rank :: team.size]
    total_bytes = sum(unit.size for unit in share)
    records = [work.read_record(unit, encoding.key(unit)) for unit in share]
    done_bytes = sum(record.counts.input_bytes for record in records)
    left = [unit for unit, record in zip(share, records, strict=True) if not record.finished]
    who = f" (rank {team.rank} of {team.size})" if team.size > 1 else ""
    progress = encoding_progress(total_bytes, done_bytes, show, who) if show else nullcontext(lambda counts: None)
    with progress as shown:

        def report(counts: Counts) -> None:
            shown(counts)
            team.check()

        encode_units(left, encoding, tokenizer, work, threads, report)


def _wait_for_all(found: Input, encoding: Encoding, work: WorkFolder, team: Team) -> list[UnitRecord]:
    """The records of all units; waits for those of other processes."""
    keys = [encoding.key(unit) for unit in found.units]
    records: list[UnitRecord] = []

    def all_there() -> bool:
        while len(records) < len(keys):
            record = work.read_record(found.units[len(records)], keys[len(records)])
            if not record.finished:
                return False
            records.append(record)
        return True

    def what() -> str:
        return f"unit {len(records)} of {len(keys)}, which rank {len(records) % team.size} encodes"

    team.wait(all_there, what)
    return records


def _merge(
    config: PrepareConfig,
    found: Input,
    encoding: Encoding,
    tokenizer: Tokenizer | None,
    records: list[UnitRecord],
    work: WorkFolder,
    folder: Path,
) -> PrepareSummary:
    """Make the dataset of what all units gave."""
    counts = _counts_of(records)
    if not counts.documents:
        work.remove()
        named = config.hf_dataset or ", ".join(config.input_path)
        raise DataError(f"{named}: no document has any text, there is nothing to train on")
    files = [file for record in records for file in record.files]
    names = {file.name for file in files}
    for leftover in work.files.iterdir():  # of other settings, or half written
        if leftover.name not in names:
            leftover.unlink()
    lengths: dict[int, int] = {}
    for record in records:
        for length, documents in record.lengths.items():
            lengths[length] = lengths.get(length, 0) + documents
    largest_token = max(record.largest_token for record in records)
    vocab_size = tokenizer.vocab_size if tokenizer else config.vocab_size or largest_token + 1
    settings = _settings(config, found)
    write_manifest(work.files, settings, tokenizer, vocab_size, counts, _median(lengths), files, encoding.dtype)
    if tokenizer is not None:
        keep_tokenizer(work.root, tokenizer)
    work.files.rename(folder)
    work.remove()
    summary = read_finished(folder, settings, tokenizer)
    assert summary is not None
    return summary


def _settings(config: PrepareConfig, found: Input) -> dict[str, object]:
    """What the dataset depends on besides the tokenizer."""
    if found.token_type is None:
        return found.settings
    return {**found.settings, "vocab_size": config.vocab_size}  # of text it is the tokenizer's


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
        largest_vocabulary=vocabulary,
        encodes_text=found.token_type is None,
    )


def _announcement(found: Input, folder: Path, tokenizer: Tokenizer | None, earlier: list[UnitRecord]) -> str:
    """What begins now, in a line or two."""
    verb = "Encoding" if found.token_type is None else "Copying the token ids of"
    using = "" if tokenizer is None else f" with a tokenizer of {tokenizer.vocab_size:,} entries"
    size = f" ({found.size / 1e6:,.1f} MB)" if found.size else ""
    line = f"{verb} {found.settings['input_files']:,} files{size} into {folder}{using}."
    before = _counts_of(earlier)
    if not before.documents:
        return line
    finished = sum(record.finished for record in earlier)
    return (
        f"{line}\nGoing on with an interrupted call: {before.documents:,} documents are there, {finished:,} of "
        f"{len(earlier):,} units are complete."
    )


def _show_dataset(summary: PrepareSummary, description: str, show: Show) -> None:
    show(description)
    summaries = read_summaries(summary.folder.parent)
    if len(summaries) > 1:
        show(describe_all(summaries))
    show(describe_training(summary))


def _cores_of_this_process(layout: ProcessLayout | None) -> int:
    """The cores that it may run on; where these are the whole machine's, it shares them with the others there."""
    cores = usable_cores()
    if layout is not None and cores == os.cpu_count():
        return max(cores // layout.local_world_size, 1)
    return cores


def _counts_of(records: list[UnitRecord]) -> Counts:
    return reduce(Counts.__add__, (record.counts for record in records), Counts())


def _median(lengths: dict[int, int]) -> int:
    """The median of document lengths that are given with their five leading bits: the middle of the median's range."""
    documents = sum(lengths.values())
    for length in sorted(lengths):
        documents -= 2 * lengths[length]
        if documents <= 0:
            break
    return length + (1 << max(length.bit_length() - 5, 0)) // 2
