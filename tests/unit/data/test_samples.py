from __future__ import annotations

import numpy as np
from unit.data.token_files import loader

from pretraining.config.training import DataConfig
from pretraining.data.samples import dummy_samples

CONFIG = DataConfig(use_dummy_dataset=True, seq_length=16, num_workers=0)


def test_every_token_is_followed_by_the_next_number() -> None:
    micro_batch = next(loader(CONFIG, vocab_size=50)).micro_batches[0]
    inputs = micro_batch.model_inputs()
    assert ((inputs.tokens_BS + 1) % 50 == inputs.labels_BS).all()
    assert inputs.tokens_BS.shape == (8, 16)


def test_a_sample_is_a_function_of_its_number_seed_and_split() -> None:
    def read(seed: int, split: str, number: int) -> list[int]:
        target = np.zeros((1, 5), dtype=np.uint16)
        samples = dummy_samples(4, 4, seed, split, 40_000)
        samples.read(samples.spans(np.array([0]), np.array([number])), target, np.array([0]))
        return [int(token) for token in target[0]]

    assert read(1, "train", 10**15) == read(1, "train", 10**15)
    variants = [read(1, "train", 5), read(2, "train", 5), read(1, "held_out", 5), read(1, "train", 6)]
    assert len({tuple(variant) for variant in variants}) == 4
