"""No change."""

from collections.abc import Mapping
from typing import ClassVar

from serving.planner.observation import Observation
from serving.planner.policies.policy import Policy, Proposal, Rest


class Static(Policy):
    """Leaves the pools as they are."""

    description: ClassVar[str] = "every pool stays as it is"
    default_interval_s: ClassVar[float] = 60.0
    needs_loads: ClassVar[bool] = False

    @property
    def rest(self) -> Rest:
        """It does not look at all."""
        return Rest(0.0)

    def propose(self, seen: Observation) -> Mapping[str, Proposal]:
        """Propose nothing."""
        return {}
