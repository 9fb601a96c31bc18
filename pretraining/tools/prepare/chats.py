"""Chats: lists of messages, which the chat template of a tokenizer makes texts of; names of special tokens in texts.

    record --reader--> Document of messages --ChatRenderer--> Document of text, or with a fault

The ids are those of `apply_chat_template` in transformers: the names of special tokens in the rendered text, contents
of messages included, are encoded as their ids. A template is a program: jinja's sandbox keeps it from all but its text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import groupby
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pretraining.data.tokenizer import Tokenizer
from pretraining.errors import DataError
from pretraining.tools.prepare.documents import Document, unicode_fault
from pretraining.tools.prepare.units import Input

_REASONING = ("reasoning_content", "thinking", "reasoning")
_LABELS = {"role", "name", "tool_call_id"}
"""Keys that say what a message is, and hold none of its content."""


def with_template(corpus: Input, tokenizer: Tokenizer | None) -> Input:
    """Return an input whose settings name the chat template, if it holds chats.

    Raises:
        DataError: the tokenizer has no chat template, or there is none.
    """
    if not corpus.is_chat:
        return corpus
    if tokenizer is None or tokenizer.chat_template is None:
        raise DataError(
            f"--text_field={corpus.settings['text_field']} holds chats, and the tokenizer has no chat template: give "
            "one that has, such as that of an instruction-tuned model, with --tokenizer_path and a new --output_path"
        )
    given = json.dumps([tokenizer.chat_template, tokenizer.special_tokens])
    return replace(corpus, settings={**corpus.settings, "chat_template": hashlib.sha256(given.encode()).hexdigest()})


def time_for(tokenizer: Tokenizer) -> str:
    """Return the time that a chat template may write; empty if it writes none."""
    return datetime.now().isoformat() if "strftime_now" in (tokenizer.chat_template or "") else ""


class ChatRenderer:
    """The chat template of a tokenizer, which makes texts of chats in jinja's sandbox, as transformers does.

    Args:
        now: time that the template may write, in ISO's form.

    Raises:
        DataError: the template cannot be read.
    """

    def __init__(self, tokenizer: Tokenizer, now: str) -> None:
        self._names = tokenizer.special_tokens
        self._marks = Marks(tokenizer)
        try:
            self._template = _compile(tokenizer.chat_template or "", now)
        except Exception as error:  # jinja raises several types, and Python's own for deep nesting
            problem = f"the chat template of the tokenizer cannot be read ({type(error).__name__}: {error})"
            raise DataError(f"{problem[:400]}. Use a tokenizer with another template") from error

    def render(self, document: Document) -> Document:
        """Return a chat as text, or with the fault that its template finds; empty documents as they are."""
        if isinstance(document.content, str) and document.content:
            return document._replace(content="", fault="it holds text, but the first record holds a chat")
        if not isinstance(document.content, list):
            return document
        try:
            line = json.dumps(document.content, ensure_ascii=False, default=str)
            text = self._text_of(document.content)
        except DataError as error:
            return document._replace(content="", fault=str(error))
        except Exception as error:  # a template is a program: it raises any error for data that it does not expect
            fault = f"the chat template refuses it ({f'{type(error).__name__}: {error}'[:300]})"
            return document._replace(content="", fault=fault)
        fault, is_marked = unicode_fault(text), bool(self._marks.find([line]))
        return document._replace(content="" if fault else text, fault=fault, is_marked=is_marked)

    def _text_of(self, messages: list[Any]) -> str:
        """Return the text of a chat; raise a DataError for a message whose content the template does not get."""
        chat = []
        for number, message in enumerate(messages, start=1):
            if not isinstance(message, dict):
                raise DataError(f"message {number} is no object with role and content")
            present = {key: value for key, value in message.items() if value is not None}
            if not isinstance(content := present.get("content", ""), str):
                present["content"] = _text_of_parts(content, number)
            reasoning = next((present[key] for key in _REASONING if key in present), None)
            if reasoning is not None:  # templates read it under different names
                present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
            chat.append(present)
        text = self._render(chat)
        for index, message in enumerate(chat):
            if "content" not in message and self._is_lost(chat, index, text):
                keys = ", ".join(map(repr, message))[:200]
                raise DataError(
                    f"message {index + 1} has no content, and the chat template writes nothing else of it (its keys "
                    f"are {keys}): rename the key of its text to content"
                )
        return text

    def _render(self, chat: list[Any]) -> str:
        return self._template.render(
            **self._names, messages=chat, tools=None, documents=None, add_generation_prompt=False
        )

    def _is_lost(self, chat: list[Any], index: int, text: str) -> bool:
        """Return whether a chat has this text also without what a message holds."""
        bare = {key: value for key, value in chat[index].items() if key in _LABELS or not value}
        try:
            return self._render([*chat[:index], bare, *chat[index + 1 :]]) == text
        except Exception:  # the template requires what is left out
            return False


class _Parts(str):
    """Text of content that was given as parts; a template that goes through parts finds one."""

    def __iter__(self) -> Iterator[Any]:
        return iter([{"type": "text", "text": str(self)}])


def _text_of_parts(content: Any, number: int) -> _Parts:
    """Return the text of a content of parts; raise a DataError if it holds anything else."""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") in (None, "text") and isinstance(part.get("text"), str)
        if not is_text:
            held = json.dumps(part, ensure_ascii=False, default=str)[:80]
            raise DataError(f"the content of message {number} is neither text nor parts of text: it holds {held}")
    return _Parts("".join(part["text"] for part in parts))


class _Generation(Extension):
    """The marks {% generation %} and {% endgeneration %}, between which a template writes the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


def _compile(template: str, now: str) -> jinja2.Template:
    """Return a template with the functions that transformers gives."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _fail,
        "strftime_now": lambda form: datetime.fromisoformat(now).strftime(form),
        "dict": lambda *given, **named: dict(*given, **named),  # the class would show its attributes
    }
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _fail(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


class Marks:
    """The names of the special tokens of a tokenizer, to search for in texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        names = [name for name in tokenizer.special_names if name]
        self._longest = max(map(len, names), default=0)
        # An expression per first character: expressions with a common beginning are searched ten times as fast.
        by_first = groupby(sorted(names, key=lambda name: (name[0], -len(name))), lambda name: name[0])
        self._patterns = [re.compile("|".join(map(re.escape, group))) for _, group in by_first]

    def find(self, texts: Sequence[str]) -> list[int]:
        """Return the indices of the texts that hold a name."""
        searches = [pattern.search for pattern in self._patterns]
        return sorted({index for search in searches for index, text in enumerate(texts) if search(text)})

    def keep_whole(self, pieces: Iterable[Document]) -> Iterator[Document]:
        """Yield the pieces of documents, with no name cut in two: its beginning moves to the next piece."""
        held: Document | None = None
        for piece in pieces:
            if held is not None and isinstance(held.content, str) and isinstance(piece.content, str):
                begin = self._cut_name(held.content[-self._longest :], piece.content[: self._longest])
                piece = piece._replace(content=held.content[len(held.content) - begin :] + piece.content)
                yield held._replace(content=held.content[: len(held.content) - begin])
            held = None if piece.is_last_part else piece
            if held is None:
                yield piece

    def _cut_name(self, before: str, after: str) -> int:
        """Return how many characters of a name are before a cut; 0 if the cut goes through none."""
        matches = (match for pattern in self._patterns for match in pattern.finditer(before + after))
        return max(
            (len(before) - match.start() for match in matches if match.start() < len(before) < match.end()), default=0
        )
