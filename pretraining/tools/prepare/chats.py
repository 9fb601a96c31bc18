"""Chats: lists of messages, which the chat template of a tokenizer makes texts of; names of special tokens in texts.

    record --reader--> Document of messages --ChatRenderer--> Document of text, or with a fault

The ids are those of `apply_chat_template` in transformers: the names of special tokens in the rendered text, contents
of messages included, are encoded as their ids. A template may be a stranger's, so another process with limits runs it.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Self

from pretraining.data.tokenizer import Tokenizer
from pretraining.errors import DataError
from pretraining.tools.prepare.documents import Document, unicode_fault
from pretraining.tools.prepare.units import Input

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that a template sees."""
MOST_SECONDS = 5.0
"""Processor time for a chat; most need less than a millisecond."""
_REMEDY = "Use a tokenizer with another template"


def with_template(found: Input, tokenizer: Tokenizer | None) -> Input:
    """Return an input whose settings name the chat template, if it holds chats.

    Raises:
        DataError: the tokenizer has no chat template, or there is none.
    """
    if not found.is_chat:
        return found
    if tokenizer is None or tokenizer.chat_template is None:
        raise DataError(
            f"--text_field={found.settings['text_field']} holds chats, and the tokenizer has no chat template: give "
            "one that has, such as that of an instruction-tuned model, with --tokenizer_path and a new --output_path"
        )
    given = json.dumps([tokenizer.chat_template, _names(tokenizer)])
    return replace(found, settings={**found.settings, "chat_template": hashlib.sha256(given.encode()).hexdigest()})


def time_for(tokenizer: Tokenizer) -> str:
    """Return the time that a chat template may write; empty if it writes none."""
    return datetime.now().isoformat() if "strftime_now" in (tokenizer.chat_template or "") else ""


def _names(tokenizer: Tokenizer) -> dict[str, str]:
    return {name: token for name, token in tokenizer.special_tokens.items() if name in _NAMES}


class ChatRenderer:
    """A process that applies the chat template of a tokenizer; as a context manager, it ends with the block.

    Args:
        now: time that the template may write, in ISO's form.
    """

    def __init__(self, tokenizer: Tokenizer, now: str) -> None:
        self._start = json.dumps(
            {"template": tokenizer.chat_template, "names": _names(tokenizer), "now": now, "seconds": MOST_SECONDS}
        )
        self._marks = Marks(tokenizer)

    def __enter__(self) -> Self:
        script = Path(__file__).with_name("render_chats.py")
        # -P: modules beside the script hide none of the standard library.
        command = [sys.executable, "-P", str(script)]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere)
        answer = self._ask(self._start)
        if "problem" in answer:
            raise DataError(f"the chat template of the tokenizer {answer['problem']}. {_REMEDY}")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def render(self, document: Document) -> Document:
        """Return a chat as text, or with the fault that its template finds; empty documents as they are.

        Raises:
            DataError: the template needs too much time or memory, or makes too much text.
        """
        if isinstance(document.content, str) and document.content:
            return document._replace(content="", fault="it holds text, but the first record holds a chat")
        if not isinstance(document.content, list):
            return document
        try:
            line = json.dumps(document.content, ensure_ascii=False, default=lambda value: f"<{type(value).__name__}>")
        except RecursionError as error:
            return document._replace(content="", fault=str(error))
        answer = self._ask(line)
        if "problem" in answer:
            raise document.error(f"for this chat, the chat template {answer['problem']}. {_REMEDY}")
        text, fault = answer.get("text", ""), answer.get("fault", "")
        fault = f"the chat template refuses it ({fault})" if fault else unicode_fault(text)
        return document._replace(content="" if fault else text, fault=fault, is_marked=bool(self._marks.find([line])))

    def _ask(self, line: str) -> dict[str, str]:
        """Return the answer to a line; a process that ended is a problem of the template."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line.encode("utf-8", "surrogatepass") + b"\n")
            self._process.stdin.flush()
        if answer := self._process.stdout.readline():
            found: dict[str, str] = json.loads(answer)
            return found
        if (code := self._process.wait()) == -signal.SIGPROF:
            return {"problem": f"takes more than {MOST_SECONDS:.0f} s"}
        return {"problem": f"ended its process with code {code}"}


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
        found = (match for pattern in self._patterns for match in pattern.finditer(before + after))
        return max(
            (len(before) - match.start() for match in found if match.start() < len(before) < match.end()), default=0
        )
