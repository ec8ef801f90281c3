"""Tokenizers: text to token ids, and back as the ids come, never half a character.

A tokenizer.json is encoded by `fastokens`, about a hundred times as fast as `tokenizers`, if the two agree on `samples`
when the model is loaded; decoding, and everything else, is `tokenizers`'.
"""

import codecs
import json
import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import fastokens
import msgspec
import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers.decoders import DecodeStream

from serving.model.errors import ModelError
from serving.model.files import ModelFiles
from serving.model.tokenizer_samples import samples

log = logging.getLogger(__name__)

Ids = npt.NDArray[np.uint32]

QUICK_BYTES = 1 << 20
QUICK_FAST = 96 << 10
QUICK_SLOW = 512
"""Characters that bytes, `fastokens` and `tokenizers` encode in about half a millisecond. The worst case is one word
without an end, which takes `fastokens` 0.4 us a character."""

COMPOSED = 4
"""Characters that Unicode's normal form NFC makes one of, at most."""


class Detokenizer(Protocol):
    """Turns one answer's tokens into text."""

    def escaped(self, tokens: list[int]) -> list[bytes] | None:
        """Return each token's text as it stands in a JSON string, if each is whole by itself; else None, and nothing happened."""
        ...

    def texts(self, tokens: list[int]) -> list[str]:
        """Return the text that is complete with each token, perhaps none."""
        ...

    def flush(self) -> str:
        """Return what is left at the end."""
        ...


class Tokenizer(Protocol):
    """A model's tokenizer."""

    @property
    def num_quick(self) -> int:
        """Characters that are encoded so quickly that an event loop can wait for it."""
        ...

    @property
    def longest_token(self) -> int | None:
        """Characters that a token stands for at most; None if there is no such limit."""
        ...

    def encode(self, text: str, *, special: bool) -> Ids:
        """Return the token ids of a text, with the model's own special tokens around it if asked for."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, that of special ones included."""
        ...

    def detokenizer(self) -> Detokenizer:
        """Return a fresh detokenizer; special tokens have no text."""
        ...

    def text_of(self, token: int) -> str:
        """Return one token's text."""
        ...

    def speakable(self) -> Ids:
        """Return tokens that read as words: what a simulated engine may say."""
        ...


def load(files: ModelFiles, *, encodes: bool = False) -> Tokenizer:
    """Build a model's tokenizer; without a tokenizer.json tokens are bytes of UTF-8.

    Args:
        files: the model's files.
        encodes: whether it is to encode much, which is worth loading a second library for seconds.

    Raises:
        ModelError: tokenizer.json cannot be used.
    """
    content = files.contents.get("tokenizer.json")
    return ByteTokenizer() if content is None else HuggingFaceTokenizer(content, encodes=encodes)


class TableDetokenizer:
    """For tokenizers in which each token stands for fixed bytes."""

    def __init__(self, table: "ByteTable") -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_clean = True

    def escaped(self, tokens: list[int]) -> list[bytes] | None:
        """See `Detokenizer`."""
        if not self._is_clean:
            return None
        escaped = self._table.escaped
        try:
            found = [escaped[token] for token in tokens]
        except KeyError:
            found = [self._table.escape(token) for token in tokens]
        return None if None in found else found  # type: ignore[return-value]

    def texts(self, tokens: list[int]) -> list[str]:
        """See `Detokenizer`."""
        texts = [self._decoder.decode(self._table.content(token)) for token in tokens]
        self._is_clean = not self._decoder.getstate()[0]
        return texts

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._decoder.decode(b"", True)


class ByteTable:
    """The bytes of each token, and its text where that is whole."""

    def __init__(self) -> None:
        self.escaped: dict[int, bytes | None] = {}

    def content(self, token: int) -> bytes:
        """Return a token's bytes, none for an unknown or special one."""
        return bytes([token]) if 0 <= token < 256 else b""

    def escape(self, token: int) -> bytes | None:
        """Return a token's text as it stands in a JSON string, or None if it is no whole text by itself."""
        try:
            text = self.content(token).decode()
        except UnicodeDecodeError:
            found = None
        else:
            found = msgspec.json.encode(text)[1:-1]
        self.escaped[token] = found
        return found


