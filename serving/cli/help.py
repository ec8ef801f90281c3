"""Help in two lengths: `--help` shows the options that people use, by question, and `--help-all` all of them, by subject."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from cyclopts import App, CoercionError, Group

from foundation.settings import kinds, plain_value

if TYPE_CHECKING:
    from cyclopts.argument import Argument
    from cyclopts.help import HelpEntry, HelpPanel

    Panels = list[tuple[Group | None, HelpPanel]]

HELP_ALL = "--help-all"
HELP_FLAGS = ("--help", "-h", HELP_ALL)

OWN = ("Arguments", "Parameters")
"""Groups of a command's help that hold what only it has."""

MOST = 30
"""Lines of help up to which `--help` shows every option, too."""

FRACTION = re.compile(r"[+-]?\d*\.0*[1-9]\d*")
"""A number that is not whole."""

NO_QUESTIONS: Mapping[str, Sequence[str]] = MappingProxyType({})


class CommandLine(App):
    """An app whose commands have both lengths of help."""

    def __init__(self, *, questions: Mapping[str, Sequence[str]] = NO_QUESTIONS, **options: Any) -> None:
        """Take the options that people use, by the question that they answer; a command shows those that it has."""
        super().__init__(**options)
        self.questions = questions
        self.shows_all = False

    def parse_args(self, tokens: Any = None, **options: Any) -> Any:
        """Parse words; `--flag=on` and `--flag=off` are accepted, because that is how the help prints a default."""
        words = sys.argv[1:] if tokens is None else [*tokens]
        self.shows_all = HELP_ALL in words
        try:
            return super().parse_args(words, **options)
        except CoercionError as error:
            if error.token is None or error.argument is None:
                raise
            typed, value = (
                f"{error.token.keyword}={error.token.value}",
                plain_value(error.token.value, error.argument.hint),
            )
            if not isinstance(value, bool) or typed not in words:
                raise
            words[words.index(typed)] = f"{error.token.keyword}={value}"
            return self.parse_args(words, **options)

    # Cyclopts reads 2.5 as the whole number 2. Of its methods only this one returns what was typed; tests notice if it goes.
    def _parse_known_args(self, *words: Any, **options: Any) -> Any:
        *result, arguments = super()._parse_known_args(*words, **options)
        for argument in arguments:
            _refuse_fraction(argument)
        return *result, arguments

    # No public method of cyclopts chooses the panels. If this one goes, help shows all options; tests notice both that and
    # another result. Its arguments are passed on as they come, because they may change.
    def _assemble_help_panels(self, *words: Any, **options: Any) -> "Panels":
        panels: Panels = super()._assemble_help_panels(*words, **options)
        found = [(group, panel) for group, panel in panels if panel.format == "parameter"]
        count = sum(len(panel.entries) for _, panel in found)
        return panels if count <= MOST or self.shows_all else [*self._by_question(found, count)]

    def _by_question(self, options: "Panels", count: int) -> Iterator[tuple[Group | None, "HelpPanel"]]:
        """Yield a panel for each question, and one that says how to see the rest."""
        from cyclopts.help import HelpEntry

        entries = {name: entry for _, panel in options for entry in panel.entries for name in entry.names}
        yield from ((group, panel) for group, panel in options if panel.title == OWN[0])
        for question, names in self.questions.items():
            if found := [entries[name] for name in names if name in entries]:
                yield _panel(question, found)
        subjects = ", ".join(str(panel.title) for _, panel in options if panel.entries and panel.title not in OWN)
        rest = f"Show all {count} options, by subject: {subjects}."
        yield _panel("What else is there?", [HelpEntry(positive_names=(HELP_ALL,), description=rest)])


def _refuse_fraction(argument: "Argument") -> None:
    """Refuse a fraction where a whole number belongs.

    Raises:
        CoercionError: the argument is one.
    """
    hint = argument.field_info.annotation
    allowed = {part for kind in kinds(hint) for part in (kind, *(set(get_args(kind)) - {...}))}
    if not any(int in kinds(part) for part in allowed) or any(float in kinds(part) for part in allowed):
        return
    for token in argument.tokens:
        if FRACTION.fullmatch(token.value):
            raise CoercionError(argument=argument, token=token, target_type=int)


def _panel(title: str, entries: list["HelpEntry"]) -> tuple[Group, "HelpPanel"]:
    from cyclopts.help import HelpPanel

    return Group(title), HelpPanel(format="parameter", title=title, entries=entries)
