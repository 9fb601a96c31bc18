"""A prompt that a trained model continues: `pretrain sample`.

checkpoint, run or Hugging Face folder -> model, tokenizer, which tokens begin and end a text
prompt -> token ids -> one token after the other, until the text ends -> stdout, as it comes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import torch

from pretraining.checkpoint.completeness import check_finite
from pretraining.checkpoint.start_point import CheckpointRef, load_model
from pretraining.config.commands import SampleConfig
from pretraining.config.recipes import settings_in
from pretraining.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from pretraining.errors import ConfigError
from pretraining.evaluation.generation import CachedModel, draw_tokens
from pretraining.files import is_file, read_json
from pretraining.launch.terminal import print_text
from pretraining.model.hf import CONFIG_FILE, GENERATION_CONFIG_FILE

UNFINISHED_CHARACTER = "\ufffd"
"""What a tokenizer shows for bytes that are no character, or not yet."""


def sample(config: SampleConfig) -> None:
    """Print a prompt and what a model continues it with, a token at a time; raises as `continue_prompt`."""
    found = continue_prompt(config, "cuda" if torch.cuda.is_available() else "cpu")
    if config.prompt_tokens:
        pieces: Iterable[str] = chain([",".join(map(str, found.prompt))], (f",{token}" for token in found.new))
    else:
        pieces = chain([config.prompt or ""], found.text())
    for piece in pieces:
        print_text(piece, end="", flush=True)
    print_text()


@dataclass(frozen=True)
class Continuation:
    """A prompt and what a model continues it with.

    Attributes:
        prompt: its tokens, with those that begin a text.
        new: the tokens that follow, until the text ends or enough are drawn; each is drawn when it is asked for.
        tokenizer: of their text; None if there is none, which a prompt of token ids does not need.
    """

    prompt: list[int]
    new: Iterator[int]
    tokenizer: Tokenizer | None

    def text(self) -> Iterator[str]:
        """Return the text of the new tokens, in pieces, as they are drawn."""
        assert self.tokenizer is not None  # there was a prompt to encode
        return stream_text(self.tokenizer.decode, self.prompt, self.new)


def continue_prompt(config: SampleConfig, device: str) -> Continuation:
    """Load a model, in bfloat16 on a GPU, and have it continue a prompt.

    Raises:
        CheckpointError: there is no model, it is damaged, or its weights are not finite.
        ConfigError, DataError: the prompt or the tokenizer cannot be used.
    """
    place, dtype = torch.device(device), torch.float32 if device == "cpu" else torch.bfloat16
    checkpoint, model = load_model(config.ckpt_load_path, place, dtype)
    for name, weight in model.named_parameters():
        check_finite(checkpoint.path, name, weight.detach())
    text = _text_of(config, checkpoint, model.shape.max_position_embeddings)
    prompt = _prompt_tokens(config, text)
    if max(prompt) >= model.shape.vocab_size:
        source = "--prompt_tokens" if config.prompt_tokens else "the tokenizer"
        limit = f"the model of {checkpoint.path} has tokens 0 to {model.shape.vocab_size - 1}"
        raise ConfigError(f"{source} gives {max(prompt)}, and {limit}")
    drawn = draw_tokens(
        CachedModel(model, text.context, place),
        prompt,
        config.max_new_tokens,
        seed=config.seed,
        temperature=config.temperature,
        top_k=config.top_k,
    )
    new = takewhile(lambda token: token not in text.ends, drawn)
    return Continuation(prompt, new, text.tokenizer)


@dataclass(frozen=True)
class _Text:
    """How text becomes tokens of a model.

    Attributes:
        begin: tokens before every text.
        ends: tokens that end one.
        context: tokens that the model looks back at, at most.
    """

    tokenizer: Tokenizer | None
    begin: tuple[int, ...]
    ends: tuple[int, ...]
    context: int


def _text_of(config: SampleConfig, checkpoint: CheckpointRef, context: int) -> _Text:
    """Find how a model was fed: from its run's settings, or from the files of another program's folder."""
    manifest, path = checkpoint.manifest, checkpoint.path
    settings = settings_in(manifest.config, f"config of {path}").data
    own = str(path) if is_file(path / TOKENIZER_FILE) else settings.tokenizer_path
    named = config.tokenizer_path or own
    is_needed = config.tokenizer_path is not None or not config.prompt_tokens
    tokenizer = load_tokenizer(named) if named is not None and is_needed else None
    ends = _ends_in(path) if settings.sep_token is None else (settings.sep_token,)
    if not ends and tokenizer is not None and tokenizer.end_of_text is not None:
        ends = (tokenizer.end_of_text,)
    if manifest.data:  # trained here
        begin = [settings.bos_token] if settings.bos_token is not None else []
        context = max(context, settings.seq_length)
    else:
        begin = [tokenizer.begin_of_text] if tokenizer is not None and tokenizer.begin_of_text is not None else []
    return _Text(tokenizer, tuple(begin), ends, context)


def _ends_in(folder: Path) -> tuple[int, ...]:
    """Return the tokens that end a text, from the first file of a Hugging Face folder that names some."""
    for name in (GENERATION_CONFIG_FILE, CONFIG_FILE):
        try:
            document: Any = read_json(folder / name)
        except (OSError, ValueError):
            continue  # none is needed: the text then ends where enough is drawn
        ids = document.get("eos_token_id") if isinstance(document, dict) else None
        found = tuple(each for each in (ids if isinstance(ids, list) else [ids]) if type(each) is int)
        if found:
            return found
    return ()


def _prompt_tokens(config: SampleConfig, text: _Text) -> list[int]:
    if config.prompt_tokens:
        return list(config.prompt_tokens)
    if text.tokenizer is None:
        raise ConfigError(
            f"{config.ckpt_load_path} comes without a tokenizer: give --tokenizer_path, or the prompt as token ids "
            "(--prompt_tokens=1,2,3)"
        )
    tokens = [*text.begin, *text.tokenizer.encode(config.prompt or "")]
    return tokens or [next(iter(text.ends), 0)]  # what stands before a document


def stream_text(decode: Callable[[Sequence[int]], str], prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens that follow a prompt as they come: each character once all of its bytes are there."""
    known, new = list(prompt[-1:]), []  # what a token reads like may depend on the one before it
    for token in tokens:
        new.append(token)
        text = decode([*known, *new])[len(decode(known)) :]
        if not text.endswith(UNFINISHED_CHARACTER):
            yield text
            known, new = [token], []
    if new:
        yield decode([*known, *new])[len(decode(known)) :]
