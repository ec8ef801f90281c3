import numpy as np
import pytest

from reports.figures import insight, like
from tests.reports.runs import apart, run


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


def test_workers_that_prefill_are_compared_with_each_other_and_the_rest_likewise():
    """Worker 0 of two computes both prompts; workers 2 and 3 answer one request each."""
    made = apart(worker=[2, 3], isl=[100, 100], osl=[10, 10], cached_tokens=[0, 0])
    assert insight.imbalance(made) == insight.Imbalance(2.0, 1.0, 0.5, 2.0)
    even = apart(prefill_worker=[0, 1], worker=[2, 3], isl=[100, 100], osl=[10, 10], cached_tokens=[0, 0])
    assert insight.imbalance(even) == insight.Imbalance(1.0, 0.0, 1.0, 1.0)
