"""Text that others wrote (servers, file names, arms), made fit for the place where it is shown."""

import json
import re
from typing import Any

from foundation.text import printable


def csv_cell(value: Any) -> Any:
    """Keep a spreadsheet from taking a text for a formula; numbers, also those written as text, stay as they are."""
    if not isinstance(value, str) or len(value) < 2 or value[0] not in "=+-@\t\r":
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def script_json(value: Any) -> str:
    """Return JSON that cannot end, or comment out, the script element it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def markdown_cell(text: str) -> str:
    """Return a text that stays in its cell of a table and is shown as it is."""
    return re.sub(r"([\\|`*<\[])", r"\\\1", printable(" ".join(text.split())))
