"""SGLang, through its offline `Engine`: token ids in and out, KV events over ZeroMQ. 0.5.23 ran here on a CPU, as one worker."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from serving.engines.event_readers import EventReaders
from serving.engines.guided import Guide, choice_regex, guide
from serving.engines.package import call_with, require, require_nixl
from serving.engines.processes import EngineProcesses
from serving.engines.sglang.roles import PORT, meeting_host, role_arguments, room
from serving.engines.side_channel import LOOPBACK, PortReservation, defaults, ucx_at
from serving.model.card import Bootstrap
from serving.model.constraints import CONSTRAINTS, NO_GRAMMAR
from serving.model.files import ModelFiles, local_weights
from serving.runtime.messages import CallError
from serving.runtime.server import GeneratorService
from serving.runtime.threads import in_thread
from serving.worker.config import ModelRunConfig, WorkerConfig, required_model
from serving.worker.engine import EngineCall, EngineLoad, EngineTraits
from serving.worker.kv_events import KvEventPublisher
from serving.worker.protocol import end_tokens, engine_id, finish_reason, sampling
from serving.worker.registry import ENGINES

MEMORY = ENGINES["sglang"].memory_argument
PAGE_SIZE = 16
"""SGLang's default is one token, which would make every token a KV event."""

GUIDES = {"xgrammar": CONSTRAINTS, "llguidance": NO_GRAMMAR, "outlines": NO_GRAMMAR}
"""What SGLang's grammar backends can guide answers by; the last two have no EBNF."""

DEFAULT_GRAMMARS = "xgrammar"

BAD_REQUEST = 400
DEFAULT_PORT = 8998
"""Port of SGLang's bootstrap server."""


class SgLang:
    """See `serving.worker.engine.Engine`."""

    def __init__(self, worker: WorkerConfig, run: ModelRunConfig, arguments: dict[str, Any]) -> None:
        given: dict[str, Any] = {
            "model_path": required_model(worker, "sglang"),
            "incremental_streaming_output": True,
            "page_size": run.kv_cache_block_size or PAGE_SIZE,
        }
        if worker.context_length is not None:
            given["context_length"] = worker.context_length
        if run.tensor_parallel_size > 1:
            given["tp_size"] = run.tensor_parallel_size
        if run.memory_fraction is not None:
            given[MEMORY] = run.memory_fraction
        if run.base_gpu_id:
            given["base_gpu_id"] = run.base_gpu_id
        if run.num_nodes > 1:
            given |= {"nnodes": run.num_nodes, "node_rank": run.node_rank, "dist_init_addr": run.leader_addr}
        self._role = worker.role
        self._arguments = given | role_arguments(worker.role) | run.extra() | arguments
        self._is_follower = run.node_rank > 0
        self._host = LOOPBACK if worker.role == "aggregated" else meeting_host(self._arguments)
        # Several nodes need the same port, so it is the user's choice or SGLang's default.
        self._chooses_port = worker.role == "prefill" and run.num_nodes == 1 and PORT not in self._arguments
        self._ranks = int(self._arguments.get("dp_size") or 1)
        has_cache = not self._arguments.get("disable_radix_cache")
        if worker.role == "decode":
            has_cache = bool(self._arguments.get("disaggregation_decode_enable_radix_cache"))
        self._has_events = worker.kv_events and has_cache and not self._is_follower
        shown = self._arguments | self._events("tcp://127.0.0.1:<free port>")
        if self._chooses_port:
            shown |= {PORT: "<free port>"}
        self.calls = (EngineCall("sglang.Engine", shown),)
        self.traits = EngineTraits(
            block_size=int(self._arguments["page_size"]), num_ranks=self._ranks, has_kv_events=self._has_events
        )
        self.service = GeneratorService(self.generate)
        self._processes = EngineProcesses("SGLang", MEMORY)
        self._running = [0] * self._ranks
        self._readers: EventReaders | None = None
        self._engine: Any = None

    async def start(self, files: ModelFiles) -> None:
        """See `Engine`; on a node that follows another, this returns only when that one ends."""
        package = require("sglang", "Engine")
        arguments = self._arguments | {
            "model_path": await in_thread(lambda: local_weights(self._arguments["model_path"]))
        }
        if self._has_events and "kv_events_config" not in arguments:
            self._readers = EventReaders(self._ranks)
            arguments |= self._events(self._readers.endpoint)
        if self._role == "aggregated":
            self._engine = await self._processes.start(lambda: call_with(package.Engine, arguments))
        else:
            await self._start_apart(package, arguments)
        self.traits = dataclasses.replace(self.traits, guided_decoding=_guides(self._engine.server_args))
        # Its first event, that its cache is empty, is sent before it is connected. Ranks on other nodes never are.
        if self._readers is not None and int(arguments.get("nnodes") or 1) == 1:
            await self._readers.connected()

    def publish_to(self, publishers: Sequence[KvEventPublisher]) -> None:
        """See `Engine`."""
        if self._readers is not None and publishers:
            self._readers.start(self.traits.block_size, [publisher.publish for publisher in publishers])

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Answer a request in token ids; leaving early aborts it in the engine."""
        self._check_seed(request["sampling_options"])
        meeting = room(request, self._role)
        id = engine_id(request)
        rank, wanted = request["dp_rank"], request["sampling_options"].get("logprobs")
        is_first, is_over = True, False
        self._running[rank] += 1
        try:
            outputs = await self._engine.async_generate(
                input_ids=request["token_ids"],
                sampling_params=_parameters(request) | _guided(guide(request, self.traits.guided_decoding, "SGLang")),
                stream=True,
                rid=id,
                return_logprob=wanted is not None,
                top_logprobs_num=wanted or 0,
                routed_dp_rank=rank if self._ranks > 1 else None,
                **meeting,
            )
            async for output in outputs:
                facts = output["meta_info"]
                # A prefill worker's one token travels with the KV; the decode worker sends it.
                tokens = [] if self._role == "prefill" else list(output["output_ids"])
                item: dict[str, Any] = {"token_ids": tokens}
                if is_first or self._role == "prefill":
                    item["cached_tokens"] = facts.get("cached_tokens", 0)
                    is_first = False
                if wanted is not None and self._role != "prefill":
                    item |= _logprobs(facts)
                if (reason := facts.get("finish_reason")) is not None:
                    is_over = True
                    item["finish_reason"] = self._finish_reason(reason)
                if is_over or self._role != "prefill":
                    yield item
        except ValueError as error:
            raise CallError(str(error), "invalid") from error
        finally:
            self._running[rank] -= 1
            if not is_over:
                self._engine.tokenizer_manager.abort_request(rid=id)

    def load(self, rank: int) -> EngineLoad:
        """See `Engine`; SGLang reports no more to the offline engine than we count ourselves."""
        return EngineLoad(num_running=self._running[rank])

    async def failed(self) -> None:
        """See `Engine`."""
        if self._readers is not None:
            await self._readers.failed()
        await asyncio.Event().wait()

    async def close(self) -> None:
        """See `Engine`."""
        await self._processes.close(None if self._engine is None else self._engine.shutdown)
        if self._readers is not None:
            await self._readers.close()

    async def _start_apart(self, package: Any, arguments: dict[str, Any]) -> None:
        """Start a prefill or decode worker's engine."""
        if arguments["disaggregation_transfer_backend"] == "nixl":
            require_nixl("SGLang's transfer backend nixl")
        port = PortReservation(self._host) if self._chooses_port else None
        # With several nodes, each has its own address, which SGLang finds itself.
        own = {} if "dist_init_addr" in arguments else {"SGLANG_HOST_IP": self._host} | ucx_at(self._host)
        with port or contextlib.nullcontext(), defaults(own):
            if port is not None:
                arguments = arguments | {PORT: port.first}
            self._engine = await self._processes.start(lambda: call_with(package.Engine, arguments))
        if self._role == "prefill":
            params = {"bootstrap_host": self._host, "bootstrap_port": arguments.get(PORT, DEFAULT_PORT)}
            self.traits = dataclasses.replace(self.traits, bootstrap=Bootstrap(params, is_needed=True))

    def _check_seed(self, options: dict[str, Any]) -> None:
        """Refuse a seed that SGLang would ignore."""
        has_effect = options.get("temperature") == 0 or self._arguments.get("enable_deterministic_inference")
        if options.get("seed") is not None and not has_effect:
            raise CallError(
                f"seed is {options['seed']}; expected none, or temperature 0: SGLang heeds seeds only with "
                "--enable-deterministic-inference",
                "invalid",
            )

    def _finish_reason(self, reason: dict[str, Any]) -> str:
        if reason.get("type") != "abort":
            return finish_reason(str(reason.get("type")))
        message = f"SGLang aborted the request: {reason.get('message', 'it gives no reason')}"
        if reason.get("status_code") == BAD_REQUEST:
            raise CallError(message, "invalid")
        # The other worker may be at fault, so another pair may do better.
        raise CallError(message, "engine" if self._role == "aggregated" else "lost")

    def _events(self, endpoint: str) -> dict[str, Any]:
        if not self._has_events or "kv_events_config" in self._arguments:
            return {}
        return {"kv_events_config": json.dumps({"publisher": "zmq", "endpoint": endpoint})}


