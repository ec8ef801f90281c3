"""The settings of one stand-in.

The classes follow the parts that read them: HTTP (`HttpConfig`), requests and answers (`ApiConfig`), adapters
(`LoraConfig`), KV events (`KvEventsConfig`), handover of KV (`KvHandoverConfig`), ranks (`RanksConfig`) and logs
(`LogConfig`). Defaults are those of `vllm serve`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from foundation.settings import CheckedSettings, Count, Positive, Whole, check_settings
from serving.engines.mock.engine import AnswerConfig, EngineConfig, TimingConfig
from serving.engines.mock.kv.nixl_peer import KvHandoverConfig
from serving.frontend.config import Port
from serving.life.lease import LeaseConfig
from serving.model.parsers import check_parsers
from serving.stand_in.faults.config import AdminConfig, FaultConfig
from serving.transfer.config import TransferRunConfig

HashAlgorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
FingerprintMode = Literal["full", "hash", "custom", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig(CheckedSettings):
    """The files with which the server proves who it is."""

    certificate: str
    """File of the certificate (PEM)."""

    key: str = ""
    """File of its key (PEM; none: it is in the certificate's)."""

    client_authorities: str = ""
    """File of the authorities that may sign clients' certificates (PEM)."""

    client_certificates: Literal[0, 1, 2] = 0
    """Whether clients need certificates, as numbered in Python's ssl: 0 no, 1 optional, 2 required."""

    ciphers: str = ""
    """Ciphers of TLS 1.2 and older (none: those of OpenSSL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig(CheckedSettings):
    """Settings of the server."""

    host: str = ""
    """Address to listen on (none: all)."""

    port: Port = 8000
    """Port to listen on (0: any free one)."""

    uds: str = ""
    """Path of a Unix socket to listen on, instead of host and port."""

    tls: TlsConfig | None = None
    """TLS, if the server speaks it."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys of which clients must send one (none: no key needed)."""

    root_path: str = ""
    """Path under which a proxy in front shows this server."""

    allowed_origins: tuple[str, ...] = ()
    """Origins whose web pages may call."""

    allowed_methods: tuple[str, ...] = ("*",)
    """Methods with which they may."""

    allowed_headers: tuple[str, ...] = ("*",)
    """Headers that they may send."""

    allow_credentials: bool = False
    """Whether they may send credentials."""

    enable_request_id_headers: bool = False
    """Whether answers have X-Request-Id."""

    has_docs: bool = True
    """Whether /docs and /openapi.json are there."""

    shutdown_timeout_s: Whole = 0
    """How long requests in progress may take to finish after the process is asked to end (s; 0: they are aborted)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """How requests are read, and answers written."""

    chat_template: str = ""
    """File of the chat template, or the template itself (none: the model's)."""

    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template that requests may replace."""

    trust_request_chat_template: bool = False
    """Whether requests may bring a chat template."""

    response_role: str = "assistant"
    """Role of the answers."""

    enable_auto_tool_choice: bool = False
    """Whether the model may choose to call tools."""

    exclude_tools_when_tool_choice_none: bool = False
    """Leave tools out of the prompt if the request says that none may be called."""

    tool_call_parser: str = ""
    """Format in which the model calls tools, by vLLM's name (none: calls stay text)."""

    reasoning_parser: str = ""
    """Format in which the model thinks before it answers, by vLLM's name (none: it stays text)."""

    max_logprobs: Annotated[int, Meta(ge=-1)] = 20
    """Most log probabilities of a token that requests may ask for (-1: as many as the vocabulary has)."""

    max_num_queued_reqs: Whole | None = None
    """Requests that may be unfinished before more get 503 (none: no limit)."""

    max_num_queued_tokens: Whole | None = None
    """Tokens of prompts that may wait before more requests get 503 (none: no limit)."""

    return_tokens_as_token_ids: bool = False
    """Write tokens of log probabilities as token_id:NUMBER."""

    enable_prompt_tokens_details: bool = False
    """Whether the usage says how many tokens of the prompt were cached."""

    enable_force_include_usage: bool = False
    """Whether every stream ends with the usage, asked for or not."""

    enable_per_request_metrics: bool = False
    """Whether answers have the times of their request."""

    enable_server_load_tracking: bool = False
    """Whether /load counts the requests in progress."""

    enable_tokenizer_info_endpoint: bool = False
    """Whether /tokenizer_info is there."""

    fingerprint_mode: FingerprintMode = "full"
    """What system_fingerprint of answers is."""

    fingerprint_value: str = ""
    """The fingerprint itself, if custom."""

    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of requests that name none, from the model's generation_config.json and the flags."""

    def __post_init__(self) -> None:
        """Reject invalid values."""
        check_settings(self)
        check_parsers(self.tool_call_parser, self.reasoning_parser)
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            raise ValueError(
                "--enable-auto-tool-choice: expected --tool-call-parser with it, the format in which the model calls tools"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModule:
    """An adapter that is served from the start."""

    name: str
    path: str
    base_model_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig(CheckedSettings):
    """Settings of adapters."""

    max_loras: Count = 1
    """Adapters that may run in one step."""

    max_lora_rank: Count = 16
    """Highest rank of an adapter."""

    modules: tuple[LoraModule, ...] = ()
    """Adapters that are served from the start."""

    may_change: bool = False
    """Whether adapters can be loaded and unloaded over HTTP. Environment: VLLM_ALLOW_RUNTIME_LORA_UPDATING."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig(CheckedSettings):
    """Where KV events are published over ZeroMQ, as in vLLM's --kv-events-config."""

    endpoint: str = "tcp://*:5557"
    """Where events are published; rank N adds N to the port."""

    replay_endpoint: str | None = None
    """Where subscribers ask for events that they missed (none: nowhere)."""

    host_ip: str = ""
    """This host's address, for an endpoint at any free port (none: that of the way out). Environment: VLLM_HOST_IP."""

    buffer_steps: Whole = 10_000
    """Messages that are kept for them."""

    hwm: Whole = 100_000
    """Messages that may wait for a slow subscriber before more are dropped (0: no limit)."""

    max_queue_size: Count = 100_000
    """Messages that may wait to be published."""

    topic: str = ""
    """Topic of the messages; {replica} in it is the number of the replica, from 0 on."""

    hash_algorithm: HashAlgorithm = "sha256"
    """How blocks are named, as vLLM's --prefix-caching-hash-algo."""

    hash_seed: str | None = None
    """Seed of their names (none: vLLM's own, or for xxhash one that is drawn). Environment: PYTHONHASHSEED."""

    use_int_block_hashes: bool = True
    """Whether names are the last 64 bits as a number, instead of all bytes. Environment:
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES."""

    describes_chunks: bool = False
    """Whether events of host memory have tokens, as with self_describing_kv_events in --kv-transfer-config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksConfig(CheckedSettings):
    """Which data-parallel ranks run here; `EngineConfig.dp_size` says how many."""

    size: Count = 1
    """Ranks in all, on all hosts."""

    first: Whole = 0
    """Number of the first rank that runs here."""

    is_external: bool = False
    """Whether something in front chooses between ranks, so that each is a server of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig(CheckedSettings):
    """What is logged."""

    stats_interval_s: Positive | None = 10.0
    """How often a line with the throughput and queues is logged (s; none: never). Environment: VLLM_LOG_STATS_INTERVAL."""

    has_stats: bool = True
    """Whether there are metrics of the engine, and lines of them in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandInConfig:
    """Settings of one stand-in."""

    family: Literal["vllm"] = "vllm"
    """The server that it stands in for."""

    model: str = "Qwen/Qwen3-0.6B"
    """The model as the user named it: a folder or a Hugging Face id."""

    model_path: str = ""
    """Folder with its tokenizer (none: tokens are bytes of UTF-8)."""

    served_model_names: tuple[str, ...] = ()
    """Names that clients may ask for; answers have the first (none: `model`)."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """The scheduler and cache of each rank."""

    timing: TimingConfig = field(default_factory=TimingConfig)
    """How long its steps take."""

    answers: AnswerConfig = field(default_factory=AnswerConfig)
    """What it answers."""

    transfer: TransferRunConfig = field(default_factory=TransferRunConfig)
    """How KV travels."""

    lease: LeaseConfig = field(default_factory=LeaseConfig)
    """How long KV waits for another instance."""

    http: HttpConfig = field(default_factory=HttpConfig)
    """Where it listens, and for whom."""

    api: ApiConfig = field(default_factory=ApiConfig)
    """How it reads requests and writes answers."""

    logs: LogConfig = field(default_factory=LogConfig)
    """What it logs."""

    ranks: RanksConfig = field(default_factory=RanksConfig)
    """Which data-parallel ranks run here."""

    lora: LoraConfig | None = None
    """Adapters, if there may be some."""

    kv_events: KvEventsConfig | None = None
    """KV events over ZeroMQ, if they are published."""

    kv_handover: KvHandoverConfig | None = None
    """Handover of KV to other instances, if there is any."""

    faults: FaultConfig = field(default_factory=FaultConfig)
    """What goes wrong on purpose."""

    admin: AdminConfig | None = None
    """Where faults are changed while it runs, if anywhere."""

    outlives_engine: bool = False
    """Whether it goes on after its engine died. Environment: VLLM_KEEP_ALIVE_ON_ENGINE_DEATH."""

    is_dev_mode: bool = False
    """Whether the routes for development are there. Environment: VLLM_SERVER_DEV_MODE."""

    seed: int = 0
    """Seed of faults that have none of their own."""

    given: Mapping[str, Any] = field(default_factory=dict)
    """The arguments that differ from vLLM's defaults, by vLLM's names, as /server_info and the log show them."""

    def __post_init__(self) -> None:
        """Name the model if it has no other name, and reject invalid values."""
        object.__setattr__(self, "served_model_names", self.served_model_names or (self.model,))
        check_settings(self)
        if self.engine.dp_size > self.ranks.size - self.ranks.first:
            raise ValueError(
                f"{self.engine.dp_size} ranks from number {self.ranks.first} on are more than there are in all, {self.ranks.size}"
            )
        if (names := self.faults.of_kv_events) and not self.publishes_events:
            raise ValueError(
                f"--fault {names[0]}: no KV events are published; expected --kv-events-config, and prefix caching"
            )

    @property
    def publishes_events(self) -> bool:
        """Whether KV events are published: without a prefix cache, there are none."""
        return self.kv_events is not None and self.engine.enable_prefix_caching
