"""The page: one HTML file with everything in it."""

import json
from pathlib import Path
from typing import Any

import jinja2

from reports.drawing import COLOURS, Drawn

Json = dict[str, Any]


def render(template: str, charts: list[Drawn], **values: Any) -> str:
    """Fill a template; styles, script and the charts' data go into the page."""
    here = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    data = json.dumps({chart.name: chart.data for chart in charts}, separators=(",", ":")).replace("</", "<\\/")
    return environment.get_template(template).render(
        charts=charts,
        colours=COLOURS,
        style=(here / "report.css").read_text(),
        script=(here / "report.js").read_text(),
        data=data,
        **values,
    )
