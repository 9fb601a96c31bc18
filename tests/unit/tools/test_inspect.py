"""What a step trains on, shown without training."""

from __future__ import annotations

import json
import logging
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from unit.data.token_files import loader, make_root, opened, plan, rows, write_documents

from pretraining.config.read import check_config
from pretraining.config.training import BatchConfig, DataConfig, ModelConfig, ParallelConfig, RunConfig
from pretraining.data.dataset import build_loader
from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import ConfigError, DataError
from pretraining.tools.command_settings import InspectConfig, InspectSettings
from pretraining.tools.inspect import Inspector, inspect

SEP = 999
BATCH = 11


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> InspectConfig:
    root = make_root(tmp_path_factory.mktemp("data"), web=300, code=120)
    data = DataConfig(data_path=str(root), datasets=("web", "code"), weights=(3, 1), seq_length=24, sep_token=SEP)
    data = replace(data, logical_shards=8, num_workers=0, held_out_fraction=0.2)
    batch, run = BatchConfig(global_batch_size=BATCH), RunConfig(seed=7)
    return InspectConfig(model=ModelConfig(vocab_size=1000), data=data, batch=batch, run=run)


def asking(config: InspectConfig, **asked: Any) -> InspectConfig:
    return replace(config, inspect=InspectSettings(**asked))


def shown(config: InspectConfig, **arguments: Any) -> list[str]:
    with redirect_stdout(StringIO()) as out:
        inspect(config, **arguments)
    return out.getvalue().splitlines()


def objects(config: InspectConfig, **asked: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in shown(asking(config, json=True, **asked))]


def inspector(config: InspectConfig) -> Inspector:
    datasets = opened(config.data)
    reader = build_loader(datasets, config.data, plan(BATCH), 0, config.run.seed, 1000).reader
    return Inspector(reader, datasets, config.data.seq_length)


def stored(span: dict[str, Any]) -> list[int]:
    """The tokens of a span as pyarrow reads them, a separator behind the document."""
    document = pa.ipc.open_file(span["file"]).read_all()["tokens"][span["row"]].as_py()
    ended = document if document[-1:] == [SEP] else [*document, SEP]
    return ended[span["start"] : span["start"] + span["length"]]


def test_step_n_shows_the_tokens_of_update_n_and_their_spans(config: InspectConfig) -> None:
    training = loader(config.data, plan(BATCH))
    for step in range(1, 9):
        batch = rows(next(training))
        slots = objects(config, step=step, tokens=True)
        assert [slot["ids"] for slot in slots] == batch
        assert all(list(slot) == ["step", "slot", "sample_id", "dataset", "spans", "ids"] for slot in slots)
        assert all(list(span) == ["file", "row", "start", "length"] for slot in slots for span in slot["spans"])
        assert [slot["slot"] for slot in slots] == list(range(BATCH))
        assert [[token for span in slot["spans"] for token in stored(span)] for slot in slots] == batch
        # After update N a checkpoint is of step N: the last sample it has seen is in step N.
        assert inspector(config).step_of_sample(training.state_dict()["next_sample"] - 1) == step


