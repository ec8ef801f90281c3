"""Engines whose means are nearer to each other than their errors are not called faster or slower."""

from reports.verdicts.engines import EngineError, between_engines

ERRORS = {
    "kv, vllm": EngineError("vllm", ttft=0.10, tpot=0.04),
    "rr, vllm": EngineError("vllm", ttft=0.10, tpot=0.04),
    "kv, sglang": EngineError("sglang", ttft=0.30, tpot=0.05),
}


def means(vllm, others, sglang):
    return {"kv, vllm": vllm, "rr, vllm": others, "kv, sglang": sglang}


def of(ttft, tpot):
    return {"ttft": ttft, "tpot": tpot}


def test_means_within_the_errors_do_not_decide():
    found = between_engines(ERRORS, means(of(0.1, 0.01), of(0.2, 0.02), of(0.15, 0.0102)))
    assert found == (
        "Which engine is faster is not decided in mean TTFT (vllm's 100 ms is off by 10%; sglang's 150 ms is off by 30%) "
        "or mean TPOT (vllm's 10 ms is off by 4%; sglang's 10.2 ms is off by 5%)."
    )


def test_means_further_apart_than_the_errors_decide():
    assert between_engines(ERRORS, means(of(0.1, 0.01), of(0.2, 0.02), of(0.2, 0.012))) == ""


def test_the_best_arm_of_each_engine_counts():
    assert between_engines(ERRORS, means(of(0.3, 0.01), of(0.1, 0.01), of(0.2, 0.012))) == ""
    assert "vllm's 150 ms" in between_engines(ERRORS, means(of(0.3, 0.01), of(0.15, 0.01), of(0.2, 0.012)))


def test_an_unknown_error_decides_nothing():
    errors = ERRORS | {"kv, sglang": EngineError("sglang")}
    found = between_engines(errors, means(of(0.1, 0.01), of(0.1, 0.01), of(9.0, None)))
    assert found == (
        "Which engine is faster is not decided in mean TTFT (vllm's 100 ms is off by 10%; sglang's 9,000 ms is off by an "
        "unknown share)."
    )


def test_one_engine_needs_no_decision():
    assert between_engines({}, means(of(0.1, 0.01), of(0.1, 0.01), of(0.1, 0.01))) == ""
