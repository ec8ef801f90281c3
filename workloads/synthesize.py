"""Generate a workload from a few settings; the same seed gives the same workload."""

import heapq
import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from foundation.settings import Count, NotNegative, Positive, Whole, check_settings
from workloads.arrivals import ARRIVALS
from workloads.request import Media, Request
from workloads.row import check_span

if TYPE_CHECKING:
    from workloads.columns import RequestColumns

Lengths = Literal["constant", "uniform", "lognormal"]
NEEDED = {"images": ("image_tokens", "image_pool"), "adapters": ("adapter_skew",)}
"""Settings that have no effect without another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthConfig:
    """Settings of a synthetic workload. Prompts are a group's shared prefix, then the session's history, then new text."""

    requests: Count = 1000
    """Number of requests, including the turns of sessions."""

    seed: int = 0
    """Seed of every random choice."""

    rate: Positive = 4.0
    """Mean arrivals of sessions per second (of requests, if sessions have one turn)."""

    arrival: Literal["constant", "poisson", "gamma"] = "poisson"
    """Arrival process of sessions."""

    burstiness: Positive = 1.0
    """Shape of gamma arrivals: 1 is Poisson, less is burstier."""

    isl: Count = 2048
    """Mean number of new prompt tokens per turn. The shared prefix comes on top (2,048 tokens by default; none with
    --prefix-blocks 0)."""

    osl: Count = 128
    """Mean number of output tokens."""

    isl_distribution: Lengths = "lognormal"
    """Distribution of new prompt tokens."""

    osl_distribution: Lengths = "lognormal"
    """Distribution of output tokens."""

    spread: NotNegative = 0.5
    """Spread of lengths around their mean: sigma of the log-normal, half-width (as a share) of the uniform."""

    max_isl: Count = 131072
    """Longest prompt (tokens); a session ends before it grows longer."""

    prefix_groups: Count = 8
    """Number of shared prefixes (system prompts, documents); their popularity follows Zipf's law."""

    prefix_blocks: Whole = 4
    """Blocks of block_size tokens (by default 4 of 512) in each shared prefix, which comes on top of isl (0: sessions share
    nothing)."""

    prefix_depth: Count = 1
    """Levels of sharing: all groups share the first level, and their prefixes diverge further at each level."""

    turns: Count = 1
    """Most turns of a session (uniform from 1); each turn's prompt includes the earlier turns and their answers."""

    think_time_s: NotNegative = 10.0
    """Mean time between two arrivals of a session (s; exponential); with --wait-for-answers, from the end of an answer to the
    next turn."""

    wait_for_answers: bool = False
    """Let each turn wait for the answer to the one before it, as agents do. Otherwise turns arrive at fixed times, even while
    that answer is in progress."""

    priority_levels: Count = 1
    """Number of priorities; the requests of a session have the same one, drawn evenly (0 goes first, as in vLLM)."""

    adapters: Whole = 0
    """Number of LoRA adapters; the requests of a session ask for the same one (0: for none)."""

    adapter_skew: NotNegative = 1.0
    """How unequally popular adapters are: the n-th is asked for in proportion to 1/n^skew (0: all alike; 1: Zipf's law)."""

    images: Whole = 0
    """Images in each turn's new part of the prompt, before its text (0: none)."""

    image_tokens: Count = 576
    """Tokens of each image, in addition to isl."""

    image_pool: Count = 1000
    """Number of different images, drawn evenly."""

    block_size: Count = 512
    """Tokens per hash id, and per block of a shared prefix."""

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        check_settings(self)
        if self.prefix_blocks * self.block_size >= self.max_isl:
            raise ValueError(
                f"a prefix of {self.prefix_blocks} blocks of {self.block_size} tokens leaves no room below max_isl {self.max_isl}"
            )
        for off, names in NEEDED.items():
            for name in names:
                if not getattr(self, off) and getattr(self, name) != SynthConfig.__dataclass_fields__[name].default:
                    raise ValueError(f"{name} is {getattr(self, name):g}, but {off} is 0; expected both or neither")


def synthesize(config: SynthConfig) -> "RequestColumns":
    """Generate the requests of a workload, in order of arrival."""
    from workloads.columns import RequestColumns

    made = itertools.islice(_requests(config), config.requests)
    waits = config.wait_for_answers and config.turns > 1
    return RequestColumns.of(_waiting(made) if waits else (request for _, request in made))


