"""How prefill and decode workers share a request by default, engine by engine, and what an engine cannot do.

Sources: vLLM 0.33's NIXL connector; SGLang 0.5.23's `srt/disaggregation`; TensorRT-LLM's `py_executor.py` and disaggregated
server of 2026.
"""

from dataclasses import dataclass, replace
from typing import Literal

from mocker.config import EngineType
from mocker.network.config import TransferConfig
from serving.life import DisaggregationConfig


@dataclass(frozen=True, slots=True)
class OwnFlow:
    """What an engine's own disaggregation does."""

    flow: Literal["source-first", "destination-first"]
    overlap: Literal["none", "chunk"]
    computes_prompts: bool = True
    """Whether its decode workers can compute a prompt."""
    may_choose: bool = False
    """Whether another flow can be simulated with its scheduler."""


OWN_FLOWS: dict[EngineType, OwnFlow] = {
    "vllm": OwnFlow("source-first", "none", may_choose=True),
    "sglang": OwnFlow("destination-first", "chunk", computes_prompts=False),
    "trtllm": OwnFlow("source-first", "none"),
}


def shared_as(config: DisaggregationConfig, kind: EngineType) -> DisaggregationConfig:
    """Return the settings with what engines of a type determine, if nothing else is set.

    Raises:
        ValueError: the engines cannot do what is set; the message begins with the setting's path.
    """
    own = OWN_FLOWS[kind]
    if config.flow is not None and config.flow != own.flow and not own.may_choose:
        raise ValueError(
            f"disaggregation.flow is {config.flow!r}; expected {own.flow!r}, or none, with engine_type {kind}: that is the "
            "order in which its workers share a request"
        )
    config = replace(config, flow=config.flow or own.flow)
    if own.computes_prompts:
        return config
    for name, value, expected in (
        ("conditional_disagg", config.conditional_disagg, "never"),
        ("prefill_fallback", config.prefill_fallback, False),
    ):
        if value != expected:
            raise ValueError(
                f"disaggregation.{name} is {value!r}; expected {expected!r} with engine_type {kind}: its decode workers "
                "cannot compute prompts"
            )
    return replace(config, enforce_disagg=True)


def linked_as(links: TransferConfig, flow: str | None, kind: EngineType) -> TransferConfig:
    """Return links with what engines of a type send while a prompt is computed, if nothing else is set.

    Raises:
        ValueError: nothing can be sent so early.
    """
    if flow == "source-first":
        if links.overlap not in (None, "none"):
            raise ValueError(
                f"transfer.overlap is {links.overlap!r}; expected 'none' with disaggregation.flow 'source-first': the decode "
                "worker is chosen after the prefill"
            )
        return replace(links, overlap="none")
    return replace(links, overlap=links.overlap or OWN_FLOWS[kind].overlap)
