"""The requests of one load: as many as it can need, generated or taken from a file."""

import math
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from dynabench.benchmark.settings import SentConfig
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import Given, source_of
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


class Talks(NamedTuple):
    """The conversations of a workload, whose turns wait for answers; a single request is one of a single turn."""

    turns: float = 1
    """Turns of a conversation."""
    think_s: float = 0.0
    """Time from an answer to the next turn (s)."""

    @classmethod
    def of(cls, workload: Workload) -> "Talks":
        """Return what a workload's sessions have on average."""
        columns = workload.columns
        sessions, waits = columns.more.get("session"), columns.values("after")
        turns = [number for number, after in enumerate(waits) if after and sessions and sessions[number]]
        if not turns:
            return cls()
        delays_s = columns.values("delay_s")
        return cls(len(waits) / (len(waits) - len(turns)), sum(delays_s[number] for number in turns) / len(turns))

    def lasts_s(self, e2e_s: float) -> float:
        """Return how long one lasts whose turns take this long each (s)."""
        return self.turns * e2e_s + (self.turns - 1) * self.think_s

    def load(self, streams: int | None, **window: Any) -> LoadConfig:
        """Return a load of this many streams (None: an open loop); each plays one conversation after another."""
        if self.turns > 1:
            return LoadConfig(session_concurrency=streams, **window)
        return LoadConfig(concurrency=streams, **window)


class Requests:
    """What is sent at every load."""

    def __init__(self, given: Given, sent: SentConfig, experiment: ExperimentConfig, form: ShapeConfig) -> None:
        """Read the workload, if there is one.

        Raises:
            WorkloadError: it cannot be used.
        """
        self._source = source_of(given, experiment) if given else None
        self._sent, self._form, self._seed = sent, form, experiment.seed
        self.given = self._source(form) if self._source else None
        """The workload of a file, before a load takes its part."""
        self.name = self.given.name if self.given else _described(sent)
        self.talks = Talks.of(self.given) if self.given else Talks(sent.turns, sent.think_time_s)

    def of(self, load: LoadConfig, rate: float | None, most_per_s: float) -> LoadRequests:
        """Return requests for a load.

        Args:
            load: how they are sent, with the time in which they count.
            rate: conversations per second, or requests that are none; None for a closed loop.
            most_per_s: the most requests per second that a closed loop may send.
        """
        span = load.warmup_s + (load.measure_s or 0.0)
        each = rate * self.talks.turns if rate is not None else most_per_s * MARGIN
        streams = load.concurrency or load.session_concurrency or 1
        count = min(math.ceil(span * each + streams * self.talks.turns), MOST)
        if self._source is not None:
            arrivals: dict[str, Any] = {} if rate is None else {"arrival": "poisson", "rate": rate}
            form = replace(self._form, max_requests=count, **arrivals)
            return LoadRequests(self._source(form), form)
        config = replace(self._sent, requests=count, seed=self._seed, rate=rate or self._sent.rate)
        return LoadRequests(Workload(self.name, config.block_size, synthesize(config)), synth=config)


def _described(sent: SentConfig) -> str:
    shared = f", {sent.prefix_blocks * sent.block_size} shared" * bool(sent.prefix_blocks)
    thinking = f" with {sent.think_time_s:g} s between them" * bool(sent.think_time_s)
    turns = f", up to {sent.turns} turns{thinking}" * (sent.turns > 1)
    return f"{sent.isl} tokens in{shared}, {sent.osl} out{turns}"