def _waiting(made: Iterable[tuple[int, Request]]) -> Iterator[Request]:
    """Let each turn wait for the one before it in its session, and then for the time between their arrivals."""
    last: dict[int, tuple[int, float]] = {}  # session -> number and arrival of its last turn so far
    for number, (session, request) in enumerate(made):
        waits: dict[str, Any] = {}
        if session in last:
            before, arrival_s = last[session]
            waits = {"after": (before,), "delay_s": round(request.arrival_s - arrival_s, 6)}
        last[session] = number, request.arrival_s
        yield msgspec.structs.replace(request, session=f"session-{session}", **waits)


def _requests(config: SynthConfig) -> Iterator[tuple[int, Request]]:
    """Generate requests forever, each with the number of its session."""
    ids = itertools.count()
    prefixes = _prefixes(config, ids)
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(len(prefixes))))
    arrivals, lengths = random.Random(f"arrivals {config.seed}"), random.Random(f"lengths {config.seed}")
    choice, levels = random.Random(f"prefixes {config.seed}"), random.Random(f"priorities {config.seed}")
    names, shares = _adapters(config)
    asked, shown = random.Random(f"adapters {config.seed}"), random.Random(f"images {config.seed}")
    coming: list[tuple[float, int, tuple[int, Request]]] = []  # turns of sessions that have started
    turn, now = itertools.count(), 0.0
    for session, gap in enumerate(ARRIVALS[config.arrival](arrivals, config.burstiness)):
        prefix = choice.choices(prefixes, cum_weights=weights)[0]
        priority = levels.randrange(config.priority_levels)
        adapter = asked.choices(names, cum_weights=shares)[0] if names else ""
        for request in _session(config, now, prefix, priority, adapter, (lengths, shown), ids):
            heapq.heappush(coming, (request.arrival_s, next(turn), (session, request)))
        now += gap / config.rate
        check_span("synth", now)
        while coming and coming[0][0] < now:
            yield heapq.heappop(coming)[2]


def _adapters(config: SynthConfig) -> tuple[list[str], list[float]]:
    """Return the names of adapters, and the sums of their popularity and that of those before them."""
    places = range(config.adapters)
    shares = itertools.accumulate((place + 1) ** -config.adapter_skew for place in places)
    return [f"adapter-{place}" for place in places], list(shares)


def _prefixes(config: SynthConfig, ids: Iterator[int]) -> list[tuple[int, ...]]:
    """Return each group's prefix: groups share level k if their numbers are equal modulo 2**k."""
    levels: dict[tuple[int, int, int], int] = {}
    prefixes = []
    for group in range(config.prefix_groups):
        prefix = []
        for place in range(config.prefix_blocks):
            level = place * config.prefix_depth // config.prefix_blocks
            is_last = level == config.prefix_depth - 1
            branch = group if is_last else group % (2**level)
            key = (level, branch, place)
            if key not in levels:
                levels[key] = next(ids)
            prefix.append(levels[key])
        prefixes.append(tuple(prefix))
    return prefixes


def _session(
    config: SynthConfig,
    start_s: float,
    prefix: tuple[int, ...],
    priority: int,
    adapter: str,
    rngs: tuple[random.Random, random.Random],
    ids: Iterator[int],
) -> Iterator[Request]:
    size, now, (rng, shown) = config.block_size, start_s, rngs
    length, history, media = len(prefix) * size, list(prefix), list[Media]()
    for _ in range(rng.randint(1, config.turns)):
        for _ in range(config.images):
            media.append(Media(length, config.image_tokens, f"image-{shown.randrange(config.image_pool)}"))
            length += config.image_tokens
        length += _draw(rng, config.isl, config.isl_distribution, config.spread)
        if length > config.max_isl:
            if now > start_s:
                return
            length = config.max_isl
            media = [item for item in media if item.offset + item.tokens <= length]
        output = _draw(rng, config.osl, config.osl_distribution, config.spread)
        full = length // size
        history += [next(ids) for _ in range(full - len(history))]
        # A partial last block gets its own id, because the next turn fills it with other content.
        tail = (next(ids),) if length % size else ()
        yield Request(
            round(now, 6), length, output, (*history, *tail), priority=priority, adapter=adapter, media=tuple(media)
        )
        length += output
        now += rng.expovariate(1 / config.think_time_s) if config.think_time_s else 0.0


def _draw(rng: random.Random, mean: int, distribution: Lengths, spread: float) -> int:
    match distribution:
        case "constant":
            value = float(mean)
        case "uniform":
            value = rng.uniform(mean * (1 - min(spread, 1)), mean * (1 + min(spread, 1)))
        case "lognormal":
            value = rng.lognormvariate(math.log(mean) - spread * spread / 2, spread)
    return max(1, round(value))
