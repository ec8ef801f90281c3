"""Check the intervals: A/A pairs without a difference, many equal arms, and a planted difference that must be found.

    python benchmarks/noise.py [--pairs 100] [--sets 100] [--difference 0.03]

A/A: each seed's workload is simulated twice with different seeds of the router. The 95% intervals of the paired
difference should exclude zero in about 5 of 100. Many: eight such runs are ranked; all should tie in about 95 of 100,
where comparing each with the best, one by one, would leave some out in about half. Planted: the engines are 3% faster. A pilot A/A pair determines how
many requests find 3% with a probability of 80%; experiments of that size follow.
"""

import argparse
import math
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import numpy as np

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from reports.figures import metrics
from reports.figures.statistics import PairedDifference, blocks_of, paired_difference
from reports.verdicts.differences import judged
from reports.verdicts.simultaneous import lowest, parts_of
from workloads import Workload
from workloads.synthesize import SynthConfig, synthesize

NAMES = ("ttft_sched", "tpot", "e2e_sched")
WORKERS = 4
ARMS = 8


class Case(NamedTuple):
    """A kind of experiment."""

    mode: str
    rate: float
    requests: int


class Side(NamedTuple):
    """One run: the case, the workload's seed, the router's seed."""

    case: Case
    workload_seed: int
    seed: int


def run(side: Side) -> dict[str, np.ndarray]:
    """Simulate a run; return the required values per request."""
    case = side.case
    config = SynthConfig(
        requests=case.requests,
        rate=case.rate,
        turns=3,
        isl=900,
        osl=100,
        prefix_groups=8,
        max_isl=16384,
        seed=side.workload_seed,
    )
    pool = Pool(replicas=WORKERS, mocker=EngineConfig(num_gpu_blocks=2000))
    run = Run.alone(Settings(Deployment(pools=(pool,), router_mode=case.mode)), seed=side.seed)
    result = simulate(run, Workload("noise", 512, synthesize(config)))
    return metrics.per_request(result.requests) | {"intended_s": result.requests.intended_s}


def compare(one: dict[str, np.ndarray], two: dict[str, np.ndarray], name: str, share: float | None) -> PairedDifference:
    """Compare two runs as an experiment does."""
    blocks = blocks_of(one["intended_s"], one["e2e_sched"])
    difference = paired_difference(one[name], two[name], blocks, share=share)
    assert difference is not None
    return difference


def false_alarms(pool: ProcessPoolExecutor, case: Case, pairs: int) -> None:
    """Count A/A pairs whose interval excludes zero."""
    sides = [Side(case, pair, 1000 * pair + number) for pair in range(pairs) for number in (1, 2)]
    runs = list(pool.map(run, sides, chunksize=10))
    cells = []
    for name in NAMES:
        for label, share in (("mean", None), ("p90", 0.9)):
            wrong = sum(not compare(runs[2 * pair], runs[2 * pair + 1], name, share).is_noise for pair in range(pairs))
            cells.append(f"{name} {label} {wrong:3}")
    print(f"  {case.mode:14} {case.rate:4g}/s {case.requests:5} requests: " + "   ".join(cells), flush=True)


def many(pool: ProcessPoolExecutor, case: Case, sets: int) -> None:
    """Count sets of equal arms in which some do not tie with the lowest, together and one by one."""
    sides = [Side(case, number, 1000 * number + arm) for number in range(sets) for arm in range(ARMS)]
    runs = list(pool.map(run, sides, chunksize=ARMS))
    cells = []
    for name in NAMES:
        together = alone = 0
        for first in range(0, len(runs), ARMS):
            arms = {str(place): one for place, one in enumerate(runs[first : first + ARMS])}
            blocks = blocks_of(arms["0"]["intended_s"], arms["0"]["e2e_sched"])
            parts = parts_of({arm: one[name] for arm, one in arms.items()}, blocks)
            ties, _ = lowest(parts, lambda pair: judged(pair, None, smallest=0.0))
            best = arms[ties[0]][name]
            pairs = [paired_difference(best, one[name], blocks) for one in arms.values()]
            together += len(ties) < ARMS
            alone += any(pair is not None and pair.low > 0 for pair in pairs)
        cells.append(f"{name} {together:3} (one by one {alone:3})")
    print(f"  {case.mode:14} {case.rate:4g}/s {case.requests:5} requests: " + "   ".join(cells), flush=True)


def planted(pool: ProcessPoolExecutor, case: Case, difference: float, tries: int) -> None:
    """Determine a sample size with a pilot, then count how often a planted difference is found with it."""
    pilot = list(pool.map(run, [Side(case, 10_000, 1), Side(case, 10_000, 2)]))
    for name in NAMES:
        needed = compare(*pilot, name, None).count_to_find(difference)
        size = max(math.ceil(needed / 100) * 100, 300)
        grown = case._replace(requests=size)
        sides = [Side(grown, 20_000 + number, 3 * number + side) for number in range(tries) for side in (0, 1)]
        runs = list(pool.map(run, sides, chunksize=2))
        pairs = []
        for number in range(tries):
            one, two = runs[2 * number], runs[2 * number + 1]
            pairs.append(compare(one, two | {name: two[name] * (1 - difference)}, name, None))
        found = sum(pair.high < 0 for pair in pairs)
        mean = float(np.mean([pair.relative for pair in pairs]))
        print(
            f"  {case.mode:14} {name:10} recommended {needed:6,}, used {size:6,}: found {found} of {tries}, mean difference {mean:+.1%}",
            flush=True,
        )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--sets", type=int, default=100)
    parser.add_argument("--difference", type=float, default=0.03)
    parser.add_argument("--tries", type=int, default=40)
    options = parser.parse_args()
    cases = [
        Case("random", 8, 1500),
        Case("random", 14, 1500),
        Case("kv+temp(0.3)", 12, 1500),
        Case("least-loaded", 12, 1500),
    ]
    with ProcessPoolExecutor() as pool:
        print(f"A/A: 95% intervals that exclude zero, of {options.pairs} (2 to 8 of 100 are as they should be)")
        for case in cases if options.pairs else []:
            false_alarms(pool, case, options.pairs)
        print(f"Equal arms: sets of {ARMS} in which some do not tie, of {options.sets} (about 5 of 100 should be)")
        for case in cases if options.sets else []:
            many(pool, case, options.sets)
        print(f"Planted: {options.difference:.0%} shorter (about 90% of the tries should find it)")
        for case in cases[1:3]:
            planted(pool, case, options.difference, options.tries)


if __name__ == "__main__":
    main()
