"""`pretrain prepare`: conversion of text, or of token ids of other tools, into token files.

    settings --find_input--> units --encode, one by one--> token files --finish--> dataset

Process r of n encodes units r, r + n, … Rank 0 chooses the encoding, trains a tokenizer if there is none, and writes
both to a hidden work folder. Each unit writes its own token files there, then a done file; after an interruption, the
same call continues with the units that have no done file. The process that finds all units done writes prepare.json and
renames the files into place, so a dataset folder is complete or absent. Files of other origin are never changed.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, overload

from pretraining.config.read import check_config
from pretraining.data.storage.dataset_files import MANIFEST_FILE
from pretraining.data.storage.document_records import record_name
from pretraining.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from pretraining.errors import DataError, PretrainError
from pretraining.files import exists, flush_folder, output_errors, read_object, write_atomic, write_flushed
from pretraining.launch.layout import ProcessLayout, resolve_layout
from pretraining.launch.machine import usable_cores
from pretraining.text import count_of
from pretraining.tools.command_settings import PrepareConfig
from pretraining.tools.prepare.chats import time_for, with_template
from pretraining.tools.prepare.console import EncodingProgress, print_summary
from pretraining.tools.prepare.encode import choose_encoder, encode_units
from pretraining.tools.prepare.inputs import warn_of_copies
from pretraining.tools.prepare.records import (
    INPUTS_FILE,
    UNKNOWN_VOCABULARIES,
    Encoding,
    PrepareSummary,
    UnitRecord,
    WorkFolder,
    changed_parts,
    check_input,
    inputs_document,
    manifest,
    read_finished,
    read_summary,
    times_of,
)
from pretraining.tools.prepare.units import Input, Unit, find_input
from pretraining.tools.prepare.vocabulary import find_tokenizer, trained_tokenizer

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
PLAN_SECONDS = 1800.0
"""Time that other processes wait for rank 0, which may train a tokenizer for minutes."""


def prepare_in_job(config: PrepareConfig) -> None:
    """Do this process's share of `prepare`."""
    prepare(config, resolve_layout(os.environ))


@overload
def prepare(config: PrepareConfig, layout: None = None) -> PrepareSummary: ...
@overload
def prepare(config: PrepareConfig, layout: ProcessLayout | None) -> PrepareSummary | None: ...
def prepare(config: PrepareConfig, layout: ProcessLayout | None = None) -> PrepareSummary | None:
    """Make a dataset of token files, and a tokenizer if there is none.

    A call for a finished dataset with the same settings returns at once. In a job, each process returns when its own
    units are done; the process that finds all units done finishes the dataset and prints a summary.

    Args:
        layout: None = the only process.

    Returns:
        The dataset; None if another process finishes it.

    Raises:
        ConfigError: contradictory settings.
        DataError: an input, tokenizer or output that cannot be used, or a dataset that exists with other settings.
    """
    check_config(config)
    rank, size = (layout.rank, layout.world_size) if layout else (0, 1)
    work = WorkFolder(Path(config.output_path).expanduser(), config.dataset_name)
    with output_errors(work.root, name_flag="--dataset or --output_path"):
        corpus = find_input(config)
        tokenizer = find_tokenizer(config, work.root)
        corpus = with_template(corpus, tokenizer)
        finished = read_finished(work.dataset, corpus.settings, tokenizer)
        if finished is None:
            if rank == 0:
                warn_of_copies(corpus.files)
            try:
                return _Job(config, corpus, tokenizer, work, rank, size).run()
            except PretrainError as error:
                error.rank = rank or None  # other processes do not report this error
                raise
        if rank == 0:
            check_input(work.dataset, finished.input_content, corpus.parts)
            work.remove()
            log.info("%s is already prepared: nothing to do.", work.dataset)
            print_summary(finished)
        return finished


