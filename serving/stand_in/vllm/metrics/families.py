"""The families of vLLM 0.32's metrics, in the order in which it lists them. Those that need a setting come only with it.

The table is families.json; the texts are ours. `tests/real_engines` compares everything else with a real server.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import msgspec

from serving.frontend.series import Labels

TABLE = Path(__file__).with_suffix(".json")
MODEL, ENGINE = "model_name", "engine"
CACHE_CONFIG, LORA = "vllm:cache_config_info", "vllm:lora_requests_info"

Bounds = tuple[float, ...]


class Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One family. A counter's samples have `_total` after its name."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    buckets: str = ""
    """The name of a histogram's buckets; `lengths` follow the longest sequence."""
    bounds: Bounds = ()
    """Those buckets' bounds."""
    own: Mapping[str, tuple[str, ...]] = {}
    """The labels that it has beside the model's and the engine's, and their values, if they are known from the start."""
    is_per_engine: bool = True
    is_there_at_once: bool = True
    """Whether it has samples before anything was counted."""
    needs: Literal["has_nixl", "has_offloading", "is_kv_consumer", "has_adapters", "speculates"] | None = None
    """The setting that it comes with."""

    def start(self) -> Iterable[Labels]:
        """Return the values of its own labels that it has from the start."""
        return product(*self.own.values()) if self.is_there_at_once else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSettings:
    """The settings on which the families depend."""

    max_model_len: int
    has_stats: bool = True
    has_nixl: bool = False
    has_offloading: bool = False
    is_kv_consumer: bool = False
    has_adapters: bool = False
    speculates: bool = False
    has_tool_calls: bool = False


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    buckets: Mapping[str, Bounds]
    families: tuple[Family, ...]
    """Those of engines."""
    tool_calls: Family
    """The server's own, of searches for tool calls."""


@functools.cache
def table() -> _Table:
    """Return what is known of all families."""
    return msgspec.json.decode(TABLE.read_bytes(), type=_Table)


def families(shown: MetricSettings) -> list[Family]:
    """Return the families of the engine that a server shows."""
    if not shown.has_stats:
        return []
    bounds = {**table().buckets, "lengths": _lengths(shown.max_model_len), "": ()}
    found = [each for each in table().families if each.needs is None or getattr(shown, each.needs)]
    return [msgspec.structs.replace(each, bounds=bounds[each.buckets]) for each in found]


def _lengths(max_model_len: int) -> Bounds:
    """Return 1, 2, 5, 10, 20, ... up to the longest sequence."""
    bounds = [digit * 10.0**power for power, digit in product(range(19), (1, 2, 5))]
    return tuple(bound for bound in bounds if bound <= max_model_len)
