"""What is wrong with a file is said where it is first met, with its place: one table of faults by stages.

start    there is no index yet: every file is looked at
restart  there is one: names and sizes are looked at, and the rest where these changed
open     the job has listed the files, and first opens this one
read     the job has it open
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from unit.data.token_files import loader, plan, random_documents, write_documents

from pretraining.config.training import DataConfig
from pretraining.data.loader import Loader
from pretraining.errors import DataError

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


def remove(path: Path) -> None:
    path.unlink()


def use_other_tokenizer(path: Path) -> None:
    """One token beyond the vocabulary, in the same place as a good one, where the middle of the file is."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 2 * 2
    content[middle : middle + 2] = (950).to_bytes(2, "little")
    path.write_bytes(content)


Fault = Callable[[Path], None]
# Where each is noticed. A file that is gone before the start is none; one that is open can still be read.
NOTICED: dict[Fault, tuple[str, ...]] = {
    truncate: ("start", "restart", "open"),
    truncate_in_place: ("start", "read"),
    flip_footer: ("start", "restart", "open"),
    zero: ("start", "restart", "open"),
    remove: ("open",),
    use_other_tokenizer: ("start", "restart", "open", "read"),
}
# Met when a sample is read; otherwise by a look at the whole file.
OF_A_SAMPLE = {(fault, "restart") for fault in (flip_footer, zero, use_other_tokenizer)} | {
    (use_other_tokenizer, "start")
}
CASES = [(fault, stage) for fault, stages in NOTICED.items() for stage in stages]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """Datasets web, of which a file will be bad, and code."""
    for seed, name in enumerate(("bad", "other", "third")):
        documents = [[(row * at + seed) % VOCABULARY for at in range((17, 23)[row % 2])] for row in range(80)]
        write_documents(tmp_path / f"data/web/{name}.arrow", documents)
    write_documents(tmp_path / "data/code/x.arrow", random_documents(60, seed=9, vocab_size=VOCABULARY))
    return DataConfig(data_path=str(tmp_path / "data"), seq_length=16, logical_shards=4, num_workers=0)


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return tmp_path / "data/web/bad.arrow"


def made(config: DataConfig) -> Loader:
    return loader(config, plan(8), vocab_size=VOCABULARY)


def train(running: Loader) -> list[list[list[int]]]:
    return [next(running).micro_batches[0].tokens_BT.tolist() for _ in range(STEPS)]


def meet(config: DataConfig, bad: Path, fault: Fault, stage: str) -> Loader:
    """Damages the file, so that it is first met at a stage; the loader that has not met it yet."""
    if stage == "start":
        fault(bad)
        return made(config)
    running = made(config)
    if stage != "open":
        train(running)
        running.rewind()
    fault(bad)
    return made(config) if stage == "restart" else running


@pytest.mark.parametrize(("fault", "stage"), CASES, ids=[f"{fault.__name__}-{stage}" for fault, stage in CASES])
def test_a_fault_is_named_where_it_is_first_met(config: DataConfig, bad: Path, fault: Fault, stage: str) -> None:
    with pytest.raises(DataError) as raised:
        train(meet(config, bad, fault, stage))
    assert raised.value.path == bad and (raised.value.row is not None) == (fault is use_other_tokenizer)
    is_of_a_sample = stage in ("open", "read") or (fault, stage) in OF_A_SAMPLE
    assert ("needed for sample " in str(raised.value)) == is_of_a_sample
    if fault is use_other_tokenizer:
        assert "is 950, but the vocabulary is 0 to 899" in str(raised.value)


IN_A_RUN = [(fault, stage) for fault, stage in CASES if stage in ("open", "read")]


@pytest.mark.parametrize(("fault", "stage"), IN_A_RUN, ids=[f"{fault.__name__}-{stage}" for fault, stage in IN_A_RUN])
def test_in_quarantine_a_fault_takes_slots_that_need_the_file_and_no_other_changes(
    config: DataConfig, bad: Path, fault: Fault, stage: str
) -> None:
    config = replace(config, bad_documents="quarantine")
    expected = train(made(config))
    running = meet(config, bad, fault, stage)
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
            if fault in (truncate, remove, zero, flip_footer):
                assert (lengths[slot] == 0) == needs_it
    assert taken
