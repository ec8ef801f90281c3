"""Tokenizers: text to token ids.

With a tokenizer.json, `fastokens` encodes, about a hundred times as fast as `tokenizers`, if the two agree on `samples`
when the model is loaded. `tokenizers` decodes and does everything else.
"""

import json
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import fastokens
import numpy as np
import numpy.typing as npt
import tokenizers

from serving.model.detokenizer import (
    ByteLevelTable,
    ByteTable,
    Detokenizer,
    StreamDetokenizer,
    TableDetokenizer,
    is_byte_level,
)
from serving.model.errors import ModelError
from serving.model.files import ModelFiles
from serving.model.tokenizer_samples import samples

log = logging.getLogger(__name__)

Ids = npt.NDArray[np.uint32]

QUICK_BYTES = 1 << 20
QUICK_FAST = 96 << 10
QUICK_SLOW = 512
"""Characters that bytes, `fastokens` and `tokenizers` encode in about half a millisecond. The worst case is one
very long word, which takes `fastokens` 0.4 us a character."""

COMPOSED = 4
"""The most characters that Unicode's normal form NFC combines into one."""


class Tokenizer(Protocol):
    """A model's tokenizer."""

    @property
    def num_quick(self) -> int:
        """Characters that are encoded so fast that an event loop can wait for it."""
        ...

    @property
    def longest_token(self) -> int | None:
        """The most characters in a token; None if there is no limit."""
        ...

    @property
    def special_tokens(self) -> frozenset[str]:
        """The texts of special tokens."""
        ...

    def encode(self, text: str, *, special: bool) -> Ids:
        """Return the token ids of a text, with the model's own special tokens around it if asked for."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, that of special ones included."""
        ...

    def detokenizer(self, visible: frozenset[str] = frozenset()) -> Detokenizer:
        """Return a fresh detokenizer; special tokens have no text but for these."""
        ...

    def text_of(self, token: int) -> str:
        """Return one token's text."""
        ...

    def speakable(self) -> Ids:
        """Return tokens that read as words, for the answers of a simulated engine."""
        ...


def load_tokenizer(files: ModelFiles, *, encodes: bool = False) -> Tokenizer:
    """Build a model's tokenizer; without a tokenizer.json, tokens are bytes of UTF-8.

    Args:
        files: the model's files.
        encodes: whether it will encode so much that seconds spent on loading a second library pay off.

    Raises:
        ModelError: tokenizer.json cannot be used.
    """
    content = files.contents.get("tokenizer.json")
    return ByteTokenizer() if content is None else HuggingFaceTokenizer(content, encodes=encodes)


class ByteTokenizer:
    """Tokens are the bytes of UTF-8."""

    num_quick = QUICK_BYTES
    longest_token = 1
    special_tokens: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._table = ByteTable()

    def encode(self, text: str, *, special: bool) -> Ids:
        """Return the text's bytes."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Join the bytes; invalid UTF-8 becomes replacement characters."""
        return b"".join(map(self._table.content, tokens)).decode(errors="replace")

    def detokenizer(self, visible: frozenset[str] = frozenset()) -> Detokenizer:
        """Return a detokenizer for 256 tokens; none is special."""
        return TableDetokenizer(self._table)

    def text_of(self, token: int) -> str:
        """Return a byte's character, if it is ASCII."""
        return self._table.content(token).decode(errors="replace")

    def speakable(self) -> Ids:
        """Return letters and, more often, spaces."""
        return np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8).astype(np.uint32)


