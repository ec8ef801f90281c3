"""Records of requests from what load generators wrote of a run: AIPerf, and vLLM's `bench serve`.

Requests arrive when they were sent, so that the simulated engine gets them when the real one did.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from workloads.formats import aiperf_export, vllm_bench
from workloads.row import Row
from workloads.source import Source

Record = dict[str, Any]
"""The values of a request that was answered, by column."""


def _aiperf(source: Source) -> Iterator[Record]:
    for metadata, metrics, (length, output) in aiperf_export.requests_of(source):
        sent_s = metadata.seconds(*aiperf_export.SENT, unit="ns")
        yield {
            "arrival_s": sent_s,
            "input_tokens": length,
            "output_tokens": output,
            "first_token_s": sent_s + metrics.seconds("time_to_first_token", "ttft"),
            "last_token_s": sent_s + metrics.seconds("request_latency"),
            "cached_tokens": metrics.values.get("usage_prompt_cache_read_tokens"),
        }


def _vllm(source: Source) -> Iterator[Record]:
    for row in vllm_bench.requests_of(source, "ttfts", "itls"):
        sizes = source.sizes(row, "input_lens", "output_lens", is_failed=bool(row.values["errors"]))
        if sizes is None:
            continue
        sent_s = vllm_bench.sent_s(row)
        ttft_s = row.seconds("ttfts", unit="s")
        # Older versions have no latencies.
        e2e_s = row.seconds("latencies", unit="s") if row.has("latencies") else ttft_s + _total_s(row, "itls")
        yield {
            "arrival_s": sent_s,
            "input_tokens": sizes[0],
            "output_tokens": sizes[1],
            "first_token_s": sent_s + ttft_s,
            "last_token_s": sent_s + e2e_s,
        }


def _total_s(row: Row, name: str) -> float:
    gaps = row.values[name]
    if not isinstance(gaps, list):
        raise row.fail(f"{name} must be a list of times")
    return sum(Row({name: gap}, row.place).seconds(name, unit="s") for gap in gaps)


OUTPUTS: Final[dict[str, Callable[[Source], Iterator[Record]]]] = {
    aiperf_export.FORMAT.name: _aiperf,
    vllm_bench.FORMAT.name: _vllm,
}
"""How records are read from each output, by the name of its format as a workload."""
