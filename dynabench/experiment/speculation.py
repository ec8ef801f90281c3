"""What a report says of speculative decoding: what drafts, how much of it is accepted, and where the times come from."""

from collections.abc import Iterable

from dynabench.deployment.description import Pool
from foundation.text import listed
from mocker import EngineConfig
from mocker.speculation.rates import rates_of


def speculation_of(pools: Iterable[Pool]) -> str:
    """Describe how simulated engines speculate; those that differ only in how many drafts they verify together."""
    longest: dict[tuple[str, str], tuple[float, ...]] = {}
    counts: dict[tuple[str, str], dict[int, None]] = {}
    for pool in pools:
        engine = pool.engine_config
        if pool.engine != "mocker" or not isinstance(engine, EngineConfig) or not engine.num_speculative_tokens:
            continue
        rates = rates_of(engine)
        key = f"a step by {engine.speculative_method}", f"from {_source(engine)}; {_drafting(engine)}"
        longest[key] = max(longest.get(key, ()), rates, key=len)
        counts.setdefault(key, {})[len(rates)] = None
    return " or ".join([_described(list(counts[key]), key, rates) for key, rates in longest.items()])


def _described(counts: list[int], key: tuple[str, str], rates: tuple[float, ...]) -> str:
    drafts = f"{listed([str(count) for count in sorted(counts)], 'or')} draft{'s' * (counts != [1])}"
    by_position = ", ".join([f"{rate:.0%}" for rate in rates])
    lengths = listed([f"{1 + sum(rates[:count]):.2f}" for count in sorted(counts)], "or")
    return f"{drafts} {key[0]}; accepted {by_position} of the time ({lengths} tokens a step), {key[1]}"


def _source(engine: EngineConfig) -> str:
    if engine.acceptance_length is not None:
        return f"acceptance_length {engine.acceptance_length:g} with {engine.acceptance_drafts} drafts, at one rate a draft"
    return "acceptance_rates" if engine.acceptance_rates is not None else f"{engine.acceptance_file}"


def _drafting(engine: EngineConfig) -> str:
    if engine.drafting_ms is not None:
        return f"drafting takes {engine.drafting_ms:g} ms a step"
    if not engine.has_drafter:
        return "drafting takes no time"
    what = engine.draft_model or "a layer like the model's last"
    return f"drafting takes as long as {what}, which was not measured"
