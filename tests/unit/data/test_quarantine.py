"""Samples that cannot be read: by default an error, in quarantine a slot without labels."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from unit.data.token_files import opened, plan, random_documents, write_documents

from pretraining.config.training import DataConfig
from pretraining.data import batch_reader
from pretraining.data.batch import StepBatch
from pretraining.data.batch_reader import LINES_SHOWN, MOST_IN_A_ROW
from pretraining.data.dataset import build_loader
from pretraining.data.loader import Loader
from pretraining.errors import DataError
from pretraining.tools.inspect import Inspector

STEPS = 12


@pytest.fixture(autouse=True)
def only_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "pretraining")


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    for name in ("good", "bad"):
        write_documents(tmp_path / f"data/web/{name}.arrow", random_documents(100, seed=len(name), vocab_size=900))
    write_documents(tmp_path / "data/code/x.arrow", random_documents(60, seed=9, vocab_size=900))
    return DataConfig(
        data_path=str(tmp_path / "data"), seq_length=16, logical_shards=4, num_workers=0, bad_documents="quarantine"
    )


def made(config: DataConfig, ranks: int = 1, rank: int = 0, vocab_size: int = 1000) -> Loader:
    return build_loader(opened(config), config, plan(8, ranks, 2), rank, 7, vocab_size)


def slots(batch: StepBatch) -> Iterator[tuple[list[int], int]]:
    """Each row of a batch with how much of it is real."""
    for micro_batch in batch.micro_batches:
        lengths = micro_batch.lengths_B
        full = torch.full((len(micro_batch.tokens_BT),), micro_batch.tokens_BT.shape[1])
        yield from zip(micro_batch.tokens_BT.tolist(), (full if lengths is None else lengths).tolist(), strict=True)


def damage(config: DataConfig, token: int = 999) -> None:
    """Overwrites one token of the file, as a disk would, without a trace in names and sizes."""
    path = Path(config.data_path or "") / "web/bad.arrow"
    content = bytearray(path.read_bytes())
    at = len(content) // 2 // 2 * 2
    content[at : at + 2] = (token).to_bytes(2, "little")
    path.write_bytes(content)


def test_on_several_ranks_the_same_slots_are_quarantined_and_logged(
    config: DataConfig, caplog: pytest.LogCaptureFixture
) -> None:
    damage(config)
    alone = made(config, vocab_size=950)
    parts = [made(config, 2, rank, vocab_size=950) for rank in range(2)]
    found = []
    for _ in range(STEPS):
        wanted = list(slots(next(alone)))
        assert [slot for part in parts for slot in slots(next(part))] == wanted
        found += [length for _, length in wanted]
    assert 0 in found and caplog.messages
    assert all("bad.arrow, row " in line and "needed for sample" in line for line in caplog.messages)


def test_where_nothing_can_be_read_the_run_ends(config: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    running = made(replace(config, datasets=("code",)))
    (Path(config.data_path or "") / "code/x.arrow").unlink()
    with pytest.raises(DataError, match=f"{MOST_IN_A_ROW} samples in a row"):
        for _ in range(MOST_IN_A_ROW):
            next(running)
    assert len(caplog.messages) == LINES_SHOWN + 3  # then 32, 64 and 128


def test_inspect_shows_which_slots_are_quarantined(config: DataConfig) -> None:
    damage(config)
    running = made(config, vocab_size=950)
    tolerant = Inspector(running.reader, opened(config), 16, quarantine=True)
    strict = Inspector(running.reader, opened(config), 16)
    found = 0
    for step in range(1, STEPS + 1):
        lengths = [length for _, length in slots(next(running))]
        shown = list(tolerant.slots(step, tokens=True))
        assert [slot.problem is None for slot in shown] == [length > 0 for length in lengths]
        for slot in shown:
            assert slot.spans and (slot.ids is None) == (slot.problem is not None) == ("problem" in slot.document())
            if slot.problem is not None:
                found += 1
                with pytest.raises(DataError):
                    list(strict.slots(step, sample_id=slot.sample_id, tokens=True))
    assert found


def test_the_run_goes_on_where_readable_samples_lie_between(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_reader, "MOST_IN_A_ROW", 20)
    running = made(config)
    (Path(config.data_path or "") / "web/bad.arrow").unlink()
    lengths = [length for _ in range(STEPS) for _, length in slots(next(running))]
    assert lengths.count(0) > 20 and set(lengths) == {0, 17}
