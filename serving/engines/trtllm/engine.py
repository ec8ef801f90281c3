"""TensorRT-LLM, through its LLM API: token ids in and out, KV events by polling. Checked against the source of 1.x, not run here."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from serving.engines.block_hashes import HashTranslator
from serving.engines.guided import choice_regex, guide
from serving.engines.package import call_with, require
from serving.engines.processes import EngineProcesses
from serving.engines.trtllm.roles import context_only, generation_only, hand_off, role_arguments
from serving.model.constraints import CONSTRAINTS
from serving.model.files import ModelFiles, local_weights
from serving.router.events import BlocksEvent, Medium
from serving.runtime.messages import CallError
from serving.runtime.server import GeneratorService
from serving.runtime.stopping import cancel_all
from serving.runtime.threads import in_thread
from serving.worker.config import ModelRunConfig, WorkerConfig, refuse_gpu_choice, required_model
from serving.worker.engine import EngineCall, EngineLoad, EngineTraits
from serving.worker.kv_events import KvEventPublisher
from serving.worker.protocol import end_tokens, finish_reason, log_probabilities, sampling
from serving.worker.registry import ENGINES

log = logging.getLogger(__name__)

MEMORY = ENGINES["trtllm"].memory_argument
CACHE_CONFIG, _, MEMORY_FRACTION = MEMORY.partition(".")
TOKENS_PER_BLOCK = 32
EVENT_BUFFER = 4096
LEVELS: tuple[Medium, ...] = ("GPU", "CPU", "STORAGE")
"""TensorRT-LLM's cache levels, from 0; host memory has `kv_cache_config.host_cache_size` bytes."""

POLL_TIMEOUT_S = 2.0
POLL_GAP_S = 0.01


