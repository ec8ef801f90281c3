"""The micro-batch scheduler: how many tokens each request that passed computes in a step, and in which order.

    1. in the order in which they passed, while max_num_tokens and max_batch_size allow: a token (and its guesses) for each
       that generates, and whole prompts. With chunked prefill, prompts are only collected.
    2. with chunked prefill, if the collected prompts do not fit, they are cut into chunks: FIRST_COME_FIRST_SERVED or
       EQUAL_PROGRESS
    3. chunks that do not end their prompts go first, each part by adapter

These are the rules of TensorRT-LLM's `PyMicroBatchScheduler`, decided by recordings. What it expects in the cache (`credit`)
may be more than is found: see `trimming.py`.
"""

from mocker.trtllm.needs import Needs
from mocker.trtllm.request import CONTEXT, GENERATING, Request


class MicroBatch:
    """What the requests of a step compute."""

    __slots__ = ("contexts", "generating")

    def __init__(self) -> None:
        self.contexts: list[Request] = []
        """Those that compute their prompts, each its `chunk`."""
        self.generating: list[Request] = []


class MicroBatchScheduler:
    """Fills the token budget of a step."""

    def __init__(
        self,
        needs: Needs,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        tokens_per_block: int,
        max_draft_len: int = 0,
        chunk_unit: int | None = None,
        has_equal_progress: bool = False,
        is_prefix_aware: bool = True,
        has_adapters: bool = True,
    ) -> None:
        """Set its limits.

        Args:
            needs: finds cached blocks.
            max_batch_size: most requests.
            max_num_tokens: most tokens.
            tokens_per_block: tokens in a KV block.
            max_draft_len: guesses for each generating request.
            chunk_unit: tokens of which chunks are multiples (None: prompts are not cut).
            has_equal_progress: chunks are given in turn.
            is_prefix_aware: what is cached costs nothing.
            has_adapters: requests may have some.
        """
        self._needs = needs
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max_num_tokens
        self._size = tokens_per_block
        self._num_decoded = 1 + max_draft_len
        self._unit = chunk_unit
        self._has_equal_progress = has_equal_progress
        self._is_prefix_aware = is_prefix_aware
        self._has_adapters = has_adapters

    def schedule(self, passed: list[Request]) -> MicroBatch:
        """Give the requests that passed their tokens."""
        batch = MicroBatch()
        used = self._collect(passed, batch)
        if self._unit is not None and batch.contexts:
            self._chunk(batch, self._max_num_tokens - used, self._unit)
        if self._has_adapters:
            batch.generating.sort(key=_adapter)
        batch.contexts.sort(key=_place)
        return batch

    def _collect(self, passed: list[Request], batch: MicroBatch) -> int:
        """Take requests in order; return the tokens used. Prompts that may be cut cost nothing yet."""
        used, left = 0, self._max_batch_size
        for request in passed:
            if left == 0:
                break
            if request.state == GENERATING:
                if used + self._num_decoded > self._max_num_tokens:
                    break
                used += self._num_decoded
                batch.generating.append(request)
            elif request.state == CONTEXT:
                self._expect(request)
                if self._unit is None:
                    cost = max(1, request.cost(request.chunk))
                    if used + cost > self._max_num_tokens:
                        break
                    used += cost
                batch.contexts.append(request)
            else:
                continue  # its last token is in flight
            left -= 1
        return used

    def _expect(self, request: Request) -> None:
        """Begin with a whole prompt, less what is expected in the cache."""
        request.credit = 0
        if self._is_prefix_aware and request.is_first_chunk:
            request.credit = self._needs.num_cached(request) * self._size
        request.chunk = request.num_to_compute

    # Chunks

    def _chunk(self, batch: MicroBatch, budget: int, unit: int) -> None:
        if sum([request.cost(request.chunk) for request in batch.contexts]) <= budget:
            return
        if self._has_equal_progress:
            self._share_equally(batch.contexts, budget, unit)
        else:
            self._serve_first(batch.contexts, budget, unit)
        batch.contexts = [request for request in batch.contexts if request.chunk > 0]

    def _serve_first(self, contexts: list[Request], budget: int, unit: int) -> None:
        """Give each prompt, in order, as much as is left."""
        left = budget
        for request in contexts:
            count = request.num_to_compute
            if request.cost(count) > left:
                count = left
            if count < request.num_to_compute:
                count -= count % unit
            request.chunk = count
            left -= request.cost(count)

    def _share_equally(self, contexts: list[Request], budget: int, unit: int) -> None:
        """Give each prompt a unit in turn; one that is refused is asked again in the next round."""
        spent, has_moved = 0, True
        for request in contexts:
            request.chunk = 0
        while has_moved and spent < budget:
            has_moved = False
            for request in contexts:
                count = min(request.chunk + unit, request.num_to_compute)
                added = request.cost(count) - request.cost(request.chunk)
                if count == request.chunk or spent + added > budget or count > self._max_num_tokens:
                    continue
                request.chunk = count
                spent += added
                has_moved = True


def _adapter(request: Request) -> int:
    return -1 if request.adapter is None else request.adapter


def _place(request: Request) -> tuple[bool, int]:
    """Return what decides the order of contexts: chunks that end a prompt last."""
    return request.chunk == request.num_to_compute, _adapter(request)
