"""A planner's decisions in its log: a line to read, and a line of JSON with all inputs."""

import msgspec

from serving.planner import Observation, PoolState, RequestTraffic, ScalingDecision


def line_of(number: int, decision: ScalingDecision, seen: Observation) -> str:
    """Return a decision, its reasons and its main inputs as one line to read."""
    changes = [
        f"{name}: {seen.pools[name].size} -> {target.replicas} ({target.reason})"
        for name, target in decision.changes.items()
    ]
    pools = [f"{name}: {_pool_line(pool)}" for name, pool in seen.pools.items()]
    name = "advice" if decision.is_advisory else "decision"
    parts = [f"{name} {number}: {', '.join(changes) or 'no change'}", *pools, _traffic_line(seen.traffic)]
    return "; ".join(parts)


def json_of(number: int, decision: ScalingDecision, seen: Observation) -> str:
    """Return a decision and all its inputs as one line of JSON."""
    content = {
        "decision": number,
        "advisory": decision.is_advisory,
        "changes": decision.changes,
        "notes": decision.notes,
        "seen": {"pools": seen.pools, "traffic": seen.traffic},
    }
    return msgspec.json.encode(content).decode()


def _pool_line(pool: PoolState) -> str:
    running, waiting = (sum(getattr(load, name) for load in pool.loads) for name in ("num_running", "num_waiting"))
    workers = f"{pool.num_ready} ready, {pool.num_starting} starting, {pool.num_draining} draining"
    return f"{workers}, {running} requests running, {waiting} waiting"


def _traffic_line(traffic: RequestTraffic | None) -> str:
    if traffic is None:
        return "traffic unknown"
    means = [
        (traffic.isl, "{:.0f} prompt tokens"),
        (traffic.osl, "{:.0f} output tokens"),
        (traffic.ttft_s, "TTFT {:.3g} s"),
        (traffic.itl_s, "ITL {:.3g} s"),
    ]
    known = [text.format(mean) for mean, text in means if mean is not None]
    return ", ".join([f"{traffic.num_requests} requests in {traffic.duration_s:.3g} s", *known])