def _guides(server: Any) -> tuple[str, ...]:
    """Return what it can guide answers by: it needs the tokenizer."""
    return () if server.skip_tokenizer_init else GUIDES.get(server.grammar_backend or DEFAULT_GRAMMARS, ())


def _guided(wanted: Guide | None) -> dict[str, Any]:
    """Return what an answer must look like, as sampling parameters."""
    match wanted:
        case None:
            return {}
        case ("json", schema):
            return {"json_schema": json.dumps(schema)}
        case ("choice", texts):
            return {"regex": choice_regex(texts)}
        case ("regex", pattern):
            return {"regex": pattern}
        case (_, grammar):
            return {"ebnf": grammar}


def _parameters(request: dict[str, Any]) -> dict[str, Any]:
    conditions, options = request["stop_conditions"], request["sampling_options"]
    given = sampling(options)
    if options.get("seed") is not None:
        given["sampling_seed"] = options["seed"]
    if bias := options.get("logit_bias"):
        given["logit_bias"] = {str(token): float(value) for token, value in bias.items()}
    if ends := end_tokens(request):
        given["stop_token_ids"] = ends
    return given | {
        "max_new_tokens": conditions["max_tokens"],
        "min_new_tokens": conditions["min_tokens"],
        "ignore_eos": conditions["ignore_eos"],
    }


def _logprobs(facts: dict[str, Any]) -> dict[str, Any]:
    chosen, tops = facts.get("output_token_logprobs") or [], facts.get("output_top_logprobs") or []
    found: dict[str, Any] = {"log_probs": [entry[0] for entry in chosen]}
    if tops:
        found["top_logprobs"] = [[[entry[1], entry[0]] for entry in top or []] for top in tops]
    return found