def test_a_rank_shows_what_that_rank_trains_on(config: InspectConfig) -> None:
    parts = [loader(config.data, plan(BATCH, 3), rank) for rank in range(3)]
    for step in (1, 2):
        for rank, part in enumerate(parts):
            slots = objects(config, step=step, tokens=True, rank=rank, world_size=3)
            assert [slot["ids"] for slot in slots] == rows(next(part))
    shared = replace(config, parallel=ParallelConfig(context_parallel_size=2))
    for rank in range(4):
        slots = objects(shared, step=1, rank=rank, world_size=4)
        assert slots == objects(config, step=1, rank=rank // 2, world_size=2)
    assert objects(shared, step=1) == objects(config, step=1)  # a number of ranks is not needed


def test_a_sample_is_found_at_any_step(config: InspectConfig) -> None:
    everything = {slot["sample_id"]: slot for step in (1, 2, 3) for slot in objects(config, step=step)}
    for sample_id in (0, 10, 11, 29):
        assert objects(config, sample_id=sample_id) == [everything[sample_id]]
        assert objects(config, sample_id=sample_id, step=sample_id // BATCH + 1) == [everything[sample_id]]
    far = 10**9  # is a step like any other
    batch = loader(config.data, plan(BATCH)).reader.read(far - 1)
    assert [slot["ids"] for slot in objects(config, step=far, tokens=True)] == rows(batch)
    assert objects(config, sample_id=BATCH * far - 1)[0]["step"] == far


def test_the_checkpoint_or_the_world_gives_a_missing_batch(
    config: InspectConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config, batch=BatchConfig(batch_size=3, grad_accum_steps=2))
    caplog.set_level(logging.INFO, "pretraining")
    inspect(asking(config, step=1))
    assert any("6 sequences, the batch of one GPU" in note and "--world_size" in note for note in caplog.messages)
    assert len(objects(config, step=1)) == 6
    assert len(objects(config, step=1, world_size=4)) == 24
    assert len(shown(asking(config, step=1, json=True), restored_batch=5)) == 5


def test_the_text_output_has_places_and_shortened_spans_or_whole_text(tmp_path: Path, config: InspectConfig) -> None:
    text = "The quick brown fox jumps over the lazy dog.\n" * 40
    tokenizer = train_tokenizer([text], 300)
    tokenizer.save(tmp_path)
    write_documents(tmp_path / "data/web/x.arrow", [tokenizer.encode(text)])
    data = DataConfig(data_path=str(tmp_path / "data"), seq_length=200, tokenizer_path=str(tmp_path))
    config = replace(config, data=data, batch=BatchConfig(global_batch_size=1))
    without = replace(config, data=replace(data, tokenizer_path=None))
    [found] = objects(config, step=1, text=True, tokens=True)
    assert found["text"] == tokenizer.decode(found["ids"]) and len(found["ids"]) == 201
    assert objects(config, step=1, text=True) == [{name: found[name] for name in found if name != "ids"}]
    [span, *_] = found["spans"]
    ids, place = found["ids"][: span["length"]], f"  {tmp_path}/data/web/x.arrow  row 0  tokens "
    lines = shown(asking(config, step=1, tokens=True))
    assert lines[1] == "slot 0  sample 0  dataset web"
    assert lines[2] == f"{place}{span['start']}-{span['start'] + span['length'] - 1}"
    assert json.dumps(tokenizer.decode(ids)[:100]) in lines[3] and " … " in lines[3] and len(lines[3]) < 250
    assert f"    {' '.join(map(str, ids[:6]))} … " in shown(asking(without, step=1, tokens=True))[3]
    whole = [f"    {line}" for line in tokenizer.decode(ids).split("\n")]
    assert shown(asking(config, step=1, text=True))[3 : 3 + len(whole)] == whole
    with pytest.raises(ConfigError, match=r"--text needs.*--tokenizer_path"):
        shown(asking(without, step=1, text=True))
    write_documents(tmp_path / "short/web/x.arrow", [[1, 2, 3]] * 9)
    short = replace(config, data=DataConfig(data_path=str(tmp_path / "short"), seq_length=5, sep_token=SEP))
    assert {"    1 2 3 999"} <= {*shown(asking(short, step=1, tokens=True))}


def test_made_up_data_has_ids_and_no_spans(config: InspectConfig) -> None:
    config = replace(config, data=DataConfig(use_dummy_dataset=True, seq_length=8))
    slots = objects(config, step=2, tokens=True)
    assert len(slots) == BATCH and all(slot["spans"] == [] and len(slot["ids"]) == 9 for slot in slots)
    (summary,) = objects(config, steps="1-4")
    assert (summary["samples"], summary["tokens"], summary["passes"]) == (4 * BATCH, 8 * 4 * BATCH, None)


def test_a_summary_counts_the_content_of_the_steps(config: InspectConfig) -> None:
    slots = [slot for step in range(3, 10) for slot in objects(config, step=step)]
    summaries = {each["dataset"]: each for each in objects(config, steps="3-9")}
    for name, weight in (("web", 0.75), ("code", 0.25)):
        mine, found = [slot for slot in slots if slot["dataset"] == name], summaries[name]
        assert (found["first_step"], found["last_step"], found["asked"]) == (3, 9, weight)
        assert (found["samples"], found["tokens"]) == (len(mine), 24 * len(mine))
        assert found["realised"] == len(mine) / len(slots)
        assert abs(len(mine) - weight * len(slots)) <= 4
    lines = shown(asking(config, steps="3-9"))
    assert lines[0] == f"steps 3 to 9: {7 * BATCH} samples, {24 * 7 * BATCH:,} tokens"
    assert [line.split()[0] for line in lines[1:]] == ["dataset", *summaries]
    packed = replace(config, data=replace(config.data, packing="greedy"))
    slots = objects(packed, step=3, tokens=True)
    assert [len(slot["ids"]) for slot in slots] == [sum(span["length"] for span in slot["spans"]) for slot in slots]


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        ({}, {"step", "sample_id", "steps"}),
        ({"steps": "1-2", "step": 1, "tokens": True}, {"steps", "step", "tokens"}),
        ({"steps": "1-2", "text": True}, {"steps", "text"}),
        ({"steps": "1-2", "sample_id": 0, "rank": 0}, {"steps", "sample_id", "rank"}),
        *(({"steps": text}, {"steps"}) for text in ("5-2", "a", "0-2")),
        ({"step": 1, "rank": 2, "world_size": 2}, {"rank", "world_size"}),
        ({"step": 2, "sample_id": 3}, {"sample_id", "step", "rank"}),
    ],
)
def test_contradictions_are_refused(config: InspectConfig, asked: dict[str, Any], settings: set[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_config(asking(config, **asked))  # as `read` does
        shown(asking(config, **asked))
    assert settings == set(refusal.value.settings)


def test_a_sample_of_another_rank_and_another_order_than_the_checkpoints_are_refused(config: InspectConfig) -> None:
    (slot,) = objects(config, sample_id=5)
    rank = int(slot["slot"] >= plan(BATCH, 2).share(1)[0])
    assert objects(config, sample_id=5, rank=rank, world_size=2) == [slot]
    with pytest.raises(ConfigError):
        objects(config, sample_id=5, rank=1 - rank, world_size=2)
    state = loader(config.data, plan(BATCH)).state_dict()
    assert shown(asking(config, step=1), state=state)
    with pytest.raises(DataError):
        shown(asking(replace(config, run=RunConfig(seed=8)), step=1), state=state)


def test_a_token_beyond_the_vocabulary_names_its_place(config: InspectConfig) -> None:
    small = replace(config, model=ModelConfig(vocab_size=20), data=replace(config.data, sep_token=None))
    assert shown(asking(small, step=1))  # places are known without reading a token
    with pytest.raises(DataError) as damage:
        shown(asking(small, step=1, tokens=True))
    assert damage.value.path is not None and damage.value.path.suffix == ".arrow" and damage.value.row is not None
