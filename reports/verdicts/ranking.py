"""Which arm is best: within the limits first, then by mean TTFT, TPOT and E2E, each among the arms that tie so far."""

from collections.abc import Mapping
from functools import partial

from reports.figures.outcomes import binding, state_of
from reports.figures.statistics import Blocks
from reports.summary import NOISE_FLOOR, PAIRED, ArmSummary, Ranking, RankingStep, Summary
from reports.verdicts.differences import Table, judged
from reports.verdicts.failures import Failures, are_too_many
from reports.verdicts.headline import margin
from reports.verdicts.routers import by_router, each_best
from reports.verdicts.simultaneous import lowest, parts_of

OUT_OF_LIMITS = "out_of_limits"
ORDER = (OUT_OF_LIMITS, *PAIRED)
"""The metrics by which arms are ranked."""


def rank(
    summary: Summary,
    tables: Mapping[str, Table],
    blocks: Blocks,
    *,
    smallest: float,
    elsewhere: Mapping[str, str | None] | None = None,
) -> Ranking | None:
    """Rank the arms of an experiment; None if there is only one.

    Args:
        summary: their figures.
        tables: their values, request by request.
        blocks: each request's block.
        smallest: the relative difference below which two arms are equal in practice.
        elsewhere: what other routers call the mode of each arm, if arms differ by it.
    """
    arms = {arm: its for arm, its in summary.arms.items() if not arm.endswith(NOISE_FLOOR)}
    if len(arms) < 2:
        return None
    aside = _set_aside(arms)
    ranked = _Ranked(tables, blocks, summary.noise_floor, smallest)
    compared = [arm for arm in arms if arm not in aside]
    steps = ranked.steps(compared)
    ties = steps[-1].ties if steps else compared
    known = {arm: where for arm, where in (elsewhere or {}).items() if where and arm in compared}
    return Ranking(
        compared=compared,
        set_aside=aside,
        steps=steps,
        winner=ties[0] if len(ties) == 1 else None,
        ties=ties,
        tpot=ranked.step("tpot", _within(steps, compared)),
        elsewhere={arm: known[arm] for arm in ties if arm in known} or ranked.each_router(known),
    )


def _within(steps: list[RankingStep], compared: list[str]) -> list[str]:
    """Return the arms that keep the most requests within the limits, or all."""
    return steps[0].ties if steps and steps[0].metric == OUT_OF_LIMITS else compared


class _Ranked:
    """The values by which arms are ranked."""

    def __init__(
        self,
        tables: Mapping[str, Table],
        blocks: Blocks,
        floor: Mapping[str, Mapping[str, float | None]],
        smallest: float,
    ) -> None:
        self.tables, self.blocks, self.floor, self.smallest = tables, blocks, floor, smallest

    def steps(self, arms: list[str]) -> list[RankingStep]:
        """Rank arms by one metric after the other, until one is left."""
        found: list[RankingStep] = []
        for metric in ORDER:
            step = self.step(metric, found[-1].ties if found else arms)
            found += [step] if step else []
        return found

    def step(self, metric: str, arms: list[str]) -> RankingStep | None:
        """Compare arms in one metric; None for a single arm, or if too few requests are known in all of them."""
        values = {arm: self.tables[arm][metric] for arm in arms if metric in self.tables[arm]}
        parts = parts_of(values, self.blocks) if len(values) > 1 else {}
        if not parts:
            return None
        judge = partial(judged, floor_s=self.floor.get(metric, {}).get("mean"), smallest=self.smallest)
        ties, differences = lowest(parts, judge, base=1.0 if metric == OUT_OF_LIMITS else None)
        return RankingStep(metric, ties[0], ties, differences)

    def each_router(self, known: Mapping[str, str]) -> dict[str, str]:
        """Return the best mode of each other router, with its name there; of several that tie, the lowest in the mean."""
        best = {}
        for router, modes in by_router(known).items():
            steps = self.steps(list(modes))
            arm = steps[-1].ties[0] if steps else next(iter(modes))
            best[router] = arm, modes[arm]
        return each_best(best)


def _set_aside(arms: Mapping[str, ArmSummary]) -> dict[str, str]:
    """Say which arms cannot be best, and why."""
    found = {arm: "no request succeeded" for arm, its in arms.items() if its.ttft_sched.mean is None}
    found |= {arm: "could not keep up" for arm, its in arms.items() if not its.stability.is_stable}
    failures = {arm: Failures(its.failed, its.requests) for arm, its in arms.items()}
    for arm, are_more in zip(arms, are_too_many(list(failures.values())), strict=True):
        if are_more:
            found.setdefault(arm, f"{failures[arm]} requests failed")
    rest = {arm: its for arm, its in arms.items() if arm not in found and its.outcomes}
    if any(state_of(its.outcomes or ()) == "met" for its in rest.values()):
        for arm, its in rest.items():
            nearest = binding(its.outcomes or ())
            if nearest is not None and nearest.state != "met":
                found[arm] = f"{nearest.limit} {margin(nearest)}"
    return found
