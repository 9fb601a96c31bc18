"""A sample of the model's text.

Every rank runs every forward, because sharded parameters are gathered by all ranks together; all draw the same tokens
from the same seed. There is no key/value cache: a sample is a glance at the model, not a service.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pretraining.distributed.fsdp import reshard_model


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    count: int,
    context: int,
    device: torch.device,
    *,
    seed: int = 0,
    temperature: float = 0.8,
    top_k: int = 50,
) -> list[int]:
    """Continues a prompt; a collective call.

    Args:
        model: returns logits [1, S, V] for tokens [1, S].
        prompt: token ids to continue, at least one.
        count: how many tokens to draw.
        context: tokens that the model looks back at, at most.
        temperature: 0 takes the likeliest token each time.
        top_k: draws among this many of the likeliest tokens.

    Returns:
        The new tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        window = torch.tensor([tokens[-context:]], dtype=torch.int64, device=device)
        logits_V = model(window)[0, -1].float().cpu()
        token = _draw(logits_V, temperature, top_k, generator)
        # Ranks of different hardware may differ in the last bit of a logit; they must not part ways.
        dist.broadcast(token, src=0)
        tokens.append(int(token))
    reshard_model(model)
    return tokens[len(prompt) :]


def _draw(logits_V: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits_V.argmax()
    best = logits_V.topk(min(top_k, logits_V.numel()))
    choice = torch.multinomial(torch.softmax(best.values / temperature, dim=-1), 1, generator=generator)
    return best.indices[choice].squeeze()
