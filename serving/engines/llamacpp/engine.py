"""llama.cpp, through llama-cpp-python: GGUF files, several requests in one batch."""

import asyncio
import ctypes
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from foundation.processes import num_cores
from serving.engines.guided import guide
from serving.engines.llamacpp.batch import LlamaBatcher, LlamaJob
from serving.engines.llamacpp.grammar import gbnf
from serving.engines.package import require
from serving.model.constraints import CONSTRAINTS
from serving.model.files import ModelFiles, local_weights
from serving.router.events import BlocksEvent
from serving.runtime.messages import CallError
from serving.runtime.server import GeneratorService
from serving.runtime.threads import in_thread, post
from serving.worker.config import ModelRunConfig, WorkerConfig, refuse_nodes, required_model
from serving.worker.engine import EngineCall, EngineError, EngineLoad, EngineTraits
from serving.worker.kv_events import KvEventPublisher
from serving.worker.protocol import end_tokens

DEFAULT_CONTEXT = 8192
"""Tokens of a slot without --context-length: models allow for more than most hosts have memory for."""

DEFAULT_SLOTS = 4
LOG_LEVEL_ERROR = 4
MODEL_ARGUMENTS = frozenset({"n_gpu_layers", "split_mode", "main_gpu", "use_mmap", "use_mlock", "check_tensors"})


