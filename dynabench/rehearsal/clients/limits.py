"""The longest requests that a deployment answers."""

from collections.abc import Sequence
from typing import NamedTuple

from dynabench.deployment.engines import ANY_LENGTH, Longest, longest_of
from mocker import SglangConfig
from mocker.timing.choose import SimulatedEngine


class Limits(NamedTuple):
    """The longest requests that all workers of a deployment answer, in tokens."""

    longest: Longest = ANY_LENGTH
    """Longer ones are refused."""
    room: int | None = None
    """Prompt and answer together: a longer answer is cut. None: any number."""

    @property
    def most(self) -> int | None:
        """The most tokens of a prompt; None: any number."""
        limits = [self.longest.prompt, None if self.room is None else self.room - 1]
        return min((limit for limit in limits if limit is not None), default=None)


NO_LIMITS = Limits()


def limits_with(context: int, engines: Sequence[SimulatedEngine]) -> Limits:
    """Return the limits of workers with these engines, behind frontends that know this context (tokens)."""
    longest, room = longest_of(engines), min((engine.longest_sequence for engine in engines), default=context)
    room = min(room, context)
    prompt = longest.prompt
    for engine in engines:
        if isinstance(settings := engine.settings, SglangConfig):  # it keeps some tokens of each request to itself
            most = settings.max_request_tokens(engine.num_usable_tokens)
            prompt = min(prompt or most, settings.max_input_tokens(engine.num_usable_tokens) - 1)
            room = min(room, most - 1, engine.num_usable_tokens - 2 * settings.page_size - 1)
    return Limits(Longest(context, prompt), room)
