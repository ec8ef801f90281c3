"""The requests of one load: as many as it can need, generated or taken from a file."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from dynabench.bench.settings import SentConfig
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import source_of
from workloads import Workload
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig
from workloads.synthesize import SynthConfig, synthesize

MARGIN = 1.3
"""More requests than are expected, because an estimate is no bound."""
MOST = 500_000


class LoadRequests(NamedTuple):
    """What is sent at one load, and how it can be made again."""

    workload: Workload
    shape: ShapeConfig = ShapeConfig()
    """What was changed about the requests of a file."""
    synth: SynthConfig | None = None
    """What was generated."""

    def described(self, count: int) -> dict[str, Any]:
        """Return what a manifest says of the first requests, which were sent."""
        if self.synth is None:
            return {"requests": count}
        return {"requests": count, "file": "generated", "synth": asdict(replace(self.synth, requests=count))}


class Requests:
    """What is sent at every load."""

    def __init__(
        self, files: tuple[Path, ...], sent: SentConfig, experiment: ExperimentConfig, form: ShapeConfig
    ) -> None:
        """Read the workload, if there is one.

        Raises:
            WorkloadError: it cannot be used.
        """
        self._source = source_of(files, experiment) if files else None
        self._sent, self._form, self._seed = sent, form, experiment.seed
        self.name = self._source(form).name if self._source else _described(sent)

    def of(self, load: LoadConfig, rate: float | None, most_per_s: float) -> LoadRequests:
        """Return requests for a load.

        Args:
            load: how they are sent, with the time in which they count.
            rate: requests per second, None for a closed loop.
            most_per_s: the most requests per second that a closed loop may send.
        """
        span = load.warmup_s + (load.measure_s or 0.0)
        each = rate if rate is not None else most_per_s * MARGIN
        count = min(math.ceil(span * each) + (load.concurrency or 1), MOST)
        if self._source is not None:
            arrivals: dict[str, Any] = {} if rate is None else {"arrival": "poisson", "rate": rate}
            form = replace(self._form, max_requests=count, **arrivals)
            return LoadRequests(self._source(form), form)
        config = replace(self._sent, requests=count, seed=self._seed, rate=rate or self._sent.rate)
        return LoadRequests(Workload(self.name, config.block_size, synthesize(config)), synth=config)


def _described(sent: SentConfig) -> str:
    shared = f", {sent.prefix_blocks * sent.block_size} shared" * bool(sent.prefix_blocks)
    turns = f", up to {sent.turns} turns" * (sent.turns > 1)
    return f"{sent.isl} tokens in{shared}, {sent.osl} out{turns}"
