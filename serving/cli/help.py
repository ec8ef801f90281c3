"""Help in two lengths: `--help` shows the options that people use, by question, and `--help-all` all of them, by subject."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cyclopts import App, CoercionError, Group

from foundation.settings import plain

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel

    Panels = list[tuple[Group | None, HelpPanel]]

HELP_ALL = "--help-all"
HELP_FLAGS = ("--help", "-h", HELP_ALL)

OWN = ("Arguments", "Parameters")
"""Groups of a command's help that hold what only it has."""

MOST = 30
"""Lines of help up to which `--help` shows every option, too."""


class CommandLine(App):
    """An app whose commands have both lengths of help."""

    common: Mapping[str, Sequence[str]] = MappingProxyType({})
    """The options that people use, by the question that they answer; a command shows those that it has."""

    def parse_args(self, tokens: Any = None, **options: Any) -> Any:
        """Parse words; `--flag=on` and `--flag=off` are accepted, because that is how the help prints a default."""
        words = sys.argv[1:] if tokens is None else [*tokens]
        try:
            return super().parse_args(words, **options)
        except CoercionError as error:
            if error.token is None or error.argument is None:
                raise
            typed, value = f"{error.token.keyword}={error.token.value}", plain(error.token.value, error.argument.hint)
            if not isinstance(value, bool) or typed not in words:
                raise
            words[words.index(typed)] = f"{error.token.keyword}={value}"
            return self.parse_args(words, **options)

    def _assemble_help_panels(self, tokens: Any, help_format: Any) -> "Panels":
        panels: Panels = super()._assemble_help_panels(tokens, help_format)
        options = [(group, panel) for group, panel in panels if panel.format == "parameter"]
        count = sum(len(panel.entries) for _, panel in options)
        return panels if count <= MOST or HELP_ALL in sys.argv else [*self._by_question(options, count)]

    def _by_question(self, options: "Panels", count: int) -> Iterator[tuple[Group | None, "HelpPanel"]]:
        """Yield a panel for each question, and one that says how to see the rest."""
        from cyclopts.help import HelpEntry

        entries = {name: entry for _, panel in options for entry in panel.entries for name in entry.names}
        yield from ((group, panel) for group, panel in options if panel.title == OWN[0])
        for question, names in self.common.items():
            if found := [entries[name] for name in names if name in entries]:
                yield _panel(question, found)
        subjects = ", ".join(str(panel.title) for _, panel in options if panel.entries and panel.title not in OWN)
        rest = f"Show all {count} options, by subject: {subjects}."
        yield _panel("What else is there?", [HelpEntry(positive_names=(HELP_ALL,), description=rest)])


def _panel(title: str, entries: list["HelpEntry"]) -> tuple[Group, "HelpPanel"]:
    from cyclopts.help import HelpPanel

    return Group(title), HelpPanel(format="parameter", title=title, entries=entries)
