"""What a layout needs at least, and what it may well need, before anything is simulated."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from dynabench.arm import Run, Settings
from dynabench.capacity.floors import SAFETY, floor_of
from dynabench.capacity.work import prices_of
from dynabench.deployment.description import Deployment, Pool
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.models.catalog import model_configs
from mocker.timing.catalog import gpu_names
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.timing.model import Prefill
from reports.figures import slo
from reports.figures.conditions import METRICS
from reports.figures.metrics import goodput
from reports.summarize import summarize
from serving.life.config import DisaggregationConfig
from tests.support.examples import worth
from tests.support.workloads import bursty
from workloads import Request, Workload
from workloads.pacing import LoadConfig
from workloads.shape import shape


@pytest.fixture(scope="module")
def source():
    whole = bursty(400)
    return lambda config: shape(whole, config)


def denser(count, times):
    requests = [structs.replace(one, arrival_s=one.arrival_s / times) for one in bursty(count).requests]
    return lambda config: shape(Workload("dense", 16, requests), config)


def floor(source, *limits, chunk=512, roles=("aggregated",), **engine):
    timing = TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100")
    pools = tuple(
        Pool(name=role, role=role, mocker=EngineConfig(max_num_batched_tokens=chunk, **engine), timing=timing)
        for role in roles
    )
    return floor_of(Settings(Deployment(pools=pools)), source, [slo.parse_slo(limit) for limit in limits])


def test_where_a_step_with_a_prompt_is_beyond_the_limit_many_workers_are_expected(source):
    assert floor(source, "itl.p99 <= 500ms", chunk=8192).expected == 1
    assert floor(source, "itl.p99 <= 20ms", chunk=8192).expected > floor(source, "itl.p90 <= 20ms", chunk=8192).expected
    assert floor(source, "itl.p99 <= 20ms", chunk=8192, roles=("prefill", "decode")).expected == 1
    assert floor(source, "itl.mean <= 20ms", chunk=8192).expected == 1


def test_what_is_expected_bounds_nothing(source):
    tight, wide = (floor(source, f"itl.p99 <= {limit}ms", chunk=8192) for limit in (20, 500))
    assert tight.workers == wide.workers
    assert not tight.impossible


def test_a_worker_does_the_work_of_its_ranks():
    source = denser(4000, 200)
    limit = "ttft.p99 <= 500ms"
    one, four = floor(source, limit), floor(source, limit, dp_size=4)
    assert one.workers > 4
    assert four.workers == -(-one.workers // 4) or four.workers == one.workers // 4 + 1


def test_work_may_end_as_late_as_the_limits_allow():
    source = denser(400, 500)
    assert floor(source, "e2e.p90 <= 1000s").workers == 1
    assert floor(source, "ttft.p90 <= 100ms").workers > 1


MODELS = {
    "8B": TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100"),
    "windows": TimingConfig(model="openai/gpt-oss-20b", gpu="h100"),
    "polynomial": TimingConfig(),
    "constant": TimingConfig(timing="constant"),
}


def drawn(seed):
    """Make a workload of any kind: short or long prompts and answers, in bursts or not, some with a shared prefix."""
    rng = random.Random(seed)
    rate, longest = 10 ** rng.uniform(-0.5, 3), rng.choice([2, 20, 200, 1500])
    typical, spread, groups = rng.uniform(3, 9), rng.choice([0.1, 1.0, 1.6]), rng.choice([0, 1, 3])
    now, requests = 0.0, []
    for number in range(rng.choice([40, 120, 400])):
        now += rng.expovariate(rate)
        length = min(int(rng.lognormvariate(typical, spread)) + 1, 30_000)
        count = -(-length // 64)
        shared = rng.randrange(count + 1) if groups else 0
        group = rng.randrange(groups) if groups else 0
        ids = [(group << 20) + place for place in range(shared)] + [
            ((number + 9) << 24) + n for n in range(count - shared)
        ]
        requests.append(Request(now, length, rng.randint(1, longest), tuple(ids)))
    return Workload("drawn", 64, requests)


@settings(max_examples=worth(40), deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([(512, 256), (8192, 32), (2048, 1024)]),
    st.sampled_from(["aggregated", "apart", "bypassed", "ranks"]),
    st.booleans(),
    st.sampled_from([LoadConfig(), LoadConfig(concurrency=8), LoadConfig(warmup_s=0.5)]),
)
def test_what_the_simulator_meets_is_never_below_a_floor(seed, model, workers, sizes, kind, is_caching, load):
    chunk, seqs = sizes
    engine = EngineConfig(
        max_num_batched_tokens=max(chunk, seqs), max_num_seqs=seqs, enable_prefix_caching=is_caching,
        dp_size=2 if kind == "ranks" else 1,
    )  # fmt: skip
    is_split = kind in ("apart", "bypassed")
    roles = {"prefill": 1, "decode": workers} if is_split else {"aggregated": workers}
    pools = tuple(
        Pool(name=role, role=role, replicas=count, mocker=engine, timing=MODELS[model]) for role, count in roles.items()
    )
    whole = drawn(seed)
    disaggregation = DisaggregationConfig(conditional_disagg="isl_or_load" if kind == "bypassed" else "never")
    asked = Settings(Deployment(pools=pools, disaggregation=disaggregation), load=load)
    record = simulate(Run.alone(asked), whole)
    for limit, attainment in met_by(record):
        found = floor_of(asked, lambda config: whole, [limit], attainment)
        assert found.workers <= workers, (seed, str(limit), attainment, found)
        assert not found.impossible, (seed, found)


def met_by(record):
    """Yield limits that a run only just meets, each with the attainment: on a statistic, and on each request."""
    [figures] = summarize([record], [], with_intervals=False).arms.values()
    for metric in ("ttft", "ttst", "tpot", "itl", "e2e"):
        known = figures.metric(METRICS[metric])
        values = {name: known.at(name) for name in ("mean", "p50", "p90", "p95", "p99", "max")}
        for statistic, value in values.items():
            if value is None:
                continue
            yield slo.parse_slo(f"{metric}.{statistic} <= {above(value)}"), 1.0
            if metric != "itl" and statistic in ("p50", "p95", "max"):
                limit = slo.parse_slo(f"{metric} <= {above(value)}")
                yield limit, goodput(record.measured, slo.good_requests(record.measured, [limit])).attainment


def above(value_s):
    return f"{math.ceil(value_s * 1e7 + 1) / 1e4:.4f}ms"


@pytest.mark.parametrize("statistic", ["p50", "p90", "p99", "mean"])
def test_a_percentile_of_gaps_is_bounded_by_the_sequences_that_are_best_off(statistic):
    lengths = [100_000] * 60 + [200] * 240
    requests = [
        Request(2.0 * n, length, 200, tuple(range(n << 20, (n << 20) + -(-length // 512))))
        for n, length in enumerate(lengths)
    ]
    source = lambda config: Workload("skew", 512, requests)  # noqa: E731
    is_impossible = bool(floor(source, f"itl.{statistic} <= 7ms").impossible)
    assert is_impossible is (statistic in ("p90", "p99", "mean"))


def test_answers_may_be_as_late_as_they_like_where_only_first_tokens_are_limited():
    requests = [Request(n / 100, 200, 4000, (n,)) for n in range(300)]
    source = lambda config: Workload("long answers", 512, requests)  # noqa: E731
    assert floor(source, "ttft.p99 <= 1s", chunk=2048, max_num_seqs=1024).workers == 1
    assert floor(source, "e2e.p99 <= 60s", chunk=2048, max_num_seqs=1024).workers > 1


ENGINES = [(name, gpu, size) for gpu in sorted(gpu_names()) for name in sorted(model_configs()) for size in (1, 4)]


def priced_too_high(engine, longest, seed, count=400):
    """Return the steps, of many that an engine could form, that cost less than what is certain of their price."""
    rng, prices, config = random.Random(seed), prices_of(engine, longest), engine.config
    tops = np.array([prices.prompt, prices.answer, prices.kv]).T
    found = []
    for _ in range(count):
        decodes = rng.choice([0, int(config.max_num_seqs ** rng.random())])
        room = config.max_num_batched_tokens - decodes
        tokens = 0 if decodes and rng.random() < 0.3 else int(room ** rng.random())
        prompts = int(min(tokens, max(config.max_num_seqs - decodes, 1)) ** rng.random()) if tokens else 0
        kv = int(min(decodes * longest, engine.num_usable_tokens) * rng.choice([1.0, rng.random(), rng.random() ** 3]))
        each = tokens / max(prompts, 1)
        seconds = (
            engine.timing.mixed(Prefill(tokens, 0, tokens * each / 2, prompts), decodes, kv)
            if tokens
            else engine.timing.decode(decodes, kv).first
        )
        price = float((tops @ (tokens, decodes, kv)).max())
        if seconds < SAFETY * price:
            found.append((seconds / price, decodes, tokens, prompts, kv))
    return found


@pytest.mark.parametrize("number", range(12))
def test_no_step_of_a_bundled_model_costs_less_than_what_is_certain_of_its_price(number):
    rng = random.Random(number)
    for name, gpu, size in rng.sample(ENGINES, 6):
        config = EngineConfig(max_num_batched_tokens=rng.choice([512, 2048, 8192]), max_num_seqs=256)
        try:
            engine = resolve(config, TimingConfig(model=name, gpu=gpu, tensor_parallel_size=size))
        except ValueError:  # it does not fit, or was not measured
            continue
        longest = rng.choice([200, 3000, 30_000])
        assert not priced_too_high(engine, longest, number), (name, gpu, size, config, longest)


def test_no_step_costs_less_than_what_is_certain_of_its_price_where_the_cache_is_full():
    timing = TimingConfig(model="meta-llama/Llama-3.1-70B", gpu="h100", tensor_parallel_size=4)
    engine = resolve(EngineConfig(max_num_batched_tokens=8192, max_num_seqs=1024), timing)
    prices, full = prices_of(engine, 3000), engine.num_usable_tokens
    for decodes in range(150, 180):
        kv = min(decodes * 3000, full)
        price = float((prices.answer * decodes + prices.kv * kv).max())
        assert engine.timing.decode(decodes, kv).first >= 0.97 * price


@pytest.mark.parametrize("seed", range(3))
def test_no_step_of_a_table_costs_less_than_what_is_certain_of_its_price_however_its_times_rise_and_fall(
    tmp_path, seed
):
    rng = random.Random(seed)
    rows = [f"{tokens},0,0,{rng.randint(20, 400)}" for tokens in (512, 2048, 3000, 4096)]
    rows += [f"0,{count},{kv * count},{rng.randint(5, 60)}" for count in (1, 11, 90) for kv in (100, 700, 5000)]
    path = tmp_path / "times.csv"
    path.write_text("\n".join(["prefill_tokens,num_decodes,kv_tokens,step_ms", *rows, ""]))
    engine = resolve(
        EngineConfig(max_num_batched_tokens=4096, num_gpu_blocks=9000), TimingConfig(timing_file=str(path))
    )
    assert not priced_too_high(engine, 3000, seed, count=4000)


def test_a_prompt_that_others_make_faster_is_not_impossible(tmp_path):
    """A step with 3,000 tokens takes half as long as one with 2,048, so two prompts that arrive together are fast."""
    path = tmp_path / "times.csv"
    path.write_text(
        "prefill_tokens,num_decodes,kv_tokens,step_ms\n2048,0,0,200\n3000,0,0,100\n4096,0,0,400\n0,1,512,8\n"
    )
    engine = EngineConfig(max_num_batched_tokens=4096, num_gpu_blocks=9000)
    pool = Pool(mocker=engine, timing=TimingConfig(timing_file=str(path)))
    asked, limit = Settings(Deployment(pools=(pool,))), slo.parse_slo("ttft.p50 <= 150ms")
    pairs = [(start, length) for start in range(40) for length in (2048, 952)]
    requests = [
        Request(float(start), length, 2, tuple(range(n << 8, (n << 8) + -(-length // 16))))
        for n, (start, length) in enumerate(pairs)
    ]
    whole = Workload("pairs", 16, requests)
    [figures] = summarize([simulate(Run.alone(asked), whole)], [limit], with_intervals=False).arms.values()
    assert figures.outcomes[0].state == "met"
    found = floor_of(asked, lambda config: whole, [limit])
    assert (found.workers, found.impossible) == (1, "")
