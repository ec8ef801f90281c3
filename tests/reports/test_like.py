import json

import numpy as np
import pandas as pd
import pytest

from reports import exports, insight, like
from tests.reports.runs import run


def of(made, tool):
    return {name: figures.mean for name, _, figures in like.table([made], tool)}


def test_one_record_is_four_numbers_in_four_tools():
    # One request: TTFT 1 s after sending, then 99 tokens at 10 ms, so E2E 1.99 s.
    made = run(ttft=[1.25], osl=[100], last_token_s=[2.24], gaps=np.array([[0.01, 0, 0, 99, 1]]))
    assert of(made, "vllm")["TPOT"] == pytest.approx(0.010)
    assert of(made, "aiperf")["Inter Token Latency"] == pytest.approx(0.010)
    assert of(made, "guidellm")["TPOT"] == pytest.approx(0.0199)
    assert of(made, "guidellm")["ITL"] == pytest.approx(0.010)


def test_chunks_of_several_tokens_are_one_gap_to_vllm():
    gaps = np.array([[0.01, 0, 0, 1, 4.0], [0.01, 0, 0, 1, 4.0]])
    made = run(ttft=[1.0], osl=[9], first_chunk_tokens=[5], gaps=gaps, is_live=True)
    assert of(made, "vllm")["ITL"] == pytest.approx(0.04)
    # aiperf divides by the tokens after the first chunk, vLLM by one less than all.
    decode = 9.0
    assert of(made, "aiperf")["Inter Token Latency"] == pytest.approx(decode / 4)
    assert of(made, "vllm")["TPOT"] == pytest.approx(decode / 8)


def test_the_waterfall_is_token_weighted():
    tokens = {"isl": [100, 300], "endless_tokens": [100, 200], "predicted_tokens": [0, 100], "cached_tokens": [0, 40]}
    made = run(ttft=[1.0, 1.0], best_tokens=[0, 200], **tokens)
    assert insight.waterfall(made) == insight.Waterfall(0.75, 0.5, 0.25, 0.1)
    assert insight.affinity_breaks(made) == 0.5
    made = run(ttft=[1.0, 1.0], best_tokens=[None, None], **tokens)
    assert insight.waterfall(made) == insight.Waterfall(0.75, None, None, 0.1)


def test_imbalance_has_three_measures():
    made = run(ttft=[1.0] * 4, worker=[0, 0, 0, 1], isl=[10] * 4, osl=[0] * 4, cached_tokens=[0] * 4)
    assert insight.imbalance(made) == insight.Imbalance(1.5, 0.5, 0.8, 1.5)


def test_the_way_from_random_to_the_bound():
    means = {"random": 1.0, "kv": 0.6, "worse": 1.1}
    assert insight.covered(means, 0.5) == pytest.approx({"random": 0.0, "kv": 0.8, "worse": -0.2})
    assert insight.covered({"kv": 0.6}, 0.5) == {}


MANIFEST = {
    "title": "t", "subtitle": "s", "created": "2026-01-01", "limits": [], "bound_s": None, "workers": {"a": 2}, "engine": {"block_size": 64},
    "arms": {"a": {"router_mode": "kv"}}, "router": {}, "versions": {"dynabench": "1"}, "workload": {"name": "w"}, "command": "c", "load": {},
}  # fmt: skip


def test_exports_hold_the_figures(tmp_path):
    made = run(ttft=[1.0] * 400)
    text = exports.export(MANIFEST, [made], "csv").decode()
    assert text.splitlines()[0].startswith("arm,repeat,request")
    assert len(text.splitlines()) == 401
    file = tmp_path / "x.parquet"
    file.write_bytes(exports.export(MANIFEST, [made], "parquet"))
    assert pd.read_parquet(file)["ttft_sched"].tolist() == [1.0] * 400
    whole = json.loads(exports.export(MANIFEST, [made], "json"))
    assert whole["summary"]["schema"] == "dynabench.summary/2"
    (report,) = json.loads(exports.export(MANIFEST, [made], "llm-d"))
    latency = report["results"]["request_performance"]["aggregate"]["latency"]
    assert latency["time_to_first_token"] == {
        "units": "s",
        "mean": 0.75,
        "p50": 0.75,
        "p90": 0.75,
        "p95": 0.75,
        "p99": 0.75,
        "max": 0.75,
    }
    assert report["scenario"]["stack"][1]["standardized"] == {"kind": "router", "name": "a"}
