"""The rates at which an engine's drafts are accepted, from its settings."""

from mocker.speculation.acceptance import check_rates, rates_of_length
from mocker.speculation.files import read_rates
from mocker.vllm.config import EngineConfig


def rates_of(engine: EngineConfig) -> tuple[float, ...]:
    """Return them by position, for each draft of a step; nothing if it does not speculate.

    Raises:
        ValueError: they are not known, are given twice, or cannot be.
    """
    num_drafts = engine.num_speculative_tokens
    if not num_drafts:
        return ()
    given = [
        name
        for name in ("acceptance_length", "acceptance_rates", "acceptance_file")
        if getattr(engine, name) is not None
    ]
    if len(given) != 1:
        raise ValueError(
            f"num_speculative_tokens is {num_drafts}, with {' and '.join(given) or 'nothing about acceptance'}; expected one of "
            "acceptance_length, acceptance_rates and acceptance_file: how many drafts are accepted has to be measured"
        )
    if engine.acceptance_drafts is not None and engine.acceptance_length is None:
        raise ValueError(
            f"acceptance_drafts is {engine.acceptance_drafts}, with {given[0]}; expected it with acceptance_length only"
        )
    if engine.acceptance_mode != "thinking_on" and not (engine.acceptance_file or "").endswith((".yaml", ".yml")):
        raise ValueError(
            f"acceptance_mode is {engine.acceptance_mode}; expected an acceptance_file in YAML with it, which has several curves"
        )
    if engine.acceptance_length is not None:
        return rates_of_length(engine.acceptance_length, engine.acceptance_drafts or num_drafts, num_drafts)
    if engine.acceptance_file is not None:
        return read_rates(engine.acceptance_file, num_drafts, engine.acceptance_mode)
    assert engine.acceptance_rates is not None
    return _listed(engine.acceptance_rates, num_drafts)


def _listed(text: str, num_drafts: int) -> tuple[float, ...]:
    try:
        rates = tuple([float(part) for part in text.split(",")])
    except ValueError:
        raise ValueError(
            f"acceptance_rates is {text!r}; expected numbers with commas, such as 0.8,0.5,0.3 (to vary them: [0.8,0.5,0.3],[0.9,0.7,0.5])"
        ) from None
    try:
        check_rates(rates)
    except ValueError as error:
        raise ValueError(f"acceptance_rates is {text!r}: {error}") from None
    if len(rates) < num_drafts:
        raise ValueError(f"acceptance_rates has {len(rates)} rates; expected one for each of {num_drafts} drafts")
    return rates[:num_drafts]
