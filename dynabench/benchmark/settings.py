"""Settings of `dynabench bench`: which loads are tried, how long each, and what is sent."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from dynabench.arm import ClientConfig
from foundation.settings import Count, NotNegative, Positive, Share, Whole, check_settings
from workloads.synthesize import Lengths, SynthConfig

MOST_STREAMS = 1024
"""The highest concurrency that is tried unless another is given."""
RANGE = re.compile(r"(.+?)\.\.(.+)")


class Loads(NamedTuple):
    """The loads to try."""

    axis: Literal["concurrency", "rate"]
    values: Sequence[float]
    """In their order; of a range, its two ends, and the second may be infinite."""
    is_range: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Which loads are tried, and how long each."""

    model: tuple[str, ...] = ()
    """Model to ask for; give it once per model to compare (default: the one that the server lists)."""

    concurrency: str = ""
    """Closed loop: numbers of streams, each with one request at a time: a list such as 1,4,16, or a range such as 1..256
    that is climbed until throughput stops growing and then searched around the knee (default: 1..1024)."""

    rate: str = ""
    """Open loop instead: requests per second (Poisson): a list such as 2,4,8, or a range such as 1..50."""

    find: Literal["concurrency", "rate"] | None = None
    """Climb this only as far as the limits (--slo) hold, and find the highest load that holds them."""

    duration_s: Positive = 4.0
    """Time of each load in which requests count (s). It is longer, up to eight times, where requests take so long that it
    would see too few of them."""

    within_s: Positive | None = None
    """Time for all loads (s): a load that would take longer than what is left of it is not tried, and one that does is cut short:
    it counts if it has enough answers (default: as long as it takes)."""

    precision: Share = 0.05
    """A load is done sooner, from 100 requests on, if the 95% intervals of its mean TTFT and E2E latency are within this share of
    the means (0: never)."""

    closeness: Annotated[float, Meta(gt=0, lt=1)] = 0.1
    """Relative distance between the highest load found within the limits and the lowest beyond them."""

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        check_settings(self)
        if self.concurrency and self.rate:
            raise ValueError(
                "concurrency and rate cannot be combined: the load is either streams or requests per second"
            )
        if self.find is not None and getattr(self, "rate" if self.find == "concurrency" else "concurrency"):
            raise ValueError(
                f"find is {self.find}, but the loads are given as another; expected --{self.find} LOW..HIGH"
            )
        if len(set(self.model)) < len(self.model):
            raise ValueError(f"model is given twice: {', '.join(self.model)}")
        loads = self.loads
        if self.find is not None and not loads.is_range:
            raise ValueError(f"{self.find} is a list; expected a range such as 1..64, in which find searches")

    @property
    def loads(self) -> Loads:
        """The loads to try.

        Raises:
            ValueError: they are not understood.
        """
        axis: Literal["concurrency", "rate"] = "rate" if self.rate or self.find == "rate" else "concurrency"
        text = getattr(self, axis)
        if not text:
            return Loads(axis, (1.0, MOST_STREAMS) if axis == "concurrency" else (0.0, float("inf")), is_range=True)
        match = RANGE.fullmatch(text.strip())
        values = [_load(axis, part) for part in (match.groups() if match else text.split(","))]
        if match and not values[0] < values[1]:
            raise ValueError(f"{axis} is {text!r}; expected the lower end first, such as 1..64")
        if len(set(values)) < len(values):
            raise ValueError(f"{axis} is {text!r}, which has a value twice")
        return Loads(axis, values, is_range=match is not None)

    @property
    def num_loads(self) -> int | None:
        """How many loads there are, None if what comes of them decides."""
        return None if self.loads.is_range else len(self.loads.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchClientConfig(ClientConfig):
    """How requests are sent to endpoints whose addresses are not known yet."""

    def __post_init__(self) -> None:
        """Refuse what no address could allow."""
        check_settings(self)

    def at(self, url: str) -> ClientConfig:
        """Return the same for an address.

        Raises:
            ValueError: the address is not understood, or a setting does not go with it.
        """
        return ClientConfig(**{field.name: getattr(self, field.name) for field in fields(self)} | {"url": url})


def _load(axis: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    is_valid = 0 < value < float("inf") and (axis == "rate" or value.is_integer())
    if not is_valid:
        kind = "whole numbers from 1 on" if axis == "concurrency" else "numbers greater than 0"
        raise ValueError(
            f"{axis} has {text.strip()!r}; expected {kind}: a list such as 1,4,16 or a range such as 1..64"
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SentConfig(SynthConfig):
    """What is sent if no workload is given: prompts of one length, which share nothing."""

    isl: Count = 512
    """Mean number of new prompt tokens per turn, without the shared prefix."""

    osl: Count = 128
    """Mean number of output tokens."""

    isl_distribution: Lengths = "constant"
    """Distribution of new prompt tokens."""

    osl_distribution: Lengths = "constant"
    """Distribution of output tokens."""

    prefix_groups: Count = 1
    """Number of shared prefixes (system prompts, documents); their popularity follows Zipf's law."""

    prefix_blocks: Whole = 0
    """Blocks of block_size tokens (by default 512) in each shared prefix, which comes on top of isl (0: sessions share nothing)."""

    think_time_s: NotNegative = 0.0
    """Mean time from the end of an answer to the next turn (s; exponential)."""

    wait_for_answers: bool = True
    """Let each turn wait for the answer to the one before it, as agents do."""

    block_size: Count = 16
    """Tokens per block, in which prefixes are counted."""

    def __post_init__(self) -> None:
        """Refuse prompts that would be cut."""
        SynthConfig.__post_init__(self)  # `super` is not for a class with slots
        if (longest := self.prefix_blocks * self.block_size + self.isl) > self.max_isl:
            raise ValueError(
                f"prompts have {longest} tokens, more than max_isl {self.max_isl}; give a larger --max-isl"
            )
