"""A planner: observations in, decisions out.

    propose     the policy proposes how many workers each pool should have
    reconcile   with pending changes: give up starts that take too long, remember promised workers
    constrain   minima, maxima, the largest step, the GPU budget (see `fitting`)

Whatever the policy:

- Nothing changes while the load of a ready rank, or the traffic, is unknown.
- A start that takes longer than `startup_timeout_s` is given up: it counts as no worker, and its GPUs become free.
- GPUs of draining workers are in use. A pool that grows while another shrinks gets its workers once those have left.
- If somebody else has changed a pool, planning continues from its new size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foundation.own_code import is_own, own_class
from foundation.text import instead_of
from serving.planner.budget import gpus_of
from serving.planner.config import PlannerConfig
from serving.planner.decision import PoolTarget, ScalingDecision
from serving.planner.fitting import Wish, fit_to_budget
from serving.planner.observation import Observation, PoolFacts, PoolState
from serving.planner.policies.named import PLANNERS
from serving.planner.policies.policy import Policy, Proposal, Rest

_ORDER = ("prefill", "decode", "aggregated")


@dataclass(slots=True)
class _Followed:
    """A planner's memory of a pool."""

    starts: list[float] = field(default_factory=list)
    """When each starting worker was first seen, in order."""
    num_overdue: int = 0
    """Starts that have taken too long."""
    size: int | None = None
    """Workers at the last look."""
    decided: int | None = None
    """Workers that it decided on."""
    owed: int = 0
    """Workers that it promised, until `owed_until`."""
    owed_until: float = 0.0


