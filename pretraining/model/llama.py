"""The decoder of the Llama family (Touvron et al. 2023), with the layer names of Hugging Face's `LlamaForCausalLM`.

    tokens -> embed_tokens
           -> L blocks:  x + self_attn(input_layernorm(x)),  then  x + mlp(post_attention_layernorm(x))
           -> norm -> lm_head -> logits, or with labels the loss, chunk by chunk (loss.py)

The switches of `LlamaShape` make it a Qwen, Mistral, OLMo 2, SmolLM 3 or Granite.

`llama.load_state_dict(hugging_face_model.state_dict())` works, and the reverse.

For sharding, a parent uses a child's parameters only by calling the child, because FSDP gathers them in this call. The
head is the exception: it is in the root's group, and the loss in the root's forward uses its matrix. Nothing is
computed before `forward`, so `with torch.device("meta"): Llama(shape)` needs no memory at any size; then shard,
`to_empty`, and `init.initialize_weights`.

Shapes: B batch, S sequence, D hidden, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretraining.config.training import LossConfig
from pretraining.config.variants import LlamaShape, load_block
from pretraining.context_group import SharedRows
from pretraining.model.attention import Attention, Reach
from pretraining.model.kernels import locate_documents
from pretraining.model.loss import HeadLoss, head_loss
from pretraining.model.rope import Rotation, compute_rotation
from pretraining.model.shared_rows import locate_rows


class Llama(nn.Module):
    """A decoder with its language-model head and loss."""

    def __init__(self, shape: LlamaShape, loss: LossConfig = LossConfig()) -> None:
        super().__init__()
        self.shape = shape
        self.loss = loss
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.tie_weights()

    @property
    def blocks(self) -> list[nn.Module]:
        """Decoder blocks, the units of sharding, compilation and activation checkpointing."""
        return list(self.model.layers)

    def tie_weights(self) -> None:
        """Make the head use the embedding's parameter if the shape says so.

        `to_empty` separates shared meta tensors, so call this again after it. FSDP needs embedding and head in one
        group, the root's.
        """
        if self.shape.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
        document_lengths: tuple[int, ...] | None = None,
        shared_rows: SharedRows | None = None,
    ) -> Tensor | HeadLoss:
        """Predict the next token at each position.

        Args:
            tokens_BS: token ids, int64 [B, S].
            labels_BS: next tokens, already shifted (`labels[:, i]` follows `tokens[:, i]`), int64 [B, S]; -100 =
                ignored.
            positions_BS: positions for the rotary embedding, integers [B, S]; None = 0 .. S-1.
            document_lengths: tokens of the documents that lie end to end in the flattened [B * S] tokens; no document
                crosses rows, and attention stays inside them. None = each row is one document.
            shared_rows: the rows of which the tokens are this rank's part; attention then covers the documents of the
                whole rows, and the call is collective. None = the rows are whole.

        Returns:
            Logits [B, S, V] in the dtype of the parameters, or with labels the loss.
        """
        hidden_BSD = self.scale_logits(self.model(tokens_BS, positions_BS, document_lengths, shared_rows))
        if labels_BS is None:
            logits_BSV: Tensor = self.lm_head(hidden_BSD)
            return logits_BSV
        chunk_tokens, weight = self.loss.loss_chunk_tokens, self.loss.z_loss_weight
        return head_loss(hidden_BSD, self.lm_head.weight, labels_BS, chunk_tokens, weight)

    def scale_logits(self, hidden: Tensor) -> Tensor:
        """Divide hidden states, and so their logits and all gradients, by `logits_scaling`."""
        return hidden if self.shape.logits_scaling == 1 else hidden / self.shape.logits_scaling


class Decoder(nn.Module):
    """The model without its head (Hugging Face's `LlamaModel`): embedding, blocks, final norm."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(block_class(shape)(shape, layer) for layer in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.watch: Callable[[str, Tensor], None] | None = None
        """Called with the output [B, S, D] of embedding, each block and norm, by name."""

    def forward(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor | None,
        document_lengths: tuple[int, ...] | None,
        shared_rows: SharedRows | None = None,
    ) -> Tensor:
        """Return hidden states [B, S, D] of tokens [B, S]; arguments as in `Llama.forward`."""
        if positions_BS is None:
            positions_BS = torch.arange(tokens_BS.size(1), device=tokens_BS.device)[None]
        rotation = compute_rotation(self.shape, positions_BS)
        x_BSD = self.embed(tokens_BS)
        reach: Reach
        if shared_rows is None:
            reach = locate_documents(document_lengths, x_BSD, self.shape.head_dim)
        else:
            reach = locate_rows(shared_rows, x_BSD, self.shape.head_dim)
        watch = self.watch or _ignore
        watch("embed", x_BSD)
        for layer, block in enumerate(self.layers):
            x_BSD = block(x_BSD, rotation, reach)
            watch(f"layers.{layer}", x_BSD)
        hidden_BSD: Tensor = self.norm(x_BSD)
        watch("norm", hidden_BSD)
        return hidden_BSD

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """Return the first hidden states [B, S, D] of tokens [B, S]."""
        x_BSD: Tensor = self.embed_tokens(tokens_BS)
        return x_BSD if self.shape.embedding_multiplier == 1 else x_BSD * self.shape.embedding_multiplier


def _ignore(name: str, output_BSD: Tensor) -> None:
    """Watch nothing."""


class DecoderBlock(nn.Module):
    """A block: attention, then feed-forward, each with a norm before it and added to the residual stream.

    Args:
        layer: number of the block, from 0.
    """

    def __init__(self, shape: LlamaShape, layer: int = 0) -> None:
        super().__init__()
        self.residual_multiplier = shape.residual_multiplier
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, layer)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x_BSD: Tensor, rotation: Rotation, reach: Reach = None) -> Tensor:
        """Map [B, S, D] to [B, S, D]; other arguments as in `Attention.forward`."""
        x_BSD = self.add(x_BSD, self.self_attn(self.input_layernorm(x_BSD), rotation, reach))
        return self.add(x_BSD, self.mlp(self.post_attention_layernorm(x_BSD)))

    def add(self, x_BSD: Tensor, change_BSD: Tensor) -> Tensor:
        """Add a change to the residual stream, times `residual_multiplier`; a factor of 1 costs nothing."""
        return torch.add(x_BSD, change_BSD, alpha=self.residual_multiplier)


class PostNormBlock(DecoderBlock):
    """A block with its norms behind attention and feed-forward layer (OLMo 2)."""

    def __init__(self, shape: LlamaShape, layer: int = 0) -> None:
        super().__init__(shape, layer)
        del self.input_layernorm
        self.post_feedforward_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x_BSD: Tensor, rotation: Rotation, reach: Reach = None) -> Tensor:
        """Map [B, S, D] to [B, S, D], as `DecoderBlock.forward`."""
        x_BSD = self.add(x_BSD, self.post_attention_layernorm(self.self_attn(x_BSD, rotation, reach)))
        return self.add(x_BSD, self.post_feedforward_layernorm(self.mlp(x_BSD)))


def block_class(shape: LlamaShape) -> type[nn.Module]:
    """Return the class of a model's blocks: the user's, if the shape names one."""
    if shape.block is not None:
        return load_block(shape.block)
    return PostNormBlock if shape.norm_position == "post" else DecoderBlock


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, GLU Variants Improve Transformer): a gate scales each feature."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D] through F features."""
        out_BSD: Tensor = self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))
        return out_BSD
