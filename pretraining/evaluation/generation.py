"""Text generation, token by token.

    text -> `encode_prompt`: begin-of-text as in training, special tokens as ids -> `draw_tokens` -> `stream_text`
    prompt -> logits of the next token -> draw a token -> prompt and this token -> …, until the text ends

`TextSampler` samples from a model in training. Every rank runs every forward, because sharded parameters are gathered
by all ranks together, and all ranks draw the same tokens from the same seed. Each forward runs over all tokens, which
is slow but simple. `CachedModel` runs each token once, in one process, for `pretrain sample`.

Shapes: B batch, S new tokens, H query heads, K key/value heads, E head dim; T tokens in the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretraining.config.training import TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.data.tokenizer import Tokenizer, load_tokenizer
from pretraining.distributed.compile import without_compiling
from pretraining.distributed.fsdp import reshard_model
from pretraining.distributed.processes import Processes, on_every_rank, on_rank_zero
from pretraining.errors import ConfigError
from pretraining.model.kernels import causal_attention
from pretraining.model.llama import Llama
from pretraining.model.rope import compute_rotation
from pretraining.observability.events import Events

log = logging.getLogger(__name__)

UNFINISHED_CHARACTER = "\ufffd"
"""Replacement character that tokenizers return for bytes that do not form a character yet."""
LARGEST_LOGIT = 1e30
"""Bound of logits; divided by a temperature, they stay finite in float32."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the defaults are those of a model in training.

    Attributes:
        temperature: 0 takes the likeliest token each time.
        top_k: number of likeliest tokens to draw from; 0 = all.
        top_p: share of the probability that the likeliest tokens to draw from have together (Holtzman et al. 2019).
    """

    seed: int
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0


@dataclass(frozen=True)
class TextSampler:
    """Sampler that continues one prompt with the same seed each time, so that samples are comparable along a run.

    Attributes:
        prompt_tokens: token ids of the prompt, at least one.
        ends: token ids that end a text.
        count: most tokens to draw.
        context: largest number of tokens in a forward.
        tokenizer: decodes tokens; None on ranks other than 0.
    """

    prompt: str
    prompt_tokens: list[int]
    ends: tuple[int, ...]
    count: int
    context: int
    seed: int
    tokenizer: Tokenizer | None

    @torch.no_grad()
    def sample(self, model: nn.Module, device: torch.device) -> str:
        """Sample from a model, possibly sharded and compiled, with logits [1, S, V]; a collective call."""

        def next_logits(tokens: Sequence[int]) -> torch.Tensor:
            window = torch.tensor([tokens[-self.context :]], dtype=torch.int64, device=device)
            logits_V: torch.Tensor = model(window)[0, -1]
            return logits_V

        with without_compiling():  # the length changes with every token
            drawn = list(draw_tokens(next_logits, self.prompt_tokens, self.count, Sampling(self.seed), self.ends))
        reshard_model(model)
        if self.tokenizer is None:
            return ""
        return "".join(stream_text(self.tokenizer.decode, self.prompt_tokens, drawn))

    def show(self, model: nn.Module, device: torch.device, step: int, events: Events) -> None:
        """Sample from a model, and log the text; a collective call."""
        text = self.sample(model, device)
        lines = (self.prompt + text).splitlines()
        log.info("step %d  generated text:\n%s", step, "\n".join(f"    {line}" for line in lines))
        events.add("sample", step, prompt=self.prompt, text=text)


def open_sampler(config: TrainConfig, processes: Processes) -> TextSampler | None:
    """Return the sampler of the settings; None if they ask for no text. A collective call that raises as `read_prompt`.

    Rank 0 keeps the tokenizer in memory, since its files may move during a long run.
    """
    read = on_every_rank(lambda: read_prompt(config) if processes.is_main else None)
    shared = on_rank_zero(lambda: read and read[1:])
    if shared is None:
        return None
    prompt, count = config.evaluation.sample_prompt, config.evaluation.sample_tokens
    tokenizer = read[0] if read else None
    return TextSampler(prompt, *shared, count, config.data.seq_length, config.run.seed, tokenizer)


def read_prompt(config: TrainConfig) -> tuple[Tokenizer, list[int], tuple[int, ...]] | None:
    """Return tokenizer, prompt and ends of generated text; None if the settings ask for no text.

    Raises:
        DataError, ConfigError: the tokenizer cannot be read, or the prompt has a token without a row or is longer than
            the context.
    """
    data = config.data
    if data.tokenizer_path is None or config.evaluation.sample_tokens == 0:
        return None
    rows = resolve_shape(config.model).vocab_size
    tokenizer = load_tokenizer(data.tokenizer_path)
    ends = tuple(each for each in (data.sep, tokenizer.end_of_text) if each is not None)[:1]
    prompt = encode_prompt(tokenizer, config.evaluation.sample_prompt, data.bos, ends)
    source = "--sample_prompt" if config.evaluation.sample_prompt else "the beginning of generated text"
    check_prompt(source, prompt, tokenizer, rows, data.seq_length)
    return tokenizer, prompt, ends


def encode_prompt(tokenizer: Tokenizer, text: str, begin: int | None, ends: Sequence[int]) -> list[int]:
    """Return the tokens of a prompt, in which names of special tokens are ids: its user typed them.

    Args:
        begin: token at the beginning of each document, unless the text has it; None = no such token.
        ends: tokens that end a document; an empty prompt is the first of them, which stands before a document.
    """
    tokens = tokenizer.encode(text, special_tokens=True)
    if begin is not None and tokens[:1] != [begin]:
        tokens = [begin, *tokens]
    return tokens or [next(iter(ends), 0)]


def check_prompt(source: str, tokens: Sequence[int], tokenizer: Tokenizer | None, rows: int, context: int) -> None:
    """Raise a ConfigError if a model with this many rows cannot continue a prompt from this source."""
    largest = max(tokens)
    if largest >= rows:
        named = str(largest) if tokenizer is None else tokenizer.named(largest)
        raise ConfigError(f"{source} gives token {named}, and the model has {rows} rows")
    if len(tokens) > context:
        raise ConfigError(
            f"{source} gives {len(tokens)} tokens, and the model has a context of {context}: give a shorter prompt"
        )


class KeyValueCache:
    """Keys and values of all earlier tokens in one block."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """T, number of cached tokens."""
        return 0 if self._kept is None else self._kept[0].size(1)

    def attend(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, scale: float | None = None) -> Tensor:
        """Add tokens, and return their attention: [B, S, H, E]. Calls after the first take one token."""
        is_first = self._kept is None
        if self._kept is not None:
            k_BSKE, v_BSKE = (torch.cat(pair, 1) for pair in zip(self._kept, (k_BSKE, v_BSKE), strict=True))
        self._kept = k_BSKE, v_BSKE
        return causal_attention(q_BSHE, k_BSKE, v_BSKE, scale, is_causal=is_first)


class CachedModel:
    """Next-token logits of an unsharded model, which runs each token once.

    Args:
        context: largest number of tokens in the cache; a full cache is rebuilt from the newest half.
    """

    def __init__(self, model: Llama, context: int, device: torch.device) -> None:
        self._model = model
        self._context = context
        self._device = device
        self._caches: list[KeyValueCache] = []
        self._seen = 0

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits [V] after these tokens, which extend those of the call before."""
        new = tokens[self._seen :]
        is_full = bool(self._caches) and self._caches[0].length + len(new) > self._context
        if is_full or len(new) > self._context:
            new = tokens[-max(1, self._context // 2) :]
        if is_full or not self._caches:
            self._caches = [KeyValueCache() for _ in self._model.blocks]
        self._seen = len(tokens)
        model, begin = self._model, self._caches[0].length
        tokens_BS = torch.tensor([new], dtype=torch.int64, device=self._device)
        positions_BS = torch.arange(begin, begin + len(new), device=self._device)[None]
        rotation = compute_rotation(model.shape, positions_BS)
        x_BSD = model.model.embed(tokens_BS)
        for block, cache in zip(model.blocks, self._caches, strict=True):
            x_BSD = block(x_BSD, rotation, cache)
        logits_BV: torch.Tensor = model.lm_head(model.scale_logits(model.model.norm(x_BSD[:, -1])))
        return logits_BV[0]


def draw_tokens(
    next_logits: Callable[[Sequence[int]], torch.Tensor],
    prompt: Sequence[int],
    count: int,
    sampling: Sampling,
    ends: Sequence[int] = (),
) -> Iterator[int]:
    """Yield drawn tokens that continue a prompt, until the text ends; each token is a collective call.

    Args:
        next_logits: returns the logits [V] after its tokens.
        prompt: token ids, at least one.
        count: most tokens to draw.
        ends: tokens that end a text; they are not yielded.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(count):
        token = _draw(next_logits(tokens).float().cpu(), sampling, generator)
        if dist.is_initialized():  # logits of different hardware may differ in the last bit; the token must not
            dist.broadcast(token, src=0)
        if int(token) in ends:
            return
        tokens.append(int(token))
        yield tokens[-1]


def _draw(logits_V: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> torch.Tensor:
    # Logits that are not finite give nonsense text, but must not stop the run.
    logits_V = logits_V.nan_to_num(nan=0.0).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    if sampling.temperature == 0:
        return logits_V.argmax()
    best = logits_V.topk(min(sampling.top_k or logits_V.numel(), logits_V.numel()))
    probabilities = torch.softmax(best.values / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        likelier = probabilities.cumsum(-1) - probabilities
        probabilities[1:] *= likelier[1:] < sampling.top_p
    choice = torch.multinomial(probabilities, 1, generator=generator)
    return best.indices[choice].squeeze()


def stream_text(decode: Callable[[Sequence[int]], str], prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens that follow a prompt; a character is yielded when all of its bytes are there."""
    known, new = list(prompt[-1:]), []  # the text of a token may depend on the previous token
    for token in tokens:
        new.append(token)
        text = decode([*known, *new])[len(decode(known)) :]
        if not text.endswith(UNFINISHED_CHARACTER):
            yield text
            known, new = [token], []
    if new:
        yield decode([*known, *new])[len(decode(known)) :]
