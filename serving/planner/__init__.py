"""The planner core: how many workers each pool should have. Observations in, decisions out; no clock, no I/O."""

from serving.planner.capacity import StepTimes
from serving.planner.config import PlannerConfig
from serving.planner.counts import Counts, traffic_between
from serving.planner.decision import PoolTarget, ScalingDecision
from serving.planner.observation import Observation, PoolFacts, PoolState, RankLoad, RequestTraffic
from serving.planner.planner import Planner, policy_named
from serving.planner.policies.named import PLANNERS
from serving.planner.policies.policy import Policy, Proposal, Rest
from serving.planner.predictors import PREDICTORS

__all__ = [
    "PLANNERS",
    "PREDICTORS",
    "Counts",
    "Observation",
    "Planner",
    "PlannerConfig",
    "Policy",
    "PoolFacts",
    "PoolState",
    "PoolTarget",
    "Proposal",
    "RankLoad",
    "RequestTraffic",
    "Rest",
    "ScalingDecision",
    "StepTimes",
    "policy_named",
    "traffic_between",
]
