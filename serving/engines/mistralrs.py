"""mistral.rs, through its Python package: Hugging Face folders and GGUF files.

The package reads and returns text. A prompt is passed as the text of its tokens, including special ones, through a chat
template that adds nothing. Seeds are not passed on: the package has one for the process, not one for each request.
"""

import asyncio
import json
import logging
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from serving.engines.guided import choice_regex, guide
from serving.engines.package import require
from serving.model.constraints import NO_GRAMMAR
from serving.model.files import ModelFiles, local_weights
from serving.model.tokenizer import Tokenizer, load_tokenizer
from serving.runtime.messages import CallError
from serving.runtime.server import GeneratorService
from serving.runtime.threads import in_thread, post
from serving.worker.config import ModelRunConfig, WorkerConfig, refuse_nodes, required_model
from serving.worker.engine import EngineCall, EngineError, EngineLoad, EngineTraits
from serving.worker.kv_events import KvEventPublisher
from serving.worker.protocol import finish_reason, sampling

log = logging.getLogger(__name__)

MAX_SEQS = 32

RAW_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class MistralRs:
    """See `serving.worker.engine.Engine`."""

    def __init__(self, worker: WorkerConfig, run: ModelRunConfig, arguments: dict[str, Any]) -> None:
        refuse_nodes("mistralrs", run, "mistral.rs uses all the GPUs it sees (CUDA_VISIBLE_DEVICES)")
        path = required_model(worker, "mistralrs")
        if path.endswith(".gguf"):
            file = Path(path).expanduser()
            which: dict[str, Any] = {"quantized_model_id": str(file.parent), "quantized_filename": file.name}
            if worker.model_config:
                which["tok_model_id"] = worker.model_config
        else:
            which = {"model_id": path}
        given = {"max_seqs": MAX_SEQS} | run.extra() | arguments
        if run.kv_cache_block_size is not None:
            given.setdefault("pa_blk_size", run.kv_cache_block_size)
        which |= {name: given.pop(name) for name in ("dtype", "tok_model_id", "arch") if name in given}
        self._kind, self._which, self._arguments = "GGUF" if "quantized_filename" in which else "Plain", which, given
        self.calls = (EngineCall(f"mistralrs.Which.{self._kind}", which), EngineCall("mistralrs.Runner", given))
        self.traits = EngineTraits(
            block_size=given.get("pa_blk_size", 16), context_length=worker.context_length, guided_decoding=NO_GRAMMAR
        )
        self.service = GeneratorService(self.generate)
        self._max_seqs = int(given["max_seqs"])
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(self._max_seqs, "mistralrs")
        self._package: Any = None
        self._runner: Any = None
        self._tokenizer: Tokenizer

    async def start(self, files: ModelFiles) -> None:
        """See `Engine`."""
        os.environ.setdefault("RUST_LOG", "info" if log.isEnabledFor(logging.DEBUG) else "warn")
        self._package = require("mistralrs", "Runner", "Which", "ChatCompletionRequest")
        self._tokenizer = load_tokenizer(files)
        await in_thread(self._load)

    def publish_to(self, publishers: Sequence[KvEventPublisher]) -> None:
        """See `Engine`; mistral.rs reports no KV events."""

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Answer a request in token ids."""
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        stopped = threading.Event()
        work = partial(self._stream, self._request(request), partial(post, loop, inbox.put_nowait), stopped)
        reading = loop.run_in_executor(self._threads, work)
        try:
            while (item := await inbox.get()) is not None:
                if isinstance(item, BaseException):
                    raise CallError(str(item), "invalid" if isinstance(item, ValueError) else "engine") from item
                yield item
        finally:
            stopped.set()
            reading.cancel()

    def load(self, rank: int) -> EngineLoad:
        """See `Engine`."""
        count = self.service.num_running
        return EngineLoad(min(count, self._max_seqs), max(count - self._max_seqs, 0), max_num_seqs=self._max_seqs)

    async def failed(self) -> None:
        """See `Engine`."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """See `Engine`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._runner = None

    def _load(self) -> None:
        package, which = self._package, dict(self._which)
        if "model_id" in which:
            which["model_id"] = local_weights(which["model_id"])
        for name, kind in (("dtype", "ModelDType"), ("arch", "Architecture")):
            if name in which:
                which[name] = _choice(getattr(package, kind), name, which[name])
        with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
            template.write(RAW_TEMPLATE)
            template.flush()
            try:
                chosen = getattr(package.Which, self._kind)(**which)
                self._runner = package.Runner(which=chosen, jinja_explicit=template.name, **self._arguments)
            except (TypeError, ValueError, RuntimeError) as error:
                raise EngineError(f"mistral.rs cannot load the model: {str(error).splitlines()[0]}") from error

    def _request(self, request: dict[str, Any]) -> Any:
        conditions, options = request["stop_conditions"], request["sampling_options"]
        if conditions["min_tokens"]:
            raise CallError("mistral.rs does not support min_tokens", "invalid")
        if options.get("seed") is not None and options.get("temperature") != 0:
            raise CallError(
                f"seed is {options['seed']}; expected none, or temperature 0: mistral.rs has one seed for all requests, "
                "which its worker is started with (-- --seed N, on a GPU only)",
                "invalid",
            )
        given = sampling(options)
        if bias := options.get("logit_bias"):
            given["logit_bias"] = {int(token): float(value) for token, value in bias.items()}
        if (logprobs := options.get("logprobs")) is not None:
            given |= {"logprobs": True, "top_logprobs": logprobs}
        given |= _grammar(request)
        text = self._tokenizer.decode(request["token_ids"])
        return self._package.ChatCompletionRequest(
            model="default",
            messages=[{"role": "user", "content": text}],
            max_tokens=conditions["max_tokens"],
            ignore_eos=conditions["ignore_eos"],
            stream=True,
            **given,
        )

    def _stream(self, request: Any, push: Any, stopped: threading.Event) -> None:
        """Run one request, in a thread of the pool: the package's iterator waits without the interpreter's lock."""
        try:
            if stopped.is_set():
                return
            with self._lock:  # the package refuses concurrent calls; the answers themselves run concurrently
                chunks = self._runner.send_chat_completion_request(request)
            for chunk in chunks:
                if stopped.is_set():
                    return  # dropping the iterator stops the engine's work
                push(self._item(chunk))
            push(None)
        except BaseException as error:  # a panic of its Rust code is no Exception
            push(error)

    def _item(self, chunk: Any) -> dict[str, Any]:
        choice, usage = chunk.choices[0], chunk.usage
        text = choice.delta.content or ""
        item: dict[str, Any] = {"text": text, "token_ids": self._tokens(text)}
        if choice.logprobs is not None:
            top = [[other.token, other.logprob] for other in choice.logprobs.top_logprobs or []]
            item |= {"log_probs": [choice.logprobs.logprob], "top_logprobs": [top]}
        if usage is not None:
            item["completion_tokens"] = usage.completion_tokens
            details = getattr(usage, "prompt_tokens_details", None)
            item["cached_tokens"] = getattr(details, "cached_tokens", None) or 0
        if choice.finish_reason is not None:
            item["finish_reason"] = finish_reason(choice.finish_reason)
        return item

    def _tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, in case the answer continues on another worker."""
        return [int(token) for token in self._tokenizer.encode(text, special=False)] if text else []


def _grammar(request: dict[str, Any]) -> dict[str, Any]:
    """Return what the answer must look like, as arguments of a request."""
    wanted = guide(request, NO_GRAMMAR, "mistral.rs")  # its own grammars are Lark's, not EBNF
    if wanted is None:
        return {}
    if wanted.kind == "json":
        return {"grammar_type": "json_schema", "grammar": json.dumps(wanted.value)}
    return {
        "grammar_type": "regex",
        "grammar": choice_regex(wanted.value) if wanted.kind == "choice" else wanted.value,
    }


def _choice(kind: Any, name: str, value: str) -> Any:
    for choice in dir(kind):
        if choice.lower() == str(value).lower():
            return getattr(kind, choice)
    known = ", ".join(choice for choice in dir(kind) if not choice.startswith("_"))
    raise EngineError(f"mistral.rs has no {name} {value!r}; expected one of {known}")
