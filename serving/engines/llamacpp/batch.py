"""Continuous batching over llama.cpp: one thread, one context, and a slot of its KV cache for each request in progress.

A slot keeps what it computed after its request ends, and the next request gets the slot that shares the longest prefix
with it. KV events report the content of slots.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from serving.router.events import BlocksEvent, BlocksRemoved, BlocksStored
from serving.router.hashing import block_hashes, sequence_hashes
from serving.runtime.messages import CallError

LAST_N = 64
"""How many tokens the penalties look back."""

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama.cpp's `llama_token_data`."""


class LlamaJob:
    """A request and its progress."""

    def __init__(
        self,
        tokens: list[int],
        *,
        max_tokens: int,
        min_tokens: int,
        ends: frozenset[int],
        sampling: dict[str, Any],
        send: Callable[[Any], None],
        grammar: str = "",
    ) -> None:
        self.tokens = tokens
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.ends = ends
        self.sampling = sampling
        self.send = send
        """Called in the caller's thread with each item of the answer, or with an exception if the request failed."""
        self.grammar = grammar
        """What the answer must look like, in GBNF."""
        self.is_cancelled = False
        self.num_output = 0
        self.num_cached = 0
        self.sampler: Any = None
        self.matcher: Any = None
        """Keeps track of the grammar, if there is one."""


