"""The page: one self-contained HTML file."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from reports import key
from reports.charts.drawing import Drawn
from reports.foreign import script_json

WORDS = ("better", "worse", "equal", "inconclusive", "unstable", "met", "missed", "unknown", "impossible", "n/a")
"""The words with which a cell may start that is more than a number."""
_INTERVAL = re.compile(r"\[[^\]]*\]( [~=])?")
NOTHING = ("-", "n/a")


def render(template: str, charts: list[Drawn], *, arms: Sequence[str] = (), **values: Any) -> str:
    """Fill a template; styles, the script and the charts' data go into the page.

    Args:
        template: the name of its file.
        charts: what is drawn.
        arms: full names, in the order of the key; a single arm needs no key.
        values: everything else that the template shows.
    """
    here = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["word"] = word
    environment.filters["intact"] = intact
    shown = key.key_of(arms) if len(arms) > 1 else {}
    environment.globals["key"] = shown
    data = script_json({chart.name: chart.data for chart in charts})
    return environment.get_template(template).render(
        charts=charts,
        shortened=[entry for entry in shown.values() if entry.name != entry.arm],
        style=key.css() + (here / "report.css").read_text(),
        script=(here / "report.js").read_text(),
        data=data,
        **values,
    )


def word(cell: str) -> str:
    """Return the class of a cell: its first word, `none` if it is not known, or nothing."""
    if cell in NOTHING:
        return "none"
    first = cell.partition(" ")[0].rstrip(",:")
    return first if first in WORDS else ""


def intact(cell: str) -> str:
    """Keep an interval on one line with the sign after it."""
    return _INTERVAL.sub(lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), cell)
