from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.data.sampling.stream_oracle import Oracle, Place, as_trained, text_number
from unit.data.token_files import loader, make_root, opened, plan, random_documents, rows, write_documents

from pretraining.config.training import IGNORED_LABEL, DataConfig
from pretraining.data.dataset import build_indices, build_loader, open_datasets
from pretraining.data.sampling.token_stream import shard_count
from pretraining.data.storage.dataset_files import list_datasets
from pretraining.data.storage.index import BLOCK_DOCUMENTS
from pretraining.errors import ConfigError, DataError, PretrainError

SEP, BOS, PAD = 999, 998, 997


def config(root: Path, **changes: object) -> DataConfig:
    return replace(DataConfig(data_path=str(root), seq_length=16, num_workers=0, logical_shards=4), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_documents", [1, 7])
@pytest.mark.parametrize("ends", [{}, {"bos_token": BOS, "strip_tokens": (PAD,), "min_length": 3}])
def test_batches_are_those_of_the_oracle_from_files_to_rows(
    tmp_path: Path, batch_documents: int, ends: dict[str, Any]
) -> None:
    documents = random_documents(2 * BLOCK_DOCUMENTS + 300, largest=6)
    documents[5], documents[6] = [1, 2, SEP], [BOS, 3]  # have the virtual tokens already
    documents[7:9] = [PAD, 4, SEP, PAD, 5, PAD, PAD], [PAD, PAD]
    for number, begin in enumerate(range(0, len(documents), 500)):
        write_documents(
            tmp_path / "web" / f"{number}.arrow", documents[begin : begin + 500], batch_documents=batch_documents
        )
    settings = config(tmp_path, sep_token=SEP, seq_length=50, logical_shards=3, document_mask=True, **ends)
    made = loader(settings, plan(16), seed=42)
    whole = [as_trained(document, SEP, **ends) for document in documents]
    oracle = Oracle([len(document) for document in whole], BLOCK_DOCUMENTS, 3, 50, (42, text_number("web", "train")))
    samples = {shard: oracle.shard_samples(shard, 2) for shard in range(3)}
    order = oracle.sample_order(2)
    for step in range(len(order) // 16):
        taken = sorted(order[step * 16 : (step + 1) * 16], key=lambda pair: pair[0])
        places = [samples[shard][number] for shard, number in taken]
        (micro_batch,) = next(made).micro_batches
        assert micro_batch.tokens_BT.tolist() == [[whole[document][at] for document, at in row] for row in places]
        inputs = micro_batch.model_inputs()
        assert inputs.labels_BS.tolist() == [
            [whole[document][at] if at else IGNORED_LABEL for document, at in row[1:]] for row in places
        ]
        assert inputs.positions_BS is not None and inputs.positions_BS.tolist() == [positions(row) for row in places]


def positions(row: list[Place]) -> list[int]:
    """Where its inputs are in their documents, which begin with the row or at their first token."""
    found: list[int] = []
    for _, at in row[:-1]:
        found.append(found[-1] + 1 if found and at else 0)
    return found


def test_what_is_listed_once_is_opened_anywhere(tmp_path: Path) -> None:
    settings = config(make_root(tmp_path, web=60, code=40))
    listing = list_datasets(settings)
    build_indices(listing, settings)
    build_indices(listing, settings)
    received = pickle.loads(pickle.dumps(listing))
    datasets = open_datasets(received, settings)
    documents = [*random_documents(60, 0), *random_documents(40, 1)]
    assert datasets.training_tokens == sum(map(len, documents)) and datasets.held_out_tokens == 0
    with_separators = opened(replace(settings, sep_token=SEP, held_out_fraction=0.5))
    assert with_separators.training_tokens + with_separators.held_out_tokens == sum(
        len(document) + 1 for document in documents if document
    )


def test_without_weights_datasets_are_taken_in_proportion_to_their_tokens(tmp_path: Path) -> None:
    settings = config(make_root(tmp_path, web=300, code=100))
    datasets = opened(settings)
    made = build_loader(datasets, settings, plan(1000), 0, 0, 1000)
    made.load_state_dict({**made.state_dict(), "next_sample": 10_000})
    share = datasets.datasets[1].tokens("train") / datasets.training_tokens
    assert made.state_dict()["counts"]["web"] == pytest.approx(10_000 * share, abs=2)


def test_weights_go_with_the_datasets_they_were_given_with(tmp_path: Path) -> None:
    root = make_root(tmp_path, web=100, code=100, books=100)
    given = loader(config(root, datasets=("web", "books", "code/"), weights=(0.7, 0.2, 0.1)), plan(10))
    sorted_by_name = loader(config(root, weights=(0.2, 0.1, 0.7)), plan(10))
    for _ in range(10):
        assert rows(next(given)) == rows(next(sorted_by_name))
    assert given.state_dict()["counts"] == {"books": 20, "code": 10, "web": 70}


def test_a_dataset_of_weight_zero_may_be_too_small_to_train_on(tmp_path: Path) -> None:
    root = make_root(tmp_path, web=100)
    write_documents(root / "tiny/x.arrow", [[1]])
    made = loader(config(root, weights=(0.0, 1.0)), plan(4))
    next(made)
    assert made.state_dict()["counts"] == {"web": 4}


@pytest.mark.parametrize(
    ("documents", "changes", "named"),
    [
        ([[1]], {"weights": (1.0, 2.0)}, "weights"),
        ([[1] * 50], {"bos_token": 1000}, "bos_token"),
        ([[1] * 50], {"sep_token": 1000}, "sep_token"),
        ([], {}, None),
        ([], {"packing": "best_fit"}, None),
        ([[], []], {}, None),
        ([[], []], {"packing": "best_fit"}, None),
        ([[1] * 16], {}, "seq_length"),
        ([[1] * 50] * 9, {"held_out_fraction": 1.0}, None),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(
    tmp_path: Path, documents: list[list[int]], changes: dict[str, Any], named: str | None
) -> None:
    write_documents(tmp_path / "web/x.arrow", documents)
    with pytest.raises(PretrainError) as raised:
        loader(config(tmp_path, **changes), vocab_size=1000)
    assert named is None or named in raised.value.settings
    assert isinstance(raised.value, ConfigError if "weights" in changes or named in changes else DataError)


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_a_held_out_split_without_a_sample_is_refused(tmp_path: Path, packing: str) -> None:
    settings = config(make_root(tmp_path, web=100), packing=packing, held_out_fraction=1e-9)
    with pytest.raises(DataError) as raised:
        build_loader(opened(settings), settings, plan(2), 0, 0, 1000, split="held_out")
    assert raised.value.settings == ("held_out_fraction",)


def test_a_strip_token_may_lie_beyond_the_vocabulary_and_a_sample_may_take_all_but_a_token(tmp_path: Path) -> None:
    write_documents(tmp_path / "web/x.arrow", [[1] * 17])
    assert next(loader(config(tmp_path, strip_tokens=(5000,)), plan(1), vocab_size=1001)).step == 0


def test_an_index_that_is_not_there_is_named_with_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = config(make_root(tmp_path, web=50))
    with pytest.raises(DataError, match="--index_path"):
        open_datasets(list_datasets(settings), settings)


def test_short_datasets_are_mixed_from_whole_samples(tmp_path: Path) -> None:
    """A sample that is longer than its shard would repeat documents; a small dataset has fewer shards instead."""
    documents = [[number] for number in range(900)]
    write_documents(tmp_path / "web/x.arrow", documents)
    made = loader(config(tmp_path, seq_length=100, logical_shards=1024), plan(8))
    assert made.reader.sources[0].shards == shard_count(900, 100, 1024) == 1
    tokens = np.concatenate([np.array(row[:-1]) for row in rows(next(made))])
    assert len(np.unique(tokens)) == 800


def test_loaders_of_one_process_share_what_they_opened_and_do_not_disturb_each_other(tmp_path: Path) -> None:
    settings = config(make_root(tmp_path, web=400), sep_token=SEP, held_out_fraction=0.3)
    variants = [
        settings,
        replace(settings, logical_shards=7),
        replace(settings, seq_length=5),
        replace(settings, seq_length=90),
    ]
    shared = opened(settings)
    together = [build_loader(shared, variant, plan(4), 0, 7, 1000) for variant in variants]
    together.append(build_loader(shared, settings, plan(4), 0, 7, 1000, split="held_out"))
    alone = [build_loader(opened(variant), variant, plan(4), 0, 7, 1000) for variant in variants]
    alone.append(build_loader(opened(settings), settings, plan(4), 0, 7, 1000, split="held_out"))
    for _ in range(15):
        assert [rows(next(made)) for made in together] == [rows(next(made)) for made in alone]
    assert len(shared.open_files) == 2


def test_the_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs/data.md").read_text()
    example = page.split("**use it from Python**")[1].split("```python\n")[1].split("```")[0]
    for name in ("one", "two"):
        write_documents(tmp_path / f"data/web/{name}.arrow", random_documents(300))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["inputs"].tokens_BS.shape == (8, 1024) and names["state"]["next_sample"] == 32
