"""Make text that others wrote (servers, file names, errors) safe to show."""

import difflib
import unicodedata
from collections.abc import Collection, Sequence

JOINERS = "\u200c\u200d"
"""Persian and Hindi words, and emoji made of several characters, need them."""


def printable(text: str) -> str:
    """Escape what a terminal would obey: control characters, and those that change the direction of writing."""
    if text.isprintable():
        return text
    return "".join(char if _is_harmless(char) else char.encode("unicode_escape").decode() for char in text)


def _is_harmless(char: str) -> bool:
    return char.isprintable() or char in "\n\t" or char in JOINERS or unicodedata.category(char) == "Zs"


def one_line(text: str | bytes | BaseException, limit: int = 300) -> str:
    """Return the beginning of a text, or of an error's message, as one printable line."""
    if isinstance(text, BaseException):
        text = str(text) or type(text).__name__
    if isinstance(text, bytes):
        text = text[: 4 * limit].decode(errors="replace")
    line = printable(" ".join(text.split()))
    return line if len(line) <= limit else f"{line[:limit]}..."


def shortened(text: str, most: int = 2000) -> str:
    """Leave out the middle of a text that nobody would read to its end."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def listed(words: Sequence[str], last: str = "and") -> str:
    """Join words by commas, and the last by `and` or another word."""
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def instead_of(word: str, known: Collection[str]) -> str:
    """Suggest what an unknown word may have meant, or list the known ones."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.7)
    return f"did you mean {' or '.join(close)}?" if close else f"expected one of {shortened(', '.join(known), 400)}"
