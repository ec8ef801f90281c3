"""Conditions on figures, as flags state them: `metric[.statistic] (<=|<|>) [+-]number [unit]`.

    --slo 'ttft.p99 <= 2s'        a limit: what is good                 slo.parse
    --fail-if 'ttft.p90 > +5%'    a gate                                gate.parse
    --fail-if 'tpot > 3%'         a threshold of the simulator's error  fidelity.parse

Each of the three says which metrics, signs and units it takes.
"""

import math
import re
from dataclasses import dataclass

METRICS = {
    "ttft": "ttft_sched",
    "ttft_sent": "ttft",
    "ttst": "ttst",
    "tpot": "tpot",
    "itl": "itl",
    "e2e": "e2e_sched",
    "e2e_sent": "e2e",
}
"""The name of a latency in limits and gates, and its name in summary.json."""

_FORM = re.compile(
    r"([a-z_0-9]+)(?:\.(mean|p50|p90|p95|p99|max))?\s*(<=|<|>)\s*([+-]?)(\d+\.?\d*|\.\d+)\s*(%|ms|s)?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, as it was read."""

    text: str
    metric: str
    statistic: str | None
    sign: str
    number: float
    unit: str = ""
    is_signed: bool = False
    """Whether the number has a + or - before it."""

    @property
    def is_above(self) -> bool:
        """Whether it is true for values above the number."""
        return self.sign == ">"

    @property
    def value(self) -> float:
        """The number in seconds, as a share, or unchanged."""
        return self.number / {"ms": 1000, "%": 100}.get(self.unit, 1)

    def __str__(self) -> str:
        return self.text


def read_condition(text: str) -> Condition | None:
    """Parse a condition; return None if it has another form, or a number that is too large to be compared."""
    match = _FORM.fullmatch(text.strip())
    if match is None or math.isinf(float(match[5]) * 1000):  # in milliseconds, too
        return None
    metric, statistic, sign, plus, number, unit = match.groups()
    return Condition(text.strip(), metric, statistic, sign, float(plus + number), unit or "", bool(plus))
