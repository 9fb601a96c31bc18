from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.data.token_files import loader, make_root, opened, plan, random_documents, rows, write_documents

from pretraining.config.training import DataConfig, Packing
from pretraining.data.dataset import build_indices, build_loader, open_datasets
from pretraining.data.samples import SplitName, stored_samples
from pretraining.data.storage.dataset_files import list_datasets
from pretraining.data.storage.index import BLOCK_DOCUMENTS
from pretraining.errors import ConfigError, DataError, PretrainError

SEP = 999


def config(root: Path, **changes: object) -> DataConfig:
    return replace(DataConfig(data_path=str(root), seq_length=16, num_workers=0, logical_shards=4), **changes)  # type: ignore[arg-type]


def test_a_pickled_listing_opens_the_same_datasets(tmp_path: Path) -> None:
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
    assert made.state_dict()["counts"]["web"][0][1] == pytest.approx(10_000 * share, abs=2)


SMALL, FEW = [[1] * 50], [[1] * 50] * 9
BEYOND = [[1001] * 50] * 9
# documents, changes of settings, the kind of error, the setting that it names, what it says
REFUSED: list[tuple[list[list[int]], dict[str, Any], type[PretrainError], str, str]] = [
    (SMALL, {"bos_token": 1003}, ConfigError, "bos_token", "the vocabulary of 1000 tokens: give --vocab_size=1004"),
    (SMALL, {"sep_token": 1000}, ConfigError, "sep_token", ""),
    ([], {}, DataError, "", "/web: "),
    ([[], []], {}, DataError, "", ""),
    ([[], []], {"packing": "best_fit"}, DataError, "", ""),
    ([[1] * 16], {}, DataError, "seq_length", ""),
    (FEW, {"held_out_fraction": 0.999999}, DataError, "", ""),
    (FEW, {"held_out_fraction": 0.999999, "packing": "best_fit"}, DataError, "", ""),
    (BEYOND, {}, DataError, "", "is 1001, but the vocabulary is 0 to 999: the files are damaged, or --vocab_size"),
]


@pytest.mark.parametrize(("documents", "changes", "kind", "named", "words"), REFUSED, ids=range(len(REFUSED)))
def test_data_that_cannot_be_trained_on_is_refused(
    tmp_path: Path, documents: list[list[int]], changes: dict[str, Any], kind: Any, named: str, words: str
) -> None:
    write_documents(tmp_path / "web/x.arrow", documents)
    with pytest.raises(kind) as raised:
        next(loader(config(tmp_path, **changes), vocab_size=1000))
    assert named in ("", *raised.value.settings) and words in str(raised.value)


def write_numbered(root: Path, files: list[list[int]], batch_documents: int) -> int:
    """Write documents of given lengths without a repeated token; return the number of tokens."""
    token = 0
    for number, lengths in enumerate(files):
        documents = []
        for length in lengths:
            documents.append(range(token, token + length))
            token += length
        write_documents(root / f"web/{number:03}.arrow", documents, batch_documents=batch_documents)
    return token


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.one_of(st.just(0), st.just(1), st.integers(0, 30)), max_size=12), min_size=1, max_size=8),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([1, 3, 10**9]),
)
@example([[0, 0, 0], [], [5, 0], [0], [0, 0, 9], []], 5, 2, 1)
@example([[0] * (2 * BLOCK_DOCUMENTS + 5), [3], [0] * BLOCK_DOCUMENTS, [2]], 3, 2, 10**9)
def test_every_token_comes_once_per_pass_beside_empty_datasets(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[int]], shards: int, seq_length: int, batch: int
) -> None:
    root = tmp_path_factory.mktemp("data")
    total = write_numbered(root, files, batch)
    asked = DataConfig(data_path=str(root), seq_length=seq_length, logical_shards=shards, num_workers=0)
    if total <= seq_length:
        with pytest.raises(DataError):
            loader(asked, plan(1))
        return
    passes = 2 * seq_length  # then no shard has tokens left, and a sample has started at every position
    made = loader(asked, plan(total))
    seen = Counter(token for _ in range(2) for row in rows(next(made)) for token in row[:-1])
    assert seen == dict.fromkeys(range(total), passes)


FILES = ("a.arrow", "b/c.arrow", "m.arrow", "z.arrow")
Place = tuple[str, str, int]  # dataset, file, row


def seen_of(config: DataConfig, split: SplitName) -> set[Place]:
    """The documents in the first passes over a split; none without enough tokens for a sample."""
    datasets = opened(config)
    if any(dataset.tokens(split) <= config.seq_length for dataset in datasets.datasets):
        return set()
    seen: set[Place] = set()
    for dataset in datasets.datasets:
        source = stored_samples(dataset, datasets, config, 7, split, 10_000)
        spans = source.spans(*source.samples(0, dataset.tokens(split)))  # seq_length passes
        for document in sorted(set(spans.documents.tolist())):
            file, row = dataset.index.locate(document)
            seen.add((source.name, dataset.files.paths[file], row))
    return seen


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.sampled_from(FILES), st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=4),
    st.sampled_from([0.02, 0.1, 0.5, 0.9]),
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(1, 3),
    st.sampled_from(["stream", "best_fit"]),
)
def test_training_and_held_out_documents_stay_disjoint_when_data_grows_or_is_resharded(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[tuple[str, int, int]],
    fraction: float,
    shards: int,
    other_shards: int,
    seq_length: int,
    packing: Packing,
) -> None:
    root = tmp_path_factory.mktemp("data")
    sizes = {name: (count, more) for name, count, more in drawn}
    config = DataConfig(
        data_path=str(root),
        seq_length=seq_length,
        sep_token=9_999,
        held_out_fraction=fraction,
        logical_shards=shards,
        packing=packing,
        num_workers=0,
    )

    def write(grown: bool) -> None:
        for name, (count, more) in sizes.items():
            write_documents(root / "web" / name, [[row % 9, row % 7] for row in range(count + grown * more)])
        write_documents(root / "code/x.arrow", [[1, 2, 3]] * 20)

    write(grown=False)
    train, held_out = seen_of(config, "train"), seen_of(config, "held_out")
    everything = {("web", name, row) for name, (count, _) in sizes.items() for row in range(count)}
    everything |= {("code", "x.arrow", row) for row in range(20)}
    assert not train & held_out and train | held_out <= everything
    if train and held_out:
        assert train | held_out == everything
    write(grown=True)
    for changes in ({}, {"logical_shards": other_shards}, {"seq_length": seq_length + 1, "logical_shards": 1}):
        asked = replace(config, **changes)  # type: ignore[arg-type]
        later_train, later_held_out = seen_of(asked, "train"), seen_of(asked, "held_out")
        assert not later_train & later_held_out
        assert not train & later_held_out and not held_out & later_train  # old documents keep their split
        assert not train or not later_train or train <= later_train
        assert not held_out or not later_held_out or held_out <= later_held_out
