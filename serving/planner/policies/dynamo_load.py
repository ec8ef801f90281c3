"""The load loop of NVIDIA Dynamo 1.6's planner, for its optimization targets throughput and latency.

Each rank has a value. A pool grows by one worker if any value is over the upper threshold. It shrinks by one if all are
under the lower one and the rest would stay under the upper one: largest value x N / (N - 1).

    role         value                                                              throughput   latency
    prefill      queued prompt tokens / longest context                             1.0, 0.1     0.1, 0
    decode       KV tokens of requests that decode or wait to / KV tokens in all    1.0, 0.6     0.4, 0.1
    aggregated   the same, with queued prompt tokens                                1.0, 0.6     0.4, 0.1

N are the ready workers; while any worker of any pool starts, no pool grows. Source: dynamo.planner.core.load_scaling.
"""

from typing import ClassVar

from serving.planner.observation import PoolFacts, PoolState, RankLoad
from serving.planner.policies.policy import Policy, Proposal, Rest

PREFILL = {"throughput": (1.0, 0.1), "latency": (0.1, 0.0)}
DECODE = {"throughput": (1.0, 0.6), "latency": (0.4, 0.1)}


class DynamoLoad(Policy):
    """Moves each pool by one worker, by thresholds."""

    description: ClassVar[str] = (
        "NVIDIA Dynamo 1.6, load: +1 if any rank's queue or KV is over a threshold, -1 if all are under one (dynamo_target)"
    )
    default_interval_s: ClassVar[float] = 5.0
    waits_for_starts: ClassVar[bool] = True

    @property
    def rest(self) -> Rest:
        """It does not look back."""
        return Rest(0.0)

    def _propose_one(self, now: float, facts: PoolFacts, state: PoolState) -> Proposal | None:
        up, down = (PREFILL if facts.role == "prefill" else DECODE)[self._config.dynamo_target]
        values = [value_of(facts, load) for load in state.loads]
        number, most = state.num_ready, max(values)
        what = "queued prompt tokens by context" if facts.role == "prefill" else "KV usage"
        # A prefill queue that equals the threshold is over it; KV usage is not (as in Dynamo).
        if most > up or (facts.role == "prefill" and most == up):
            return Proposal(number + 1, f"{what} of a rank is {most:.3g}, over {up}")
        is_idle = most < down or (most == down == 0)
        if not is_idle or state.size == 1:
            return None
        reason = f"{what} of all ranks is at most {most:.3g}, under {down}"
        if number > 1 and most * number / (number - 1) < up:
            return Proposal(number - 1, reason)
        return Proposal(number, reason) if state.num_starting else None


def value_of(facts: PoolFacts, load: RankLoad) -> float:
    """Return the value to compare with the thresholds."""
    if facts.role == "prefill":
        return load.queued_prefill_tokens / (facts.max_model_len or facts.max_kv_tokens)
    tokens = load.decode_kv_tokens + load.queued_decode_kv_tokens
    if facts.role == "aggregated":
        tokens += load.queued_prefill_tokens
    return tokens / facts.max_kv_tokens