class TrtLlm:
    """See `serving.worker.engine.Engine`."""

    def __init__(self, worker: WorkerConfig, run: ModelRunConfig, arguments: dict[str, Any]) -> None:
        refuse_gpu_choice("trtllm", run)
        if run.node_rank:
            raise ValueError(
                "out=trtllm: MPI starts the other nodes; run the leader as "
                "mpirun -n <GPUs> trtllm-llmapi-launch dynamo-run ... (or by srun), without --node-rank"
            )
        given: dict[str, Any] = {
            "model": required_model(worker, "trtllm"),
            "tensor_parallel_size": run.tensor_parallel_size,
        }
        if run.num_nodes > 1:
            if run.tensor_parallel_size % run.num_nodes:
                raise ValueError(
                    f"--tensor-parallel-size {run.tensor_parallel_size} is not a multiple of --num-nodes {run.num_nodes}"
                )
            given["gpus_per_node"] = run.tensor_parallel_size // run.num_nodes
        if worker.context_length is not None:
            given["max_seq_len"] = worker.context_length
        self._role = worker.role
        given |= role_arguments(worker.role) | run.extra() | arguments
        cache = given.get(CACHE_CONFIG) or {}
        size = int(cache.get("tokens_per_block") or run.kv_cache_block_size or TOKENS_PER_BLOCK)
        self._has_events = worker.kv_events and cache.get("enable_block_reuse") is not False
        events = {"event_buffer_max_size": EVENT_BUFFER, "enable_block_reuse": True} if self._has_events else {}
        share = {} if run.memory_fraction is None else {MEMORY_FRACTION: run.memory_fraction}
        given[CACHE_CONFIG] = {"tokens_per_block": size} | share | events | cache
        given.setdefault("enable_iter_perf_stats", True)
        # Its grammars need the tokenizer. It has none unless asked for, and how they go through a hand-over was not tried.
        is_guided = given.get("guided_decoding_backend") is not None and worker.role == "aggregated"
        given.setdefault("skip_tokenizer_init", not is_guided)
        is_guided = is_guided and not given["skip_tokenizer_init"]
        self._arguments = given
        self.calls = (EngineCall("tensorrt_llm.LLM", given),)
        self.traits = EngineTraits(
            block_size=size, has_kv_events=self._has_events, guided_decoding=CONSTRAINTS if is_guided else ()
        )
        self.service = GeneratorService(self.generate)
        self._processes = EngineProcesses("TensorRT-LLM", MEMORY)
        self._translator = HashTranslator(size)
        self._window = 0
        self._load = EngineLoad()
        self._num_vocab = 0
        self._polling: list[asyncio.Task[None]] = []
        self._package: Any = None
        self._llm: Any = None

    async def start(self, files: ModelFiles) -> None:
        """See `Engine`."""
        self._package = require("trtllm", "LLM", "SamplingParams")
        self._num_vocab = int(files.json("config.json").get("vocab_size") or 0)
        arguments = self._arguments | {"model": await in_thread(lambda: local_weights(self._arguments["model"]))}
        self._llm = await self._processes.start(lambda: call_with(self._package.LLM, arguments))

    def publish_to(self, publishers: Sequence[KvEventPublisher]) -> None:
        """See `Engine`."""
        self._polling.append(asyncio.create_task(self._poll_load()))
        if publishers:
            self._polling.append(asyncio.create_task(self._poll_events(publishers[0])))

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Answer a request in token ids; leaving early aborts it in the engine."""
        if self._role == "prefill":
            yield await self._prefilled(request)
            return
        params = request.get("kv_transfer_params")
        phase = generation_only(self._package, params) if self._role == "decode" and params else None
        result = self._begin(request, phase, streaming=True)
        wanted = request["sampling_options"].get("logprobs") is not None
        is_first, is_over = True, False
        try:
            async for output in result:
                one = output.outputs[0]
                tokens = list(one.token_ids_diff)
                item: dict[str, Any] = {"token_ids": tokens}
                if is_first:
                    item["cached_tokens"] = getattr(output, "cached_tokens", 0) or 0
                    is_first = False
                if wanted:
                    item |= log_probabilities(tokens, one.logprobs_diff)
                if one.finish_reason is not None:
                    is_over = True
                    item["finish_reason"] = _finish_reason(one.finish_reason)
                yield item
        finally:
            if not is_over:
                result.abort()

    async def _prefilled(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the only item of a prefill worker: token 1 travels with the KV, and the decode worker sends it."""
        conditions = request["stop_conditions"]
        limits = {"max_tokens": 1, "min_tokens": min(conditions["min_tokens"], 1)}
        result = self._begin(
            request | {"stop_conditions": conditions | limits}, context_only(self._package), streaming=False
        )
        try:
            output = await result
        except BaseException:
            result.abort()
            raise
        return {
            "token_ids": [],
            "finish_reason": _finish_reason(output.outputs[0].finish_reason or "length"),
            "cached_tokens": getattr(output, "cached_tokens", 0) or 0,
            "kv_transfer_params": hand_off(output.disaggregated_params),
        }

    def _begin(self, request: dict[str, Any], phase: Any, *, streaming: bool) -> Any:
        try:
            return self._llm.generate_async(
                request["token_ids"],
                sampling_params=self._parameters(request),
                streaming=streaming,
                disaggregated_params=phase,
            )
        except ValueError as error:
            raise CallError(str(error), "invalid") from error

    def load(self, rank: int) -> EngineLoad:
        """See `Engine`."""
        return self._load

    async def failed(self) -> None:
        """See `Engine`."""
        if not self._polling:
            await asyncio.Event().wait()
        done, _ = await asyncio.wait(self._polling, return_when=asyncio.FIRST_COMPLETED)
        await done.pop()

    async def close(self) -> None:
        """See `Engine`."""
        await cancel_all(*self._polling)
        await self._processes.close(None if self._llm is None else self._llm.shutdown)

    async def _poll_events(self, publisher: KvEventPublisher) -> None:
        while True:
            found: list[BlocksEvent] = []
            async for event in self._llm.get_kv_cache_events_async(timeout=POLL_TIMEOUT_S):
                found += self._translate(event)
            if found:
                publisher.publish(found)
            await asyncio.sleep(POLL_GAP_S)

    def _translate(self, event: dict[str, Any]) -> list[BlocksEvent]:
        """Translate an event; skip those of smaller windows, which come from layers that forget early."""
        data, window = event["data"], event.get("window_size") or 0
        if data["type"] == "created":
            self._window = max(self._window, window)
        if window < self._window:
            return []
        match data["type"]:
            case "stored":
                return self._stored(data)
            case "updated" if level := data.get("cache_level"):
                return self._translator.moved(
                    data["block_hash"], LEVELS[level["old_value"]], LEVELS[level["new_value"]]
                )
            case "removed":
                gone = [self._translator.removed(data["block_hashes"], medium=medium) for medium in LEVELS]
                return [removed for removed in gone if removed is not None]
        return []

    def _stored(self, data: dict[str, Any]) -> list[BlocksEvent]:
        # The last block of a sequence may be partly filled; it is stored again once it is full.
        full = [block for block in data["blocks"] if len(block["tokens"]) == self.traits.block_size]
        found: list[BlocksEvent] = []
        parent = data["parent_hash"]
        for level, group in itertools.groupby(full, lambda block: block.get("cache_level") or 0):
            blocks = list(group)
            names = [block["block_hash"] for block in blocks]
            tokens = [token["token_id"] for block in blocks for token in block["tokens"]]
            if stored := self._translator.stored(names, parent, tokens, medium=LEVELS[level]):
                found.append(stored)
            parent = names[-1]
        return found

    async def _poll_load(self) -> None:
        while True:
            async for stats in self._llm.get_stats_async(timeout=POLL_TIMEOUT_S):
                cache = stats.get("kvCacheStats") or {}
                self._load = EngineLoad(
                    num_running=int(stats.get("numActiveRequests") or 0),
                    num_waiting=int(stats.get("numQueuedRequests") or 0),
                    kv_active_blocks=int(cache.get("usedNumBlocks") or 0),
                    kv_total_blocks=int(cache.get("maxNumBlocks") or 0),
                    max_num_seqs=int(stats.get("maxNumActiveRequests") or 0),
                )
            await asyncio.sleep(POLL_GAP_S)

    def _parameters(self, request: dict[str, Any]) -> Any:
        conditions, options = request["stop_conditions"], request["sampling_options"]
        # TensorRT-LLM is greedy by default, but OpenAI's default temperature is 1.
        given = {"temperature": 1.0} | sampling(options, "seed", "logprobs")
        if given.get("top_k", 1) <= 0:
            del given["top_k"]  # all tokens: TensorRT-LLM expects none for that
        if bias := options.get("logit_bias"):
            given["embedding_bias"] = self._bias(bias)
        if (wanted := guide(request, self.traits.guided_decoding, "TensorRT-LLM")) is not None:
            kind, value = wanted if wanted.kind != "choice" else ("regex", choice_regex(wanted.value))
            given["guided_decoding"] = self._package.llmapi.GuidedDecodingParams(**{kind: value})
        ends = end_tokens(request)
        return self._package.SamplingParams(
            max_tokens=conditions["max_tokens"],
            min_tokens=conditions["min_tokens"] or None,
            ignore_eos=conditions["ignore_eos"],
            # Without a tokenizer it needs an end token; -1 means none.
            end_id=ends[0] if ends else -1,
            pad_id=ends[0] if ends else -1,
            stop_token_ids=ends or None,
            detokenize=False,
            **given,
        )

    def _bias(self, bias: dict[str, float]) -> Any:
        import torch

        tensor = torch.zeros(self._num_vocab, dtype=torch.float32)
        for token, value in bias.items():
            if int(token) < self._num_vocab:
                tensor[int(token)] = float(value)
        return tensor


def _finish_reason(reason: str) -> str:
    if reason in ("timeout", "cancelled"):
        raise CallError(f"TensorRT-LLM aborted the request: {reason}", "engine")
    return finish_reason(reason)
