"""One setting, as a page shows it: a flag of a command, or a key of a deployment's file."""

import re
import textwrap
import typing
from dataclasses import dataclass
from typing import Any

from cyclopts.argument import Argument
from msgspec import Meta

from foundation.settings import Unit, expected
from serving.cli.command_line import plain_default

WIDTH = 120
"""Columns of a line in docs."""

_ENVIRONMENT = re.compile(r"\s*Environment: (\w+)\.")
_SPANS = re.compile(r"(`[^`]*`)")


@dataclass(frozen=True, slots=True)
class Setting:
    """A name, what it does, what it may be, and what it is if nobody says."""

    names: tuple[str, ...]
    help: str
    values: str
    default: str

    @classmethod
    def of(cls, argument: Argument) -> "Setting":
        """Describe an argument of a command."""
        parameter, value = argument.parameter, argument.field_info.default
        allowed = words(argument.field_info.annotation).replace("True or false", "A switch")
        values = "May be repeated" if parameter.count else "Required. " * argument.required + allowed
        default = "" if argument.required or parameter.count else default_of(value, ("off", "on"))
        return cls(tuple(argument.names), parameter.help or "", values, default)

    @property
    def environment(self) -> str:
        """The environment variable that sets it, "" if there is none."""
        found = _ENVIRONMENT.search(self.help)
        return found[1] if found else ""

    @property
    def about(self) -> str:
        """What it does, as Markdown."""
        return prose(_ENVIRONMENT.sub("", self.help))

    def line(self, note: str = "") -> str:
        """Return it as an item of a list in Markdown."""
        names = ", ".join(f"`{name}`" for name in self.names)
        facts = f"{self.values}."
        if self.default:
            facts += f" Default: `{self.default}`."
        elif not re.search(
            r"Required|May be repeated|by default|none:|empty:|default:|same default|default there",
            self.values + self.help,
        ):
            facts += " Default: none."
        facts += f" Environment: `{self.environment}`." if self.environment else ""
        return item(f"**{names}**: {self.about} *{facts}{note}*")


def default_of(value: Any, booleans: tuple[str, str]) -> str:
    """Return a default as it would be typed, "" if nothing is set."""
    if isinstance(value, bool):
        return booleans[value]
    return plain_default(value or None) or "" if isinstance(value, dict) else plain_default(value) or ""


def words(hint: Any) -> str:
    """Say what an annotation allows, and whether it may be given several times."""
    if typing.get_origin(hint) is typing.Annotated and not any(
        isinstance(note, Meta | Unit) for note in hint.__metadata__
    ):
        hint = typing.get_args(hint)[0]
    parts = typing.get_args(hint)
    if typing.get_origin(hint) in (tuple, list):
        return f"{words(parts[0])}; one or more"
    if typing.get_origin(hint) is dict:
        return "A mapping"
    if any(typing.get_origin(part) is dict for part in parts):
        return "JSON: text or a mapping"
    return _capital(expected(hint))


def prose(text: str) -> str:
    """Return a help text as Markdown: a sentence, with flags, settings and pages as such."""
    parts = _SPANS.split(" ".join(text.split()))
    return _capital("".join(part if part.startswith("`") else _marked(part) for part in parts))


def item(text: str) -> str:
    """Return a text as an item of a list, in lines that fit a page of docs."""
    return textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def paragraph(text: str) -> str:
    """Return a text in lines that fit a page of docs."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _marked(text: str) -> str:
    text = re.sub(r"<(?=\w)", "&lt;", text.replace("*", r"\*").replace("[", r"\["))
    text = re.sub(r"(?<![\w-])--[a-z][\w-]*|(?<![=\w.])[a-z]+(?:_[a-z0-9]+)+\b(?![=./])", r"`\g<0>`", text)
    return re.sub(r"\bdocs/([\w-]+\.md)", r"[docs/\1](../\1)", text)


def _capital(text: str) -> str:
    """Let a text begin as a sentence does, but not where it begins with names: `kv, dynamo-kv: ...`."""
    return text if re.match(r"[\w-]+(, [\w-]+)*[:=]", text) else text[:1].upper() + text[1:]