class LlamaCpp:
    """See `serving.worker.engine.Engine`."""

    def __init__(self, worker: WorkerConfig, run: ModelRunConfig, arguments: dict[str, Any]) -> None:
        refuse_nodes("llamacpp", run, "llama.cpp uses all the GPUs it sees (CUDA_VISIBLE_DEVICES)")
        path = required_model(worker, "llamacpp")
        if not path.endswith(".gguf"):
            raise ValueError(f"out=llamacpp needs a GGUF file, not {path}")
        given = {"n_parallel": DEFAULT_SLOTS, "n_gpu_layers": -1} | run.extra() | arguments
        self._slots = int(given.pop("n_parallel"))
        self._context_length = worker.context_length
        model = {name: given.pop(name) for name in sorted(MODEL_ARGUMENTS & given.keys())}
        threads = num_cores()
        context = {
            "n_ctx": self._slots * (worker.context_length or DEFAULT_CONTEXT),
            "n_seq_max": self._slots,
            "n_threads": threads,
            "n_threads_batch": threads,
        } | given
        self._model_arguments, self._context_arguments = model, context
        self._path = path
        self.calls = (
            EngineCall("llama_cpp.llama_model_load_from_file", {"path_model": path} | model),
            EngineCall("llama_cpp.llama_init_from_model", context),
        )
        self.traits = EngineTraits(block_size=run.kv_cache_block_size or 16, has_kv_events=True)
        self.service = GeneratorService(self.generate)
        self._last_error = ""
        self._publisher: KvEventPublisher | None = None
        self._batcher: LlamaBatcher | None = None
        self._llama: Any = None
        self._model: Any = None
        self._context: Any = None

    async def start(self, files: ModelFiles) -> None:
        """See `Engine`."""
        llama = self._llama = require("llamacpp", "llama_model_load_from_file", "llama_free")
        own = files.context_length
        length = min(self._context_length or min(own, DEFAULT_CONTEXT), own)
        self._context_arguments["n_ctx"] = self._slots * length
        await in_thread(self._load)
        loop = asyncio.get_running_loop()
        size = self.traits.block_size
        vocab = llama.llama_model_get_vocab(self._model)
        # Once an answer is complete, a grammar lets nothing follow but such a token.
        has_end = llama.llama_vocab_eos(vocab) >= 0 or llama.llama_vocab_eot(vocab) >= 0
        self.traits = EngineTraits(
            block_size=size,
            context_length=length,
            has_kv_events=True,
            guided_decoding=CONSTRAINTS if has_end else (),
        )
        self._batcher = LlamaBatcher(
            llama,
            self._context,
            num_slots=self._slots,
            block_size=size,
            post=partial(post, loop, self._deliver),
        )

    def publish_to(self, publishers: Sequence[KvEventPublisher]) -> None:
        """See `Engine`."""
        self._publisher = publishers[0] if publishers else None

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Answer a request in token ids."""
        assert self._batcher is not None
        conditions, tokens = request["stop_conditions"], request["token_ids"]
        limit = (self.traits.context_length or 0) - len(tokens)
        if limit < 1:
            raise CallError(
                f"{len(tokens)} tokens do not fit in the context of {self.traits.context_length}", "invalid"
            )
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        job = LlamaJob(
            tokens,
            max_tokens=min(conditions["max_tokens"] or limit, limit),
            min_tokens=conditions["min_tokens"],
            ends=frozenset(end_tokens(request)),
            sampling=request["sampling_options"],
            send=inbox.put_nowait,
            grammar=await in_thread(lambda: self._grammar(request)),
        )
        self._batcher.submit(job)
        try:
            while True:
                item = await inbox.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if isinstance(item, dict) and "finish_reason" in item:
                    return
        finally:
            self._batcher.cancel(job)

    def load(self, rank: int) -> EngineLoad:
        """See `Engine`."""
        batcher = self._batcher
        assert batcher is not None
        total = self._slots * ((self.traits.context_length or 0) // self.traits.block_size)
        return EngineLoad(batcher.num_running, batcher.num_waiting, batcher.num_active_blocks, total, self._slots)

    async def failed(self) -> None:
        """See `Engine`."""
        assert self._batcher is not None
        error = await asyncio.wrap_future(self._batcher.failure)
        raise EngineError(f"llama.cpp's thread failed: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """See `Engine`."""
        if self._batcher is not None:
            await in_thread(self._batcher.close)
        if self._context is not None:
            self._llama.llama_free(self._context)
        if self._model is not None:
            self._llama.llama_model_free(self._model)
        self._batcher = self._context = self._model = None

    def _grammar(self, request: dict[str, Any]) -> str:
        wanted = guide(request, self.traits.guided_decoding, "llama.cpp")
        if wanted is None:
            return ""
        if request["stop_conditions"]["min_tokens"]:
            raise CallError(
                "llama.cpp does not support min_tokens for an answer that must look a certain way", "invalid"
            )
        try:
            return gbnf(wanted)
        except ValueError as error:
            raise CallError(f"{wanted.kind}: {error}", "invalid") from error

    def _load(self) -> None:
        llama = self._llama
        self._log = llama.llama_log_callback(self._on_log)  # kept here because llama.cpp does not keep it
        llama.llama_log_set(self._log, ctypes.c_void_p(0))
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(
            local_weights(self._path).encode(),
            _fill(llama.llama_model_default_params(), self._model_arguments),
        )
        if not self._model:
            raise EngineError(f"llama.cpp cannot load {self._path}: {self._last_error or 'it gives no reason'}")
        self._context = llama.llama_init_from_model(
            self._model, _fill(llama.llama_context_default_params(), self._context_arguments)
        )
        if not self._context:
            wanted = self._context_arguments["n_ctx"]
            raise EngineError(
                f"llama.cpp has no memory for a KV cache of {wanted} tokens "
                f"({self._slots} requests at a time): pass a smaller --context-length ({self._last_error})"
            )

    def _on_log(self, level: int, text: bytes, data: Any) -> None:
        """Keep llama.cpp's last error; the rest does not belong on the user's terminal."""
        if level == LOG_LEVEL_ERROR:
            self._last_error = text.decode(errors="replace").strip()

    def _deliver(self, items: list[tuple[LlamaJob, Any]], events: list[BlocksEvent]) -> None:
        for job, item in items:
            job.send(item)
        if events and self._publisher is not None:
            self._publisher.publish(events)


def _fill(parameters: Any, values: dict[str, Any]) -> Any:
    names = {field[0] for field in parameters._fields_}
    if unknown := sorted(values.keys() - names):
        raise EngineError(f"llama.cpp has no argument {', '.join(unknown)}; it has {', '.join(sorted(names))}")
    for name, value in values.items():
        setattr(parameters, name, value)
    return parameters
