"""How many requests may be unfinished, and how many tokens of prompts may wait, before more are turned away, as in vLLM."""

from serving.engines.mock.engine import Mocker
from serving.frontend.api.errors import ApiError
from serving.frontend.prepared import Prepared
from serving.stand_in.config import ApiConfig
from serving.stand_in.local import LocalCalls
from serving.stand_in.vllm.answers.errors import BUSY
from serving.stand_in.vllm.metrics.metrics import VllmMetrics


class QueueLimits:
    """See the module."""

    def __init__(self, config: ApiConfig, engine: Mocker, calls: LocalCalls, metrics: VllmMetrics) -> None:
        self._max_requests = config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens
        self._engine = engine
        self._calls = calls
        self._metrics = metrics

    def check(self, prepared: Prepared) -> None:
        """Turn a request away, whichever limit it exceeds; each of its answers counts.

        Raises:
            ApiError: it would exceed one.
        """
        wanted = len(prepared.prompts) * (prepared.options.n or 1)
        if self._max_requests is not None and self._calls.num_streams + wanted > self._max_requests:
            self._refuse("max_num_queued_reqs", "requests")
        if self._max_tokens is not None and self._engine.num_prefilling_tokens >= self._max_tokens:
            self._refuse("max_num_queued_tokens", "tokens of prompts")

    def _refuse(self, limit: str, what: str) -> None:
        self._metrics.count_rejection(limit)
        raise ApiError(503, f"too many {what} are waiting ({limit}); try again later or elsewhere", code=BUSY)
