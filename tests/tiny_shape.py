"""The smallest Llama that tests of other parts than the model need."""

from __future__ import annotations

from pretraining.config.variants import LlamaShape

TINY_SHAPE = LlamaShape(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=32,
    max_position_embeddings=32,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    rope_scaling=None,
)
