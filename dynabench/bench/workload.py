"""The requests of one load: as many as it can need, generated or taken from a file."""

import math
from dataclasses import replace
from pathlib import Path

from dynabench.bench.settings import SentConfig
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import source_of
from workloads import Workload
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig, shape
from workloads.synthesize import synthesize

MARGIN = 1.3
"""More requests than are expected, because at a higher load each may take less time, too."""
MOST = 500_000


class Requests:
    """What is sent at every load."""

    def __init__(
        self, files: tuple[Path, ...], sent: SentConfig, experiment: ExperimentConfig, form: ShapeConfig
    ) -> None:
        """Read the workload, if there is one.

        Raises:
            WorkloadError: it cannot be used.
        """
        self._sent, self._seed = sent, experiment.seed
        self._whole = source_of(files, experiment)(form) if files else None
        self.name = self._whole.name if self._whole else _described(sent)

    def of(self, load: LoadConfig, rate: float | None, e2e_s: float) -> Workload:
        """Return requests for a load.

        Args:
            load: how they are sent, with the time in which they count.
            rate: requests per second, None for a closed loop.
            e2e_s: how long one takes alone (s).
        """
        span = load.warmup_s + (load.measure_s or 0.0)
        each = rate if rate is not None else (load.concurrency or 1) / max(e2e_s, 1e-4) * MARGIN
        count = min(math.ceil(span * each) + (load.concurrency or 1), MOST)
        if self._whole is not None:
            form = (
                ShapeConfig(max_requests=count)
                if rate is None
                else ShapeConfig(max_requests=count, arrival="poisson", rate=rate)
            )
            return shape(self._whole, form, seed=self._seed)
        config = replace(self._sent, requests=count, seed=self._seed, rate=rate or self._sent.rate)
        return Workload(self.name, config.block_size, synthesize(config))


def _described(sent: SentConfig) -> str:
    shared = f", {sent.prefix_blocks * sent.block_size} shared" * bool(sent.prefix_blocks)
    turns = f", up to {sent.turns} turns" * (sent.turns > 1)
    return f"{sent.isl} tokens in{shared}, {sent.osl} out{turns}"
