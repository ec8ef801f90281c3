"""The page: one HTML file with everything in it."""

from pathlib import Path
from typing import Any

import jinja2

from reports import key
from reports.charts.drawing import Drawn
from reports.foreign import script_json


def render(template: str, charts: list[Drawn], **values: Any) -> str:
    """Fill a template; styles, script and the charts' data go into the page."""
    here = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    data = script_json({chart.name: chart.data for chart in charts})
    return environment.get_template(template).render(
        charts=charts,
        colours=[f"var(--arm-{number})" for number in range(len(key.PALETTE))],
        style=key.css() + (here / "report.css").read_text(),
        script=(here / "report.js").read_text(),
        data=data,
        **values,
    )
