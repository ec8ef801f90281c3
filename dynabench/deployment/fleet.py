"""The life of workers: how long they take to start, how they leave, and scheduled events."""

import math
import random
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from dynabench.deployment.fleet_events import FleetEvent, parse_fleet_events
from foundation.settings import NotNegative, Positive, check_settings
from mocker.timing.config import TimingConfig
from mocker.timing.memory import size_of_weights

DrainPolicy = Literal["wait", "bounded", "hand-over"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """How workers come and go while requests are served."""

    events: str = ""
    """What happens to workers at given times: 'at 60s: +2 decode; at 300s: kill worker 3; at 5m: slow worker 0 x2 for 60s'
    (+N, -N and =N change the size of a pool; kill, lose, drain and slow apply to one worker)."""

    startup_s: NotNegative | None = None
    """Mean time from the start of a worker until it takes requests (s; default: startup_fixed_s and the time to read the weights)."""

    startup_fixed_s: NotNegative = 45.0
    """The part of the start-up time that does not depend on the weights: container, runtime, compilation, CUDA graphs (s)."""

    weights_gb_s: Positive = 3.0
    """Bandwidth at which each GPU's weights are read (GB/s): 1 from a network disk, 3 to 7 from NVMe, 25 and more from host memory."""

    startup_spread: Annotated[float, Meta(ge=0, le=10)] = 0.0
    """Spread of start-up times: standard deviation / mean of a log-normal distribution."""

    start_failure_rate: Annotated[float, Meta(ge=0, le=0.95)] = 0.0
    """Share of the starts that fail at the moment when the worker should be ready; each is tried again."""

    drain_policy: DrainPolicy = "wait"
    """How a worker stops: it finishes its requests first (wait); it has drain_limit_s to finish them, and other workers
    compute the rest again (bounded); or other workers read the KV of its decoding requests and continue them
    (hand-over)."""

    drain_limit_s: NotNegative = 30.0
    """How long a stopping worker has to finish its requests, with drain_policy bounded (s)."""

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        check_settings(self)
        parse_fleet_events(self.events)

    @property
    def timeline(self) -> tuple[FleetEvent, ...]:
        """The events, in order of time."""
        return parse_fleet_events(self.events)

    def mean_startup_s(self, timing: TimingConfig) -> float:
        """Return the mean start-up time of a worker with these step times (s).

        The GPUs of a worker read their weights at the same time. Without a named model, reading them takes no time.
        """
        if self.startup_s is not None:
            return self.startup_s
        if timing.model is None:
            return self.startup_fixed_s
        weights = size_of_weights(timing.shape, timing.tensor_parallel_size)
        return self.startup_fixed_s + weights / (self.weights_gb_s * 1e9)

    def draw_startup_s(self, mean_s: float, rng: random.Random) -> float:
        """Draw a start-up time (s) from a log-normal distribution with this mean."""
        if not (self.startup_spread and mean_s):
            return mean_s
        variance = math.log1p(self.startup_spread**2)
        return rng.lognormvariate(math.log(mean_s) - variance / 2, math.sqrt(variance))
