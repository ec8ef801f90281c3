"""The result of a gate: passed, failed, or undecided where noise could be the reason."""

from typing import Literal, NamedTuple

GateState = Literal["passed", "failed", "undecided"]
"""The state of a gate that is a comparison, by its value and the 95% interval of its difference, if there is one:

    value over the limit    interval includes the limit and no difference    undecided: it may be noise
                            else                                             failed
    value within the limit  interval includes the limit                      undecided
                            else                                             passed

An interval also covers how far two equal runs differed, if that was measured. Only what failed fails the command.
"""


class GateResult(NamedTuple):
    """The result of a gate, or of another check, for an arm."""

    arm: str
    check: str
    state: GateState
    text: str
