"""Counts what happens at one rank, at the moments and by the rules of vLLM's statistics.

    queued ----> first token ----> tokens ----> finished
                 TTFT, prompt      ITL          everything about the whole request

A request whose client hangs up is never counted as finished. Times between tokens are not counted one by one: the engine
logs them by the batch anyway.
"""

from typing import NamedTuple

from serving.engines.mock.live import Live
from serving.engines.mock.observer import Gaps
from serving.frontend.series import Series
from serving.runtime.world import world
from serving.stand_in.vllm.metrics.adapters import AdaptersInUse
from serving.stand_in.vllm.metrics.stats_log import StatsLog
from serving.worker.protocol import PreprocessedRequest

Key = tuple[str, bytes]


class Asked(NamedTuple):
    """What the metrics need of a request."""

    max_tokens: int | None
    num_choices: int
    key: Key
    """What the answers to the same prompt of a request have in common."""


class Siblings:
    """The answers to one prompt: how many are missing, and the longest of those that have ended."""

    __slots__ = ("longest", "num_missing")

    def __init__(self, num_choices: int) -> None:
        self.num_missing = num_choices
        self.longest = 0


class Recorder:
    """See the module, and `Observer` for the methods."""

    def __init__(
        self,
        series: Series,
        adapters: AdaptersInUse | None,
        stats_log: StatsLog | None = None,
    ) -> None:
        """Start to count.

        Args:
            series: where things are counted.
            adapters: the adapters in use, if there may be some.
            stats_log: logs lines while something happens, if there are to be any.
        """
        self.series = series
        self._stats_log = stats_log
        self._adapters = adapters
        self._asked: dict[Live, Asked] = {}
        self._siblings: dict[Key, Siblings] = {}
        self._num_preemptions: dict[Live, int] = {}
        self._step_end_s = 0.0
        self._is_aborting = False

    def on_queued(self, live: Live, request: PreprocessedRequest) -> None:
        """See `Observer`."""
        limit = None if request.is_embedding else request.stop_conditions.max_tokens
        key = (request.request_id, live.prompt.tobytes() if request.num_choices > 1 else b"")
        self._asked[live] = Asked(limit, request.num_choices, key)
        if request.num_choices > 1 and key not in self._siblings:
            self._siblings[key] = Siblings(request.num_choices)

    def on_step(
        self, end_s: float, num_decoded: int, prefilled: list[Live], finished: list[Live], preempted: list[Live]
    ) -> None:
        """See `Observer`."""
        self._step_end_s, self._is_aborting = end_s, False
        if self._stats_log is not None:
            self._stats_log.wake()
        num_tokens, num_computed = num_decoded, 0
        for live in prefilled:
            num_tokens += live.embedding is None
            if not live.made:
                num_computed += self._count_first(live)
        for live in (*prefilled, *preempted):
            if live.sequence.num_preemptions:
                self._count_preemptions(live)
        if num_tokens or prefilled or finished:
            self.series.count("vllm:generation_tokens", by=num_tokens)
            self.series.observe("vllm:iteration_tokens_total", num_computed + num_tokens)
        for live in finished:
            self._count_finished(live)
        if self._adapters is not None:
            self._adapters.record()

    def on_left(self, live: Live, *, has_stopped: bool) -> None:
        """See `Observer`."""
        if has_stopped:
            self._count_ended(live, "stop", live.made)
        elif (asked := self._forget(live)) is not None:
            self._siblings.pop(asked.key, None)

    def on_aborted(self, live: Live) -> None:
        """See `Observer`: to vLLM's frontend, the end is output without tokens, in one batch for all that were aborted."""
        if not self._is_aborting:
            self._is_aborting = True
            self.series.observe("vllm:iteration_tokens_total", 0)
        self._count_empty(live, world().now())
        self._count_ended(live, "abort", live.made)

    def on_gaps(self, gaps: Gaps) -> None:
        """See `Observer`."""
        self.series.histograms["vllm:inter_token_latency_seconds"].observe_all(gaps.seconds, gaps.counts)

    def _count_first(self, live: Live) -> int:
        """Count the first token of a request and the sources of its prompt; return how much of that was computed."""
        series, num_prompt = self.series, live.sequence.num_prompt
        local, external = sources_of(live)
        computed = num_prompt - local - external
        series.observe("vllm:time_to_first_token_seconds", world().now() - live.arrival_s)
        series.count("vllm:prompt_tokens", by=num_prompt)
        series.count("vllm:prompt_tokens_by_source", "local_compute", by=computed)
        series.count("vllm:prompt_tokens_by_source", "local_cache_hit", by=local)
        series.count("vllm:prompt_tokens_by_source", "external_kv_transfer", by=external)
        series.count("vllm:prompt_tokens_cached", by=local + external)
        if live.load is not None and live.load.error is None:
            self._count_transfer(live)
        if self._adapters is not None and live in self._asked:
            self._adapters.begin(live.sequence.adapter)
        return computed

    def _count_transfer(self, live: Live) -> None:
        """Count the transfer of a prompt's KV from another engine; each block is one piece, and starting costs nothing."""
        load, series = live.load, self.series
        if load is None or not load.num_bytes or "vllm:nixl_xfer_time_seconds" not in series.histograms:
            return
        series.observe("vllm:nixl_xfer_time_seconds", load.times["transfer_end"] - load.times["transfer_start"])
        series.observe("vllm:nixl_post_time_seconds", 0.0)
        series.observe("vllm:nixl_bytes_transferred", load.num_bytes)
        series.observe("vllm:nixl_num_descriptors", len(load.keys))

    def _count_preemptions(self, live: Live) -> None:
        """Count preemptions of a request since it last got a token: vLLM's frontend hears of them with the next one."""
        before, now = self._num_preemptions.get(live, 0), live.sequence.num_preemptions
        if now > before:
            self.series.count("vllm:num_preemptions", by=now - before)
            self._num_preemptions[live] = now

    def _count_finished(self, live: Live) -> None:
        sequence = live.sequence
        if not sequence.is_failed:
            num_tokens = 0 if live.embedding is not None else sequence.num_total - sequence.num_prompt
            self._count_ended(live, sequence.finish_reason, num_tokens)
            return
        self._count_empty(live, self._step_end_s)
        self._count_ended(live, "error", live.made)

    def _count_empty(self, live: Live, at_s: float) -> None:
        """Count output that only says that a request has ended: for its times, vLLM takes it for a token."""
        if not live.made:
            self.series.observe("vllm:time_to_first_token_seconds", world().now() - live.arrival_s)
        elif live in self._asked:
            self.series.observe("vllm:inter_token_latency_seconds", max(at_s - self._step_end_s, 0.0))

    def _count_ended(self, live: Live, reason: str, num_tokens: int) -> None:
        """Count a request that has ended."""
        if (asked := self._asked.get(live)) is None:
            return
        series, sequence = self.series, live.sequence
        self._count_preemptions(live)
        series.count("vllm:request_success", reason)
        self._count_times(live, num_tokens)
        series.observe("vllm:request_num_preemptions", self._num_preemptions.get(live, 0))
        series.observe("vllm:request_prefill_kv_computed_tokens", sequence.num_prompt - live.num_cached)
        series.observe("vllm:request_prompt_tokens", sequence.num_prompt)
        series.observe("vllm:request_generation_tokens", num_tokens)
        if asked.max_tokens:
            series.observe("vllm:request_params_max_tokens", asked.max_tokens)
        self._count_choice(asked, num_tokens)
        self._forget(live)

    def _count_times(self, live: Live, num_tokens: int) -> None:
        """Count how long a request took; stages that it never reached took no time."""
        series, end_s = self.series, self._step_end_s
        begun_s = live.sequence.first_scheduled_s
        begun_s = end_s if begun_s < 0 else begun_s
        first_s = live.sequence.first_token_s
        first_s = end_s if first_s < 0 else first_s
        decoding_s = end_s - first_s
        # On its engine's clock, a late step begins before what came in the meantime.
        series.observe("vllm:request_queue_time_seconds", max(begun_s - live.arrival_s, 0.0))
        series.observe("vllm:request_prefill_time_seconds", first_s - begun_s)
        series.observe("vllm:request_inference_time_seconds", end_s - begun_s)
        series.observe("vllm:request_decode_time_seconds", decoding_s)
        series.observe("vllm:e2e_request_latency_seconds", world().now() - live.arrival_s)
        mean_s = decoding_s / (num_tokens - 1) if num_tokens > 1 else 0.0
        series.observe("vllm:request_time_per_output_token_seconds", mean_s)

    def _count_choice(self, asked: Asked, num_tokens: int) -> None:
        """Count what concerns all answers to a prompt, once the last of them has ended."""
        siblings = self._siblings.get(asked.key)
        if siblings is None:
            if asked.num_choices > 1:
                return  # its request was given up
            siblings = Siblings(1)
        siblings.num_missing -= 1
        siblings.longest = max(siblings.longest, num_tokens)
        if not siblings.num_missing:
            self.series.observe("vllm:request_max_num_generation_tokens", siblings.longest)
            self.series.observe("vllm:request_params_n", asked.num_choices)
            self._siblings.pop(asked.key, None)

    def _forget(self, live: Live) -> Asked | None:
        asked = self._asked.pop(live, None)
        self._num_preemptions.pop(live, None)
        if asked is not None and self._adapters is not None and live.sequence.first_token_s >= 0:
            self._adapters.end(live.sequence.adapter)
        return asked


def sources_of(live: Live) -> tuple[int, int]:
    """Return how many tokens of a prompt were found in blocks of its engine, and how many elsewhere."""
    sequence, load = live.sequence, live.load
    if load is not None and load.error is None:
        return sequence.cached_tokens, sequence.num_prompt - sequence.cached_tokens
    external = sequence.host_tokens + sequence.disk_tokens + sequence.store_tokens
    return sequence.cached_tokens - external, external
