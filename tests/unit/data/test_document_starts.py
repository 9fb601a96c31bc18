"""Where documents begin in the batches of a loader, held against lists of (document, place) made the slow way."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from unit.data.sampling.stream_oracle import Oracle, Place, text_number
from unit.data.token_files import loader, plan, random_documents, write_documents

from pretraining.config.training import DataConfig
from pretraining.data.batch import IGNORED_LABEL
from pretraining.data.storage.index import BLOCK_DOCUMENTS

SEP, BOS, SEED = 999, 998, 7
S = 24


@pytest.fixture
def documents() -> list[list[int]]:
    """With the separator inside, at the end of some, and some empty."""
    made = random_documents(300, largest=60)
    for number, document in enumerate(made):
        if document and number % 3 == 0:
            document[len(document) // 2] = SEP
        if document and number % 7 == 0:
            document[-1] = SEP
    return made


@pytest.mark.parametrize("bos", [None, BOS])
def test_pieces_positions_and_labels_are_those_of_the_oracle(
    tmp_path: Path, documents: list[list[int]], bos: int | None
) -> None:
    write_documents(tmp_path / "web/a.arrow", documents[:100], batch_documents=9)
    write_documents(tmp_path / "web/b.arrow", documents[100:])
    front = [] if bos is None else [bos]
    trained = [
        [*front, *document, *([SEP] if document[-1] != SEP else [])] if document else [] for document in documents
    ]
    config = DataConfig(
        data_path=str(tmp_path),
        seq_length=S,
        sep_token=SEP,
        bos_token=bos,
        document_mask=True,
        logical_shards=3,
        num_workers=0,
    )
    made = loader(config, plan(16), seed=SEED)
    oracle = Oracle([len(each) for each in trained], BLOCK_DOCUMENTS, 3, S, (SEED, text_number("web", "train")))
    passes = 2
    samples = {shard: oracle.shard_samples(shard, passes + 1) for shard in range(3)}
    order = oracle.sample_order(passes)
    labels_seen: Counter[Place] = Counter()
    for step in range(len(order) // 16):
        taken = sorted(order[step * 16 : (step + 1) * 16], key=lambda pair: pair[0])
        (micro_batch,) = next(made).micro_batches
        inputs = micro_batch.model_inputs()
        assert inputs.positions_BS is not None
        rows = zip(
            taken,
            micro_batch.tokens_BT.tolist(),
            inputs.labels_BS.tolist(),
            inputs.positions_BS.tolist(),
            strict=True,
        )
        lengths: list[int] = []
        for (shard, number), tokens, labels, positions in rows:
            places = samples[shard][number]
            assert tokens == [trained[document][at] for document, at in places]
            position = 0
            for at in range(S):
                begins = at == 0 or places[at][1] == 0
                position = 0 if begins else position + 1
                lengths = [*lengths, 1] if begins else [*lengths[:-1], lengths[-1] + 1]
                crosses = places[at + 1][1] == 0
                assert positions[at] == position
                assert labels[at] == (IGNORED_LABEL if crosses else tokens[at + 1])
                if not crosses:
                    labels_seen[places[at + 1]] += 1
        assert inputs.document_lengths == tuple(lengths)
    wanted = {(document, at) for document, each in enumerate(trained) for at in range(1, len(each))}
    assert labels_seen.keys() == wanted
    # Every label once a pass; steps that are not whole and the last sample's end are the only ones that may lack.
    assert set(labels_seen.values()) <= {passes - 1, passes}
    assert sum(labels_seen.values()) >= passes * len(wanted) - 16 * (S + 1) - 3 * S
