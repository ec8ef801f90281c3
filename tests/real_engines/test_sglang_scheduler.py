"""SGLang's own scheduler and ours in random scenarios: whatever the one does in a step, the other does."""

import json
import os
import random
import traceback
from collections import Counter

import pytest

from dynabench.fidelity import families
from dynabench.fidelity.sglang import real
from dynabench.fidelity.sglang.record import recorded
from tests.real_engines.sglang_scenarios import hicache_scenario_of, scenario_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]  # SGLang's imports warn
NUM_SCENARIOS = int(os.environ.get("DYNABENCH_SGLANG_SCENARIOS", "80"))
RARE = {"mixed", "requeued", "aborted", "stop", "length", "abort", "removed"}
"""What has to happen in some scenario."""
OF_HICACHE = {"stored CPU_PINNED", "removed CPU_PINNED"}
OUT_OF_MEMORY = "RuntimeError: Out of memory"
"""SGLang's end when a chunk that has to go on finds no room. Nothing is left to compare."""
MOST_SKIPPED = 0.05
"""Share of scenarios that may end so."""


def record(scenario, path):
    """Record a scenario in a fork: a process has one scheduler of SGLang's in its life. Return whether SGLang got to its end."""
    child = os.fork()
    if child == 0:
        try:
            head, rows = recorded(scenario)
            path.write_text("".join(json.dumps(row) + "\n" for row in (head, *rows)))
        except BaseException:  # nothing of it may go on
            path.with_suffix(".error").write_text(traceback.format_exc())
        os._exit(0)
    os.waitpid(child, 0)
    error = path.with_suffix(".error")
    why = error.read_text() if error.exists() else ""
    assert not why or OUT_OF_MEMORY in why, why
    return not why


def what_happened(path):
    """Count kinds of steps, ends and events of a recording."""
    happened = Counter()
    for line in path.read_text().splitlines()[1:]:
        row = json.loads(line)
        happened[row["kind"]] += 1
        happened += Counter({what: len(row.get(what, ())) for what in ("requeued", "aborted")})
        happened += Counter(end for _, end in row.get("finished", ()))
        happened += Counter(f"{event['t']} {event.get('medium', '')}".strip() for event in row.get("events", ()))
    return happened


@pytest.mark.parametrize(("scenario_for", "rare"), [(scenario_of, RARE), (hicache_scenario_of, RARE | OF_HICACHE)])
def test_both_schedulers_do_the_same(tmp_path, scenario_for, rare):
    real.prepare_to_fork()
    happened = Counter()
    for seed in range(NUM_SCENARIOS):
        path = tmp_path / f"{seed}.jsonl"
        scenario = scenario_for(random.Random(seed), seed)
        if not record(scenario, path):
            happened[OUT_OF_MEMORY] += 1
            continue
        verdict = families.verify(path)
        assert verdict.difference is None, f"scenario {seed}: {verdict.difference} with {scenario['config']}"
        happened += what_happened(path)
    assert set(happened) >= rare, happened
    assert happened[OUT_OF_MEMORY] <= MOST_SKIPPED * NUM_SCENARIOS, happened
