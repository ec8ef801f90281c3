"""Texts in the tokens of a model: pieces that are encoded one by one and read right when put together."""

from functools import lru_cache

import msgspec

from serving.engines.mock.forms.errors import FormError
from serving.engines.mock.forms.prose import Words
from serving.model.tokenizer import Tokenizer

SAMPLE = '{"name":"x","items":[{"id":12,"kind":"large","ratio":0.5},{"id":345,"kind":"small","ratio":1.25}],"ok":true}'
PROBES = (SAMPLE, '"', "word", " word", "[1,2]", '","b":')
BEFORE = '{"a":"b'
"""A text before a piece: what comes first may be read differently."""

SPACES = (" ", "\n", "\t")
CACHED_CHARS = 256
MAX_STARTS = 1_000
"""How many words are looked for that a text may start with."""


class Writer:
    """Encodes texts for a model's answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Learn how the tokenizer writes.

        Raises:
            FormError: it cannot write JSON.
        """
        self._tokenizer = tokenizer
        self._before = tokenizer.encode(BEFORE, special=False).tolist()
        self._before_text = self._read(self._before)
        self._anchor = next((anchor for anchor in ("", "\n", "\n\n") if self._is_exact(anchor)), None)
        self._cached = lru_cache(4096)(self._encoded)
        if self._anchor is None or self._before_text != BEFORE:
            raise FormError("the model's tokenizer does not reproduce JSON text")
        ids = tokenizer.speakable()
        texts = [self.text([token]) for token in ids.tolist()]
        self.words = Words(ids, texts, self._starts(texts))
        self.rate = len(self.tokens(SAMPLE)) / len(SAMPLE)
        """Tokens per character of JSON, about."""
        self._spaces = [tokens[0] for space in SPACES if len(tokens := self._encode(space) or []) == 1]

    def _starts(self, texts: list[str]) -> dict[int, str]:
        """Return the tokens of some words without the blank before them, where they have one."""
        spaced = [text for text in texts if text.startswith(" ") and text.strip()]
        words = [text.strip() for text in spaced[:: 1 + len(spaced) // MAX_STARTS]]
        tokens = [(self._encoded(word) or [], word) for word in words]
        return {found[0]: word for found, word in tokens if len(found) == 1}

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a piece of an answer.

        Raises:
            FormError: the tokenizer cannot reproduce it.
        """
        found = self._cached(text) if len(text) <= CACHED_CHARS else self._encoded(text)
        if found is None:
            raise FormError(f"the model's tokenizer does not reproduce {text[:80]!r}")
        return found

    def marked(self, text: str) -> list[int]:
        """Return the tokens of a whole answer that may have markers in it, which may be special tokens.

        Raises:
            FormError: the tokenizer cannot reproduce it.
        """
        tokens: list[int] = self._tokenizer.encode(text, special=False).tolist()
        if self._tokenizer.decode(tokens) != text:
            raise FormError(f"the model's tokenizer does not reproduce {text[:80]!r}")
        return tokens

    def text(self, tokens: list[int]) -> str:
        """Return the text of tokens of an answer."""
        return self._read([*self._before, *tokens])[len(BEFORE) :]

    @property
    def space(self) -> int | None:
        """A token that reads as white space, None if there is none."""
        return self._spaces[0] if self._spaces else None

    def quoted(self, text: str) -> str:
        """Return a text as in JSON, with everything escaped that the tokenizer does not reproduce."""
        plain = msgspec.json.encode(text).decode()
        if (self._cached(plain) if len(plain) <= CACHED_CHARS else self._encoded(plain)) is not None:
            return plain
        units = text.encode("utf-16-be", "surrogatepass")
        codes = [units[place] << 8 | units[place + 1] for place in range(0, len(units), 2)]
        is_plain = [code < 128 and (chr(code).isalnum() or code == 32) for code in codes]
        escaped = (chr(code) if plain else f"\\u{code:04x}" for code, plain in zip(codes, is_plain, strict=True))
        return f'"{"".join(escaped)}"'

    def _encoded(self, text: str) -> list[int] | None:
        """Return the tokens of a text, None if they do not read as it."""
        tokens = self._encode(text)
        if tokens is None or self._read([*self._before, *tokens]) != BEFORE + text:
            return None
        return tokens

    def _encode(self, text: str) -> list[int] | None:
        anchor = self._anchor or ""
        before = self._tokenizer.encode(anchor, special=False).tolist() if anchor else []
        tokens: list[int] = self._tokenizer.encode(anchor + text, special=False).tolist()
        return tokens[len(before) :] if tokens[: len(before)] == before else None

    def _is_exact(self, anchor: str) -> bool:
        self._anchor = anchor
        return all(self._encoded(probe) is not None for probe in PROBES)

    def _read(self, tokens: list[int]) -> str:
        detokenizer = self._tokenizer.detokenizer()
        return "".join(detokenizer.texts(tokens)) + detokenizer.flush()