class Planner:
    """Decides how many workers each pool has."""

    def __init__(self, config: PlannerConfig, pools: Sequence[PoolFacts]) -> None:
        """Plan these pools.

        Raises:
            ValueError: there is no such policy, or it cannot work with these pools or settings.
        """
        kind = policy_named(config.planner)
        _check(kind, config, pools)
        self._config = config
        self._pools = sorted(pools, key=lambda pool: _ORDER.index(pool.role))
        self._policy = kind(config, self._pools)
        self._followed = {pool.name: _Followed() for pool in pools}

    @property
    def name(self) -> str:
        """The policy's name."""
        return self._config.planner

    @property
    def interval_s(self) -> float:
        """How often to ask it (s)."""
        return self._config.planner_interval_s or self._policy.default_interval_s

    @property
    def rest(self) -> Rest | None:
        """When it only repeats itself; None: never, as far as is known."""
        if "rest" not in vars(type(self._policy)):  # a class derived from another may remember more than that
            return None
        rest = self._policy.rest
        return None if rest is None else rest._replace(after_s=rest.after_s + self._config.startup_timeout_s)

    def decide(self, observation: Observation) -> ScalingDecision:
        """Return how many workers each pool should have from now on."""
        notes = [note for pool in self._pools for note in self._follow(observation, pool.name)]
        blind = self._unknown(observation)
        if blind:
            return ScalingDecision({}, {}, (*notes, *blind), self._config.advisory)
        known = {pool.name: self._without_overdue(pool.name, observation.pools[pool.name]) for pool in self._pools}
        proposals: dict[str, Proposal] = {}
        for name, proposal in self._policy.propose(replace(observation, pools=known)).items():
            if isinstance(proposal, str):
                notes.append(f"{name} stays as it is: {proposal}")
            else:
                proposals[name] = proposal
        if self._policy.waits_for_starts and any(state.num_starting for state in known.values()):
            proposals = {name: each for name, each in proposals.items() if each.replicas <= known[name].num_ready}
        return self._constrain(observation, proposals, notes)

    def _follow(self, observation: Observation, name: str) -> list[str]:
        """Compare a pool with the last decision, and return notes."""
        state, pool = observation.pools.get(name), self._followed[name]
        if state is None:
            return []
        del pool.starts[: max(0, len(pool.starts) - state.num_starting)]  # the oldest start becomes ready first
        pool.starts += [observation.now] * (state.num_starting - len(pool.starts))
        pool.num_overdue = sum(observation.now - start > self._config.startup_timeout_s for start in pool.starts)
        if observation.now > pool.owed_until:
            pool.owed = 0
        is_as_decided = pool.decided is None or state.size == pool.decided
        if not is_as_decided and not _is_between(state.size, pool.size, pool.decided):
            note = f"{name} has {_workers(state.size)}, not the {pool.decided} decided: planning continues from there"
            pool.decided, pool.owed, pool.size = state.size, 0, state.size
            self._policy.forget(name)
            return [note]
        pool.size = state.size
        return []

    def _unknown(self, observation: Observation) -> list[str]:
        """Return why the policy cannot decide."""
        missing = [pool.name for pool in self._pools if pool.name not in observation.pools]
        if missing:
            return [f"nothing changes: the state of {', '.join(missing)} is unknown"]
        if self._policy.needs_traffic and observation.traffic is None:
            return ["nothing changes: the requests that arrived are unknown"]
        if not self._policy.needs_loads:
            return []
        return [note for pool in self._pools if (note := _missing_loads(pool, observation.pools[pool.name]))]

    def _without_overdue(self, name: str, state: PoolState) -> PoolState:
        overdue = self._followed[name].num_overdue
        return replace(state, num_starting=state.num_starting - overdue) if overdue else state

    def _constrain(self, observation: Observation, proposals: dict[str, Proposal], notes: list[str]) -> ScalingDecision:
        """Fit the policy's proposals to the limits, and remember the decisions."""
        states = [observation.pools[pool.name] for pool in self._pools]
        wishes = [
            self._wish(pool, state, proposals.get(pool.name)) for pool, state in zip(self._pools, states, strict=True)
        ]
        planned, now = fit_to_budget(wishes, self._config)
        targets: dict[str, PoolTarget] = {}
        for pool, wish, end, replicas in zip(self._pools, wishes, planned, now, strict=True):
            proposal = proposals.get(pool.name)
            if not self._config.advisory:
                self._remember(observation.now, pool.name, replicas, end)
            if wish.present < wish.size:
                notes.append(
                    f"{pool.name}: {_starts(wish.size - wish.present)} took longer than "
                    f"{self._config.startup_timeout_s:g} s and is given up"
                )
            if proposal is None and replicas == wish.size:
                continue
            targets[pool.name] = PoolTarget(replicas, self._reason(proposal, wish, end, replicas))
        growth = {name: target.replicas - observation.pools[name].size for name, target in targets.items()}
        changes = {name: targets[name] for name in sorted(growth, key=growth.__getitem__) if growth[name]}
        if self._config.advisory:
            notes += [f"advisory: {name} would have {target.replicas} workers" for name, target in changes.items()]
        return ScalingDecision(targets, changes, tuple(notes), self._config.advisory)

    def _wish(self, pool: PoolFacts, state: PoolState, proposal: Proposal | None) -> Wish:
        """Return the workers that a pool wants within its own limits."""
        config, followed = self._config, self._followed[pool.name]
        healthy = state.size - followed.num_overdue
        wanted = healthy if proposal is None else proposal.replicas
        if wanted < healthy:
            followed.owed = 0
        if config.max_scale_step is not None:
            wanted = min(max(wanted, healthy - config.max_scale_step), healthy + config.max_scale_step)
        wanted = max(wanted, config.min_endpoint, followed.owed)
        # A minimum of workers is kept even if they do not start; first, others are started in addition.
        kept = min(followed.num_overdue, max(0, config.min_endpoint - state.num_ready))
        given_up = followed.num_overdue - kept
        goal = kept + (min(wanted, healthy) if given_up else wanted)  # first make room, then start others
        if config.max_replicas is not None:
            goal = min(goal, config.max_replicas)
        return Wish(pool.gpus_per_worker, state.size, state.num_draining, state.size - given_up, goal, followed.owed)

    def _remember(self, now: float, name: str, replicas: int, end: int) -> None:
        followed = self._followed[name]
        followed.decided = replicas
        if end <= replicas:
            followed.owed = 0
        elif not followed.owed:
            followed.owed, followed.owed_until = end, now + self._config.startup_timeout_s

    def _reason(self, proposal: Proposal | None, wish: Wish, end: int, replicas: int) -> str:
        """Explain in a line why a pool gets this many workers."""
        said = [] if proposal is None else [proposal.reason]
        if wish.present < wish.size:
            said.append(f"{_starts(wish.size - wish.present)} given up")
        if proposal is None or wish.goal != proposal.replicas:
            said.append(f"the pool's limits and pending changes make that {wish.goal}")
        if end != wish.goal:
            said.append(f"the GPU budget makes that {end}")
        if replicas < end:
            said.append(f"{_workers(end - replicas)} must wait until GPUs are free")
        return "; ".join(said)


