"""Detokenizers: token ids to text as they arrive, never half a character."""

import codecs
from functools import lru_cache
from typing import Protocol

import msgspec
import tokenizers
from tokenizers.decoders import DecodeStream


class Detokenizer(Protocol):
    """Turns one answer's tokens into text."""

    def escaped(self, tokens: list[int]) -> list[bytes] | None:
        """Return each token's text as in a JSON string if all are whole characters; else do nothing and return None."""
        ...

    def texts(self, tokens: list[int]) -> list[str]:
        """Return the text that each token completes, perhaps none."""
        ...

    def flush(self) -> str:
        """Return what is left at the end."""
        ...


class TableDetokenizer:
    """For tokenizers in which each token has fixed bytes."""

    def __init__(self, table: "ByteTable") -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_clean = True

    def escaped(self, tokens: list[int]) -> list[bytes] | None:
        """Look the texts up, unless a token before left part of a character."""
        if not self._is_clean:
            return None
        escaped = self._table.escaped
        try:
            texts = [escaped[token] for token in tokens]
        except KeyError:
            texts = [self._table.escape(token) for token in tokens]
        return None if None in texts else texts  # type: ignore[return-value]

    def texts(self, tokens: list[int]) -> list[str]:
        """Decode the tokens' bytes; an incomplete character waits for the next token."""
        texts = [self._decoder.decode(self._table.content(token)) for token in tokens]
        self._is_clean = not self._decoder.getstate()[0]
        return texts

    def flush(self) -> str:
        """Return a replacement character for half a character."""
        return self._decoder.decode(b"", True)


class ByteTable:
    """The bytes of each token, and its text if that is whole characters."""

    def __init__(self) -> None:
        self.escaped: dict[int, bytes | None] = {}

    def content(self, token: int) -> bytes:
        """Return a token's bytes, none for an unknown or special one."""
        return bytes([token]) if 0 <= token < 256 else b""

    def escape(self, token: int) -> bytes | None:
        """Return a token's text as in a JSON string, or None if it is not whole characters."""
        try:
            text = msgspec.json.encode(self.content(token).decode())[1:-1]
        except UnicodeDecodeError:
            text = None
        self.escaped[token] = text
        return text


class ByteLevelTable(ByteTable):
    """Byte-level BPE: a token's name spells its bytes in a printable alphabet. Of special tokens, those in `visible` have text."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, visible: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._added = dict(tokenizer.get_added_tokens_decoder().items())
        self._visible = visible

    def content(self, token: int) -> bytes:
        """Spell a token's name in bytes."""
        added = self._added.get(token)
        if added is not None:
            is_hidden = added.special and added.content not in self._visible
            return b"" if is_hidden else str(added.content).encode()
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        alphabet = _alphabet()
        return bytes([alphabet[character] for character in name if character in alphabet])


def is_byte_level(decoder: object) -> bool:
    """Return whether a tokenizer.json's decoder is only that of byte-level BPE."""
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        return [part.get("type") for part in decoder.get("decoders", [])] == ["ByteLevel"]
    return decoder.get("type") == "ByteLevel"


@lru_cache(1)
def _alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-ins for bytes: themselves where printable, else letters from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


class StreamDetokenizer:
    """For other tokenizers, in which a token's text depends on the tokens before."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._stream = DecodeStream(skip_special_tokens=False)

    def escaped(self, tokens: list[int]) -> list[bytes] | None:
        """Return None: a token has no text of its own."""
        return None

    def texts(self, tokens: list[int]) -> list[str]:
        """Return the text from the library's stream for each, none for hidden ones."""
        step, hidden = self._stream.step, self._hidden
        return ["" if token in hidden else step(self._tokenizer, token) or "" for token in tokens]

    def flush(self) -> str:
        """Return nothing: the stream does not reveal half a character."""
        return ""
