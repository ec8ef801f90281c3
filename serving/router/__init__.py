"""The router core: picks ranks and keeps the books; no clock, no I/O."""

from serving.router.blocks import PromptBlocks
from serving.router.candidates import Prompt, RankState
from serving.router.config import RouterConfig, StepCosts
from serving.router.policies.modes import ROUTER_MODES, Mode, check_live_mode, wants_kv_events
from serving.router.router import Decision, Router

__all__ = [
    "ROUTER_MODES",
    "Decision",
    "Mode",
    "Prompt",
    "PromptBlocks",
    "RankState",
    "Router",
    "RouterConfig",
    "StepCosts",
    "check_live_mode",
    "wants_kv_events",
]