class HuggingFaceTokenizer:
    """A tokenizer.json."""

    def __init__(self, content: bytes, *, encodes: bool = False) -> None:
        """Load it as `load` does.

        Raises:
            ModelError: the tokenizers library cannot.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            facts = json.loads(content)
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"tokenizer.json cannot be used: {error}") from error
        self._table = ByteLevelTable(self._tokenizer) if is_byte_level(facts.get("decoder")) else None
        self._tables: dict[frozenset[str], ByteLevelTable] = {}
        self._texts: dict[int, str] = {}
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = {token: str(entry.content) for token, entry in added.items() if entry.special}
        self.special_tokens = frozenset(self._special.values())
        self._fast = _fast(content, self._tokenizer, facts) if encodes else None
        self.num_quick = QUICK_SLOW if self._fast is None else QUICK_FAST
        self.longest_token = _longest_token(self._tokenizer, facts) if self._table is not None else None

    @property
    def is_fast(self) -> bool:
        """Whether `fastokens` encodes."""
        return self._fast is not None

    def encode(self, text: str, *, special: bool) -> Ids:
        """Encode, with `fastokens` if it agrees."""
        if self._fast is not None:
            return _encode_fast(self._fast, text, special=special)
        return _encode(self._tokenizer, text, special=special)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text, special tokens included."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def detokenizer(self, visible: frozenset[str] = frozenset()) -> Detokenizer:
        """Return one that uses a table if the decoder allows it."""
        if self._table is None:
            hidden = frozenset(token for token, text in self._special.items() if text not in visible)
            return StreamDetokenizer(self._tokenizer, hidden)
        visible = visible.intersection(self._special.values())
        return TableDetokenizer(self._table_with(visible) if visible else self._table)

    def _table_with(self, visible: frozenset[str]) -> ByteLevelTable:
        found = self._tables.get(visible)
        if found is None:  # one for each format of answers, which are few
            found = self._tables[visible] = ByteLevelTable(self._tokenizer, visible)
        return found

    def text_of(self, token: int) -> str:
        """Return one token's text, and cache it."""
        found = self._texts.get(token)
        if found is None:
            if self._table is not None and token not in self._added:
                found = self._table.content(token).decode(errors="replace")
            else:
                found = str(self._tokenizer.decode([token], skip_special_tokens=False))
            self._texts[token] = found  # at most one for each token of the vocabulary
        return found

    def speakable(self) -> Ids:
        """Return lower-case words, with starts of words first.

        Raises:
            ModelError: there are none.
        """
        words: list[int] = []
        pieces: list[int] = []
        for token in range(min(self._tokenizer.get_vocab_size(), 200_000)):
            name = self._tokenizer.id_to_token(token) or ""
            body = name[1:] if name[:1] in ("Ġ", "▁") else name
            if body.isascii() and body.isalpha() and body.islower():
                (pieces if body is name else words).append(token)
        found = words if len(words) >= 16 else words + pieces
        if not found:
            raise ModelError("the tokenizer has no plain words for the mocker to generate")
        return np.array(found[:4096], np.uint32)


def _encode(tokenizer: tokenizers.Tokenizer, text: str, *, special: bool) -> Ids:
    # `encode` of a single text would block all other threads of the interpreter.
    (encoding,) = tokenizer.encode_batch([text], add_special_tokens=special)
    return np.array(encoding.ids, np.uint32)


def _encode_fast(tokenizer: fastokens.Tokenizer, text: str, *, special: bool) -> Ids:
    ids, _ = tokenizer.encode_batch_flat([text], add_special_tokens=special)
    return np.frombuffer(ids, "<u4")


def _fast(content: bytes, tokenizer: tokenizers.Tokenizer, facts: dict[str, Any]) -> fastokens.Tokenizer | None:
    """Return fastokens' tokenizer if it agrees with the real one on all samples."""
    try:
        fast = fastokens.Tokenizer.from_json_str(content.decode())
        for sample in samples(facts):
            for special in (True, False):
                real = _encode(tokenizer, sample, special=special)
                if not np.array_equal(_encode_fast(fast, sample, special=special), real):
                    log.info("using tokenizers to encode this model's texts: fastokens differs on %r", sample)
                    return None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # either library may panic (not an `Exception`), or raise undocumented errors
        log.info("using tokenizers to encode this model's texts: fastokens cannot: %s", error)
        return None
    log.info("using fastokens to encode this model's texts")
    return fast


def _longest_token(tokenizer: tokenizers.Tokenizer, facts: dict[str, Any]) -> int | None:
    """Return the most characters in a token of a byte-level tokenizer, None if it may drop some."""
    normalizer = (facts.get("normalizer") or {}).get("type")
    strips = any(token.get("lstrip") or token.get("rstrip") for token in facts.get("added_tokens") or ())
    if normalizer not in (None, "NFC") or strips:
        return None
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)))
    return longest * (COMPOSED if normalizer else 1)
