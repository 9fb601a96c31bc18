"""How many parameters a Llama has, and how many floating-point operations a token of training costs. Arithmetic only.

Letters: D hidden, H query heads, K key/value heads, E head dim, F feed-forward, V vocabulary, L layers, S sequence.
"""

from __future__ import annotations

from pretraining.config.variants import LlamaShape, parameter_count

__all__ = ["flops_per_token", "matmul_parameters", "parameter_count", "recomputed_flops_per_token"]


def matmul_parameters(shape: LlamaShape) -> int:
    """Parameters that a token is multiplied with: of each block and of the head.

    attention     q and o: D·(H·E) each; k and v: D·(K·E) each
    feed-forward  gate, up, down: D·F each
    head          D·V, tied or not. The embedding is a look-up and never counts.
    """
    attention = 2 * shape.hidden_size * (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
    feed_forward = 3 * shape.hidden_size * shape.intermediate_size
    return shape.num_hidden_layers * (attention + feed_forward) + shape.hidden_size * shape.vocab_size


def flops_per_token(shape: LlamaShape, seq_length: float) -> float:
    """Floating-point operations that training needs for one token: 6 x matmul parameters + 6·L·(H·E)·S.

    Matrices: a token and a parameter meet in one multiplication and one addition, 2 FLOPs. Backward does it twice more,
    for the gradient of the input and for that of the parameter: 2 + 4 = 6.

    Attention: a token's scores against S keys cost 2·(H·E)·S, its mix of S values again 2·(H·E)·S; three times that for
    forward and backward: 12·(H·E)·S a layer. Causality leaves half, since a token sees S/2 others on average.

    This is what the model needs, not what the hardware does: recomputed activations do not count, nor do norms,
    rotations and softmax. It is the numerator of MFU in PaLM (Chowdhery et al. 2022, appendix B), except that the
    attention term there is not halved.

    Args:
        shape: dimensions of the model.
        seq_length: S, tokens a sequence. Where attention stays inside documents, the tokens of the document that a
            token is in, on average over tokens: the formula is linear in it.
    """
    attention = 6 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * seq_length
    return 6 * matmul_parameters(shape) + attention


def recomputed_flops_per_token(shape: LlamaShape, share: float, seq_length: float) -> float:
    """Operations a token that activation checkpointing does twice: share x forward of the blocks.

        forward of the blocks  =  2 x matmul parameters of the blocks  +  2·L·(H·E)·S

    With `flops_per_token` it is the numerator of HFU (hardware FLOPs utilisation; Chowdhery et al. 2022, appendix B).
    Head and embedding are outside of the blocks and never computed again. What a flash kernel computes again inside its
    backward does not count, as it does not in the literature.

    Args:
        shape: dimensions of the model.
        share: of the blocks' forward that backward computes again; 0 = nothing, 1 = all of it.
        seq_length: S, as in `flops_per_token`.
    """
    matrices = 2 * (matmul_parameters(shape) - shape.hidden_size * shape.vocab_size)
    attention = 2 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * seq_length
    return share * (matrices + attention)
