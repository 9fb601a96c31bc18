"""Find sentences of the documentation that are hard to read.

    python scripts/check_sentences.py [FILE ...]     # without files: README.md, CONTRIBUTING.md and docs/

A sentence is flagged that has more than 35 words, that begins with "Of", "What", "Who" or "Where", or that says "a row
a document" for "a row per document". Headings and code blocks are left out, code inside a sentence counts as one word,
and a cell of a table is read like a paragraph.
"""

from __future__ import annotations

import argparse
import re
import sys
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
_WORD = re.compile(r"\w[\w'’/.,%-]*")
_MEASURED = "bits|bytes|KiB|MiB|GiB|MB|GB|tokens|TFLOPs?|seconds|ms|µs"
_EACH = "second|byte|token|step|parameter|row|document|report|line|file|page|process|rank|GPU|node|dataset|run|sample"
_PER = re.compile(rf"\b(?:an? \w+|{_MEASURED}) an? (?:{_EACH})\b(?! (?:has|is|takes|holds))")
_OPENING = re.compile(r"(?:Of|What|Who|Where)\b(?!.*\?$)")


def sentences(markdown: str) -> Iterator[str]:
    """Yield the sentences of a page, without markup."""
    text = _HEADING.sub("\n\n", _COMMENT.sub("", _INDENTED.sub("\n", _FENCE.sub("\n\n", markdown))))
    text = _TAG.sub("", _LINK.sub(r"\1", _CODE.sub("`", text)))
    for block in _BLOCK.split(text):
        for sentence in _END_OF_SENTENCE.split(" ".join(block.split())):
            if plain := sentence.strip(" *_"):
                yield plain


def problem(sentence: str) -> str | None:
    """Return what is wrong with a sentence, if anything is."""
    words = len(_WORD.findall(sentence.replace("`", "code")))
    if words > MOST_WORDS:
        return f"{words} words"
    if match := _OPENING.match(sentence):
        return f'begins with "{match[0]}"'
    if match := _PER.search(sentence):
        return f'"{match[0]}": write "per"'
    return None


def main() -> None:
    """Print each flagged sentence and how long sentences are; exit with 1 if one was flagged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    files = parser.parse_args().files or [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
    flagged = 0
    for path in files:
        for sentence in sentences(path.read_text(encoding="utf-8")):
            if found := problem(sentence):
                flagged += 1
                print(f"{path}: {found}: {sentence}")
    sys.exit(f"{flagged} sentences to rewrite" if flagged else 0)


if __name__ == "__main__":
    main()
