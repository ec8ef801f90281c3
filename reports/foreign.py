"""Make text that others wrote (servers, file names, arms) safe where it is shown."""

import json
import re
from typing import Any

from foundation.text import printable


def csv_cell(value: Any) -> Any:
    """Keep a spreadsheet from reading a text as a formula; numbers, even those written as text, stay as they are."""
    if not isinstance(value, str) or len(value) < 2 or value[0] not in "=+-@\t\r":
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def script_json(value: Any) -> str:
    """Return JSON that cannot end, or comment out, the script element around it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def markdown_cell(text: str) -> str:
    """Escape a text so that it stays in its table cell and is shown literally."""
    return re.sub(r"([\\|`*<\[])", r"\\\1", printable(" ".join(text.split())))
