"""What one run is made of, and the order in which the runs of an experiment are carried out."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from dynabench.additions import masked_header, read_extra_body, read_headers
from dynabench.deployment.description import Deployment
from foundation.settings import Positive, Share, Whole, check_settings
from serving.runtime.config import masked
from workloads import Request
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig

SEEDS_APART = 1_000_003
"""Between an arm and its twin that shows the noise floor."""

MAX_FAILED_SHARE = 0.01
"""Share of failed requests above which a run is not valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """What `dynabench run` measures, and how it sends requests."""

    url: str | None = None
    """Measure this OpenAI endpoint (http://host:port) instead of starting a stack."""

    prompts: Literal["tokens", "text", "chat"] = "tokens"
    """Send token ids; text, the workload's own or about as many words; or the same as chat messages (for endpoints without /v1/completions)."""

    header: tuple[str, ...] = field(default=(), repr=False)
    """With --url: send this header, as in 'x-tenant: a'; may be repeated. The results have names only, no values.
    'authorization: env:NAME' takes the value from an environment variable, so that no list of processes shows it."""

    extra_body: str = ""
    """Add these fields to each request's body: a JSON object, such as '{"temperature": 0}'. They replace those of the
    workload's own bodies (default: none)."""

    insecure: bool = False
    """With an https:// URL: accept any certificate, such as a self-signed one. The results say so."""

    ca_file: str | None = None
    """With an https:// URL: accept certificates of this authority, too (PEM). The variable SSL_CERT_FILE replaces those
    that the system knows."""

    server_metrics: bool = True
    """With --url: ask the server for its metrics once a second, and set what it says of itself beside what is measured.
    Each time costs it some milliseconds."""

    metrics_url: tuple[str, ...] = ()
    """With --url: read these metrics, too: of workers behind the server, or of a DCGM or nvidia_smi exporter of its GPUs
    (http://host:port/metrics); may be repeated (default: none)."""

    clients: Annotated[int, Meta(ge=1, le=64)] = 1
    """Processes that send requests from one schedule; more than one reach higher rates."""

    warmup_requests: Whole | None = None
    """Requests sent before a run and left out of its figures, with the workload's lengths and other prompts (default: 8
    for each worker that runs a model, because the first of each size take longer there; else none)."""

    timeout_s: Positive = 600.0
    """Time after which a request counts as failed (s)."""

    max_failed_share: Share = MAX_FAILED_SHARE
    """Share of the requests that may fail; beyond it the run is not valid, and the exit code is 1."""

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        check_settings(self)
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {self.url!r}")
        if self.header and self.url is None:
            raise ValueError("header applies to another server; give its --url")
        if (self.insecure or self.ca_file) and not (self.url or "").startswith("https://"):
            name = "insecure" if self.insecure else "ca_file"
            raise ValueError(f"{name} applies to certificates; give the --url of a server with https://")
        if self.metrics_url and (self.url is None or not self.server_metrics):
            raise ValueError(
                "metrics_url adds to the metrics of another server; give its --url, without --no-server-metrics"
            )
        for url in self.metrics_url:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"metrics_url must begin with http:// or https://, not {url!r}")
        _ = self.headers, self.body_fields

    @property
    def headers(self) -> dict[str, str]:
        """The headers to send, by lower-case name."""
        return read_headers(self.header)

    @property
    def body_fields(self) -> dict[str, Any]:
        """The fields to add to each body."""
        return read_extra_body(self.extra_body)

    @property
    def shown(self) -> dict[str, Any]:
        """The settings as results hold them: without secrets."""
        said = dataclasses.asdict(self)
        return said | {
            "url": self.url and masked(self.url),
            "header": list(map(masked_header, self.header)),
            "metrics_url": list(map(masked, self.metrics_url)),
        }


@dataclass(frozen=True, slots=True)
class Settings:
    """What is deployed, what is sent to it, and how."""

    deployment: Deployment = field(default_factory=Deployment)
    shape: ShapeConfig = ShapeConfig()  # noqa: RUF009 (frozen)
    load: LoadConfig = LoadConfig()  # noqa: RUF009
    client: ClientConfig | None = None
    """How a client measures on the wall clock; none in virtual time."""

    @property
    def url(self) -> str | None:
        """The endpoint of others that is measured instead of the deployment."""
        return self.client.url if self.client is not None else None


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison."""

    name: str
    settings: Settings
    changes: Mapping[str, Any]
    """What sets it apart, by name of the setting."""
    is_repeated: bool = False
    """Whether it is the first arm once more, to show how far two equal runs differ."""

    @property
    def plain_changes(self) -> dict[str, str | int | float | None]:
        """What sets it apart, as JSON takes it."""
        return {
            name: value if isinstance(value, (str, int, float, type(None))) else str(value)
            for name, value in self.changes.items()
        }


@dataclass(frozen=True, slots=True)
class Run:
    """One run: an arm of the experiment, carried out for the nth time."""

    arm: Arm
    repeat: int = 0
    seed: int = 0

    @classmethod
    def alone(cls, settings: Settings, *, seed: int = 0) -> "Run":
        """Return a run that is compared with no other."""
        return cls(Arm(settings.deployment.router_mode, settings, {}), seed=seed)

    @property
    def settings(self) -> Settings:
        """What is run."""
        return self.arm.settings

    @property
    def deployment(self) -> Deployment:
        """What is deployed."""
        return self.arm.settings.deployment


def runs_of(arms: Sequence[Arm], repeats: int, seed: int) -> list[Run]:
    """Return every run in the order in which they are carried out.

    Arms alternate in direction from repeat to repeat (ABBA), so that drift favours none. Arms of one repeat share a seed.
    """
    return [
        Run(arm, repeat, seed + repeat + SEEDS_APART * arm.is_repeated)
        for repeat in range(repeats)
        for arm in (arms if repeat % 2 == 0 else arms[::-1])
    ]


def sends_content(request: Request, prompts: str) -> bool:
    """Return whether a request's own text is sent, and its body's fields with it, if prompts are sent in this way."""
    return request.content is not None and prompts != "tokens"
