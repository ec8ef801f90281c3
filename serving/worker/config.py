"""Settings of workers and of the engines that run models, and checks of both."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from foundation.settings import Count, Wait, Whole, changed, check_settings
from serving.model.card import Migrations, Role
from serving.model.parsers import check_parsers
from serving.router import check_registered_mode
from serving.runtime.address import EndpointAddress

Model = TypeVar("Model", bound="ModelConfig")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is served, and the formats of its answers."""

    model_path: str = ""
    """Folder, Hugging Face id or GGUF file of the model (mocker: only its tokenizer; none: tokens are bytes of UTF-8)."""

    model_name: str = ""
    """Name that clients ask for (default: the folder's, file's or repository's)."""

    model_config: str = ""
    """Folder or Hugging Face id with the tokenizer and config.json, if a GGUF file lacks them."""

    context_length: Count | None = None
    """Maximum tokens of a sequence (default: the model's context length)."""

    tool_call_parser: str = ""
    """Format in which the model calls tools, by vLLM's name: hermes, llama3_json, mistral, qwen3_coder, glm45, deepseek_v31, ...
    (none: calls stay text; a mocker's is hermes)."""

    reasoning_parser: str = ""
    """Format in which the model thinks before it answers, by vLLM's name: qwen3, deepseek_r1, glm45, ... (none: it stays text)."""

    def __post_init__(self) -> None:
        """Reject invalid values."""
        check_settings(self)
        check_parsers(self.tool_call_parser, self.reasoning_parser)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ModelConfig):
    """Settings of a worker."""

    endpoint: str = "dyn://"
    """Endpoint that it serves: dyn://namespace.component.endpoint; missing parts get defaults (dynamo.backend.generate,
    or dynamo.prefill.generate for prefill workers)."""

    role: Role = "aggregated"
    """Part of each request that it does: all of it (aggregated); the prompt, whose KV a decode worker then reads
    (prefill); the answer (decode)."""

    router_mode: str | None = None
    """How requests are spread over workers like it (none: the frontend's mode)."""

    migration_limit: Migrations = 0
    """How often a request may continue on another worker after losing its own (0 to 1023)."""

    kv_events: bool = True
    """Report KV events, if the engine can; otherwise routers predict what the worker holds."""

    drain_s: Wait = 30.0
    """How long requests in progress may take to finish after the process is asked to end (s)."""

    def __post_init__(self) -> None:
        """Reject invalid values."""
        check_settings(self)
        if self.router_mode is not None:
            check_registered_mode(self.router_mode)
        check_parsers(self.tool_call_parser, self.reasoning_parser)

    @property
    def address(self) -> EndpointAddress:
        """Where it serves."""
        return EndpointAddress.parse(self.endpoint, component="prefill" if self.role == "prefill" else "backend")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEngineConfig:
    """An engine of the user's own."""

    engine_file: str | None = None
    """Python file that defines `async def generate(request)`: the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunConfig:
    """How an engine runs a model."""

    kv_cache_block_size: Count | None = None
    """Tokens in a KV block (default: the engine's own)."""

    tensor_parallel_size: Annotated[int, Meta(ge=1, le=255)] = 1
    """GPUs that one instance spans, on all its hosts together."""

    base_gpu_id: Whole = 0
    """The first GPU to use (sglang; for others set CUDA_VISIBLE_DEVICES)."""

    num_nodes: Count = 1
    """Hosts that one instance spans."""

    node_rank: Whole = 0
    """Number of this host; 0 is the leader."""

    leader_addr: str = ""
    """host:port at which the others reach the leader."""

    memory_fraction: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Share of each GPU's memory (without a GPU: the host's) that vllm, sglang or trtllm takes (default: the engine's own)."""

    extra_engine_args: Path | None = None
    """JSON or YAML file with any other arguments of the engine; they override ours."""

    def __post_init__(self) -> None:
        """Reject values that are invalid or do not fit together."""
        check_settings(self)
        if self.node_rank >= self.num_nodes:
            raise ValueError(
                f"--node-rank must be from 0 to {self.num_nodes - 1} with --num-nodes {self.num_nodes}, not {self.node_rank}"
            )
        if self.num_nodes > 1 and not self.leader_addr:
            raise ValueError(f"--num-nodes {self.num_nodes} needs --leader-addr HOST:PORT, the same on every node")
        if self.leader_addr and not self.leader_addr.rpartition(":")[2].isdigit():
            raise ValueError(f"--leader-addr {self.leader_addr}: host:port was expected")

    @property
    def leader(self) -> tuple[str, int]:
        """The leader's host and port."""
        host, _, port = self.leader_addr.rpartition(":")
        return host, int(port)

    def extra(self) -> dict[str, Any]:
        """Read `extra_engine_args`.

        Raises:
            ValueError: the file cannot be read, or does not contain an object.
        """
        return {} if self.extra_engine_args is None else read_arguments(self.extra_engine_args)


def read_arguments(path: Path) -> dict[str, Any]:
    """Read engine arguments from a JSON or YAML file.

    Raises:
        ValueError: it cannot be read, or does not contain an object.
    """
    import yaml

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


LISTS = frozenset({"lora_modules"})
"""Arguments of engines with any number of values."""


def flags_to_arguments(flags: Sequence[str]) -> dict[str, Any]:
    """Turn the flags after `--` into arguments of the engine: `--max-num-seqs 8 --enforce-eager` into max_num_seqs=8, enforce_eager=True.

    Of `LISTS`, all words after the flag are values: `--lora-modules a=x b=y`.

    Raises:
        ValueError: some of the words are not flags.
    """
    import yaml

    arguments: dict[str, Any] = {}
    waiting: str | None = None  # the flag whose value may follow
    for word in flags:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            given = yaml.safe_load(value) if equals else True
            if name in LISTS and not isinstance(given, list):  # a list may also be written as JSON
                given = [given] if equals else []
            arguments[name] = given
            waiting = name if not equals or name in LISTS else None
        elif waiting is None:
            raise ValueError(f"{word!r} after --: expected engine arguments as --name value")
        elif waiting in LISTS:
            arguments[waiting].append(yaml.safe_load(word))
        else:
            arguments[waiting] = yaml.safe_load(word)
            waiting = None
    return arguments


def replace_model(settings: Model, model: str | None) -> Model:
    """Return the settings with the model of the positional argument, if there is one."""
    return settings if model is None else dataclasses.replace(settings, model_path=model)


def required_model(worker: WorkerConfig, engine: str) -> str:
    """Return the model's path.

    Raises:
        ValueError: there is none.
    """
    if not worker.model_path:
        raise ValueError(f"out={engine} needs a model: a folder, a GGUF file or a Hugging Face id")
    return worker.model_path


def refuse_gpu_choice(engine: str, run: ModelRunConfig) -> None:
    """Reject --base-gpu-id for engines that choose GPUs by the environment."""
    if run.base_gpu_id:
        raise ValueError(f"out={engine} has no --base-gpu-id: set CUDA_VISIBLE_DEVICES to the GPUs it may use")


def refuse_nodes(engine: str, run: ModelRunConfig, hint: str) -> None:
    """Reject --num-nodes, --tensor-parallel-size and the like for engines that find their GPUs themselves."""
    given = changed(run)
    for name in ("tensor_parallel_size", "num_nodes", "base_gpu_id", "leader_addr", "memory_fraction"):
        if name in given:
            raise ValueError(f"out={engine} does not use --{name.replace('_', '-')}: {hint}")
