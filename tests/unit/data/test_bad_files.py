"""What is wrong with a file is said where it is first met, with its place: one table of faults by stages.

start    there is no index yet: every file is looked at
restart  there is one: names and sizes are looked at, and the rest where these changed
open     the job has listed the files, and first opens this one
read     the job has it open
verify   everything is looked at
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from unit.data.token_files import loader, plan, random_documents, write_documents

from pretraining.config.commands import VerifyConfig
from pretraining.config.training import DataConfig
from pretraining.data.loader import Loader
from pretraining.data.storage.dataset_files import MANIFEST_FILE
from pretraining.errors import DataError
from pretraining.files import file_checksum
from pretraining.tools.verify_data import verify

VOCABULARY = 900
STEPS = 50  # more than a pass


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def truncate_in_place(path: Path) -> None:
    os.truncate(path, 600)


def flip_footer(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 8
    path.write_bytes(content)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def replace_by_text(path: Path) -> None:
    path.write_text("It was a dark and stormy night. " * 40)


def retype(path: Path) -> None:
    write_documents(path, [[1.5] * 9] * 50, pa.list_(pa.float32()))  # type: ignore[list-item]


def rename_column(path: Path) -> None:
    write_documents(path, random_documents(60), column="input_ids")


def use_other_tokenizer(path: Path) -> None:
    """One token beyond the vocabulary, in the same place as a good one, where the middle of the file is."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 2 * 2
    content[middle : middle + 2] = (950).to_bytes(2, "little")
    path.write_bytes(content)


def swap(path: Path) -> None:
    """With the other file, which has as many bytes and other documents."""
    other = path.with_name("other.arrow")
    one, two = path.read_bytes(), other.read_bytes()
    assert len(one) == len(two) and one != two
    path.write_bytes(two)
    other.write_bytes(one)


CHANGED = r"changed since `pretrain prepare` wrote it: its bytes have the checksum \w{8}, not \w{8}"
RESIZED = r"has [\d,]+ bytes, but `pretrain prepare` wrote [\d,]+"
BEYOND = r"row \d+: token \d+ of the document is 950, but the vocabulary is 0 to 899"
FOREIGN = r"web/bad\.arrow has a column 'tokens' of type list<item: float>, but documents are lists of integers"
NOT_ARROW = r"is damaged: it does not end as an Arrow file does"
DAMAGED = r"is truncated or damaged: it does not end as an Arrow file does"
UNNOTICED = ""
"""Names and sizes are as they were, and nobody promises to look further."""

FAULTS: dict[Callable[[Path], None], dict[str, str]] = {
    truncate: {
        "start": DAMAGED,
        "restart": DAMAGED,
        "open": r"has changed since the job began: it had [\d,]+ bytes and now has [\d,]+",
        "verify": RESIZED,
    },
    truncate_in_place: {
        "start": DAMAGED,
        "read": r"ends at byte 600, before its documents do: it was truncated",
        "verify": RESIZED,
    },
    flip_footer: {
        "start": DAMAGED,
        "restart": NOT_ARROW,
        "open": NOT_ARROW,
        "verify": CHANGED,
    },
    zero: {
        "start": DAMAGED,
        "restart": NOT_ARROW,
        "open": NOT_ARROW,
        "read": UNNOTICED,
        "verify": CHANGED,
    },
    empty: {
        "start": r"is damaged: 0 bytes are no Arrow file",
        "restart": r"is damaged: 0 bytes are no Arrow file",
        "open": r"has changed since the job began: it had [\d,]+ bytes and now has 0",
        "verify": RESIZED,
    },
    remove: {
        "start": UNNOTICED,  # but for a link to it, and for a run that goes on: see test_listing and test_state
        "open": r"cannot open .*web/bad\.arrow: No such file or directory",
        "read": UNNOTICED,
        "verify": rf"is gone, but {re.escape(MANIFEST_FILE)} names it",
    },
    replace_by_text: {
        "start": DAMAGED,
        "restart": DAMAGED,
        "open": r"has changed since the job began",
        "verify": RESIZED,
    },
    retype: {
        "start": FOREIGN,
        "restart": FOREIGN,
        "open": r"has changed since the job began",
        "verify": FOREIGN,
    },
    rename_column: {
        "start": r"web/bad\.arrow has no column 'tokens', but input_ids: give --col_name",
        "restart": r"web/bad\.arrow has no column 'tokens', but input_ids: give --col_name",
        "open": r"has changed since the job began",
        "verify": r"web/bad\.arrow has no column 'tokens', but input_ids: give --col_name",
    },
    use_other_tokenizer: {
        "start": BEYOND,
        "restart": BEYOND,
        "open": BEYOND,
        "read": BEYOND,
        "verify": r"row \d+, byte [\d,]+: token \d+ of the document is 950, but the vocabulary is 0 to 899",
    },
    swap: {
        "start": UNNOTICED,
        "restart": UNNOTICED,
        "open": UNNOTICED,
        "verify": CHANGED,
    },
}
CASES = [(fault, stage) for fault, stages in FAULTS.items() for stage in stages]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """Datasets web, of which a file will be bad and another has as many bytes, and code."""
    folder = tmp_path / "data/web"
    for seed, name in enumerate(("bad", "other", "third")):
        lengths = [23, 17] if name == "other" else [17, 23]
        documents = [[(row * at + seed) % VOCABULARY for at in range(lengths[row % 2])] for row in range(80)]
        write_documents(folder / f"{name}.arrow", documents)
    write_documents(tmp_path / "data/code/x.arrow", random_documents(60, seed=9, vocab_size=VOCABULARY))
    entries = []
    for path in sorted(folder.glob("*.arrow")):
        checksum, size = file_checksum(path)
        entries.append({"name": path.name, "documents": 80, "tokens": 1600, "bytes": size, "crc32": checksum})
    record = {"files": entries, "tokenizer": {"vocab_size": VOCABULARY}}
    (folder / MANIFEST_FILE).write_text(repr(record).replace("'", '"'))
    return DataConfig(data_path=str(tmp_path / "data"), seq_length=16, logical_shards=4, num_workers=0)


