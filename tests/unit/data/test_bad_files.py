"""A fault of a file is reported at the first stage that meets it: one table of faults by stages.

start    there is no index yet: every file is read
restart  there is an index: names and sizes are checked, and changed files are read
open     the job has listed the files, and first opens this one
read     the job has it open
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from unit.data.token_files import loader, opened, plan, random_documents, write_documents

from pretraining.config.training import DataConfig
from pretraining.data import batch_reader
from pretraining.data.batch import MicroBatch
from pretraining.data.batch_reader import MAX_CONSECUTIVE, MAX_NAMED
from pretraining.data.loader import Loader
from pretraining.errors import DataError
from pretraining.tools.inspect import Inspector

VOCABULARY = 900
STEPS = 28  # more than a pass


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
    """Replace the token in the middle of the file by one outside the vocabulary."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 2 * 2
    content[middle : middle + 2] = (950).to_bytes(2, "little")
    path.write_bytes(content)


Fault = Callable[[Path], None]
# Stages at which faults are found. A file removed before the start is no fault; an open one stays readable.
NOTICED: dict[Fault, tuple[str, ...]] = {
    truncate: ("start", "restart", "open"),
    truncate_in_place: ("start", "read"),
    flip_footer: ("start", "restart", "open"),
    zero: ("start", "restart", "open"),
    remove: ("open",),
    use_other_tokenizer: ("start", "restart", "open", "read"),
}
# Found when a sample is read; the others when the whole file is read.
OF_A_SAMPLE = {(use_other_tokenizer, stage) for stage in ("start", "restart")}
CASES = [(fault, stage) for fault, stages in NOTICED.items() for stage in stages]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """The datasets web, with a file to damage, and code."""
    for seed, name in enumerate(("bad", "other", "third")):
        documents = [[(row * at + seed) % VOCABULARY for at in range((17, 23)[row % 2])] for row in range(40)]
        write_documents(tmp_path / f"data/web/{name}.arrow", documents)
    write_documents(tmp_path / "data/code/x.arrow", random_documents(30, seed=9, vocab_size=VOCABULARY))
    return DataConfig(data_path=str(tmp_path / "data"), seq_length=16, logical_shards=4, num_workers=0)


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return tmp_path / "data/web/bad.arrow"


def made(config: DataConfig, ranks: int = 1, rank: int = 0) -> Loader:
    return loader(config, plan(8, ranks), rank, vocab_size=VOCABULARY)


def lengths_of(micro_batch: MicroBatch) -> list[int]:
    """Tokens of each row without padding."""
    return [17] * 8 if micro_batch.lengths_B is None else micro_batch.lengths_B.tolist()


def train(running: Loader) -> list[list[list[int]]]:
    return [next(running).micro_batches[0].tokens_BT.tolist() for _ in range(STEPS)]


def meet(config: DataConfig, bad: Path, fault: Fault, stage: str) -> Loader:
    """Damage the file just before a stage; return a loader that has not found the fault."""
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
def test_a_fault_is_named_at_its_first_sample(config: DataConfig, bad: Path, fault: Fault, stage: str) -> None:
    with pytest.raises(DataError) as raised:
        train(meet(config, bad, fault, stage))
    assert raised.value.path == bad and (raised.value.row is not None) == (fault is use_other_tokenizer)
    is_of_a_sample = stage in ("open", "read") or (fault, stage) in OF_A_SAMPLE
    assert ("needed for sample " in str(raised.value)) == is_of_a_sample
    if fault is use_other_tokenizer:
        assert "is 950, but the vocabulary is 0 to 899" in str(raised.value)


# In quarantine: a slot without labels in place of the error
IN_A_RUN = [(fault, stage) for fault, stage in CASES if stage in ("open", "read")]
IN_A_RUN += [(fault, "restart") for fault in (flip_footer, zero)]


@pytest.mark.parametrize(("fault", "stage"), IN_A_RUN, ids=[f"{fault.__name__}-{stage}" for fault, stage in IN_A_RUN])
def test_quarantine_ignores_the_slots_that_need_the_file(
    config: DataConfig, bad: Path, fault: Fault, stage: str
) -> None:
    config = replace(config, bad_documents="quarantine")
    expected = train(made(config))
    running = meet(config, bad, fault, stage)
    taken = 0
    for step in range(STEPS):
        slots = running.reader.slots(step)
        (micro_batch,) = next(running).micro_batches
        lengths = lengths_of(micro_batch)
        for slot, tokens in enumerate(micro_batch.tokens_BT.tolist()):
            source = running.reader.sources[int(slots.datasets[slot])]
            spans = source.spans(slots.shards[slot : slot + 1], slots.numbers[slot : slot + 1])
            needs_it = source.name == "web" and (spans.documents < 40).any()
            if lengths[slot] == 17:
                assert tokens == expected[step][slot]
            else:
                assert needs_it and lengths[slot] == 0 and tokens == [0] * 17
                taken += 1
            if fault in (truncate, remove, zero, flip_footer):
                assert (lengths[slot] == 0) == needs_it
    assert taken


def test_ranks_and_inspect_quarantine_alike(config: DataConfig, bad: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "pretraining")
    config = replace(config, bad_documents="quarantine")
    alone, parts = made(config), [made(config, 2, rank) for rank in range(2)]
    use_other_tokenizer(bad)
    tolerant = Inspector(alone.reader, opened(config), 16, quarantine=True)
    strict = Inspector(alone.reader, opened(config), 16)
    empty = 0
    for step in range(1, STEPS):
        (whole,) = next(alone).micro_batches
        shared = [next(part).micro_batches[0] for part in parts]
        assert [row for part in shared for row in part.tokens_BT.tolist()] == whole.tokens_BT.tolist()
        slots = list(tolerant.slots(step, tokens=True))
        assert [slot.problem is None for slot in slots] == [length > 0 for length in lengths_of(whole)]
        for slot in slots:
            assert slot.spans and (slot.ids is None) == (slot.problem is not None) == ("problem" in slot.document())
            if slot.problem is not None:
                empty += 1
                with pytest.raises(DataError):
                    list(strict.slots(step, sample_id=slot.sample_id, tokens=True))
    assert empty and caplog.messages and all(str(bad) in line for line in caplog.messages)


def test_a_run_stops_if_nothing_is_readable_and_continues_between_readable_samples(
    config: DataConfig, bad: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "pretraining")
    config = replace(config, bad_documents="quarantine")
    running = made(replace(config, datasets=("code",)))
    (bad.parents[1] / "code/x.arrow").unlink()
    with pytest.raises(DataError):
        for _ in range(MAX_CONSECUTIVE):
            next(running)
    assert len(caplog.messages) == MAX_NAMED + 3  # then 32, 64 and 128
    monkeypatch.setattr(batch_reader, "MAX_CONSECUTIVE", 20)
    running = made(replace(config, datasets=("web",)))
    bad.unlink()
    lengths = [length for _ in range(STEPS) for length in lengths_of(next(running).micro_batches[0])]
    assert lengths.count(0) > 20 and set(lengths) == {0, 17}
