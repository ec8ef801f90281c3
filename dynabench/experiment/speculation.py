"""What a report says of speculative decoding: what drafts, how much of it is accepted, and where the times come from."""

from dynabench.deployment.description import Pool
from mocker import EngineConfig
from mocker.timing.choose import resolve


def speculation_of(pool: Pool) -> str | None:
    """Describe how a pool's simulated engines speculate; None if they do not."""
    engine = pool.engine_config
    rates = resolve(engine, pool.timing).acceptance
    if not rates or not isinstance(engine, EngineConfig):
        return None
    drafts = f"{len(rates)} drafts" if len(rates) > 1 else "1 draft"
    by_position = ", ".join([f"{rate:.0%}" for rate in rates])
    return (
        f"{drafts} a step by {engine.speculative_method}; accepted {by_position} of the time "
        f"({1 + sum(rates):.2f} tokens a step), from {_source(engine)}; {_drafting(engine)}"
    )


def _source(engine: EngineConfig) -> str:
    if engine.acceptance_length is not None:
        return f"acceptance_length {engine.acceptance_length:g} with {engine.acceptance_drafts} drafts, at one rate a draft"
    return "acceptance_rates" if engine.acceptance_rates is not None else f"{engine.acceptance_file}"


def _drafting(engine: EngineConfig) -> str:
    if engine.drafting_ms is not None:
        return f"drafting takes {engine.drafting_ms:g} ms a step"
    if engine.speculative_method == "ngram":
        return "drafting takes no time"
    what = engine.draft_model or "a layer like the model's last"
    return f"drafting takes as long as {what}, which was not measured"
