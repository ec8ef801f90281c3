"""`dynabench doctor`."""

import json
import textwrap
from typing import Annotated

from cyclopts import Parameter

from foundation.text import printable

WIDTH = 80
COLUMNS = "{:<9}{:<12}"
HANGING = " " * len(COLUMNS.format("", ""))


def doctor(*, as_json: Annotated[bool, Parameter(name="--json", negative=())] = False) -> int:
    """Check what is installed and reachable on this host, and suggest what to do next.

    Exits with 1 if something that the environment configures does not work, such as the server in ETCD_ENDPOINTS.
    Missing packages and warnings do not count.

    Args:
        as_json: Print the findings as one JSON document.
    """
    from dynabench.doctor import checks, next_steps

    found = checks()
    steps = next_steps(found)
    if as_json:
        print(json.dumps({"checks": [check._asdict() for check in found], "next": steps}, indent=2))
    else:
        for check in found:
            line = COLUMNS.format(check.state, check.name) + printable(check.found)
            advice = printable(check.advice)
            if advice and len(line) + len(advice) + 3 <= WIDTH:
                line, advice = f"{line} ({advice})", ""
            _print(line)
            if advice:
                _print(HANGING + advice)
        print("\nNext:")
        for step in steps:
            _print(f"  {printable(step)}")
    return int(any(check.state == "broken" for check in found))


def _print(line: str) -> None:
    print("\n".join(textwrap.wrap(line, WIDTH, subsequent_indent=HANGING, break_on_hyphens=False)))
