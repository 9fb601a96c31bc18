"""`pretrain sample`: text that a trained model generates from a prompt.

checkpoint, run or Hugging Face folder -> model, tokenizer, tokens that begin and end a text
prompt -> token ids -> new tokens, one by one, until the text ends -> stdout
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from pretraining.checkpoint.completeness import check_finite
from pretraining.checkpoint.restore import load_model
from pretraining.checkpoint.run_folder import run_of
from pretraining.config.recipe_files import settings_in
from pretraining.config.training import DataConfig
from pretraining.data.prepared import recorded_tokenizer
from pretraining.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from pretraining.errors import ConfigError
from pretraining.evaluation.generation import (
    CachedModel,
    Sampling,
    check_prompt,
    draw_tokens,
    encode_prompt,
    stream_text,
)
from pretraining.files import is_file, read_object
from pretraining.launch.terminal import print_text
from pretraining.model.hf import CONFIG_FILE, GENERATION_CONFIG_FILE
from pretraining.tools.command_settings import SampleConfig


def sample(config: SampleConfig) -> None:
    """Print a prompt and its continuation, token by token; errors as in `continue_prompt`."""
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
    """A prompt and the tokens that a model adds.

    Attributes:
        prompt: prompt tokens, with the token that begins a text.
        new: new tokens, drawn lazily until the text ends or the limit is reached.
        tokenizer: None only if the prompt was given as token ids.
    """

    prompt: list[int]
    new: Iterator[int]
    tokenizer: Tokenizer | None

    def text(self) -> Iterator[str]:
        """Yield the text of the new tokens in pieces, as they are drawn."""
        assert self.tokenizer is not None  # it encoded the prompt
        return stream_text(self.tokenizer.decode, self.prompt, self.new)


def continue_prompt(config: SampleConfig, device: str) -> Continuation:
    """Load a model (on a GPU in bfloat16) and continue a prompt.

    Raises:
        CheckpointError: a missing or damaged model, or weights that are not finite.
        ConfigError, DataError: unusable prompt or tokenizer.
    """
    place, dtype = torch.device(device), torch.float32 if device == "cpu" else torch.bfloat16
    checkpoint, model = load_model(config.ckpt_load_path, place, dtype)
    for name, weight in model.named_parameters():
        check_finite(checkpoint.path, name, weight.detach())
    is_trained_here = bool(checkpoint.manifest.facts_of_data)
    settings = settings_in(checkpoint.manifest.config, f"config of {checkpoint.path}").data
    tokenizer = _find_tokenizer(config, checkpoint.path, settings)
    begin = settings.bos if is_trained_here or tokenizer is None else tokenizer.begin_of_text
    ends = _ends_of_text(checkpoint.path, settings, tokenizer)
    prompt = list(config.prompt_tokens)
    if tokenizer is not None and not prompt:
        prompt = encode_prompt(tokenizer, config.prompt or "", begin, ends)
    if not prompt:
        raise ConfigError(
            f"{config.ckpt_load_path} has no tokenizer: set --tokenizer_path, or give the prompt as token ids "
            "(--prompt_tokens=1,2,3)"
        )
    context = max(model.shape.max_position_embeddings, settings.seq_length if is_trained_here else 0)
    source = "--prompt_tokens" if config.prompt_tokens else "--prompt"
    check_prompt(source, prompt, tokenizer, model.shape.vocab_size, context)
    window, length = model.shape.sliding_window, len(prompt) + config.max_new_tokens
    if window is not None and length > window:
        raise ConfigError(
            f"prompt and new tokens are {length} tokens, but the model of {checkpoint.path} has a sliding window of "
            f"{window}, and here attention covers all tokens: give a smaller --max_new_tokens or a shorter prompt"
        )
    sampling = Sampling(config.seed, config.temperature, config.top_k, config.top_p)
    drawn = draw_tokens(CachedModel(model, context, place), prompt, config.max_new_tokens, sampling, ends)
    return Continuation(prompt, drawn, tokenizer)


def _find_tokenizer(config: SampleConfig, path: Path, settings: DataConfig) -> Tokenizer | None:
    """Return the tokenizer of `config`; else, if the prompt is text, that of the folder or of the run."""
    own = str(path) if is_file(path / TOKENIZER_FILE) else recorded_tokenizer(settings, run_of(path.parent))
    named = config.tokenizer_path or (own if not config.prompt_tokens else None)
    return None if named is None else load_tokenizer(named)


def _ends_of_text(path: Path, settings: DataConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the tokens that end a text: from the run's settings, the Hugging Face folder or the tokenizer."""
    if settings.sep is not None:
        return (settings.sep,)
    for name in (GENERATION_CONFIG_FILE, CONFIG_FILE):
        ids: Any = read_object(path / name).get("eos_token_id")
        found = tuple(each for each in (ids if isinstance(ids, list) else [ids]) if type(each) is int)
        if found:
            return found
    end = None if tokenizer is None else tokenizer.end_of_text
    return () if end is None else (end,)
