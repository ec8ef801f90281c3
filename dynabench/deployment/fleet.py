"""How workers come and go: what starting one takes, how one leaves, and what happens to them at given times."""

import math
import random
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from dynabench.deployment.fleet_events import FleetEvent, parse
from foundation.settings import NotNegative, Positive, check
from mocker.timing.catalog import find_model
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
    """Mean time from the start of a worker until it takes requests (s; default: its fixed part, and the time to read the weights)."""

    startup_fixed_s: NotNegative = 45.0
    """The part of it that does not depend on the weights: the container, the runtime, compilation, CUDA graphs (s)."""

    weights_gb_s: Positive = 3.0
    """Bandwidth at which each GPU's weights are read (GB/s): 1 from a network disk, 3 to 7 from NVMe, 25 and more from host memory."""

    startup_spread: NotNegative = 0.0
    """How much times of starts differ: the standard deviation over the mean of a log-normal distribution."""

    start_failure_rate: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of the starts that fail when they should be ready; each is tried again."""

    drain_policy: DrainPolicy = "wait"
    """How a worker leaves: once it has finished its requests (wait); after drain_limit_s at the latest, when what is left of them
    is computed again at other workers (bounded); or as soon as other workers have read the KV of those that are decoding, and go
    on with them (hand-over)."""

    drain_limit_s: NotNegative = 30.0
    """Longest time that a worker which leaves may take to finish its requests, with drain_policy bounded (s)."""

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        check(self)
        parse(self.events)

    @property
    def timeline(self) -> tuple[FleetEvent, ...]:
        """What happens, in order."""
        return parse(self.events)

    def mean_startup_s(self, timing: TimingConfig) -> float:
        """Return how long a worker with these step times takes on average until it is ready (s).

        The GPUs of a worker read their weights at the same time. Those of a model that is not named count nothing.
        """
        if self.startup_s is not None:
            return self.startup_s
        if timing.model is None:
            return self.startup_fixed_s
        weights = size_of_weights(find_model(timing.model), timing.tensor_parallel_size, 1, timing.quantization or "")
        return self.startup_fixed_s + weights / (self.weights_gb_s * 1e9)

    def draw_startup_s(self, mean_s: float, rng: random.Random) -> float:
        """Draw how long a start takes (s), of a log-normal distribution with this mean."""
        if not (self.startup_spread and mean_s):
            return mean_s
        variance = math.log1p(self.startup_spread**2)
        return rng.lognormvariate(math.log(mean_s) - variance / 2, math.sqrt(variance))
