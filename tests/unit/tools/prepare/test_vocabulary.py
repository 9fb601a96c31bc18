"""Which text a tokenizer is trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.tools.prepare.prepare_files import json_lines

from pretraining.tools.commands import PrepareConfig
from pretraining.tools.prepare import encode, units, vocabulary
from pretraining.tools.prepare.units import find_input
from pretraining.tools.prepare.vocabulary import training_sample

TEXTS = [f"Document {n} of a small test.\n" * (n + 1) for n in range(9)]


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / f"texts/{number}.txt").write_text(text)
    return PrepareConfig(input_path=(str(tmp_path / "texts"),), output_path=str(tmp_path / "out"))


def test_a_tokenizer_is_trained_on_all_text_or_the_head_of_each_part(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_input(config)
    assert sorted(training_sample(found, "text")) == sorted(TEXTS)
    monkeypatch.setattr(vocabulary, "PIECE_CHARACTERS", 50)
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 50)
    sample = list(training_sample(found, "text", characters=220))
    assert sum(map(len, sample)) == 220 and max(map(len, sample)) <= 50 and len(sample) > 4
    assert all(any(part in text for text in TEXTS) for part in sample)


def test_a_large_file_is_sampled_from_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 1000)
    monkeypatch.setattr(vocabulary, "PIECE_CHARACTERS", 10)
    (tmp_path / "a.jsonl").write_bytes(json_lines([f"{n:03d} number" for n in range(200)]))
    sample = list(training_sample(find_input(PrepareConfig(input_path=(str(tmp_path),))), "text", characters=100))
    numbers = [int(text[:3]) for text in sample if text[:3].isdecimal()]
    assert min(numbers) < 50 and max(numbers) > 150
