from __future__ import annotations

from unit.data.token_files import loader

from pretraining.config.training import DataConfig

CONFIG = DataConfig(use_dummy_dataset=True, seq_length=16, num_workers=0)


def test_every_token_is_followed_by_the_next_number() -> None:
    micro_batch = next(loader(CONFIG, vocab_size=50)).micro_batches[0]
    inputs = micro_batch.model_inputs()
    assert ((inputs.tokens_BS + 1) % 50 == inputs.labels_BS).all()
    assert inputs.tokens_BS.shape == (8, 16)
