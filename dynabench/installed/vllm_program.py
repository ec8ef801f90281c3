"""A program that the Python of another environment runs: the scheduler of its vLLM, asked over two pipes.

    PYTHON vllm_program.py READ_FD WRITE_FD

A message is its length in four bytes, and MessagePack: `[name, engine, argument]`. Each has one answer of the same form: what is
described in `mocker/installed/scheduler.py`, or `{"error": text}`. The tokens of prompts and answers are made up, because scheduling does not
depend on them; the names of blocks are those that it is given.

It knows nothing of this project, which that environment need not have.
"""

import inspect
import json
import os
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from struct import Struct
from typing import Any

os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"  # names, whole
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import msgspec

NAME = Struct("<QQ")
OWN = 1 << 63  # in the name of a block that no other request has
ANY_TOKEN, LAST_TOKEN = 5, 2
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 64, "torch_dtype": "float32",
}  # fmt: skip
"""A model that is never loaded."""


def known(kind: type, given: dict[str, Any], off: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that this version of vLLM has; the others must be off."""
    names = {field.name for field in fields(kind)}
    for name in given.keys() - names:
        if given[name] != off.get(name):
            raise ValueError(f"{name} is {given[name]}, which this vLLM does not have")
    return {name: value for name, value in given.items() if name in names}


OFF = {
    "max_num_active_seqs": None,
    "watermark": 0.0,
    "scheduler_reserve_full_isl": True,
    "prefill_schedule_interval": 1,
}
"""Settings that older versions lack, at the value that is let pass: the one with which they do nothing. Only
`scheduler_reserve_full_isl` is let pass while it is on, because that is our default. A version without it never reserves; an
audit then names it as the reason."""


def vllm_settings(given: dict[str, Any]) -> Any:
    """Return vLLM's settings."""
    from vllm.config import CacheConfig, DeviceConfig, LoRAConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.config.kv_events import KVEventsConfig

    longest, size, budget = given["max_model_len"], given["block_size"], given["max_num_batched_tokens"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": longest}))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=longest)
    scheduling = {
        "max_num_seqs": given["max_num_seqs"],
        "max_num_active_seqs": given["max_num_active_seqs"],
        "max_num_batched_tokens": budget,
        "policy": given["scheduling_policy"],
        "long_prefill_token_threshold": given["long_prefill_token_threshold"],
        "watermark": given["watermark"],
        "scheduler_reserve_full_isl": given["scheduler_reserve_full_isl"],
        "prefill_schedule_interval": given["prefill_schedule_interval"],
    }
    settings = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_model_len=longest, is_encoder_decoder=False, **known(SchedulerConfig, scheduling, OFF)
        ),
        cache_config=CacheConfig(block_size=size, enable_prefix_caching=given["enable_prefix_caching"]),
        device_config=DeviceConfig("cpu"),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=given["kv_events"], publisher="null"),
    )
    # What the CPU's platform corrects for its kernels' sake, which take no part here.
    settings.scheduler_config.async_scheduling = given["async_scheduling"]
    settings.scheduler_config.enable_chunked_prefill = given["enable_chunked_prefill"]
    settings.scheduler_config.max_num_batched_tokens = budget
    settings.cache_config.block_size = size
    settings.cache_config.enable_prefix_caching = given["enable_prefix_caching"]
    settings.cache_config.num_gpu_blocks = given["num_gpu_blocks"]
    if given["num_speculative_tokens"]:
        from vllm.config import SpeculativeConfig

        settings.speculative_config = SpeculativeConfig(
            method="ngram", num_speculative_tokens=given["num_speculative_tokens"], prompt_lookup_max=2
        )
        settings.speculative_config.method = given["speculative_method"]  # only now: it would load a drafter
    if given["max_loras"]:
        settings.lora_config = LoRAConfig(max_loras=given["max_loras"])
    return settings


def scheduler_of(settings: Any, given: dict[str, Any]) -> Any:
    """Return vLLM's scheduler, for layers that keep everything."""
    import torch
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    size = given["block_size"]
    attention = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    arguments = {
        "vllm_config": settings,
        "kv_cache_config": KVCacheConfig(given["num_gpu_blocks"], [], [KVCacheGroupSpec(["layer"], attention)]),
        "block_size": size,
        "hash_block_size": size,
        "log_stats": False,
        "structured_output_manager": StructuredOutputManager(settings),
    }
    kind = AsyncScheduler if given["async_scheduling"] else Scheduler
    known_arguments = inspect.signature(Scheduler.__init__).parameters
    scheduler = kind(**{name: value for name, value in arguments.items() if name in known_arguments})
    scheduler.use_v2_model_runner = False
    adapt_threshold(scheduler, is_adaptive=given["long_prefill_token_threshold_adaptive"])
    return scheduler


