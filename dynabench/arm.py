"""What one run is made of, and the order in which the runs of an experiment are carried out."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from dynabench.additions import masked_header, read_extra_body, read_headers, read_key
from dynabench.apis import HAVE_TURNS, WHOLE, Api, Endpoint, Prompts, Way, endpoint_of, one_api, way_of
from dynabench.deployment.description import Deployment
from dynabench.images import ImageSize
from dynabench.proxy import Proxy
from foundation.own_code import shown
from foundation.settings import Positive, Share, Whole, check_settings
from serving.runtime.config import masked
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
    """Measure this endpoint instead of starting a stack: http://host:port, with or without /v1 or the path of an API,
    such as /v1/chat/completions."""

    api: Api | None = None
    """API that requests are sent to: OpenAI's completions, chat, responses or embeddings, Anthropic's messages, or rerank
    (default: that of the URL's path; else completions, and chat for the workload's chats with --prompts text)."""

    prompts: Prompts | None = None
    """What prompts are made of: tokens, their ids, which completions and embeddings take; or text, the workload's own or about as
    many words. chat is short for text with --api chat (default: tokens for completions, else text)."""

    history: Literal["workload", "server"] = "workload"
    """Answers that later turns of a session repeat: the workload's, or those that the server gave to the earlier turns
    (chat, responses and messages only)."""

    image_size: str = ""
    """With --url: send the workload's media as images of WIDTHxHEIGHT pixels, such as 512x512 (chat, responses and messages
    only; default: refuse workloads with media)."""

    header: tuple[str, ...] = field(default=(), repr=False)
    """With --url: send this header, as in 'x-tenant: a'; may be repeated. The results have names only, no values.
    'authorization: env:NAME' takes the value from an environment variable, so that no list of processes shows it."""

    stream: bool = True
    """With --url: ask for answers token by token. Answers that come as a whole have neither TTFT nor ITL."""

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
    api_key_file: str = ""
    """With --url: file that holds the API key, or env:NAME for an environment variable (default: env:OPENAI_API_KEY, if
    it is set)."""

    proxy: str | None = field(default=None, repr=False)
    """With --url: HTTP proxy on the way, http://host:port; https:// goes through a tunnel (CONNECT). Environment variables
    such as HTTPS_PROXY are ignored, because a proxy that nobody thinks of distorts figures (default: none)."""

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
        for name in ("header", "api_key_file", "proxy", "image_size"):
            if getattr(self, name) and self.url is None:
                raise ValueError(f"{name} applies to another server; give its --url")
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
        self._check_turns()
        self._check_stream()
        if self.proxy is not None:
            Proxy.at(self.proxy)
        _ = self.headers, self.body_fields, self.way, self.api_key

    def _check_turns(self) -> None:
        """Refuse what only messages can have with another API."""
        apis = f"only {', '.join(HAVE_TURNS)}"
        if self.history == "server" and self.way.api not in HAVE_TURNS:
            raise ValueError(f"history is 'server', but {apis} have earlier answers; give one as --api")
        if self.image_size and self.way.api not in HAVE_TURNS:
            raise ValueError(f"image_size is {self.image_size!r}, but {apis} have images; give one as --api")
        if self.image_size and self.history == "server":
            raise ValueError(
                "history is 'server' and image_size is given: turns with images cannot repeat answers; leave one out"
            )
        _ = self.size_of_images

    def _check_stream(self) -> None:
        """Refuse answers as a whole where something else needs their parts."""
        if self.stream:
            return
        if self.url is None:
            raise ValueError("stream is false, which applies to another server; give its --url")
        if self.history == "server":
            raise ValueError(
                "stream is false, but history is 'server': only streamed answers can be repeated; leave one out"
            )

    @property
    def has_tokens(self) -> bool:
        """Whether answers come token by token."""
        return self.stream and self.way.api not in WHOLE

    @property
    def size_of_images(self) -> ImageSize | None:
        """The size of the images to send, None if media are refused."""
        return ImageSize.parse(self.image_size) if self.image_size else None

    @property
    def api_key(self) -> str:
        """The key of another server, empty for none."""
        return read_key(self.api_key_file) if self.url is not None else ""

    @property
    def endpoint(self) -> Endpoint | None:
        """The address to measure, None for our own stack."""
        return endpoint_of(self.url) if self.url is not None else None

    @property
    def way(self) -> Way:
        """How prompts are sent."""
        api = one_api(self.api, self.endpoint.api, self.url or "") if self.endpoint else self.api
        return way_of(self.prompts, api)

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
            "metrics_url": list(map(masked, self.metrics_url)),
            "proxy": self.proxy and masked(self.proxy),
            "header": list(map(masked_header, self.header)),
            "prompts": self.way.prompts,
            "api": self.way.api,
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
            name: value if isinstance(value, (int, float, type(None))) else shown(str(value))
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
