"""The router core: which worker gets a request. No clock, no I/O: `now` and `rng` are arguments."""

from serving.router.config import RouterConfig
from serving.router.policies import ROUTER_MODES
from serving.router.router import Decision, Prompt, Router

__all__ = ["ROUTER_MODES", "Decision", "Prompt", "Router", "RouterConfig"]
