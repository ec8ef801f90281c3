"""What Python's users give to `dynabench` by mistake: one line, as db.UserError; and nothing given is dropped in silence."""

import asyncio
import copy
import dataclasses
import pickle
import threading

import numpy as np
import pandas as pd
import polars
import pytest

import dynabench as db
from dynabench.api.wording import plain_errors

ROLES = {"first": {"role": "prefill"}, "then": {"role": "decode"}}
ROWS = {"ts": [0.0, 1.0, 2.5], "in": [10, 20, 30], "out": [1, 2, 3]}
LLAMA = {"model": "meta-llama/Llama-3.1-8B", "gpu": "h100"}


def frame(**columns):
    return pd.DataFrame(ROWS | columns)


def read(given, **named):
    return db.Workload.from_frame(given, **{"arrival": "ts", "input": "in", "output": "out"} | named)


@pytest.fixture(scope="module")
def trace():
    return db.Workload.synth("small", requests=60, rate=8, isl=200, osl=10)


@pytest.fixture(scope="module")
def result(trace):
    return db.simulate(trace, db.Deployment(workers=2), vary={"router_mode": ["round-robin", "kv"]}, jobs=1)


def test_settings_of_a_role_reach_the_pools_of_that_role():
    first, then = db.Deployment(pools=ROLES, decode_max_num_seqs=1, prefill_workers=3, num_gpu_blocks=99).pools
    assert (first.replicas, then.replicas) == (3, 1)
    assert (first.mocker.max_num_seqs, then.mocker.max_num_seqs) == (256, 1)
    assert first.mocker.num_gpu_blocks == then.mocker.num_gpu_blocks == 99


def test_a_pool_keeps_its_own_setting_beside_one_for_all():
    old, new = db.Deployment(pools={"old": {"num_gpu_blocks": 50}, "new": {}}, num_gpu_blocks=99).pools
    assert (old.mocker.num_gpu_blocks, new.mocker.num_gpu_blocks) == (50, 99)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pools": {"a": {}}, "prefill_workers": 5}, "prefill_workers has no effect: there is no prefill pool"),
        (
            {"pools": {"a": {}}, "prefill_num_gpu_blocks": 9},
            "prefill_num_gpu_blocks has no effect: there is no prefill",
        ),
        ({"pools": {"a": {"replicas": 2}}, "workers": 3}, "workers has no effect: every pool sets replicas itself"),
        ({"engine_type": "sglang", "num_gpu_blocks": 20}, "has no effect: .*; use max_total_tokens"),
        ({"pools": {"a": {"engine_type": "trtllm", "max_num_seqs": 2}}}, "has no effect: .*; use max_batch_size"),
        ({"workers": 3, "prefill_workers": 2}, "workers=3 counts aggregated workers; leave it out"),
        ({"workers": 3, "replicas": 2}, "replicas is 2 and 3, as workers or replicas; leave one out"),
        ({"planner": {"planner": "hpa", "max_replicas": 4}, "max_replicas": 5}, "max_replicas is 5 and 4, in planner"),
        ({"latency_ms": 1.0, "transfer_latency_ms": 2.0}, "transfer_latency_ms is 2.0 and 1.0, in transfer"),
        ({"pools": [{"replicas": 2}]}, "pools is .*expected pools by name"),
        ({"pools": None}, "pools is None; expected pools by name"),
        ({"pools": (1,)}, r"pools is \(1,\); expected pools by name"),
        ({"pools": ()}, r"pools is \(\); expected pools by name"),
        ({"pools": {"a": 3}}, "pools.a is 3; expected its settings, such as"),
        ({"router": ["x"], "kv_overlap_score_weight": 2.0}, "router is .*; expected its settings, by name"),
    ],
)
def test_what_a_deployment_would_drop_or_cannot_read_is_refused(given, message):
    with pytest.raises(db.UserError, match=message):
        db.Deployment(**given)


def test_equal_values_given_twice_are_fine():
    assert db.Deployment(workers=2, replicas=2) == db.Deployment(workers=2)
    db.Deployment(planner={"planner": "hpa", "max_replicas": 4}, max_replicas=4)


