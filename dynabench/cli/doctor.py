"""`dynabench doctor`."""

import json
from typing import Annotated

from cyclopts import Parameter

from dynabench.terminal import Terminal

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
        console = Terminal()
        for check in found:
            line, advice = COLUMNS.format(check.state, check.name) + check.found, check.advice
            if advice and len(line) + len(advice) + 3 <= console.width:
                line, advice = f"{line} ({advice})", ""
            console.say(line, indent=HANGING)
            if advice:
                console.say(HANGING + advice, indent=HANGING)
        console.say("\nNext:")
        for step in steps:
            console.verbatim(f"  {step}")
    return int(any(check.state == "broken" for check in found))
