"""Settings of workers and of the engines that run models, and what does not fit them."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serving.runtime.address import EndpointAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of a worker."""

    endpoint: str = "dyn://dynamo.backend.generate"
    """Where it serves: dyn://namespace.component.endpoint; missing parts get defaults."""

    model_path: str = ""
    """Folder, Hugging Face id or GGUF file of the model (mocker: only its tokenizer; none: tokens are bytes of UTF-8)."""

    model_name: str = ""
    """Name that clients ask for (default: the folder's, file's or repository's)."""

    model_config: str = ""
    """Folder or Hugging Face id with the tokenizer and config.json, where a GGUF file lacks them."""

    context_length: int | None = None
    """Tokens a sequence may reach (default: the model's)."""

    migration_limit: int = 0
    """How often a request may go on at another worker when its own is lost (0 to 1023)."""

    kv_events: bool = True
    """Report KV events, if the engine can; otherwise routers predict what the worker holds."""

    drain_s: float = 30.0
    """How long requests in progress may take to finish once the process was asked to end (s)."""

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        if not 0 <= self.migration_limit <= 1023:
            raise ValueError(f"migration_limit must be from 0 to 1023, not {self.migration_limit}")
        if self.context_length is not None and self.context_length < 1:
            raise ValueError(f"context_length must be at least 1, not {self.context_length}")

    @property
    def address(self) -> EndpointAddress:
        """Where it serves."""
        return EndpointAddress.parse(self.endpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunConfig:
    """How an engine runs a model."""

    kv_cache_block_size: int | None = None
    """Tokens in a KV block (default: the engine's own)."""

    tensor_parallel_size: int = 1
    """GPUs that one instance is spread over, on all its hosts together."""

    base_gpu_id: int = 0
    """The first GPU to use (sglang; for others set CUDA_VISIBLE_DEVICES)."""

    num_nodes: int = 1
    """Hosts that one instance is spread over."""

    node_rank: int = 0
    """Which of them this is; 0 leads."""

    leader_addr: str = ""
    """host:port at which the leader can be reached by the others."""

    memory_fraction: float | None = None
    """Share of each GPU's memory (without a GPU: the host's) that vllm, sglang or trtllm takes (default: the engine's own)."""

    extra_engine_args: Path | None = None
    """JSON or YAML file with any other arguments of the engine; they win over ours."""

    def __post_init__(self) -> None:
        """Refuse values that do not fit together."""
        if not 1 <= self.tensor_parallel_size <= 255:
            raise ValueError(f"--tensor-parallel-size must be from 1 to 255, not {self.tensor_parallel_size}")
        if self.num_nodes < 1:
            raise ValueError(f"--num-nodes must be at least 1, not {self.num_nodes}")
        if not 0 <= self.node_rank < self.num_nodes:
            raise ValueError(
                f"--node-rank must be from 0 to {self.num_nodes - 1} with --num-nodes {self.num_nodes}, not {self.node_rank}"
            )
        if self.num_nodes > 1 and not self.leader_addr:
            raise ValueError(f"--num-nodes {self.num_nodes} needs --leader-addr HOST:PORT, the same on every node")
        if self.leader_addr and not self.leader_addr.rpartition(":")[2].isdigit():
            raise ValueError(f"--leader-addr {self.leader_addr}: host:port was expected")
        if self.base_gpu_id < 0:
            raise ValueError(f"--base-gpu-id must be at least 0, not {self.base_gpu_id}")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ValueError(f"--memory-fraction must be above 0 and at most 1, not {self.memory_fraction}")
        if self.kv_cache_block_size is not None and self.kv_cache_block_size < 1:
            raise ValueError(f"--kv-cache-block-size must be at least 1, not {self.kv_cache_block_size}")

    @property
    def leader(self) -> tuple[str, int]:
        """The leader's host and port."""
        host, _, port = self.leader_addr.rpartition(":")
        return host, int(port)

    def extra(self) -> dict[str, Any]:
        """Read `extra_engine_args`.

        Raises:
            ValueError: the file cannot be read, or holds something else than an object.
        """
        return {} if self.extra_engine_args is None else read_arguments(self.extra_engine_args)


def read_arguments(path: Path) -> dict[str, Any]:
    """Read engine arguments from a JSON or YAML file.

    Raises:
        ValueError: it cannot be read, or holds something else than an object.
    """
    is_yaml = path.suffix in (".yaml", ".yml")
    try:
        text = path.read_text()
        values = yaml.safe_load(text) if is_yaml else json.loads(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"--extra-engine-args {path}: {error}; a {'YAML' if is_yaml else 'JSON'} file was expected"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(f"--extra-engine-args {path}: {'a YAML mapping' if is_yaml else 'a JSON object'} was expected")
    return values


def flags_to_arguments(flags: Sequence[str]) -> dict[str, Any]:
    """Turn the flags after `--` into arguments of the engine: `--max-num-seqs 8 --enforce-eager` into max_num_seqs=8, enforce_eager=True.

    Raises:
        ValueError: something else is among them.
    """
    arguments: dict[str, Any] = {}
    waiting: str | None = None
    for word in flags:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            arguments[name] = yaml.safe_load(value) if equals else True
            waiting = None if equals else name
        elif waiting is None:
            raise ValueError(f"{word!r} after --: engine arguments as --name value were expected")
        else:
            arguments[waiting] = yaml.safe_load(word)
            waiting = None
    return arguments


def replace_model(worker: WorkerConfig, model: str | None) -> WorkerConfig:
    """Return the settings with a model named by position."""
    return worker if model is None else dataclasses.replace(worker, model_path=model)


def required_model(worker: WorkerConfig, engine: str) -> str:
    """Return the model's path.

    Raises:
        ValueError: there is none.
    """
    if not worker.model_path:
        raise ValueError(f"out={engine} needs a model: a folder, a GGUF file or a Hugging Face id")
    return worker.model_path


def refuse_gpu_choice(engine: str, run: ModelRunConfig) -> None:
    """Refuse --base-gpu-id for engines that choose GPUs by the environment.

    Raises:
        ValueError: it is given.
    """
    if run.base_gpu_id:
        raise ValueError(f"out={engine} has no --base-gpu-id: set CUDA_VISIBLE_DEVICES to the GPUs it may use")


def refuse_nodes(engine: str, run: ModelRunConfig, hint: str) -> None:
    """Refuse --num-nodes and --tensor-parallel-size for engines that find their GPUs themselves.

    Raises:
        ValueError: one is given.
    """
    default = ModelRunConfig()
    for name in ("tensor_parallel_size", "num_nodes", "base_gpu_id", "leader_addr", "memory_fraction"):
        if getattr(run, name) != getattr(default, name):
            raise ValueError(f"out={engine} has no use for --{name.replace('_', '-')}: {hint}")
