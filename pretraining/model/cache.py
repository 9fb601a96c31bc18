"""The key-value cache of text generation, with which each key and value is computed once.

Shapes: B batch, S new tokens, H query heads, K key/value heads, E head dim; T tokens in the cache.
"""

from __future__ import annotations

from torch import Tensor

from pretraining.model.kernels import causal_attention


class KeyValueCache:
    """Keys and values of all earlier tokens in one block.

    Attributes:
        length: T, number of cached tokens.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._memory: tuple[Tensor, Tensor] | None = None
        self.length = 0

    def attend(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, scale: float | None = None) -> Tensor:
        """Add tokens, and return their attention: [B, S, H, E]. Calls after the first take one token."""
        is_first = self.length == 0
        assert is_first or q_BSHE.size(1) == 1
        keys_BTKE, values_BTKE = self._extend(k_BSKE, v_BSKE)
        return causal_attention(q_BSHE, keys_BTKE, values_BTKE, scale, is_causal=is_first)

    def _extend(self, k_BSKE: Tensor, v_BSKE: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values; return all cached keys and values, [B, T, K, E] each."""
        begin, self.length = self.length, self.length + k_BSKE.size(1)
        assert self.length <= self._capacity
        if self._memory is None:
            size = (k_BSKE.size(0), self._capacity, *k_BSKE.shape[2:])
            self._memory = k_BSKE.new_empty(size), v_BSKE.new_empty(size)
        for memory, new_BSKE in zip(self._memory, (k_BSKE, v_BSKE), strict=True):
            memory[:, begin : self.length] = new_BSKE
        keys, values = self._memory
        return keys[:, : self.length], values[:, : self.length]
