"""The groups of flags that several commands share."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from dynabench.arm import ClientConfig
from dynabench.deployment.core import CoreConfig
from dynabench.deployment.flags import (
    LivePoolConfig,
    MeasuredFrontendConfig,
    MeasuredRouterConfig,
    PoolConfig,
    prefixed,
)
from dynabench.deployment.fleet import FleetConfig
from dynabench.deployment.kv_store import KvStoreConfig
from dynabench.deployment.overhead import OverheadConfig
from dynabench.experiment.settings import ExperimentConfig
from dynabench.terminal import Terminal
from foundation.errors import plain_errors as plain_errors
from mocker import EngineConfig, SglangConfig, TrtllmConfig
from mocker.config import EngineTypeConfig
from mocker.network.config import TransferConfig
from mocker.timing.config import TimingConfig
from serving.cli.command_line import flat
from serving.engines.mock.config import AnswerConfig
from serving.frontend.config import FrontendConfig
from serving.life import DisaggregationConfig
from serving.planner import PlannerConfig
from serving.router import RouterConfig
from serving.runtime.config import RuntimeConfig
from serving.transfer.config import OF_LINKS, TransferRunConfig
from serving.worker.config import ModelConfig
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """What a command prints."""

    all_metrics: Annotated[bool, Parameter(negative=())] = False
    """Print all metrics, not only the key ones."""

    json: Annotated[bool, Parameter(negative=())] = False
    """Print the results to stdout as one JSON document, and everything else to stderr."""

    def terminal(self) -> Terminal:
        """Return the stream for text."""
        return Terminal(stderr=self.json)

    def document(self, folder: Path | None, content: Any) -> None:
        """Print the result as JSON, if requested."""
        if self.json:
            print(json.dumps({"folder": None if folder is None else str(folder)} | content, indent=2))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsOutputConfig(OutputConfig):
    """What a command on runs prints."""

    markdown: Annotated[bool, Parameter(negative=())] = False
    """Print a Markdown summary, for a pull request."""

    def __post_init__(self) -> None:
        """Refuse two forms at once."""
        if self.markdown and self.json:
            raise ValueError("--markdown and --json print the same result; use only one of them")

    def terminal(self) -> Terminal:
        """Return the stream for text."""
        return Terminal(stderr=self.markdown or self.json)


FLAT = Parameter(name="*")
"""Makes the fields of a dataclass options of the command that takes it, and the groups in it groups of its help."""

Output = Annotated[OutputConfig, flat("Output", 1)]
RunsOutput = Annotated[RunsOutputConfig, flat("Output", 1)]
Experiment = Annotated[ExperimentConfig, flat("Experiment", 1)]
Shape = Annotated[ShapeConfig, flat("Workload", 2)]
Load = Annotated[LoadConfig, flat("Load", 3)]
Client = Annotated[ClientConfig, flat("Client", 4)]
Pool = Annotated[PoolConfig, flat("Workers", 5)]
LivePool = Annotated[LivePoolConfig, flat("Workers", 5)]
WITHOUT_ROLE = Parameter(parse="^(?!(kv_role|disaggregation_mode|server_role)$)")
"""Leaves out the flag that follows from a pool's role."""
Engine = Annotated[EngineConfig, WITHOUT_ROLE, flat("Simulated engine", 6)]
SEEN = (
    "engine_version",
    "num_gpu_blocks",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "enable_prefix_caching",
    "async_scheduling",
    "scheduling_policy",
)
"""The settings of an engine that its owner has told, if anyone."""
MeasuredEngine = Annotated[
    EngineConfig, Parameter(parse=f"^(engine|{'|'.join(SEEN)})$"), flat("The server's engine, with --from", 6)
]
Scheduler = Annotated[EngineTypeConfig, flat("Simulated engine", 6)]
Sglang = Annotated[SglangConfig, WITHOUT_ROLE, flat("Simulated engine: --engine-type sglang", 6)]
Trtllm = Annotated[TrtllmConfig, WITHOUT_ROLE, flat("Simulated engine: --engine-type trtllm", 6)]
Timing = Annotated[TimingConfig, flat("Simulated engine", 6)]
Answers = Annotated[AnswerConfig, flat("Simulated engine", 6)]
FORMATS = Parameter(parse="^(?!(model_path|model_name|model_config|context_length)$)")
"""Leaves out the flags that say which model it is."""
Formats = Annotated[ModelConfig, FORMATS, flat("Tools and reasoning", 6)]
Overheads = Annotated[OverheadConfig, flat("Between client and engine", 7)]
Core = Annotated[CoreConfig, flat("Simulated engine", 6)]
Disaggregation = Annotated[DisaggregationConfig, flat("Prefill and decode workers", 7)]
Transfers = Annotated[TransferConfig, prefixed("transfer"), flat("Prefill and decode workers", 7)]
ELSEWHERE = Parameter(parse=f"^(?!({'|'.join(OF_LINKS)}|kv_store|kv_store_write_policy)$)")
"""Leaves out flags of settings that the sections `transfer` and `kv_store` of a file have for both clocks."""
KvTransfer = Annotated[TransferRunConfig, ELSEWHERE, flat("KV between processes", 7)]
KvStore = Annotated[KvStoreConfig, flat("KV store", 7)]
Fleet = Annotated[FleetConfig, flat("Changing the workers", 7)]
Planner = Annotated[PlannerConfig, flat("Planner", 7)]
Router = Annotated[RouterConfig, flat("Router", 8)]
MeasuredRouter = Annotated[MeasuredRouterConfig, flat("Router", 8)]
Frontend = Annotated[FrontendConfig, flat("Frontend", 9)]
MeasuredFrontend = Annotated[MeasuredFrontendConfig, flat("Frontend", 9)]
Runtime = Annotated[RuntimeConfig, flat("Runtime", 10)]
FILE = Parameter(name=["--deployment", "-f"])
DeploymentFile = Annotated[Path | None, FILE]
