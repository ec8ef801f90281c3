"""The arguments of `vllm serve`, as its own parser has them (flags.json; tests/real_engines/vllm_flags.py writes it)."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

TABLE = Path(__file__).with_name("flags.json")

Kind = Literal["positional", "help", "switch", "pair", "value", "value_or_none", "list", "repeated"]
Type = Literal[
    "text", "name", "integer", "count", "count_or_auto", "number", "json", "json_or_text", "settings", "ids", "lora_modules"
]  # fmt: skip


class Argument(msgspec.Struct, frozen=True, kw_only=True):
    """One argument."""

    dest: str
    """Its name in vLLM."""
    flags: tuple[str, ...]
    """All its spellings; with underscores for hyphens each is another."""
    group: str
    """The section of vLLM's help that has it."""
    kind: Kind
    """How many words it takes. A switch takes none; a pair is a switch with a --no- form."""
    type: Type = "text"
    """What its words are: a name is lower case with underscores; a count may be 8k; settings are JSON of `fields`."""
    choices: tuple[str | int, ...] = ()
    default: Any = None
    """Its default, if JSON can say it; None also if it has none."""
    fields: Mapping[str, Any] = {}
    """What its settings may hold, with their defaults."""
    is_optional: bool = False
    """Whether None and the empty word mean that it is not set."""

    @property
    def flag(self) -> str:
        """The spelling by which messages call it."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.dest)


class _Table(msgspec.Struct, frozen=True):
    version: str
    arguments: tuple[Argument, ...]


@functools.cache
def _table() -> _Table:
    return msgspec.json.decode(TABLE.read_bytes(), type=_Table)


def version() -> str:
    """Return the version of vLLM that has these arguments."""
    return _table().version


@functools.cache
def arguments() -> Mapping[str, Argument]:
    """Return all arguments by their names in vLLM, in the order of its help."""
    return {each.dest: each for each in _table().arguments if each.kind != "help"}