def test_equal_deployments_have_equal_hashes_and_copies_keep_their_settings():
    fleet = db.Deployment(workers=2, max_num_batched_tokens=1024)
    for same in (copy.deepcopy(fleet), pickle.loads(pickle.dumps(fleet)), dataclasses.replace(fleet)):
        assert same == fleet
        assert hash(same) == hash(fleet)
        assert same.chooses("max_num_batched_tokens")
        assert not same.chooses("num_gpu_blocks")
    assert len({fleet, db.Deployment(workers=2, max_num_batched_tokens=1024), db.Deployment(workers=3)}) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: db.Deployment.from_yaml(3), "source is 3; expected a path"),
        (lambda folder: db.Deployment.from_yaml(b"x"), "source is b'x'; expected a path"),
        (lambda folder: db.Deployment().to_yaml(folder / "no" / "x.yaml"), "x.yaml: No such file"),
        (lambda folder: db.Deployment().to_yaml(folder), "Is a directory"),
        (lambda folder: db.Workload.read(3), "paths is 3; expected a path"),
        (lambda folder: db.Workload.read(block_size=-1), "block_size is -1; expected at least 1 token"),
        (lambda folder: db.Workload.read(block_size="x"), "block_size is 'x'; expected a whole number"),
        (lambda folder: db.Workload.read(format=3), "format is 3; expected text"),
        (lambda folder: db.Workload.synth(name=3), "name is 3; expected text"),
        (lambda folder: db.Workload.synth(requests=1).write(3), "path is 3; expected a path"),
        (lambda folder: db.simulate(slo=3), "slo is 3; expected text such as"),
        (lambda folder: db.simulate(vary=[1]), r"vary is \[1\]; expected values by name"),
        (lambda folder: db.simulate(vary={1: [2]}), "vary is .*; expected values by name"),
        (lambda folder: db.simulate(out=3), "out is 3; expected a path"),
        (lambda folder: db.simulate(progress="x"), "progress is 'x'; expected true or false"),
        (lambda folder: db.load(None), "folders is None; expected a path"),
        (lambda folder: db.bench(None), "url is None; expected text such as"),
        (lambda folder: db.rehearse(out=None), "out is None; expected a path"),
        (lambda folder: db.plan(slo="ttft.p90 <= 2s", loads=["x"]), "loads is 'x'; expected multiples of the rate"),
        (lambda folder: db.plan(slo="ttft.p90 <= 2s", price=3), r"price must be a list; of each, text, not \(3,\)"),
    ],
)
def test_arguments_of_another_type_are_refused(call, message, tmp_path):
    with pytest.raises(db.UserError, match=message):
        call(tmp_path)


@pytest.mark.parametrize(
    ("given", "named", "message"),
    [
        (frame(), {"block_size": -1}, "block_size is -1; expected at least 1 token"),
        (frame(), {"block_size": 0}, "block_size is 0; expected at least 1 token"),
        (frame(), {"arrival": None}, "arrival is None; expected text or a whole number"),
        (frame(), {"session": 1.5}, "session is 1.5; expected the name of a column"),
        (pd.concat([frame(), frame()], axis=1), {}, "cannot become a table of Arrow .*Duplicate column names"),
        (frame(out=pd.arrays.SparseArray([1, 2, 3])), {}, "cannot become a table of Arrow .*column out"),
        (frame(c=1j), {}, "cannot become a table of Arrow .*column c with type complex128"),
        (frame(h=[[1], [1, 2, 3], [3]]), {"hash_ids": "h"}, r"row 2 of the frame: .*\(is block_size right\?\)"),
        (frame(ts=pd.to_datetime([1, 2, 3], unit="s")), {"arrival": "ts:ms"}, "ts holds times, whose unit is known"),
        (frame(ts=pd.to_timedelta([1, 2, 3], unit="s")), {"arrival": "ts:ms"}, "ts holds times, whose unit is known"),
        (frame(ts=["2026-01-31T18:15:46"] * 3), {"arrival": "ts:ms"}, "ts holds times, whose unit is known"),
        ([1], {}, r"expected a data frame of pandas, polars or Arrow, not \[1\]"),
    ],
)
def test_frames_that_cannot_be_read_are_refused_in_one_line(given, named, message):
    with pytest.raises(db.UserError, match=message) as refused:
        read(given, **named)
    assert "\n" not in str(refused.value)


def test_columns_may_be_numbered_and_arrivals_durations():
    plain = [each.arrival_s for each in read(frame()).requests]
    numbered = read(frame().set_axis([0, 1, 2], axis=1), arrival=0, input=1, output=2)
    assert [each.arrival_s for each in numbered.requests] == plain == [0.0, 1.0, 2.5]
    times = pd.to_timedelta([3.0, 4.0, 5.5], unit="s")
    assert [each.arrival_s for each in read(frame(ts=times)).requests] == plain
    assert [each.arrival_s for each in read(polars.from_pandas(frame(ts=times))).requests] == plain


def test_a_plan_keeps_what_the_deployment_names(tmp_path):
    trace = db.Workload.synth(requests=200, rate=10, isl=200, osl=10)
    fleet = db.Deployment(**LLAMA, tensor_parallel_size=4, max_num_batched_tokens=1024)
    found = db.plan(
        trace, fleet, slo="ttft.p90 <= 2s", loads=[1], max_gpus=8, vary={"router_mode": ["kv"]}, out=tmp_path / "p"
    )
    (pool,) = found.deployment.pools
    assert (pool.timing.tensor_parallel_size, pool.mocker.max_num_batched_tokens) == (4, 1024)
    with pytest.raises(
        db.UserError, match=r"tensor_parallel_size is .*, but the deployment has tensor_parallel_size 4"
    ):
        db.plan(trace, fleet, slo="ttft.p90 <= 2s", tensor_parallel_size=[1, 2], out=tmp_path / "x")


