"""Keys and values of a text's tokens, kept while it is continued: each is computed once.

Shapes: B batch, S new tokens, H query heads, K key/value heads, E head dim; T tokens in the cache.
"""

from __future__ import annotations

from torch import Tensor

from pretraining.model.attention import causal_attention


class KeyValueCache:
    """Keys and values of the tokens that a block has seen.

    Attributes:
        length: T, how many tokens are in it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._memory: tuple[Tensor, Tensor] | None = None
        self.length = 0

    def attend(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        """Return attention of the first tokens, or of one more, which sees all of them: [B, S, H, E]."""
        is_first = self.length == 0
        assert is_first or q_BSHE.size(1) == 1
        return causal_attention(q_BSHE, *self._extend(k_BSKE, v_BSKE), is_causal=is_first)

    def _extend(self, k_BSKE: Tensor, v_BSKE: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values of the next tokens; returns those of all of them, [B, T, K, E] each."""
        begin, self.length = self.length, self.length + k_BSKE.size(1)
        assert self.length <= self._capacity
        if self._memory is None:
            size = (k_BSKE.size(0), self._capacity, *k_BSKE.shape[2:])
            self._memory = k_BSKE.new_empty(size), v_BSKE.new_empty(size)
        for memory, new_BSKE in zip(self._memory, (k_BSKE, v_BSKE), strict=True):
            memory[:, begin : self.length] = new_BSKE
        keys, values = self._memory
        return keys[:, : self.length], values[:, : self.length]
