"""Text that a model goes on with, token by token.

    a prompt -> logits of the next token -> one is drawn -> the prompt and this token -> …

`TextSampler` samples from a model that trains. Every rank runs every forward, because sharded parameters are gathered
by all ranks together; all draw the same tokens from the same seed. There the model looks at all tokens each time: it is
a glance at the model, not a service. `CachedModel` looks at each once, in one process, for `pretrain sample`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from pretraining.config.training import TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.data.tokenizer import Tokenizer, load_fitting_tokenizer
from pretraining.distributed.compile import without_compiling
from pretraining.distributed.fsdp import reshard_model
from pretraining.distributed.processes import Processes, on_every_rank, on_rank_zero
from pretraining.model.cache import KeyValueCache
from pretraining.model.llama import Llama, next_token_logits

TEMPERATURE, TOP_K = 0.8, 50
"""Of samples of a model that trains."""
LARGEST_LOGIT = 1e30
"""Divided by a temperature, it is still finite in float32."""
COLDEST = 1e-6
"""Below this temperature no token but the likeliest is ever drawn, and quotients by it leave the range of float32."""


@dataclass(frozen=True)
class Sample:
    """Text that a model has written.

    Attributes:
        prompt: what it was to continue.
        text: what it wrote; empty on other ranks than 0.
    """

    prompt: str
    text: str

    def indented(self) -> str:
        """Prompt and text for people, four spaces before each line."""
        return "\n".join(f"    {line}" for line in (self.prompt + self.text).splitlines())


@dataclass(frozen=True)
class TextSampler:
    """Has a model continue a prompt, with the same draws each time, so that samples compare along a run.

    Attributes:
        prompt: its text.
        prompt_tokens: its token ids, at least one.
        count: how many tokens to draw.
        context: tokens that the model looks back at, at most.
        tokenizer: makes text of tokens; None on other ranks than 0.
    """

    prompt: str
    prompt_tokens: list[int]
    count: int
    context: int
    seed: int
    tokenizer: Tokenizer | None

    @torch.no_grad()
    def sample(self, model: nn.Module, device: torch.device) -> Sample:
        """Sample from a model that may be sharded and compiled, and gives logits [1, S, V]; a collective call."""

        def next_logits(tokens: Sequence[int]) -> torch.Tensor:
            window = torch.tensor([tokens[-self.context :]], dtype=torch.int64, device=device)
            logits_V: torch.Tensor = model(window)[0, -1]
            return logits_V

        with without_compiling():  # every token makes the sequence longer
            drawn = list(draw_tokens(next_logits, self.prompt_tokens, self.count, self.seed, TEMPERATURE, TOP_K))
        reshard_model(model)
        return Sample(self.prompt, self.tokenizer.decode(drawn) if self.tokenizer is not None else "")


def open_sampler(config: TrainConfig, processes: Processes) -> TextSampler | None:
    """Return what samples text from the model, or None where no text is asked for; errors are as in `read_prompt`.

    Rank 0 keeps the tokenizer, since its files may move while a run goes on for months. A collective call.
    """
    read = on_every_rank(lambda: read_prompt(config) if processes.is_main else None)
    tokens = on_rank_zero(lambda: read and read[1])
    if tokens is None:
        return None
    prompt, count = config.evaluation.sample_prompt, config.evaluation.sample_tokens
    tokenizer = read[0] if read else None
    return TextSampler(prompt, tokens, count, config.data.seq_length, config.run.seed, tokenizer)


def read_prompt(config: TrainConfig) -> tuple[Tokenizer, list[int]] | None:
    """Return the tokenizer of the samples of text and the tokens that they continue; None without samples.

    Raises:
        DataError: the tokenizer cannot be read.
        ConfigError: it has more tokens than the model.
    """
    if config.data.tokenizer_path is None or config.evaluation.sample_tokens == 0:
        return None
    tokenizer = load_fitting_tokenizer(config.data.tokenizer_path, resolve_shape(config.model).vocab_size)
    return tokenizer, tokenizer.encode(config.evaluation.sample_prompt) or [tokenizer.end_of_text or 0]


class CachedModel:
    """The next token's logits from a whole model, which looks at each token once.

    Args:
        context: tokens that the model looks back at, at most; where they are used up, it goes on from the newest half.
    """

    def __init__(self, model: Llama, context: int, device: torch.device) -> None:
        self._model = model
        self._context = context
        self._device = device
        self._caches: list[KeyValueCache] = []
        self._seen = 0

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return logits [V] of the token after these, which begin with those of the call before."""
        new = tokens[self._seen :]
        is_full = bool(self._caches) and self._caches[0].length + len(new) > self._context
        if is_full or len(new) > self._context:
            new = tokens[-max(1, self._context // 2) :]
        if is_full or not self._caches:
            self._caches = [KeyValueCache(self._context) for _ in self._model.blocks]
        self._seen = len(tokens)
        tokens_BS = torch.tensor([new], dtype=torch.int64, device=self._device)
        return next_token_logits(self._model, tokens_BS, self._caches)[0]


def draw_tokens(
    next_logits: Callable[[Sequence[int]], torch.Tensor],
    prompt: Sequence[int],
    count: int,
    seed: int,
    temperature: float,
    top_k: int,
) -> Iterator[int]:
    """Yield tokens that continue a prompt, as they are drawn; a collective call for each.

    Args:
        next_logits: returns logits [V] of the token after these.
        prompt: token ids, at least one.
        count: how many tokens to draw.
        temperature: 0 takes the likeliest token each time.
        top_k: draws among this many of the likeliest tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        token = _draw(next_logits(tokens).float().cpu(), temperature, top_k, generator)
        if dist.is_initialized():  # ranks of different hardware may differ in the last bit of a logit; not in the token
            dist.broadcast(token, src=0)
        tokens.append(int(token))
        yield tokens[-1]


def _draw(logits_V: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> torch.Tensor:
    # A model that computes no finite logits writes nonsense; a look at it must not end its run.
    logits_V = logits_V.nan_to_num(nan=0.0).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    if temperature < COLDEST:
        return logits_V.argmax()
    best = logits_V.topk(min(top_k, logits_V.numel()))
    choice = torch.multinomial(torch.softmax(best.values / temperature, dim=-1), 1, generator=generator)
    return best.indices[choice].squeeze()