@dataclass
class _Job:
    """The work of one of `size` processes.

    Attributes:
        tokenizer: given or found in the root, else set from the plan.
    """

    config: PrepareConfig
    corpus: Input
    tokenizer: Tokenizer | None
    work: WorkFolder
    rank: int
    size: int

    def run(self) -> PrepareSummary | None:
        """Encode the remaining units of this process, and finish the dataset if all units are done."""
        began, corpus, work = time.monotonic(), self.corpus, self.work
        share = corpus.units[self.rank :: self.size]
        encoding = self._plan() if share else None
        if encoding is None:
            return None
        left = [unit for unit in share if not self._is_done(unit, encoding)]
        if left and exists(work.dataset / MANIFEST_FILE):  # another process finished it and removed the done files
            return None
        done = f" ({len(share) - len(left):,} are done)" if len(left) < len(share) else ""
        log.info("Encoding %s into %s%s.", count_of(len(left), "unit"), work.dataset, done)
        total, left_bytes = (sum(unit.size for unit in units) for units in (share, left))
        title = "encoding" if self.size == 1 else f"encoding (rank {self.rank} of {self.size})"
        progress = EncodingProgress(title, total, total - left_bytes)
        encode_units(left, encoding, work, self.config.num_workers or usable_cores(), progress.add)
        records = [work.read_record(unit, encoding) for unit in corpus.units]
        complete = [record for record in records if record is not None]
        if len(complete) == len(records):
            summary = self._finish(encoding, complete)
            if summary is not None:
                print_summary(summary, progress.done, time.monotonic() - began)
            return summary
        done = f"{len(complete):,} of {count_of(len(records), 'unit')} are done"
        log.info("%s: the last process finishes the dataset. If none does, run the same command again.", done)
        return None

    def _is_done(self, unit: Unit, encoding: Encoding) -> bool:
        """Return whether a unit was encoded, from the input as it is now."""
        record = self.work.read_record(unit, encoding)
        changed = changed_parts(unit.parts, record.contents) if record is not None else []
        for part in changed:
            log.info("%s has changed since it was encoded: encoding it again", part.source_name)
        return record is not None and not changed

    def _plan(self) -> Encoding | None:
        """Return the encoding, which rank 0 chooses and writes; None if the dataset was finished meanwhile.

        Other ranks wait for rank 0. The tokenizer that an interrupted job trained for the same input and settings is
        reused.
        """
        work, config, deadline = self.work, self.config, time.monotonic() + PLAN_SECONDS
        given = self.tokenizer and self.tokenizer.sha256
        wanted = self.corpus.settings | {"vocab_size": config.vocab_size, "tokenizer": given, "encoder": config.encoder}
        finished = work.dataset / MANIFEST_FILE
        while (encoding := self._read_plan(wanted)) is None and self.rank > 0 and not exists(finished):
            if time.monotonic() > deadline:
                raise DataError(
                    f"rank 0 wrote no plan for these settings and this input within {PLAN_SECONDS:.0f} s. Start all "
                    "processes together, with the same flags, input and --output_path",
                    path=work.plan,
                )
            time.sleep(POLL_SECONDS)
        if exists(finished):
            return None
        if encoding is not None:
            return encoding
        work.files.mkdir(parents=True, exist_ok=True)
        if self.tokenizer is None and self.corpus.token_type is None:
            self.tokenizer = trained_tokenizer(config, self.corpus, work.root)
        encoding = self._choose_encoding()
        if self.tokenizer is not None:
            self.tokenizer.save(work.path)
        decided = {"asked": wanted, "encoding": asdict(encoding), "input_times": times_of(self.corpus.parts)}
        write_atomic(work.plan, json.dumps(decided))
        return encoding

    def _read_plan(self, wanted: dict[str, Any]) -> Encoding | None:
        """Return the encoding of the plan, and load its tokenizer; None if no plan has these settings."""
        plan = read_object(self.work.plan)
        if plan.get("asked") != wanted or "encoding" not in plan:
            return None
        if self.rank == 0 and plan["input_times"] != times_of(self.corpus.parts):  # train on the text as it is now
            return None
        encoding = Encoding(**plan["encoding"] | {"skip_bad": self.config.bad_records == "skip"})
        if encoding.tokenizer is not None:
            try:
                tokenizer = load_tokenizer(self.work.path)
            except DataError:  # the file is damaged
                return None
            if tokenizer.sha256 != encoding.tokenizer:
                return None
            self.tokenizer = tokenizer
            if encoding.encoder is not None:
                choose_encoder(tokenizer, encoding.encoder)  # which this machine must have, too
        return encoding

    def _choose_encoding(self) -> Encoding:
        tokenizer, is_text = self.tokenizer, self.corpus.token_type is None
        vocabulary = tokenizer.vocab_size if tokenizer else self.config.vocab_size
        if vocabulary is None:  # unknown until all is read, so the type of the input gives the width
            kind = self.corpus.token_type
            vocabulary = UNKNOWN_VOCABULARIES[16 if kind is not None and kind.bit_width <= 16 else 32]
        return Encoding(
            text_field=self.config.text_field or "",
            tokens_per_file=self.config.tokens_per_file,
            largest_vocabulary=vocabulary,
            tokenizer=None if tokenizer is None else tokenizer.sha256,
            encoder=choose_encoder(tokenizer, self.config.encoder) if tokenizer and is_text else None,
            skip_bad=self.config.bad_records == "skip",
            special_tokens=self.corpus.settings.get("special_tokens", "text"),
            chat_template=self.corpus.settings.get("chat_template", ""),
            now=time_for(tokenizer) if tokenizer and self.corpus.is_chat else "",
        )

    def _finish(self, encoding: Encoding, records: list[UnitRecord]) -> PrepareSummary | None:
        """Make the dataset, and save its tokenizer in the root; return None if another process was faster.

        Two processes may find all units done at the same time. Both write the same bytes and rename each file into
        place; only one of them succeeds in renaming the folder.
        """
        work, tokenizer = self.work, self.tokenizer
        if not any(record.files for record in records):
            work.remove()
            named = self.config.hf_dataset or ", ".join(self.config.input_path)
            bad = [name for record in records for name in record.bad_records]
            first = f" (the first: {bad[0]})" if bad else ""
            problem = f"all documents are empty, cannot be read{first}, or hold only characters that the tokenizer"
            raise DataError(f"{problem} cannot encode: there is nothing to train on", path=named)
        largest_token = max(record.largest_token for record in records)
        vocab_size = tokenizer.vocab_size if tokenizer else self.config.vocab_size or largest_token + 1
        content = manifest(self.corpus.settings, tokenizer, vocab_size, encoding.dtype.name, records)
        names = [file.name for record in records for file in record.files]
        kept = {MANIFEST_FILE, INPUTS_FILE, *names, *map(record_name, names)}
        try:
            for leftover in {path.name for path in work.files.iterdir()} - kept:  # from other settings, or incomplete
                (work.files / leftover).unlink(missing_ok=True)
            with TemporaryDirectory(dir=work.path, ignore_cleanup_errors=True) as folder:
                write_flushed(Path(folder, MANIFEST_FILE), content)
                Path(folder, MANIFEST_FILE).replace(work.files / MANIFEST_FILE)
                contents = [content for record in records for content in record.contents]
                write_flushed(Path(folder, INPUTS_FILE), inputs_document(contents))
                Path(folder, INPUTS_FILE).replace(work.files / INPUTS_FILE)
                if tokenizer is not None:
                    tokenizer.save(Path(folder))
                    for name in (name for name in tokenizer.contents() if not exists(work.root / name)):
                        (work.root / name).parent.mkdir(exist_ok=True)
                        Path(folder, name).replace(work.root / name)
            if tokenizer is not None and load_tokenizer(work.root).sha256 != tokenizer.sha256:
                raise DataError(
                    "another process wrote another tokenizer meanwhile: run the command again to encode with it",
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