class _Slot:
    """A sequence of the KV cache: the tokens computed in it."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.tokens: list[int] = []
        self.hashes: list[int] = []
        self.job: LlamaJob | None = None
        self.used = 0


class LlamaBatcher:
    """Runs one llama.cpp context."""

    def __init__(
        self,
        llama: Any,
        context: Any,
        *,
        num_slots: int,
        block_size: int,
        post: Callable[[list[tuple[LlamaJob, Any]], list[BlocksEvent]], None],
    ) -> None:
        """Start the thread.

        Args:
            llama: the package llama_cpp.
            context: an initialized llama_context that nobody else uses from now on.
            num_slots: sequences of its KV cache.
            block_size: tokens in a block of the KV events.
            post: called in our thread with the results of a step: items for jobs, and KV events.
        """
        self._llama = llama
        self._context = context
        self._memory = llama.llama_get_memory(context)
        self._model = llama.llama_get_model(context)
        self._vocab = llama.llama_model_get_vocab(self._model)
        self._num_vocab = llama.llama_vocab_n_tokens(self._vocab)
        self._capacity = llama.llama_n_batch(context)
        self._batch = llama.llama_batch_init(self._capacity, 0, 1)
        self._slots = [_Slot(number) for number in range(num_slots)]
        self._block_size = block_size
        self._post = post
        self._waiting: list[LlamaJob] = []
        self._bell = threading.Condition()
        self._is_closing = False
        self._steps = 0
        self.failure: Future[Exception] = Future()
        """Why the thread has ended, if it failed: nothing is answered after that."""
        self.failure.set_running_or_notify_cancel()  # who stops waiting for it does not cancel it
        self._thread = threading.Thread(target=self._run, name="llama.cpp", daemon=True)
        self._thread.start()

    def submit(self, job: LlamaJob) -> None:
        """Queue a request."""
        with self._bell:
            self._waiting.append(job)
            self._bell.notify()

    def cancel(self, job: LlamaJob) -> None:
        """Stop working on a request soon."""
        job.is_cancelled = True

    @property
    def num_running(self) -> int:
        """Requests in slots."""
        return sum(slot.job is not None for slot in self._slots)

    @property
    def num_waiting(self) -> int:
        """Requests without one."""
        return len(self._waiting)

    @property
    def num_active_blocks(self) -> int:
        """Blocks of requests in progress."""
        return sum(len(slot.tokens) // self._block_size + 1 for slot in self._slots if slot.job is not None)

    def close(self) -> None:
        """Stop the thread; requests in progress get no more tokens."""
        with self._bell:
            self._is_closing = True
            self._bell.notify()
        self._thread.join()
        self._llama.llama_batch_free(self._batch)

    def _run(self) -> None:
        try:
            self._run_batches()
        except Exception as error:
            self.failure.set_result(error)

    def _run_batches(self) -> None:
        while True:
            with self._bell:
                while not (self._is_closing or self._waiting or self.num_running):
                    self._bell.wait()
                if self._is_closing:
                    return
            items: list[tuple[LlamaJob, Any]] = []
            events: list[BlocksEvent] = []
            self._drop_cancelled()
            self._admit(items, events)
            self._step(items, events)
            if items or events:
                self._post(items, events)

    def _drop_cancelled(self) -> None:
        with self._bell:
            self._waiting = [job for job in self._waiting if not job.is_cancelled]
        for slot in self._slots:
            if slot.job is not None and slot.job.is_cancelled:
                self._release(slot)

    def _admit(self, items: list[tuple[LlamaJob, Any]], events: list[BlocksEvent]) -> None:
        """Give each waiting request the free slot with the longest prefix of its prompt, the least recently used among equals."""
        while True:
            free = [slot for slot in self._slots if slot.job is None]
            with self._bell:
                if not free or not self._waiting:
                    return
                job = self._waiting.pop(0)
            try:
                job.matcher = self._matcher(job.grammar)
            except CallError as error:
                items.append((job, error))
                continue
            shared = [_common(slot.tokens, job.tokens) for slot in free]
            best = max(range(len(free)), key=lambda place: (shared[place], -free[place].used))
            slot = free[best]
            job.num_cached = self._truncate(slot, min(shared[best], len(job.tokens) - 1), events)
            slot.job = job
            job.sampler = self._sampler(job.sampling)

    def _truncate(self, slot: _Slot, keep: int, events: list[BlocksEvent]) -> int:
        """Forget a slot's tokens beyond `keep`, or all of them if the model cannot forget a part."""
        remove = self._llama.llama_memory_seq_rm
        if keep < len(slot.tokens) and not remove(self._memory, slot.id, keep, -1):
            keep = 0
            remove(self._memory, slot.id, -1, -1)
        del slot.tokens[keep:]
        if gone := slot.hashes[keep // self._block_size :]:
            events.append(BlocksRemoved(gone))
            del slot.hashes[keep // self._block_size :]
        return keep

    def _step(self, items: list[tuple[LlamaJob, Any]], events: list[BlocksEvent]) -> None:
        """Compute one batch: a token of every answer, and as much of the prompts as also fits."""
        plan = self._plan()
        if not plan:
            return
        if (code := self._llama.llama_decode(self._context, self._batch)) != 0:
            for slot, _, _ in plan:
                assert slot.job is not None
                items.append((slot.job, RuntimeError(f"llama_decode failed with code {code}")))
                self._release(slot)
                self._truncate(slot, 0, events)
            return
        self._steps += 1
        for slot, count, place in plan:
            job = slot.job
            assert job is not None
            start = len(slot.tokens)
            slot.tokens += job.tokens[start : start + count]
            slot.used = self._steps
            self._tell_stored(slot, events)
            if place is not None:
                items.append((job, self._sample(slot, job, place)))

    def _plan(self) -> list[tuple[_Slot, int, int | None]]:
        """Fill the batch; return (slot, number of its tokens, position of its last token if that completes the prompt)."""
        busy = [slot for slot in self._slots if slot.job is not None]
        busy.sort(key=lambda slot: len(slot.job.tokens) - len(slot.tokens) if slot.job else 0)
        plan: list[tuple[_Slot, int, int | None]] = []
        batch, size = self._batch, 0
        for slot in busy:
            assert slot.job is not None
            start, tokens = len(slot.tokens), slot.job.tokens
            count = min(len(tokens) - start, self._capacity - size)
            if count <= 0:
                break
            is_last = start + count == len(tokens)
            for place in range(count):
                batch.token[size] = tokens[start + place]
                batch.pos[size] = start + place
                batch.n_seq_id[size] = 1
                batch.seq_id[size][0] = slot.id
                batch.logits[size] = is_last and place == count - 1
                size += 1
            plan.append((slot, count, size - 1 if is_last else None))
        batch.n_tokens = size
        return plan

    def _sample(self, slot: _Slot, job: LlamaJob, place: int) -> Any:
        """Choose the next token; return the item to send."""
        llama = self._llama
        wants, is_early = job.sampling.get("logprobs"), job.num_output < job.min_tokens
        item: dict[str, Any] = {}
        if is_early or wants is not None or job.matcher is not None:
            pointer = llama.llama_get_logits_ith(self._context, place)
            logits = np.ctypeslib.as_array(pointer, shape=(self._num_vocab,))
            likely = logits.copy() if wants is not None else logits
            if is_early:
                logits[list(job.ends)] = -np.inf
            if job.matcher is not None and not self._mask(job, logits):
                self._release(slot)
                return CallError("no token can continue the answer as it must look", "invalid")
        token = int(llama.llama_sampler_sample(job.sampler, self._context, place))
        if job.matcher is not None:
            llama.llama_sampler_accept(job.matcher, token)
        if wants is not None:
            item |= _logprobs(likely, token, wants)
        if job.num_output == 0:
            item["cached_tokens"] = job.num_cached
        job.num_output += 1
        job.tokens.append(token)
        is_complete = job.matcher is not None and llama.llama_vocab_is_eog(self._vocab, token)
        if is_complete or (token in job.ends and not is_early):
            item["finish_reason"] = "stop"
        elif job.num_output >= job.max_tokens:
            item["finish_reason"] = "length"
        if "finish_reason" in item:
            self._release(slot)
        return {"token_ids": [token]} | item if item else token

    def _tell_stored(self, slot: _Slot, events: list[BlocksEvent]) -> None:
        size, known = self._block_size, len(slot.hashes)
        if (full := len(slot.tokens) // size) > known:
            parent = slot.hashes[-1] if slot.hashes else None
            tokens = np.array(slot.tokens[known * size : full * size], np.uint32)
            new = sequence_hashes(block_hashes(tokens, size), parent)
            slot.hashes += new
            events.append(BlocksStored(new, parent))

    def _mask(self, job: LlamaJob, logits: Any) -> bool:
        """Rule out the tokens that a job's grammar does not allow; return whether any is left.

        llama.cpp would end the process if it were given a token that is not allowed.
        """
        candidates = np.zeros(self._num_vocab, CANDIDATE)
        candidates["id"] = np.arange(self._num_vocab)
        data = candidates.ctypes.data_as(ctypes.POINTER(self._llama.llama_token_data))
        array = self._llama.llama_token_data_array(data=data, size=self._num_vocab, selected=-1, sorted=False)
        self._llama.llama_sampler_apply(job.matcher, ctypes.byref(array))
        is_allowed = np.isfinite(candidates["logit"])
        logits[~is_allowed] = -np.inf
        return bool(is_allowed.any())

    def _release(self, slot: _Slot) -> None:
        """Free a slot; it keeps its tokens."""
        assert slot.job is not None
        self._llama.llama_sampler_free(slot.job.sampler)
        if slot.job.matcher is not None:
            self._llama.llama_sampler_free(slot.job.matcher)
        slot.job = None

    def _matcher(self, grammar: str) -> Any:
        """Return what follows a grammar, None without one.

        Raises:
            CallError: llama.cpp does not understand it.
        """
        if not grammar:
            return None
        matcher = self._llama.llama_sampler_init_grammar(self._vocab, grammar.encode(), b"root")
        if not matcher:
            raise CallError("llama.cpp cannot read the grammar that the answer is to have", "invalid")
        return matcher

    def _sampler(self, options: dict[str, Any]) -> Any:
        """Build llama.cpp's sampler chain for a request's options."""
        llama = self._llama
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())

        def add(sampler: Any) -> None:
            llama.llama_sampler_chain_add(chain, sampler)

        if bias := options.get("logit_bias"):
            array = (llama.llama_logit_bias * len(bias))()
            for place, (token, value) in enumerate(bias.items()):
                array[place].token, array[place].bias = int(token), float(value)
            add(llama.llama_sampler_init_logit_bias(self._num_vocab, len(bias), array))
        repeat = float(options.get("repetition_penalty") or 1.0)
        frequency, presence = (float(options.get(f"{name}_penalty") or 0.0) for name in ("frequency", "presence"))
        if repeat != 1.0 or frequency or presence:
            add(llama.llama_sampler_init_penalties(self._num_vocab, LAST_N, repeat, frequency, presence))
        temperature = options.get("temperature", 1.0)
        if temperature <= 0:
            add(llama.llama_sampler_init_greedy())
            return chain
        if (top_k := options.get("top_k")) is not None and top_k > 0:
            add(llama.llama_sampler_init_top_k(int(top_k)))
        if (top_p := options.get("top_p")) is not None and top_p < 1:
            add(llama.llama_sampler_init_top_p(float(top_p), 1))
        if min_p := options.get("min_p"):
            add(llama.llama_sampler_init_min_p(float(min_p), 1))
        add(llama.llama_sampler_init_temp(float(temperature)))
        seed = options.get("seed")
        add(llama.llama_sampler_init_dist(ctypes.c_uint32(-1 if seed is None else int(seed)).value))
        return chain


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    limit = min(len(left), len(right))
    for place in range(limit):
        if left[place] != right[place]:
            return place
    return limit


def _logprobs(logits: Any, token: int, count: int) -> dict[str, Any]:
    """Return the log-probabilities of the token and of the `count` most likely tokens."""
    finite = logits[np.isfinite(logits)].astype(np.float64)
    total = float(finite.max() + np.log(np.exp(finite - finite.max()).sum()))
    top = np.argsort(logits)[::-1][:count]
    return {
        "log_probs": [float(logits[token]) - total],
        "top_logprobs": [[[int(other), float(logits[other]) - total] for other in top]],
    }
