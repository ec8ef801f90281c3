"""All metrics of one stand-in: what its ranks and its server count, and how it is shown."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from serving.engines.mock.engine import Mocker
from serving.frontend.series import Series
from serving.runtime.world import world
from serving.stand_in.config import StandInConfig
from serving.stand_in.vllm.metrics.adapters import AdaptersInUse
from serving.stand_in.vllm.metrics.cache_config import cache_config_labels, num_gpu_blocks
from serving.stand_in.vllm.metrics.exposition import Histograms, Values, exposition, metric_of
from serving.stand_in.vllm.metrics.families import CACHE_CONFIG, ENGINE, LORA, Family, MetricSettings, families, table
from serving.stand_in.vllm.metrics.http import HttpCounts
from serving.stand_in.vllm.metrics.recorder import Recorder
from serving.stand_in.vllm.metrics.state import copies_of, sleep_state, state_of, transfers_of
from serving.stand_in.vllm.metrics.stats_log import StatsLog


def shown_by(config: StandInConfig, max_model_len: int) -> MetricSettings:
    """Return the settings of a stand-in on which the families depend."""
    handover = config.kv_handover
    return MetricSettings(
        max_model_len=max_model_len,
        has_stats=config.logs.has_stats,
        has_nixl=handover is not None,
        has_offloading=config.engine.has_host_memory,
        is_kv_consumer=config.engine.has_host_memory or (handover is not None and handover.role != "kv_producer"),
        has_adapters=config.lora is not None,
        speculates=config.engine.num_speculative_tokens > 0,
        has_tool_calls=bool(config.api.tool_call_parser),
    )


class VllmMetrics:
    """Counts from the start; it must `observe` the engine before that runs, and `follow` it then."""

    def __init__(self, config: StandInConfig, max_model_len: int) -> None:
        """Count for a stand-in whose longest sequences are so long."""
        self.created_s = world().wall_s()
        self.http = HttpCounts(self.created_s, world().wall_s)
        self.sleep_level: int | None = None
        """How deep the engine sleeps; None while it is awake."""
        self._config = config
        self._max_model_len = max_model_len
        self._shown = shown_by(config, max_model_len)
        self._families = families(self._shown)
        self._adapters = None if config.lora is None else AdaptersInUse(config.lora.max_loras)
        self._server = Series({})
        self._engine: Mocker | None = None
        bounds = {each.name: each.bounds for each in self._families if each.kind == "histogram" and not each.own}
        count, interval_s = config.engine.dp_size if config.logs.has_stats else 0, config.logs.stats_interval_s
        self.stats_log = StatsLog(interval_s) if interval_s and count else None
        self._recorders = [Recorder(Series(bounds), self._adapters, self.stats_log) for _ in range(count)]

    def observe(self, engine: Mocker) -> None:
        """Have the ranks of an engine observed; they do not run yet."""
        engine.observers = self._recorders
        self._engine = engine

    def follow(self) -> None:
        """Log lines about the engine, which runs now."""
        assert self._engine is not None
        if self.stats_log is not None:
            ranks = zip(self._engine.ranks, self._recorders, strict=True)
            first = self._config.ranks.first
            self.stats_log.follow({first + n: (rank, each.series) for n, (rank, each) in enumerate(ranks)})

    def close(self) -> None:
        """Log nothing more."""
        if self.stats_log is not None:
            self.stats_log.close()

    def count_rejection(self, limit: str) -> None:
        """Count a request that is turned away because of a limit, by vLLM's name of it."""
        self._server.count("vllm:admission_rejections", limit)

    def count_tool_call(self, request_type: str, *, is_streamed: bool, has_called: bool) -> None:
        """Count a search for tool calls: of an answer, or of a piece of a streamed one."""
        mode, outcome = "streaming" if is_streamed else "non_streaming", "tool_call" if has_called else "no_tool_call"
        self._server.count("vllm:tool_call_parser_invocations", mode, outcome, request_type)

    def text(self) -> bytes:
        """Return all metrics as text."""
        return exposition(self._all())

    def _all(self) -> Iterator[Metric]:
        model = self._config.served_model_names[0]
        engines = {self._config.ranks.first + rank: self._of_rank(rank) for rank in range(len(self._recorders))}
        for family in self._families:
            if family.name == LORA:
                yield self._lora(family)
            else:
                yield metric_of(family, model, engines, self.created_s)
        if engines:
            yield self._cache_config()
        yield from self.http.families()
        if self._shown.has_tool_calls:
            yield metric_of(table().tool_calls, model, {0: (self._server.counters, {})}, self.created_s)

    def _of_rank(self, number: int) -> tuple[Values, Histograms]:
        engine, recorder = self._engine, self._recorders[number]
        assert engine is not None
        rank, series = engine.ranks[number], recorder.series
        recorder.on_gaps(rank.take_gaps())
        has_connector = self._shown.has_nixl or self._shown.has_offloading
        values = {
            **series.counters,
            **self._server.counters,
            **state_of(rank, has_connector=has_connector),
            "vllm:engine_sleep_state": sleep_state(self.sleep_level),
        }
        load = engine.load(number)
        if self._shown.has_nixl:
            values |= transfers_of(load)
        if load.kv_tiers:
            values |= copies_of(load.kv_tiers[0])
        return values, {name: {(): each} for name, each in series.histograms.items() if any(each.counts)}

    def _cache_config(self) -> Metric:
        assert self._engine is not None
        metric = Metric(CACHE_CONFIG, "Settings of the cache", "gauge")
        for number, rank in enumerate(self._engine.ranks):
            labels = cache_config_labels(
                self._config.given,
                block_size=rank.config.block_size,
                num_blocks=num_gpu_blocks(rank),
                max_model_len=self._max_model_len,
                enable_prefix_caching=rank.config.enable_prefix_caching,
            )
            metric.add_sample(CACHE_CONFIG, labels | {ENGINE: str(self._config.ranks.first + number)}, 1)
        return metric

    def _lora(self, family: Family) -> Metric:
        assert self._adapters is not None
        metric = Metric(family.name, family.text, family.kind)
        for names, at in self._adapters.seen_s.items():
            labels = dict(zip(family.own, (str(self._adapters.max_loras), names, names), strict=True))
            metric.add_sample(family.name, labels, at)
        return metric