def policy_named(name: str) -> type[Policy]:
    """Return a policy: a built-in one, or the user's from a file.

    Raises:
        ValueError: there is no policy of that name.
    """
    if name in PLANNERS:
        return PLANNERS[name]
    if is_own(name):
        try:
            return own_class(name, Policy)
        except ValueError as error:
            raise ValueError(f"planner {error}") from error
    raise ValueError(f"planner {name!r} is unknown; {instead_of(name, PLANNERS)}")


def _check(kind: type[Policy], config: PlannerConfig, pools: Sequence[PoolFacts]) -> None:
    """Refuse pools and settings that the policy, or every policy, cannot work with."""
    _check_limits(kind, config, pools)
    names = [pool.name for pool in pools]
    if not pools or len(set(names)) < len(names):
        raise ValueError(f"a planner needs pools with different names, not {', '.join(names) or 'none'}")
    without = [pool.name for pool in pools if pool.times is None]
    if kind.needs_times and without:
        raise ValueError(f"planner {config.planner} needs step times; those of {', '.join(without)} are unknown")
    roles = tuple(sorted(pool.role for pool in pools))
    if kind.layouts and roles not in kind.layouts:
        known = " or ".join(_pools(layout) for layout in kind.layouts)
        raise ValueError(f"planner {config.planner} plans {known}, not {_pools(roles)}")
    least = gpus_of([config.min_endpoint] * len(pools), [pool.gpus_per_worker for pool in pools])
    if config.max_gpu_budget is not None and config.max_gpu_budget < least:
        raise ValueError(
            f"max_gpu_budget must be at least {least}, the GPUs of min_endpoint {config.min_endpoint} in each pool, "
            f"not {config.max_gpu_budget}"
        )
    slow = [pool for pool in pools if pool.startup_s > config.startup_timeout_s]
    if slow:
        raise ValueError(
            f"startup_timeout_s must be at least the start-up time of {slow[0].name} ({slow[0].startup_s:g} s), "
            f"not {config.startup_timeout_s:g}"
        )


def _check_limits(kind: type[Policy], config: PlannerConfig, pools: Sequence[PoolFacts]) -> None:
    """Refuse a policy whose limits are missing."""
    if not kind.needs_limits:
        return
    roles = {pool.role for pool in pools}
    if config.planner_ttft_ms is None and roles & {"aggregated", "prefill"}:
        raise ValueError(
            f"planner {config.planner} needs a TTFT limit: set planner_ttft_ms, in a file as planner: {{planner_ttft_ms: 2000}}, or use --slo 'ttft <= ...' with "
            "simulate or run"
        )
    if config.planner_itl_ms is None and roles & {"aggregated", "decode"}:
        raise ValueError(
            f"planner {config.planner} needs an ITL limit: set planner_itl_ms, in a file as planner: {{planner_itl_ms: 50}}, or use --slo 'itl <= ...' or 'tpot <= "
            "...' with simulate or run"
        )


def _missing_loads(pool: PoolFacts, state: PoolState) -> str:
    """Return a note that names the missing loads, if any."""
    expected = state.num_ready * pool.num_ranks
    missing = expected - len(state.loads)
    if missing <= 0:
        return ""
    return f"nothing changes: the loads of {missing} of {expected} ranks of {pool.name} are missing"


def _is_between(size: int, before: int | None, decided: int | None) -> bool:
    """Return whether a pool may still be on its way to the decided size."""
    if before is None or decided is None or before == decided:
        return False
    return min(before, decided) <= size <= max(before, decided)


def _pools(roles: Sequence[str]) -> str:
    """Format the number of pools of each role."""
    counts = {role: roles.count(role) for role in _ORDER if role in roles}
    return " and ".join(f"{number} {role} pool{'' if number == 1 else 's'}" for role, number in counts.items())


def _workers(number: int) -> str:
    return f"{number} worker{'' if number == 1 else 's'}"


def _starts(number: int) -> str:
    return f"{number} start{'' if number == 1 else 's'}"
