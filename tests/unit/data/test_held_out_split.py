"""Held-out documents are never trained on, for any additions to the data and any shards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.token_files import opened, plan, write_documents

from pretraining.config.training import DataConfig, Packing
from pretraining.data.dataset import build_loader
from pretraining.data.samples import SplitName

FILES = ("a.arrow", "b/c.arrow", "m.arrow", "z.arrow")
Place = tuple[str, str, int]  # dataset, file, row


def seen_of(config: DataConfig, split: SplitName) -> set[Place]:
    """The documents in the first passes over a split; none without enough tokens for a sample."""
    datasets = opened(config)
    if any(dataset.tokens(split) <= config.seq_length for dataset in datasets.datasets):
        return set()
    made = build_loader(datasets, config, plan(50), 0, 7, 10_000, split=split)
    seen: set[Place] = set()
    for dataset, source in zip(datasets.datasets, made.reader.sources, strict=True):
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
