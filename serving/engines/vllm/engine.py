"""vLLM, through AsyncLLM: token ids in and out, KV events over ZeroMQ, data-parallel ranks."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from foundation.text import one_line
from serving.engines.event_readers import EventReaders
from serving.engines.guided import guide
from serving.engines.package import call_with, require, require_nixl
from serving.engines.processes import EngineProcesses
from serving.engines.vllm.adapters import take_modules
from serving.engines.vllm.on_cpu import keep_async_scheduling
from serving.engines.vllm.roles import (
    check_types,
    connector_params,
    counted,
    hand_off,
    lease_duration_s,
    prompt_only,
    side_channel,
    stage_times,
    transfer_config,
    uses_nixl,
)
from serving.engines.vllm.tiers import take_offloading, telling
from serving.model.constraints import CONSTRAINTS, NO_GRAMMAR
from serving.model.files import ModelFiles, local_weights
from serving.runtime.messages import CallError
from serving.runtime.server import GeneratorService
from serving.runtime.threads import in_thread
from serving.worker.config import ModelRunConfig, WorkerConfig, refuse_gpu_choice, required_model
from serving.worker.engine import EngineCall, EngineError, EngineLoad, EngineTraits, KvTransfers
from serving.worker.kv_events import KvEventPublisher
from serving.worker.protocol import end_tokens, engine_id, finish_reason, log_probabilities, sampling
from serving.worker.registry import ENGINES

MEMORY = ENGINES["vllm"].memory_argument

CHECK_S = 0.1
CLOSE_TIMEOUT_S = 5.0


class Vllm:
    """See `serving.worker.engine.Engine`."""

    def __init__(self, worker: WorkerConfig, run: ModelRunConfig, arguments: dict[str, Any]) -> None:
        refuse_gpu_choice("vllm", run)
        given: dict[str, Any] = {
            "model": required_model(worker, "vllm"),
            "disable_log_stats": True,
        }
        if worker.context_length is not None:
            given["max_model_len"] = worker.context_length
        if run.kv_cache_block_size is not None:
            given["block_size"] = run.kv_cache_block_size
        if run.tensor_parallel_size > 1:
            given["tensor_parallel_size"] = run.tensor_parallel_size
        own = run.extra() | arguments
        has_cache_size = "kv_cache_memory_bytes" in own or os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        if run.memory_fraction is not None and not has_cache_size:
            given[MEMORY] = run.memory_fraction
        if run.num_nodes > 1:
            host, port = run.leader
            if run.node_rank:
                raise ValueError(
                    f"out=vllm: start the other nodes with vLLM itself: vllm serve {given['model']} --headless "
                    f"--tensor-parallel-size {run.tensor_parallel_size} --nnodes {run.num_nodes} "
                    f"--node-rank {run.node_rank} --master-addr {host} --master-port {port}"
                )
            given |= {
                "nnodes": run.num_nodes,
                "node_rank": run.node_rank,
                "master_addr": host,
                "master_port": port,
                "distributed_executor_backend": "mp",
            }
        self._role = worker.role
        self._wants_events = worker.kv_events and own.get("enable_prefix_caching") is not False
        self._modules = take_modules(own)
        tier = take_offloading(own)
        self._transfer = transfer_config(worker.role, own.get("kv_transfer_config"), tier)
        if self._wants_events:
            self._transfer = telling(self._transfer)
        if self._transfer is not None:
            own["kv_transfer_config"] = self._transfer
        self._arguments = given | own
        self._adapters: dict[str, Any] = {}  # by name, in vLLM's words
        self.calls = (
            EngineCall("vllm.AsyncEngineArgs", self._shown()),
            EngineCall("vllm.v1.engine.async_llm.AsyncLLM.from_engine_args"),
        )
        self.traits = EngineTraits()
        self.service = GeneratorService(self.generate)
        self._processes = EngineProcesses("vLLM", MEMORY)
        self._ranks = int(self._arguments.get("data_parallel_size") or 1)
        self._stats: dict[int, Any] = {}
        self._transfers = KvTransfers()
        self._shape = (0, 0)  # KV blocks, sequences in a batch
        self._defaults: dict[str, Any] = {}
        self._readers: EventReaders | None = None
        self._refusals: tuple[type[Exception], ...] = (ValueError,)
        self._vllm: Any = None
        self._llm: Any = None

    async def start(self, files: ModelFiles) -> None:
        """See `Engine`."""
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if not logging.getLogger().isEnabledFor(logging.DEBUG):
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self._vllm = require(
            "vllm",
            "AsyncEngineArgs",
            "SamplingParams",
            "PoolingParams",
            "config.KVEventsConfig",
            "config.KVTransferConfig",
        )
        self._refusals = _refusals()
        arguments = self._arguments | {"model": await in_thread(lambda: local_weights(self._arguments["model"]))}
        if self._wants_events and "kv_events_config" not in arguments:
            from vllm.config import KVEventsConfig

            self._readers = EventReaders(self._ranks)
            arguments["kv_events_config"] = KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=self._readers.endpoint
            )
        if self._transfer is not None:
            from vllm.config import KVTransferConfig

            arguments["kv_transfer_config"] = call_with(KVTransferConfig, self._transfer)
        if uses_nixl(self._transfer):
            require_nixl("vLLM's NixlConnector", " (beside vLLM's CPU build: pip install --no-deps nixl nixl-cu12)")
        with side_channel(self._ranks) if uses_nixl(self._transfer) else contextlib.nullcontext():
            await self._processes.start(lambda: self._load(arguments))
        await self._load_adapters()
        config = self._llm.vllm_config
        # The client adds up the blocks of its data-parallel engines.
        num_blocks = (config.cache_config.num_gpu_blocks or 0) // self._ranks
        self._shape = (num_blocks, config.scheduler_config.max_num_seqs)
        self._defaults = config.model_config.get_diff_sampling_param()
        self.traits = EngineTraits(
            block_size=config.cache_config.block_size,
            context_length=config.model_config.max_model_len,
            num_ranks=self._ranks,
            has_kv_events=self._readers is not None and bool(config.cache_config.enable_prefix_caching),
            guided_decoding=_guides(config),
            has_embeddings="embed" in await self._llm.get_supported_tasks(),
            adapters=tuple(module.name for module in self._modules),
        )

    def publish_to(self, publishers: Sequence[KvEventPublisher]) -> None:
        """See `Engine`."""
        if self._readers is not None and publishers:
            roots = {module.name: module.root for module in self._modules}
            self._readers.start(self.traits.block_size, [publisher.publish for publisher in publishers], roots)

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Answer a request in token ids; leaving early aborts it in the engine."""
        is_first = True
        if self._llm.errored:
            raise CallError("vLLM's engine process died", "draining")
        try:
            if request.get("is_embedding"):
                yield await self._embedding(request)
                return
            async for output in self._llm.generate(
                {"prompt_token_ids": request["token_ids"]},
                self._parameters(request),
                engine_id(request),
                lora_request=self._adapter(request),
                data_parallel_rank=request["dp_rank"] if self._ranks > 1 else None,
            ):
                if self._role != "prefill":
                    yield self._item(request, output, is_first=is_first)
                elif output.finished:
                    yield self._prefilled(output)
                    self._transfers = self._transfers._replace(num_offered=self._transfers.num_offered + 1)
                is_first = False
        except self._refusals as error:
            raise CallError(str(error), "invalid") from error
        except CallError:
            raise
        except Exception as error:
            if self._llm.errored:
                raise CallError("vLLM's engine process died", "lost") from error
            raise

    def _adapter(self, request: dict[str, Any]) -> Any:
        """Return the adapter that a request asks for, in vLLM's words; None if it asks for the model itself.

        Raises:
            CallError: this worker does not have it.
        """
        name = (request.get("cache_scope") or {}).get("lora_name")
        if not name:
            return None
        if name not in self._adapters:
            raise CallError(f"adapter {name!r} is not among lora_modules of this worker", "invalid")
        return self._adapters[name]

    async def _embedding(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the embedding of a prompt, from a model that vLLM runs for that (`--runner pooling`)."""
        prompt, wanted = {"prompt_token_ids": request["token_ids"]}, self._vllm.PoolingParams(task="embed")
        [output] = [output async for output in self._llm.encode(prompt, wanted, engine_id(request))]
        numbers = output.outputs.data.float().tolist()
        return {
            "token_ids": [],
            "embedding": numbers,
            "cached_tokens": output.num_cached_tokens or 0,
            "finish_reason": "stop",
        }

    def load(self, rank: int) -> EngineLoad:
        """See `Engine`."""
        num_blocks, max_num_seqs = self._shape
        stats = self._stats.get(rank)
        transfers = KvTransfers() if rank else self._transfers
        if stats is None:
            return EngineLoad(kv_total_blocks=num_blocks, max_num_seqs=max_num_seqs)
        active = round(stats.kv_cache_usage * num_blocks)
        return EngineLoad(stats.num_running_reqs, stats.num_waiting_reqs, active, num_blocks, max_num_seqs, transfers)

    async def failed(self) -> None:
        """See `Engine`."""
        reading = asyncio.create_task(self._readers.failed()) if self._readers is not None else None
        try:
            while not self._llm.errored:
                await asyncio.sleep(CHECK_S)
                if reading is not None and reading.done():
                    await reading
        finally:
            if reading is not None:
                reading.cancel()
        raise EngineError("vLLM's engine process died (its messages are above)")

    async def released(self) -> None:
        """Wait until no KV is held any more, neither for our requests nor for other engines to read.

        A scheduler reports figures at the end of a request, and with every step while it holds KV: it is stepped with empty
        batches until the KV is read or its lease ends.
        """
        while True:
            await asyncio.sleep(CHECK_S)  # the figures arrive just after the answer
            if self._llm.errored or not any(stats.kv_cache_usage for stats in self._stats.values()):
                return

    async def close(self) -> None:
        """See `Engine`."""
        llm = self._llm
        await self._processes.close(None if llm is None else lambda: llm.shutdown(timeout=CLOSE_TIMEOUT_S))
        if self._readers is not None:
            await self._readers.close()

    async def _load_adapters(self) -> None:
        """Load each adapter once, as vLLM's server does, so that one that cannot be loaded is known before it is asked for."""
        if not self._modules:
            return
        from vllm.lora.request import LoRARequest

        for module in self._modules:
            self._adapters[module.name] = LoRARequest(module.name, module.number, module.path)
            try:
                await self._llm.add_lora(self._adapters[module.name])
            except Exception as error:  # what fails in its process comes as any of several
                raise EngineError(f"vLLM cannot load the adapter {module.name!r}: {one_line(error)}") from error

    def _shown(self) -> dict[str, Any]:
        if not self._wants_events or "kv_events_config" in self._arguments:
            return self._arguments
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:<free port>"}
        return self._arguments | {"kv_events_config": events}

    def _load(self, arguments: dict[str, Any]) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import StatLoggerBase

        latest, adapter = self._stats, self

        class Watcher(StatLoggerBase):  # type: ignore[misc]
            """Keeps the scheduler's latest figures."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                self._index = engine_index

            def record(self, scheduler_stats: Any, iteration_stats: Any, *more: Any, **options: Any) -> None:
                if scheduler_stats is not None:
                    latest[self._index] = scheduler_stats
                    if uses_nixl(adapter._transfer):
                        adapter._transfers = counted(adapter._transfers, scheduler_stats)

            def log_engine_initialized(self) -> None:
                pass

        settings = call_with(self._vllm.AsyncEngineArgs, arguments)
        keep_async_scheduling(settings)
        self._llm = AsyncLLM.from_engine_args(settings, stat_loggers=[Watcher])

    def _item(self, request: dict[str, Any], output: Any, *, is_first: bool) -> Any:
        one = output.outputs[0]
        tokens = list(one.token_ids)
        item: dict[str, Any] = {}
        if is_first:
            item["cached_tokens"] = output.num_cached_tokens or 0
            item["times"] = stage_times(output.metrics, is_decode=self._role == "decode")
            if output.prompt_logprobs:
                found = log_probabilities(request["token_ids"][1:], output.prompt_logprobs[1:])
                item |= {f"prompt_{name}": [None, *values] for name, values in found.items()}
        if one.logprobs is not None:
            item |= log_probabilities(tokens, one.logprobs)
        if one.finish_reason is not None:
            item["finish_reason"] = _finish_reason(one.finish_reason)
        return {"token_ids": tokens} | item if item else tokens

    def _prefilled(self, output: Any) -> dict[str, Any]:
        """Return the last item of a prefill worker; the decode worker sends its one token."""
        assert self._transfer is not None
        return {
            "token_ids": [],
            "finish_reason": _finish_reason(output.outputs[0].finish_reason),
            "cached_tokens": output.num_cached_tokens or 0,
            "kv_transfer_params": hand_off(output.kv_transfer_params, lease_duration_s(self._transfer)),
            "times": stage_times(output.metrics, is_decode=False),
        }

    def _transfer_params(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the parameters of a request for vLLM's connector."""
        params: dict[str, Any] | None = request.get("kv_transfer_params")
        if self._transfer is None:
            return None
        if params is not None and uses_nixl(self._transfer):
            check_types(params)
        return connector_params(params, self._role, lease_duration_s(self._transfer))

    def _parameters(self, request: dict[str, Any]) -> Any:
        params = self._transfer_params(request)
        if self._role == "prefill":
            request = prompt_only(request)
        conditions, options = request["stop_conditions"], request["sampling_options"]
        given = self._defaults | sampling(options, "seed", "logprobs", "prompt_logprobs")
        if bias := options.get("logit_bias"):
            given["logit_bias"] = {int(token): float(value) for token, value in bias.items()}
        given["max_tokens"] = conditions["max_tokens"]
        if (wanted := guide(request, self.traits.guided_decoding, "vLLM")) is not None:
            from vllm.sampling_params import StructuredOutputsParams

            given["structured_outputs"] = StructuredOutputsParams(**{wanted.kind: wanted.value})
        from vllm.sampling_params import RequestOutputKind

        return self._vllm.SamplingParams(
            **given,
            min_tokens=conditions["min_tokens"],
            ignore_eos=conditions["ignore_eos"],
            stop_token_ids=end_tokens(request) or None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=None if params is None else {"kv_transfer_params": dict(params)},
        )


def _refusals() -> tuple[type[Exception], ...]:
    """Return how vLLM says that a request is at fault; older ones have no class of their own for it."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:
        return (ValueError,)
    return ValueError, VLLMClientError


def _guides(config: Any) -> tuple[str, ...]:
    """Return what vLLM's backends can guide answers by: they need the tokenizer."""
    if config.model_config.skip_tokenizer_init:
        return ()
    has_grammars = config.structured_outputs_config.backend in ("auto", "xgrammar", "guidance")
    return CONSTRAINTS if has_grammars else NO_GRAMMAR


def _finish_reason(theirs: str) -> str:
    if theirs in ("abort", "error"):
        raise CallError(f"vLLM aborted the request ({theirs}): perhaps the KV of its prompt did not arrive", "lost")
    return finish_reason(theirs)