def made(config: DataConfig) -> Loader:
    return loader(config, plan(8), vocab_size=VOCABULARY)


def train(running: Loader) -> list[list[list[int]]]:
    return [next(running).micro_batches[0].tokens_BT.tolist() for _ in range(STEPS)]


def meet(config: DataConfig, fault: Callable[[Path], None], stage: str) -> None:
    """Damages the file, so that it is first met at a stage, and goes as far as it lets one."""
    bad = Path(config.data_path or "") / "web/bad.arrow"
    if stage == "start":
        fault(bad)
        train(made(config))
    elif stage == "restart":
        train(made(config))
        fault(bad)
        train(made(config))
    elif stage == "open":
        running = made(config)
        fault(bad)
        train(running)
    elif stage == "read":
        running = made(config)
        train(running)
        fault(bad)
        train(running)
    else:
        fault(bad)
        try:
            with redirect_stdout(StringIO()) as out:
                verify(VerifyConfig(data_path=str(bad.parents[1])))
        except DataError as error:
            raise DataError(f"{out.getvalue()}{error}") from error


@pytest.mark.parametrize(("fault", "stage"), CASES, ids=[f"{fault.__name__}-{stage}" for fault, stage in CASES])
def test_a_fault_is_named_where_it_is_first_met(config: DataConfig, fault: Callable[[Path], None], stage: str) -> None:
    message = FAULTS[fault][stage]
    if message == UNNOTICED:
        meet(config, fault, stage)
        return
    with pytest.raises(DataError, match=message) as raised:
        meet(config, fault, stage)
    text = str(raised.value)
    assert "web/bad.arrow" in text
    sample_is_named = re.search(r"\n  needed for sample \d+ \(step \d+, slot \d+: dataset 'web', shard \d", text)
    assert bool(sample_is_named) == (stage in ("open", "read") or message in (BEYOND, NOT_ARROW))


def test_both_of_two_swapped_files_are_named(config: DataConfig) -> None:
    with pytest.raises(DataError) as raised:
        meet(config, swap, "verify")
    assert re.search(rf"web/bad\.arrow has {CHANGED}(.|\n)*web/other\.arrow has {CHANGED}", str(raised.value))


NOTICED = [(fault, stage) for fault, stage in CASES if stage in ("open", "read") and FAULTS[fault][stage]]


@pytest.mark.parametrize(("fault", "stage"), NOTICED, ids=[f"{fault.__name__}-{stage}" for fault, stage in NOTICED])
def test_in_quarantine_a_fault_takes_slots_that_need_the_file_and_no_other_changes(
    config: DataConfig, fault: Callable[[Path], None], stage: str
) -> None:
    config = replace(config, bad_documents="quarantine")
    running, bad = made(config), Path(config.data_path or "") / "web/bad.arrow"
    expected = train(made(config))
    if stage == "read":
        train(running)
        running.rewind()
    fault(bad)
    taken = 0
    for step in range(STEPS):
        slots = running.reader.slots(step)
        (micro_batch,) = next(running).micro_batches
        lengths = np.full(8, 17) if micro_batch.lengths_B is None else micro_batch.lengths_B.numpy()
        for slot, tokens in enumerate(micro_batch.tokens_BT.tolist()):
            source = running.reader.sources[int(slots.datasets[slot])]
            spans = source.spans(slots.shards[slot : slot + 1], slots.numbers[slot : slot + 1])
            needs_it = source.name == "web" and (spans.documents < 80).any()
            if lengths[slot] == 17:
                assert tokens == expected[step][slot]
            else:
                assert needs_it and lengths[slot] == 0 and tokens == [0] * 17
                taken += 1
            if fault in (truncate, empty, remove, zero, flip_footer):
                assert (lengths[slot] == 0) == needs_it
    assert taken
