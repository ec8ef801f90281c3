"""What more load needs, and which of equally cheap layouts takes most of it.

At more load, a layout is assumed to need no fewer workers. So where the chosen layout still meets the limits, nothing can
be cheaper, and nothing else is simulated. Only where it misses them is the whole search repeated.
"""

from collections.abc import Sequence

from dynabench.capacity.asking import Asking
from dynabench.capacity.findings import Findings
from dynabench.capacity.floors import Floor
from dynabench.capacity.search import Question, Search


def choose(asking: Asking, found: Findings) -> Question | None:
    """Return, of the cheapest layouts, one that meets the limits at the highest load, or of several the one furthest within them.

    From the highest load down, each is tried, the one furthest within limits first; the first that meets them is chosen.

    Raises:
        InterruptError: the user interrupted it.
    """
    equal = found.equally_cheap()
    if len(equal) < 2:
        return next(iter(equal), None)
    for load in sorted(found.higher_loads, reverse=True):
        for question in _possible(asking, found, equal, load):
            if asking.point(found, question, load).state == "met":
                return question
    return equal[0]


def _possible(asking: Asking, found: Findings, equal: Sequence[Question], load: float) -> list[Question]:
    """Return those whose lower bound at this load they have, simulated on all cores if that is more than one."""
    floors = asking.floors(found, load, [question.layout for question in equal])
    possible = [
        question
        for question, floor in zip(equal, floors, strict=True)
        if not floor.impossible and floor.workers <= question.workers
    ]
    asking.compare([found.arm(question, load) for question in possible], found.load_told(load))
    return possible


def search_at(asking: Asking, found: Findings, load: float, chosen: Question, first: Sequence[Floor]) -> Search:
    """Find what another multiple of the load needs.

    Args:
        asking: simulates.
        found: the finished search at the load to plan for.
        load: the multiple.
        chosen: the layout that was chosen; nothing is cheaper at a higher load if it still meets the limits.
        first: what each layout needs at least at the load to plan for.

    Raises:
        InterruptError: the user interrupted it.
    """
    if load < found.load:
        search = found.new_search(asking.floors(found, load), load)
    else:
        is_met = asking.point(found, chosen, load).state == "met"
        search = found.new_search(first if is_met else asking.floors(found, load), load)
        for question in found.equally_cheap():
            if (point := found.known(question, load)) is not None:
                search.learn(question, point.state, point.outcomes)
    asking.drive(found, search, load)
    return search
