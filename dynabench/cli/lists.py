"""Commands that list what can be chosen: modes and planners."""

from dynabench.terminal import Terminal
from serving.planner import PLANNERS
from serving.router import ROUTER_MODES
from serving.router.elsewhere import name_elsewhere
from serving.router.policies.modes import ADDITIONS, SYMBOLS

FIRST = "round-robin", "kv", "lmetric", "marginal-all"
"""The modes to try first; docs/routing-study.md shows why."""

REASON = (
    "round-robin and kv are baselines. lmetric needs to know nothing about the engines. marginal-all was the best "
    "mode in our study if the times of steps are known, as they are in a simulation."
)

HERDS = (
    "A mode that herds sends most of a burst of prompts behind one cached prefix to the worker that has it, and the "
    "others idle: it counts no work for a cached prompt, or too little. Add +bound(1.25) where bursts occur."
)


def modes() -> None:
    """List the router modes, and what can be added to them."""
    console = Terminal()
    flags = " ".join(f"--router-mode {mode}" for mode in FIRST)
    console.verbatim(f"Try first: dynabench simulate TRACE {flags}")
    console.say(f"{REASON}\n")
    for name, kind in ROUTER_MODES.items():
        console.entry(name, f"{kind.description} Herds." if kind.herds else kind.description)
    console.say(f"\n{HERDS}")
    console.say("\nThe lowest cost wins. For the prompt and for each worker, the formulas use:")
    for name, text in SYMBOLS.items():
        console.entry(name, text)
    console.say("\nIn other routers, these modes are (the others exist only in dynabench):")
    for name in ROUTER_MODES:
        if where := name_elsewhere(name):
            console.entry(name, where)
    console.say("\nAdd these with +, as in lmetric+eps(5):")
    for text in ADDITIONS.values():
        name, _, effect = text.partition(": ")
        console.entry(name, effect)


def planners() -> None:
    """List the policies that decide how many workers each pool has."""
    console = Terminal()
    for name, kind in PLANNERS.items():
        console.entry(name, kind.description)
