"""A planner policy: a small class that proposes how many workers pools should have."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from serving.planner.config import PlannerConfig
from serving.planner.observation import Observation, PoolFacts, PoolState


class Proposal(NamedTuple):
    """The size that a policy asks for."""

    replicas: int
    """Ready and starting workers together."""
    reason: str
    """One line."""


class Rest(NamedTuple):
    """When a policy that sees the same at every look only repeats itself."""

    after_s: float
    """Time for which it must have seen the same (s); what it saw earlier no longer matters."""
    every: int = 1
    """Looks after which its proposals, and what it remembers, repeat."""


class Policy:
    """A planner policy."""

    description: ClassVar[str]
    """One line for the list of policies, with the formula."""
    default_interval_s: ClassVar[float]
    """How often it decides by default."""
    needs_loads: ClassVar[bool] = True
    """Whether it reads the load of each rank."""
    needs_traffic: ClassVar[bool] = False
    """Whether it reads the requests that arrived."""
    needs_limits: ClassVar[bool] = False
    """Whether it needs limits of TTFT and ITL."""
    needs_times: ClassVar[bool] = False
    """Whether it needs step times."""
    layouts: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Roles of the pools that it can plan, in alphabetical order; none: any pools, each separately."""
    waits_for_starts: ClassVar[bool] = False
    """Whether it proposes no more workers while some are starting."""

    def __init__(self, config: PlannerConfig, pools: Sequence[PoolFacts]) -> None:
        self._config = config
        self._pools = {pool.name: pool for pool in pools}

    @property
    def rest(self) -> Rest | None:
        """When it only repeats itself: a simulation leaves out such looks. None: never, as far as is known."""
        return None

    def propose(self, seen: Observation) -> Mapping[str, Proposal | str]:
        """Propose how many workers pools should have, or return why that is unknown.

        A pool that is left out stays as it is. Unless a policy overrides this, each pool is planned separately.

        Args:
            seen: the planner's observation, without starts that took too long. It has all loads, and the traffic, if
                the policy needs them.
        """
        proposals = {
            name: self._propose_one(seen.now, self._pools[name], state)
            for name, state in seen.pools.items()
            if state.num_ready
        }
        return {name: proposal for name, proposal in proposals.items() if proposal is not None}

    def _propose_one(self, now: float, facts: PoolFacts, state: PoolState) -> Proposal | str | None:
        """Propose for one pool, if `propose` is not overridden for all pools together."""
        raise NotImplementedError

    def forget(self, pool: str) -> None:
        """Forget the decision for a pool, because somebody else has changed it."""
