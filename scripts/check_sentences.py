"""Find sentences of the documentation and of the package that are hard to read.

    python scripts/check_sentences.py [FILE ...]     # without files: README.md, CONTRIBUTING.md, docs/ and pretraining/

The script flags a sentence that has more than 35 words, or that begins with "Of", "What", "Who" or "Where". It also
flags a few phrases that plain English avoids, such as "a row a document" for "a row per document". It skips headings
and code blocks. Code inside a sentence counts as one word, and a cell of a table is read like a paragraph. In Python
files, the script reads docstrings, comments and texts with three plain words in a row.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS = 35
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n+)+")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"(`+).+?\1", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_TAG = re.compile(r"<[^>]+>")
_HEADING = re.compile(r"^#+ .*$", re.MULTILINE)
_BLOCK = re.compile(r"^ *(?:>|[-*+]|\d+\.) +|^ *$|\|", re.MULTILINE)
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])[\"')*]* +(?=[\"'(*]*[A-Z0-9`])|(?<=[.!?])$")
_ENTRY = re.compile(r"^(?:Args|Attributes|Raises|Returns|Yields):\n|^ +(?=[\w*, ]+: )", re.MULTILINE)
_PROSE = re.compile(r"(?:^|\s)[A-Za-z]+ [a-z]+ [a-z]+(?:[\s.,:;]|$)")
_WORD = re.compile(r"\w[\w'’/.,%-]*")
_MEASURED = "bits|bytes|KiB|MiB|GiB|MB|GB|tokens|TFLOPs?|seconds|ms|µs"
_EACH = "second|byte|token|step|parameter|row|document|report|line|file|page|process|rank|GPU|node|dataset|run|sample"
_PER = re.compile(rf"\b(?:an? \w+|{_MEASURED}) an? (?:{_EACH})\b(?! (?:has|is|takes|holds))")
_UNCLEAR = re.compile(
    r"\b(?:anew|whoever|so many|all the same|onwards|of one's own|(?:go|goes|going|gone|went) on|ha(?:s|ve) come to)\b",
    re.IGNORECASE,
)
_OPENING = re.compile(r"(?:Of|What|Who|Where)\b(?!.*\?$)")


def sentences(markdown: str) -> Iterator[str]:
    """Yield the sentences of a page, without markup."""
    text = _HEADING.sub("\n\n", _COMMENT.sub("", _INDENTED.sub("\n", _FENCE.sub("\n\n", markdown))))
    text = _TAG.sub("", _LINK.sub(r"\1", _CODE.sub("`", text)))
    for block in _BLOCK.split(text):
        for sentence in _END_OF_SENTENCE.split(" ".join(block.split())):
            if plain := sentence.strip(" *_"):
                yield plain


def texts(python: str) -> Iterator[str]:
    """Yield the docstrings, comments and longer texts of a Python file, as Markdown."""
    tree = ast.parse(python)
    documented = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            documented.add(node.body[0].value)  # type: ignore[attr-defined]
            yield _ENTRY.sub("\n\n", text)
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "`code`" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {node} & (documented | parts):
            text = node.value
        else:
            continue
        if _PROSE.search(text):
            yield text
    comment, last = "", 0
    for token in tokenize.generate_tokens(io.StringIO(python).readline):
        if token.type == tokenize.COMMENT:
            text, line = token.string.lstrip("# "), token.start[0]
            comment, last = f"{comment} {text}" if line == last + 1 else f"{comment}\n\n{text}", line
    yield comment


def problem(sentence: str) -> str | None:
    """Return the problem of a sentence; None if it has none."""
    words = len(_WORD.findall(sentence.replace("`", "code")))
    if words > MOST_WORDS:
        return f"{words} words"
    if match := _OPENING.match(sentence):
        return f'begins with "{match[0]}"'
    if match := _UNCLEAR.search(sentence):
        return f'says "{match[0]}"'
    if match := _PER.search(sentence):
        return f'"{match[0]}": write "per"'
    return None


def main() -> None:
    """Print each flagged sentence; exit with 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
    flagged = 0
    for path in parser.parse_args().files or [*pages, *sorted(ROOT.glob("pretraining/**/*.py"))]:
        text = path.read_text(encoding="utf-8")
        for page in texts(text) if path.suffix == ".py" else [text]:
            for sentence in sentences(page):
                if found := problem(sentence):
                    flagged += 1
                    print(f"{path}: {found}: {sentence}")
    sys.exit(f"{flagged} sentences to rewrite" if flagged else 0)


if __name__ == "__main__":
    main()