class ByteTokenizer:
    """Tokens are the bytes of UTF-8."""

    num_quick = QUICK_BYTES
    longest_token = 1

    def __init__(self) -> None:
        self._table = ByteTable()

    def encode(self, text: str, *, special: bool) -> Ids:
        """See `Tokenizer`."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return b"".join(map(self._table.content, tokens)).decode(errors="replace")

    def detokenizer(self) -> Detokenizer:
        """See `Tokenizer`."""
        return TableDetokenizer(self._table)

    def text_of(self, token: int) -> str:
        """See `Tokenizer`."""
        return self._table.content(token).decode(errors="replace")

    def speakable(self) -> Ids:
        """See `Tokenizer`."""
        return np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8).astype(np.uint32)


class HuggingFaceTokenizer:
    """A tokenizer.json."""

    def __init__(self, content: bytes, *, encodes: bool = False) -> None:
        """Load it; see `load`.

        Raises:
            ModelError: the tokenizers library cannot.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            facts = json.loads(content)
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"tokenizer.json cannot be used: {error}") from error
        self._table = _ByteLevelTable(self._tokenizer) if _is_byte_level(facts.get("decoder")) else None
        self._texts: dict[int, str] = {}
        self._special = frozenset(self._tokenizer.get_added_tokens_decoder())
        self._fast = _fast(content, self._tokenizer, facts) if encodes else None
        self.num_quick = QUICK_SLOW if self._fast is None else QUICK_FAST
        self.longest_token = _longest_token(self._tokenizer, facts) if self._table is not None else None

    @property
    def is_fast(self) -> bool:
        """Whether `fastokens` encodes."""
        return self._fast is not None

    def encode(self, text: str, *, special: bool) -> Ids:
        """See `Tokenizer`."""
        if self._fast is not None:
            return _encode_fast(self._fast, text, special=special)
        return _encode(self._tokenizer, text, special=special)

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def detokenizer(self) -> Detokenizer:
        """See `Tokenizer`."""
        return _StreamDetokenizer(self._tokenizer) if self._table is None else TableDetokenizer(self._table)

    def text_of(self, token: int) -> str:
        """See `Tokenizer`."""
        found = self._texts.get(token)
        if found is None:
            if self._table is not None and token not in self._special:
                found = self._table.content(token).decode(errors="replace")
            else:
                found = str(self._tokenizer.decode([token], skip_special_tokens=False))
            self._texts[token] = found  # at most one for each token of the vocabulary
        return found

    def speakable(self) -> Ids:
        """See `Tokenizer`."""
        words: list[int] = []
        pieces: list[int] = []
        for token in range(min(self._tokenizer.get_vocab_size(), 200_000)):
            name = self._tokenizer.id_to_token(token) or ""
            body = name[1:] if name[:1] in ("Ġ", "▁") else name
            if body.isascii() and body.isalpha() and body.islower():
                (pieces if body is name else words).append(token)
        found = words if len(words) >= 16 else words + pieces
        if not found:
            raise ModelError("the tokenizer has no plain words for the mocker to say")
        return np.array(found[:4096], np.uint32)


class _ByteLevelTable(ByteTable):
    """Byte-level BPE: a token's name spells its bytes in a printable alphabet."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._added = dict(tokenizer.get_added_tokens_decoder().items())

    def content(self, token: int) -> bytes:
        """See `ByteTable`."""
        added = self._added.get(token)
        if added is not None:
            return b"" if added.special else str(added.content).encode()
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        alphabet = _alphabet()
        return bytes([alphabet[character] for character in name if character in alphabet])


class _StreamDetokenizer:
    """For other tokenizers, whose text depends on what came before."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def escaped(self, tokens: list[int]) -> list[bytes] | None:
        """See `Detokenizer`."""
        return None

    def texts(self, tokens: list[int]) -> list[str]:
        """See `Detokenizer`."""
        return [self._stream.step(self._tokenizer, token) or "" for token in tokens]

    def flush(self) -> str:
        """See `Detokenizer`."""
        return ""


def _encode(tokenizer: tokenizers.Tokenizer, text: str, *, special: bool) -> Ids:
    # `encode` of a single text would keep the interpreter from all other threads.
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
                    log.info("tokenizers encodes this model's texts: fastokens differs on %r", sample)
                    return None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # either library may panic, which is no `Exception`, or raise what is not documented
        log.info("tokenizers encodes this model's texts: fastokens cannot: %s", error)
        return None
    log.info("fastokens encodes this model's texts")
    return fast


def _longest_token(tokenizer: tokenizers.Tokenizer, facts: dict[str, Any]) -> int | None:
    """Return the most characters that a token of a byte-level tokenizer stands for, None if it may drop some."""
    normalizer = (facts.get("normalizer") or {}).get("type")
    strips = any(token.get("lstrip") or token.get("rstrip") for token in facts.get("added_tokens") or ())
    if normalizer not in (None, "NFC") or strips:
        return None
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)))
    return longest * (COMPOSED if normalizer else 1)


@lru_cache(1)
def _alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-ins for bytes: themselves where printable, else letters from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        return [part.get("type") for part in decoder.get("decoders", [])] == ["ByteLevel"]
    return decoder.get("type") == "ByteLevel"
