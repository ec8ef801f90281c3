"""The router core: picks ranks and keeps the books; no clock, no I/O."""

from serving.router.blocks import PromptBlocks
from serving.router.candidates import Candidates, Prompt, RankState
from serving.router.config import RouterConfig, StepCosts
from serving.router.decision import RoutingDecision
from serving.router.policies.modes import ROUTER_MODES, Mode, check_live_mode, check_registered_mode, wants_kv_events
from serving.router.policies.policy import Policy
from serving.router.router import Router, choices_of

__all__ = [
    "ROUTER_MODES",
    "Candidates",
    "Mode",
    "Policy",
    "Prompt",
    "PromptBlocks",
    "RankState",
    "Router",
    "RouterConfig",
    "RoutingDecision",
    "StepCosts",
    "check_live_mode",
    "check_registered_mode",
    "choices_of",
    "wants_kv_events",
]