def test_numbers_of_numpy_are_as_good_as_pythons(trace):
    assert db.Deployment(workers=np.int64(3)) == db.Deployment(workers=3)
    found = db.simulate(trace, repeats=np.int64(1), seed=np.int32(7), rate_scale=np.float64(2), jobs=1)
    assert found.verdict == db.simulate(trace, seed=7, rate_scale=2.0, jobs=1).verdict


def test_numbers_of_numpy_are_taken_within_lists_and_mappings_and_as_arrays(trace):
    pools = {"a": {"replicas": np.int64(2), "num_gpu_blocks": np.int32(900)}}
    assert db.Deployment(pools=pools) == db.Deployment(pools={"a": {"replicas": 2, "num_gpu_blocks": 900}})
    given = {"workers": np.array([1, 2]), "rate_scale": [np.float64(2)]}
    found = db.simulate(trace, vary=given, jobs=1)
    assert found.arms == db.simulate(trace, vary={"workers": [1, 2], "rate_scale": [2.0]}, jobs=1).arms
    assert (
        found.manifest["command"]
        == "dynabench.simulate(..., vary={'workers': [1, 2], 'rate_scale': [2.0]}, repeats=1, seed=0, jobs=1)"
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (OSError(28, "No space left on device", "x.json"), "x.json: No space left on device"),
    ],
)
def test_an_error_of_the_system_names_a_file_only_if_there_is_one(error, message):
    with pytest.raises(db.UserError) as caught, plain_errors():
        raise error
    assert str(caught.value) == message


def test_a_plan_chooses_the_size_that_only_dynabench_gave():
    assert not db.Deployment(**LLAMA).chooses("tensor_parallel_size")
    assert db.Deployment(**LLAMA, tensor_parallel_size=1).chooses("tensor_parallel_size")


@pytest.mark.parametrize("same", [copy.deepcopy, lambda fleet: pickle.loads(pickle.dumps(fleet)), dataclasses.replace])
@pytest.mark.parametrize(("model", "gpus"), [("meta-llama/Llama-3.1-70B", 4), ("meta-llama/Llama-3.1-8B", 1)])
def test_copies_know_whether_the_gpus_of_a_worker_were_chosen(same, model, gpus):
    fleet = db.Deployment(model=model, gpu="h100")
    assert fleet.pools[0].tensor_parallel_size == gpus
    assert not same(fleet).chooses("tensor_parallel_size")
    assert same(db.Deployment(model=model, gpu="h100", tensor_parallel_size=gpus)).chooses("tensor_parallel_size")


def test_a_file_names_the_gpus_of_a_worker_only_if_its_writer_chose_them(tmp_path):
    model = {"model": "meta-llama/Llama-3.1-70B", "gpu": "h100"}
    given = db.Deployment(**model)
    given.to_yaml(tmp_path / "given.yaml")
    again = db.Deployment.from_yaml(tmp_path / "given.yaml")
    assert again == given == db.Deployment.from_yaml(given.to_yaml())
    assert again.pools[0].tensor_parallel_size == 4
    assert not again.chooses("tensor_parallel_size")
    assert again.to_yaml() == given.to_yaml()
    _, rest = given.to_yaml().split("\n", 1)
    marked = f"# dynabench: fitted tensor_parallel_size, in words of another version\n{rest}"
    assert not db.Deployment.from_yaml(marked).chooses("tensor_parallel_size")
    for size in (4, 8):
        assert db.Deployment.from_yaml(db.Deployment(**model, tensor_parallel_size=size).to_yaml()).chooses(
            "tensor_parallel_size"
        )
    edited = given.to_yaml().replace("tensor_parallel_size: 4", "tensor_parallel_size: 8")
    assert db.Deployment.from_yaml(edited).chooses("tensor_parallel_size")


@pytest.mark.parametrize(("gpus", "is_chosen"), [(4, False), (8, True)])
def test_with_other_pools_gpus_that_the_model_needs_are_not_chosen(gpus, is_chosen):
    fleet = db.Deployment(model="meta-llama/Llama-3.1-70B", gpu="h100", tensor_parallel_size=gpus)
    changed = dataclasses.replace(fleet, pools=(dataclasses.replace(fleet.pools[0], replicas=3),))
    assert changed.chooses("tensor_parallel_size") is is_chosen


def test_results_cannot_be_changed_through_what_they_return(result):
    shown, estimate = repr(result), result.compare("kv").ttft.p90
    requests = result.requests
    requests["ttft"] = 0.0
    result.arms.clear()
    result.manifest.clear()
    requests.attrs["manifest"].clear()
    assert (repr(result), result.compare("kv").ttft.p90) == (shown, estimate)
    assert np.count_nonzero(result.requests["ttft"]) == 120
    assert result.manifest["title"]


def test_calls_work_in_a_running_loop_and_in_threads(trace, result):
    async def cell():
        return db.simulate(trace, db.Deployment(workers=2), vary={"router_mode": ["round-robin", "kv"]}, jobs=1)

    found = [asyncio.run(cell())]
    threads = [threading.Thread(target=lambda: found.append(asyncio.run(cell()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.verdict for each in found] == [result.verdict] * 3
