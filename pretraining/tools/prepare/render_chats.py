"""Process that applies a chat template, a JSON value per line in and out; it runs as a script, without the package.

A template is a stranger's program. A sandbox keeps it from all but its text, and the system's limits on the processor
time and the memory of this process bound it, whatever it does. It sees what `apply_chat_template` of transformers
gives to it, without tools, documents and a generation prompt.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_MEMORY_BYTES = 1 << 31
MOST_TEXT, MOST_TEXT_PER_INPUT = 1 << 20, 16
"""Longest text of a chat in characters, and in addition per character of its messages as JSON."""
_REASONING = ("reasoning_content", "thinking", "reasoning")


class _Generation(Extension):
    """The marks {% generation %} and {% endgeneration %}, between which a template writes the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _fail(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def compile_template(template: str, now: str) -> jinja2.Template:
    """Return a template with the functions that transformers gives; `now` is the time in ISO's form."""
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


def render(template: jinja2.Template, messages: list[Any], names: dict[str, str]) -> str:
    """Return the text of a chat."""
    chat = []
    for message in messages:
        if not isinstance(message, dict):
            raise TypeError("a message is no object with role and content")
        present = {key: value for key, value in message.items() if value is not None}
        reasoning = next((present[key] for key in _REASONING if key in present), None)
        if reasoning is not None:  # templates read it under different names
            present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
        chat.append(present)
    given = {"messages": chat, "tools": None, "documents": None, "add_generation_prompt": False}
    return template.render(**names, **given)


def _answer(template: jinja2.Template, line: bytes, names: dict[str, str]) -> dict[str, str]:
    """Return the text of a chat, its fault, or the problem of the template."""
    try:
        text = render(template, json.loads(line), names)
    except MemoryError:
        return {"problem": "needs too much memory"}
    except Exception as error:  # a program raises any error for data that it does not expect
        return {"fault": f"{type(error).__name__}: {error}"[:300]}
    if len(text) > MOST_TEXT + MOST_TEXT_PER_INPUT * len(line):
        return {"problem": f"makes {len(text):,} characters"}
    return {"text": text}


def main() -> None:
    """Answer each line of the input; the first one has the template."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops this process
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends this process, also within a call of a library
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = MOST_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MOST_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    template, start = None, dict[str, Any]()
    for line in sys.stdin.buffer:
        start = start or json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, start["seconds"])
        try:
            if template is None:
                template, answer = compile_template(start["template"], start["now"]), {"text": ""}
            else:
                answer = _answer(template, line, start["names"])
        except Exception as error:
            answer = {"problem": f"cannot be read ({type(error).__name__}: {error})"[:300]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