def adapt_threshold(scheduler: Any, *, is_adaptive: bool) -> None:
    """Turn the adaptive threshold of long prefills on or off; a version that has none can only leave it off."""
    if hasattr(scheduler, "adaptive_long_prefill_threshold"):
        scheduler.adaptive_long_prefill_threshold = is_adaptive
    elif is_adaptive:
        raise ValueError("long_prefill_token_threshold_adaptive is on, which this vLLM does not have")


class Engine:
    """One engine's scheduler."""

    def __init__(self, given: dict[str, Any], settings: Any) -> None:
        self._size = given["block_size"]
        self._is_cached = given["enable_prefix_caching"]
        self._ahead = getattr(settings, "num_hash_lookahead_tokens", 0)
        self._proposes = given["num_speculative_tokens"] if not given["async_scheduling"] else 0
        self._scheduler = scheduler_of(settings, given)
        self._requests: dict[str, Any] = {}
        self._stops: dict[str, int | None] = {}
        self._flights: deque[tuple[Any, list[str]]] = deque()  # a batch, and the requests that it brings a token
        self._published: list[Any] = []
        if given["kv_events"]:
            self._scheduler.kv_event_publisher.publish = lambda batch: self._published.extend(batch.events)

    def add(self, asked: list[Any]) -> int:
        """Queue a request."""
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        number, num_prompt, max_tokens, stop_after, priority, arrival, adapter, names, num_named, per_name, _ = asked
        size, ahead = self._size, self._ahead

        def name(block: int) -> bytes:
            if block < num_named:
                return NAME.pack(names[block // per_name], block % per_name)
            return NAME.pack(OWN + number, block)

        def new_names(request: Any) -> list[bytes]:
            stop = max(request.num_tokens - ahead, 0) // size
            return [name(block) for block in range(len(request.block_hashes), stop)]

        parameters = SamplingParams(max_tokens=max_tokens, stop_token_ids=[LAST_TOKEN], temperature=0)
        request = Request(
            str(number),
            [ANY_TOKEN] * num_prompt,
            parameters,
            None,
            arrival_time=arrival,
            priority=priority,
            lora_request=LoRARequest(f"adapter {adapter}", adapter, "none") if adapter else None,
            block_hasher=new_names if self._is_cached else None,
        )
        self._requests[str(number)], self._stops[str(number)] = request, stop_after
        self._scheduler.add_request(request)
        return int(request.max_tokens)

    def abort(self, number: int) -> int:
        """Remove a request."""
        from vllm.v1.request import RequestStatus

        self._scheduler.finish_requests(str(number), RequestStatus.FINISHED_ABORTED)
        self._forget(str(number))
        return self._num_free()

    def schedule(self, _: None) -> list[Any]:
        """Close a batch."""
        scheduler, requests = self._scheduler, self._requests
        if not scheduler.has_requests():
            return [[], [], [], [], self._num_free(), False]
        output = scheduler.schedule()
        counts, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        tokens = [(int(id), count, requests[id].is_prefill_chunk) for id, count in counts.items()]
        started = [(int(one.req_id), one.num_computed_tokens) for one in output.scheduled_new_reqs]
        if cached.resumed_req_ids:
            found = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            started += [(int(id), count) for id, count in found if id in cached.resumed_req_ids]
        preempted = [int(id) for id in output.preempted_req_ids or ()]
        drafts = [(int(id), len(each)) for id, each in output.scheduled_spec_decode_tokens.items()]
        is_closed = bool(scheduler.running or preempted or counts)
        if is_closed:
            self._flights.append((output, [id for id in counts if not requests[id].is_prefill_chunk]))
        else:
            self._end(output, [], {})
        return [tokens, started, preempted, drafts, self._num_free(), is_closed]

    def update(self, accepted: list[list[int]]) -> list[Any]:
        """End the oldest batch."""
        output, sampling = self._flights.popleft()
        outputs = self._end(output, sampling, {str(number): count for number, count in accepted})
        tokens = [(int(one.request_id), len(one.new_token_ids)) for one in outputs if one.new_token_ids]
        finished = [int(one.request_id) for one in outputs if one.finish_reason is not None]
        if self._proposes:
            self._propose(sampling)
        for number in finished:
            self._forget(str(number))
        events = [event for each in self._published for event in described(each)]
        self._published.clear()
        return [tokens, finished, events, self._num_free()]

    def _end(self, output: Any, sampling: list[str], accepted: dict[str, int]) -> list[Any]:
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(output.num_scheduled_tokens)
        sampled = {id: self._answer(id, 1 + accepted.get(id, 0)) for id in sampling if id in self._requests}
        made = {
            "req_ids": ids,
            "req_id_to_index": {id: place for place, id in enumerate(ids)},
            "sampled_token_ids": [sampled.get(id, []) for id in ids],
            "logprobs": None,
            "prompt_logprobs_dict": {},
            "pooler_output": [],
        }
        return [
            one
            for each in self._scheduler.update_from_output(output, ModelRunnerOutput(**made)).values()
            for one in each.outputs
        ]

    def _answer(self, id: str, count: int) -> list[int]:
        """Return the next tokens of an answer."""
        place, stop = self._requests[id].num_output_tokens, self._stops[id]
        return [LAST_TOKEN if each == stop else ANY_TOKEN for each in range(place + 1, place + count + 1)]

    def _propose(self, sampling: list[str]) -> None:
        from vllm.v1.outputs import DraftTokenIds

        ids = [id for id in sampling if id in self._requests]
        self._scheduler.update_draft_token_ids(DraftTokenIds(ids, [[ANY_TOKEN] * self._proposes for _ in ids]))

    def reset(self, _: None) -> bool:
        """Forget all cached blocks, unless any is in use."""
        return bool(self._scheduler.reset_prefix_cache())

    def _forget(self, id: str) -> None:
        self._requests.pop(id, None)
        self._stops.pop(id, None)

    def _num_free(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def described(event: Any) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return an event, without the blocks that only one request has."""
    kind = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}[type(event).__name__]
    names = [NAME.unpack(name) for name in getattr(event, "block_hashes", ())]
    blocks = [(name, place) for name, place in names if name < OWN]
    return [(kind, blocks)] if blocks or kind == "cleared" else []


class Schedulers:
    """All engines."""

    def __init__(self) -> None:
        self._engines: list[Engine] = []
        self._settings: dict[str, Any] = {}  # equal engines share them: reading a model's takes a while

    def __call__(self, name: str, engine: int, argument: Any) -> Any:
        """Answer a message."""
        if name == "version":
            return version()
        if name == "forget":
            self._engines.clear()
            return True
        if name == "new":
            key = json.dumps(argument, sort_keys=True)
            self._settings[key] = self._settings.get(key) or vllm_settings(argument)
            self._engines.append(Engine(argument, self._settings[key]))
            return len(self._engines) - 1
        return getattr(self._engines[engine], name)(argument)


def serve(read_fd: int, write_fd: int, answered: Callable[[str, int, Any], Any]) -> None:
    """Answer until the pipe is closed."""
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode
    with os.fdopen(read_fd, "rb") as asked, os.fdopen(write_fd, "wb") as answers:
        while len(head := asked.read(4)) == 4:
            answer: Any
            try:
                answer = answered(*decode(asked.read(int.from_bytes(head, "little"))))
            except Exception as error:  # reported to who asked
                import traceback

                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            frame = encode(answer)
            answers.write(len(frame).to_bytes(4, "little") + frame)
            answers.flush()


def version() -> list[str]:
    """Return the release of vLLM, and a digest of the files that schedule."""
    from hashlib import sha256

    import vllm

    package = Path(vllm.__file__).parent
    patterns = (
        "v1/core/**/*.py",
        "v1/request.py",
        "v1/kv_cache_interface.py",
        "config/scheduler.py",
        "config/cache.py",
    )
    files = sorted([file for pattern in patterns for file in package.glob(pattern)])
    digest = sha256()
    for file in files:
        digest.update(file.read_bytes())
    return [vllm.__version__, digest.hexdigest()[:16]]


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    serve(int(sys.argv[1]), int(sys.argv[2]), Schedulers())
