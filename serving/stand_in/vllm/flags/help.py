"""What the help says of vLLM's flags: by group, and what is done with each."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from serving.stand_in.vllm.flags.arguments import Argument, arguments, version
from serving.stand_in.vllm.flags.treatment import treatments

TITLES = {"positional arguments": "Model", "options": "Process"}
"""Groups whose titles in vLLM say nothing."""
ALL = "all"
WIDTH = 100


def groups() -> dict[str, list[Argument]]:
    """Return the arguments by group, in vLLM's order."""
    found: dict[str, list[Argument]] = {}
    for argument in arguments().values():
        found.setdefault(TITLES.get(argument.group, argument.group), []).append(argument)
    return found


def overview() -> str:
    """Return a paragraph that says how many flags there are, and how to see them."""
    counts = Counter(each.kind for each in treatments().values())
    how_many = ", ".join(f"{counts[kind]} {kind}" for kind in ("modelled", "harmless", "refused with --gpu", "refused"))
    titles = ", ".join(f"{title} ({len(members)})" for title, members in groups().items())
    return (
        f"Every flag of vllm serve {version()} is known: {how_many}. --help=WORD shows those whose group or name has "
        f"the word, --help=all shows all. Groups: {titles}."
    )


def help_of(word: str) -> str:
    """Return the flags of the groups with this title, else those with this word in a spelling.

    Raises:
        ValueError: there are none.
    """
    plain = word.lower().replace("_", "-")
    by_title = {title: members for title, members in groups().items() if plain in (ALL, title.lower())}
    found = by_title or {
        title: named
        for title, members in groups().items()
        if (named := [each for each in members if any(plain in flag for flag in _spellings(each))])
    }
    if not found:
        raise ValueError(f"--help={word}: no group and no flag of vllm serve has this word; expected another, or all")
    return "\n\n".join("\n".join(_section(title, members)) for title, members in found.items())


def _spellings(argument: Argument) -> Sequence[str]:
    return argument.flags or (argument.dest.replace("_", "-"),)


def _section(title: str, members: Sequence[Argument]) -> Iterator[str]:
    yield f"{title}:"
    for argument in members:
        kind, about = treatments()[argument.dest]
        yield f"  {', '.join(_spellings(argument))}{values(argument)}"
        yield textwrap.fill(f"{kind}: {about}", WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 8)


def values(argument: Argument) -> str:
    """Return what follows a flag: its choices, or what it takes."""
    if argument.kind in ("switch", "pair", "positional"):
        return ""
    what = "|".join(map(str, argument.choices)) if 0 < len(argument.choices) < 8 else WORDS[argument.type]
    return f" {what}" + " ..." * (argument.kind == "list")


WORDS = {
    "text": "TEXT",
    "name": "NAME",
    "integer": "INT",
    "count": "COUNT",
    "count_or_auto": "COUNT|auto",
    "number": "NUMBER",
    "json": "JSON",
    "json_or_text": "JSON|TEXT",
    "settings": "JSON",
    "ids": "ID,ID",
    "lora_modules": "NAME=PATH",
}
"""What the value of each type is called."""
