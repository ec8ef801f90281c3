"""What is to go wrong, and where that can be changed while the server runs."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from foundation.settings import Positive, Share, Wait, check_settings
from serving.frontend.config import Port
from serving.stand_in.faults.values import Moment, Stall, Times

OF_KV_EVENTS = ("kv_events_drop", "kv_events_delay", "kv_events_swap")

ErrorStatus = Annotated[str, Meta(pattern=r"^[45]\d\d$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """Settings of faults. Shares are of requests for answers, unless said otherwise."""

    statuses: Mapping[ErrorStatus, Share] = field(default_factory=dict)
    """Share of requests that get an error of each status at once; the engine does not see them."""

    disconnect: Share = 0.0
    """Share of requests whose connection is closed before anything is answered; the engine does not see them."""

    cut: Share = 0.0
    """Share of answers whose connection is closed in the middle."""

    stall: Stall | None = None
    """Share of answers that stop in the middle, with the connection open, and how long they stop."""

    first_byte: Times | None = None
    """Time added before the first byte of each answer."""

    token: Times | None = None
    """Time added before each event of a stream; the engine is as fast as before."""

    slow: Positive = 1.0
    """The engine's steps take this many times as long."""

    exit: Moment | None = None
    """When the process ends with exit code 1."""

    kill: Moment | None = None
    """When the process ends as if by SIGKILL."""

    engine_death: Moment | None = None
    """When the engine dies, as vLLM's may, while the server goes on for a while."""

    startup: Wait = 0.0
    """How long the port stays closed after the start (s)."""

    unready: Wait = 0.0
    """How long /health answers 503 after the start (s)."""

    health: Literal["honest", "up", "down"] = "honest"
    """What /health answers: the truth, or always 200 or 503."""

    kv_load: Share = 0.0
    """Share of prompts whose KV cannot be read from another instance."""

    kv_events_drop: Share = 0.0
    """Share of messages with KV events that are lost on the way to subscribers; they can be replayed."""

    kv_events_delay: Times | None = None
    """How much later messages with KV events come; they keep their order."""

    kv_events_swap: Share = 0.0
    """Share of messages with KV events that come after the next one."""

    metrics_freeze: Moment | None = None
    """When /metrics stops changing."""

    metrics_fail: Share = 0.0
    """Share of scrapes of /metrics that get a 500."""

    metrics_delay: Times | None = None
    """Time added before each scrape is answered."""

    by: Literal["number", "id"] = "number"
    """What decides which requests a fault befalls: their number, or their X-Request-Id (those without one: their number)."""

    seed: int = 0
    """Seed of the choices."""

    def __post_init__(self) -> None:
        """Reject invalid values."""
        check_settings(self)
        shares = [*self.statuses.values(), self.disconnect, self.cut, self.stall.share if self.stall else 0.0]
        if sum(shares) > 1 + 1e-9:
            raise ValueError(
                f"the shares of errors, disconnect, cut and stall add up to {sum(shares):g}; expected at most 1: a request "
                "meets one of them"
            )

    @property
    def is_empty(self) -> bool:
        """Whether nothing goes wrong."""
        return self == FaultConfig(by=self.by, seed=self.seed)

    @property
    def of_kv_events(self) -> list[str]:
        """The faults that befall messages with KV events, by their names."""
        return [name for name in OF_KV_EVENTS if getattr(self, name)]

    def healed(self) -> "FaultConfig":
        """Return settings with which nothing goes wrong from now on; only the seed stays."""
        return FaultConfig(seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminConfig:
    """Settings of the port at which faults are changed while the server runs."""

    port: Port = 0
    """Port to listen on (0: any free one)."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    token: str = field(default="", repr=False)
    """Token that callers must send as Authorization: Bearer (none: no token needed). Environment: DYNABENCH_ADMIN_TOKEN."""

    def __post_init__(self) -> None:
        """Reject invalid values."""
        check_settings(self)
        if not self.token and not is_loopback(self.host):
            raise ValueError(
                f"--admin-host {self.host}: others can reach it; expected a loopback address, or --admin-token with it: whoever "
                "reaches that port can end this process"
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine is reached at a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
