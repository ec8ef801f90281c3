"""Pools that only prefill or only decode: how they are described, varied and refused."""

import json
import sys

import pytest

from dynabench.arm import Run, Settings
from dynabench.cli.app import main
from dynabench.deployment import file, paths
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.engines import check_fits, context_of, engines_of
from dynabench.deployment.flags import PoolConfig, RoleConfig, simulated_pools
from dynabench.deployment.processes import deployment_programs
from dynabench.experiment.arms import comparison_of
from dynabench.experiment.settings import ExperimentConfig
from dynabench.live.run import on_this_host
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from serving.life import DisaggregationConfig
from serving.runtime.config import RuntimeConfig
from serving.worker.config import WorkerConfig
from tests.support.commands import PROGRESS, dynabench
from workloads import Request, Workload, WorkloadError

APART = """
pools:
  prefill: {role: prefill, replicas: 2, tensor_parallel_size: 2, router_mode: kv}
  decode: {role: decode, replicas: 3, max_num_seqs: 64}
transfer: {bandwidth_gb_s: 42}
disaggregation: {flow: destination-first}
"""


def read(folder, text):
    path = folder / "deployment.yaml"
    path.write_text(text)
    return file.read_deployment(path)


def pool(role, replicas=1, tp=1, **settings):
    timing = TimingConfig(tensor_parallel_size=tp)
    return Pool(**{"name": role, "role": role, "replicas": replicas, "timing": timing} | settings)


def apart(prefill=1, decode=1, **settings):
    return Deployment(pools=(pool("prefill", prefill), pool("decode", decode)), **settings)


def test_a_file_gives_pools_roles_and_says_what_lies_between_them(tmp_path):
    deployment = read(tmp_path, APART)
    assert [(each.role, each.num_gpus, each.router_mode) for each in deployment.pools] == [
        ("prefill", 4, "kv"),
        ("decode", 3, None),
    ]
    assert (deployment.transfer.bandwidth_gb_s, deployment.disaggregation.flow) == (42, "destination-first")
    assert file.from_plain(file.as_plain(deployment)) == deployment


def test_the_role_of_a_pool_decides_the_part_of_its_engines(tmp_path):
    deployment = read(tmp_path, APART)
    engines = engines_of(deployment)
    assert [engine.config.kv_role for engine in engines] == ["kv_producer"] * 2 + ["kv_consumer"] * 3
    assert [each.role for each in deployment.worker_pools] == ["prefill"] * 2 + ["decode"] * 3
    assert [engine.config.max_num_seqs for engine in engines] == [256] * 2 + [64] * 3
    assert (deployment.mode_of("prefill"), deployment.mode_of("decode")) == ("kv", "round-robin")


def test_nobody_gives_an_engine_another_part_than_its_pool(tmp_path):
    with pytest.raises(file.DeploymentError, match=r"pools.a.kv_role is unknown; did you mean role?"):
        read(tmp_path, "pools: {a: {kv_role: kv_producer}}")
    with pytest.raises(
        ValueError, match=r"kv_role is 'kv_consumer'; expected no kv_role: the pool's role determines it"
    ):
        Pool(mocker=EngineConfig(kv_role="kv_consumer"))
    with pytest.raises(ValueError, match=r"pools.prefill.kv_role is unknown"):
        paths.change(apart(), {"pools.prefill.kv_role": "kv_consumer"})


PREFILL = "pools: {p: {role: prefill}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PREFILL + "}", "pools.p.role is 'prefill'; expected workers with role 'decode' as well that serve mock"),
        ("pools: {d: {role: decode}}", "pools.d.role is 'decode'; expected workers with role 'prefill' as well that"),
        (
            PREFILL + ", d: {role: decode, model_name: x}}",
            "pools.p.role is 'prefill'; expected workers with role 'decode' as well that serve mock; pools.d serves x",
        ),
        (
            PREFILL + ", d: {role: decode, replicas: 0}}",
            "pools.p.role is 'prefill'; expected workers with role 'decode' as well that serve mock; pools.d has 0 "
            "replicas",
        ),
        (
            PREFILL + ", d: {role: decode}, a: {}}",
            "pools.a.role is 'aggregated'; expected 'prefill' or 'decode', as pools.p has 'prefill': both serve mock",
        ),
        (
            PREFILL + ", d: {role: decode, block_size: 16}}",
            "pools.d.block_size is 16; expected 64, as in pools.p: both serve mock",
        ),
        (
            PREFILL + ", d: {role: decode, kv_cache_dtype: fp8}}",
            "pools.d.kv_cache_dtype is 'fp8'; expected 'auto', as in pools.p",
        ),
        (
            "pools: {p: {role: prefill, model: Qwen/Qwen3-8B, model_name: x}, d: {role: decode, model: Qwen/Qwen3-32B, "
            "model_name: x}}",
            "pools.d.model is 'Qwen/Qwen3-32B'; expected 'Qwen/Qwen3-8B', as in pools.p: both serve x",
        ),
        (
            "pools: {p: {role: prefill, tensor_parallel_size: 4}, d: {role: decode, tensor_parallel_size: 6}}",
            "pools.p.tensor_parallel_size is 4 and pools.d.tensor_parallel_size is 6; expected one to be a multiple of the",
        ),
        (
            PREFILL + ", d: {role: decode, router_mode: kv}, e: {role: decode}}",
            "pools.e.router_mode is None; expected 'kv', as in pools.d",
        ),
        (
            "pools: {a: {router_mode: kv}}",
            "pools.a: router_mode is 'kv'; expected none with role 'aggregated': the deployment's mode applies to "
            "all aggregated workers",
        ),
        ("pools: {p: {role: prefill, router_mode: best}}", "pools.p: router_mode 'best' is unknown; expected one of "),
        (
            "pools: {e: {engine: echo_full, role: decode}}",
            "pools.e: role is 'decode'; expected 'aggregated' with engine echo_full: only mocker, vllm, sglang, trtllm hand",
        ),
        (
            "gpus: 2\n" + PREFILL + ", d: {role: decode, replicas: 2}}",
            "gpus is 2; expected at least 3, the number that the pools need (p 1, d 2)",
        ),
        (
            PREFILL + ", d: {role: decode}}\ntransfer: {bandwidth_gb_s: -1}",
            "transfer.bandwidth_gb_s is -1; expected",
        ),
        (
            PREFILL + ", d: {role: decode}}\ndisaggregation: {kv_lease_duration_s: .inf}",
            "disaggregation.kv_lease_duration_s is inf; expected",
        ),
        (PREFILL + ", d: {role: decode}}\ndisaggregation: {flow: up}", "disaggregation.flow is 'up'; expected one of "),
    ],
)
def test_roles_that_do_not_fit_are_one_line_that_names_both_sides(tmp_path, text, message):
    with pytest.raises(file.DeploymentError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pools_of_two_models_each_have_roles_of_their_own():
    models = {
        name: [
            pool(role, name=f"{role}-{name}", worker=WorkerConfig(model_name=name)) for role in ("prefill", "decode")
        ]
        for name in ("x", "y")
    }
    assert list(Deployment(pools=(*models["x"], *models["y"])).models) == ["x", "y"]


def workload(isl, osl):
    return Workload("w", 16, [Request(0.0, isl, osl, tuple(range(isl // 16)))])


def test_a_prefill_worker_need_not_hold_an_answer_and_a_decode_worker_must():
    small = EngineConfig(block_size=16, num_gpu_blocks=11)  # 160 tokens
    prefill, decode = engines_of(Deployment(pools=(pool("prefill", mocker=small), pool("decode", mocker=small))))
    check_fits(workload(160, 100), prefill)
    with pytest.raises(
        WorkloadError, match=r"160 prompt and 100 output tokens, more than the 160 that a decode engine can hold"
    ):
        check_fits(workload(160, 100), decode)
    with pytest.raises(
        WorkloadError, match=r"161 prompt and 1 output tokens, more than the 160 that a prefill engine can hold"
    ):
        check_fits(workload(161, 1), prefill)


def test_an_answer_may_be_as_long_as_decode_workers_hold():
    prefill, decode = (EngineConfig(block_size=16, num_gpu_blocks=blocks) for blocks in (11, 101))
    engines = engines_of(Deployment(pools=(pool("prefill", mocker=prefill), pool("decode", mocker=decode))))
    assert context_of(engines) == 1601


def workers_of(deployment):
    """Return the settings of each worker's process."""
    found = deployment_programs(deployment, RuntimeConfig(), namespace="x", descriptor=0)
    return {program.name: program.settings[0] for program in found if isinstance(program.settings[0], WorkerConfig)}


def test_workers_are_told_their_role_and_prefill_workers_have_an_endpoint_of_their_own():
    found = workers_of(Deployment(pools=(pool("prefill", 2, router_mode="kv"), pool("decode"))))
    assert [(name, worker.role, worker.endpoint, worker.router_mode) for name, worker in found.items()] == [
        ("prefill-0", "prefill", "dyn://x.prefill.generate", "kv"),
        ("prefill-1", "prefill", "dyn://x.prefill.generate", "kv"),
        ("decode-0", "decode", "dyn://x.backend.generate", None),
    ]


def test_each_of_two_models_has_two_endpoints():
    pools = [
        pool(role, name=f"{role[0]}-{model}", worker=WorkerConfig(model_name=model))
        for model in ("x", "y")
        for role in ("prefill", "decode")
    ]
    assert {name: worker.address.component for name, worker in workers_of(Deployment(pools=tuple(pools))).items()} == {
        "p-x-0": "p-x",
        "d-x-0": "d-x",
        "p-y-0": "p-y",
        "d-y-0": "d-y",
    }


def test_a_prefill_worker_that_names_no_endpoint_has_that_of_its_role():
    assert str(WorkerConfig(role="prefill").address) == "dyn://dynamo.prefill.generate"
    assert str(WorkerConfig(role="decode").address) == "dyn://dynamo.backend.generate"
    assert str(WorkerConfig(role="prefill", endpoint="dyn://ns.mine").address) == "dyn://ns.mine.generate"


def events_of(**settings):
    """Return which roles report KV events in a run."""
    deployment = on_this_host(Run.alone(Settings(apart(**settings)))).deployment
    return {pool.role: pool.worker.kv_events for pool in deployment.pools}


def test_workers_report_the_kv_events_that_the_router_of_their_stage_wants():
    assert events_of() == {"prefill": False, "decode": False}
    assert events_of(router_mode="kv") == {"prefill": True, "decode": False}
    local = DisaggregationConfig(conditional_disagg="isl_bounding")
    assert events_of(router_mode="kv", disaggregation=local) == {"prefill": True, "decode": True}
    assert events_of(disaggregation=local) == {"prefill": False, "decode": True}


def pools_of(*varied, **settings):
    return simulated_pools(PoolConfig(**settings), Pool(mocker=EngineConfig(max_num_seqs=32)), varied)


def test_flags_make_two_pools_that_are_alike_but_for_what_is_said_of_one():
    prefill, decode = pools_of(
        prefill=RoleConfig(workers=2, tensor_parallel_size=4, router_mode="kv"),
        decode=RoleConfig(workers=4, num_gpu_blocks=9),
    )
    assert (prefill.name, prefill.role, prefill.replicas, prefill.num_gpus) == ("prefill", "prefill", 2, 8)
    assert (decode.name, decode.role, decode.replicas, decode.mocker.num_gpu_blocks) == ("decode", "decode", 4, 9)
    assert prefill.mocker.max_num_seqs == decode.mocker.max_num_seqs == 32
    assert (prefill.router_mode, decode.router_mode) == ("kv", None)


def test_axes_may_count_the_workers_that_no_flag_counts():
    assert [each.role for each in pools_of("prefill_workers", "decode_workers")] == ["prefill", "decode"]
    assert [each.replicas for each in pools_of("prefill_workers", decode=RoleConfig(workers=3))] == [1, 3]
    assert [each.replicas for each in pools_of("prefill_workers", gpus=8)] == [1, 1]
    with pytest.raises(ValueError, match="--decode-workers is missing"):
        pools_of("prefill_workers")


def arms(*vary, gpus=None, modes=("kv",), deployment=None):
    settings = Settings(deployment or apart(gpus=gpus))
    return comparison_of(ExperimentConfig(router_mode=modes, vary=vary), settings)


def test_every_split_of_a_budget_is_compared_with_the_aggregated_deployment_of_equal_size():
    found, left_out = arms("prefill_workers=1,2,3", gpus=4)
    assert [arm.name for arm in found] == [
        "aggregated",
        "prefill_workers 1, decode_workers 3",
        "prefill_workers 2, decode_workers 2",
        "prefill_workers 3, decode_workers 1",
    ]
    assert [[(each.role, each.num_gpus) for each in arm.settings.deployment.pools] for arm in found] == [
        [("aggregated", 4)],
        [("prefill", 1), ("decode", 3)],
        [("prefill", 2), ("decode", 2)],
        [("prefill", 3), ("decode", 1)],
    ]
    assert not left_out
    assert found[0].changes == {"router_mode": "kv", "prefill_workers": "aggregated"}


def test_the_aggregated_deployment_is_there_once_for_all_that_differs_between_roles_only():
    found, _ = arms(
        "prefill_workers=1,2",
        "max_num_seqs=8,16",
        "pools.decode.dp_size=1,2",
        "flow=source-first",
        gpus=8,
        modes=("kv", "random"),
    )
    wholes = [arm for arm in found if arm.name.startswith("aggregated")]
    assert [arm.name for arm in wholes] == [
        "aggregated, kv, max_num_seqs 8",
        "aggregated, kv, max_num_seqs 16",
        "aggregated, random, max_num_seqs 8",
        "aggregated, random, max_num_seqs 16",
    ]
    assert [arm.settings.deployment.pools[0].mocker.max_num_seqs for arm in wholes] == [8, 16, 8, 16]


def test_splits_that_do_not_come_out_even_are_left_out_with_the_reason():
    deployment = Deployment(pools=(pool("prefill"), pool("decode", tp=2)), gpus=4)
    found, left_out = arms("prefill_workers=1,2,4", deployment=deployment)
    assert [arm.name for arm in found] == ["aggregated", "prefill_workers 2, decode_workers 1"]
    assert left_out == [
        "gpus is 4, pools.prefill uses 1, so 3 left for pools.decode; expected a positive multiple of 2, the GPUs "
        "that each of its workers needs",
        "gpus is 4, pools.prefill uses 4, so 0 left for pools.decode; expected a positive multiple of 2, the GPUs "
        "that each of its workers needs",
    ]
    with pytest.raises(ValueError, match=r"^gpus is 4, pools.prefill uses 4, so 0 left for pools.decode"):
        arms("prefill_workers=4", deployment=deployment)


def test_the_budget_may_be_varied_itself():
    found, _ = arms("prefill_workers=1", "gpus=2,4")
    assert [arm.settings.deployment.num_workers for arm in found] == [2, 4, 2, 4]


def test_without_a_budget_or_with_both_counts_nothing_is_filled_up():
    assert [arm.settings.deployment.num_workers for arm in arms("prefill_workers=1,2").arms] == [2, 3]
    assert [arm.name for arm in arms("prefill_workers=1", "decode_workers=1,2", gpus=8).arms] == [
        "decode_workers 1",
        "decode_workers 2",
    ]


def test_settings_of_roles_are_varied_by_flag_or_path():
    deployment = apart()
    for name, path in (
        ("prefill_workers", "pools.prefill.replicas"),
        ("decode_tensor_parallel_size", "pools.decode.tensor_parallel_size"),
        ("prefill_router_mode", "pools.prefill.router_mode"),
        ("transfer_bandwidth_gb_s", "transfer.bandwidth_gb_s"),
        ("latency_ms", "transfer.latency_ms"),
        ("flow", "disaggregation.flow"),
        ("prefill_busy_tokens", "disaggregation.prefill_busy_tokens"),
        ("prefill_colour", None),
        ("colour_transfer", None),
    ):
        assert paths.full(deployment, name) == path
    changed = arms("pools.prefill.router_mode=kv,none", "transfer_latency_ms=2", "flow=destination-first").arms
    assert [arm.settings.deployment.mode_of("prefill") for arm in changed] == ["kv", "kv"]
    assert [arm.settings.deployment.pools[0].router_mode for arm in changed] == ["kv", None]
    assert {arm.settings.deployment.transfer.latency_ms for arm in changed} == {2}
    assert {arm.settings.deployment.disaggregation for arm in changed} == {
        DisaggregationConfig(flow="destination-first")
    }


def test_a_setting_that_all_pools_share_is_varied_for_all_at_once():
    found = arms("pools.prefill.block_size=16", "pools.decode.block_size=16").arms
    assert [each.mocker.block_size for each in found[0].settings.deployment.pools] == [16, 16]


def test_what_lies_between_roles_is_not_varied_where_there_are_none():
    with pytest.raises(ValueError, match=r"transfer.latency_ms applies only to prefill and decode workers or"):
        arms("transfer.latency_ms=1,2", deployment=Deployment())


def test_a_pool_with_a_hyphen_in_its_name_is_varied_by_its_path():
    deployment = Deployment(pools=(Pool(name="b-2"), Pool(name="c")))
    found = arms("pools.b-2.replicas=1,3", deployment=deployment).arms
    assert [arm.settings.deployment.num_workers for arm in found] == [2, 4]


ROLES = ("--prefill-workers", "1", "--decode-workers", "1")


@pytest.mark.filterwarnings("ignore:Cyclopts application invoked without tokens")
@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (
            "simulate",
            ("--prefill-workers", "2", "--decode-workers", "0"),
            "decode_workers must be from 1 to 10000, not 0",
        ),
        (
            "simulate",
            ("--prefill-workers", "2"),
            "--decode-workers is missing; expected it together with --prefill-workers",
        ),
        (
            "simulate",
            ("--decode-gpu", "h100"),
            "--prefill-workers is missing; expected it together with --decode-workers",
        ),
        (
            "simulate",
            ("--workers", "4", *ROLES),
            "--workers 4 counts aggregated workers; leave it out with --prefill-workers and",
        ),
        ("simulate", ("--kv-role", "kv_producer"), "Unknown option: --kv-role"),
        ("simulate", ("--transfer-latency-ms", "1"), "--transfer-latency-ms needs prefill and decode workers; use"),
        ("simulate", ("--flow", "destination-first"), "--flow needs prefill and decode workers; use"),
        (
            "simulate",
            (*ROLES, "--gpus", "1"),
            "gpus is 1; expected at least 2, the number that the pools need (prefill 1, decode 1)",
        ),
        (
            "simulate",
            (*ROLES, "--decode-num-gpu-blocks", "1"),
            "pools.decode: num_gpu_blocks must be at least 2, not 1",
        ),
        ("simulate", (*ROLES, "--decode-num-gpu-blocks", "3"), "more than the 128 that a decode engine can hold"),
        ("simulate", (*ROLES, "--prefill-num-gpu-blocks", "3"), "more than the 128 that a prefill engine can hold"),
        (
            "sweep",
            ("--gpus", "4", "--vary", "prefill_workers=1,2", "--decode-workers", "2"),
            "--decode-workers 2 cannot be used with --gpus 4 and --vary prefill_workers",
        ),
        ("sweep", ("--vary", "prefill_workers=1,2"), "--decode-workers is missing"),
        ("run", ("--prefill-workers", "2"), "--decode-workers is missing; expected it together with --prefill-workers"),
        ("run", ("--prefill-workers", "0"), "prefill_workers must be from 1 to 10000, not 0"),
        (
            "run",
            (*ROLES, "--url", "http://x"),
            "--prefill-workers and --decode-workers apply to dynabench's own stack, but --url",
        ),
        ("run", ("--transfer", "tcp"), "--transfer needs prefill and decode workers; use --prefill-workers and"),
        ("run", (*ROLES, "--kv-bytes-scale", "2"), "kv_bytes_scale must be from 0 to 1, not 2"),
        ("run", (*ROLES, "--transfer-latency-ms", "1"), "Unknown option: --transfer-latency-ms"),
        (
            "run",
            (*ROLES, "--vary", "transfer.latency_ms=1,2"),
            "transfer.latency_ms applies only to virtual time; vary it with",
        ),
        (
            "simulate",
            (*ROLES, "--vary", "kv_bytes_scale=0.1,1"),
            "kv_transfer.kv_bytes_scale applies only to real processes",
        ),
        (
            "run",
            (*ROLES, "--engine", "llamacpp", "--model", "x"),
            "role is 'prefill'; expected 'aggregated' with engine llamacpp: only mocker, vllm, sglang, trtllm hand KV over",
        ),
        (
            "run",
            (*ROLES, "--engine", "vllm", "--model", "x", "--decode-num-gpu-blocks", "9"),
            "--decode-num-gpu-blocks is for simulated engines, not for --engine vllm",
        ),
        (
            "serve",
            ("--decode-workers", "2"),
            "--prefill-workers is missing; expected it together with --decode-workers",
        ),
        (
            "serve",
            ("--workers", "2", *ROLES),
            "--workers 2 counts aggregated workers; leave it out with --prefill-workers and",
        ),
        ("serve", ("--flow", "destination-first"), "--flow needs prefill and decode workers; use"),
        ("serve", (*ROLES, "--standalone-router"), "standalone_router is true; expected false with prefill and decode"),
        ("serve", (*ROLES, "--decode-router-mode", "oracle-cache"), "late(H) and the oracles are for virtual time"),
        ("validate", ROLES, "cannot be validated: validate compares aggregated workers only"),
    ],
)
def test_flags_of_roles_that_make_no_sense_are_one_line(tmp_path, monkeypatch, capsys, command, flags, message):
    out = ("--out", str(tmp_path / "out")) if command != "serve" else ()
    said = refusal(monkeypatch, capsys, command, *flags, *out)
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def refusal(monkeypatch, capsys, *words):
    """Return what the command line says to words that it refuses."""
    monkeypatch.setattr(sys, "argv", ["dynabench", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return PROGRESS.sub("", capsys.readouterr().err)


@pytest.mark.filterwarnings("ignore:Cyclopts application invoked without tokens")
@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (
            "simulate",
            ("--prefill-workers", "2", "--transfer-latency-ms", "3"),
            "--prefill-workers, --transfer-latency-ms cannot be used with --deployment",
        ),
        (
            "run",
            ("--flow", "source-first", "--prefill-workers", "2"),
            "--prefill-workers, --flow cannot be used with --deployment",
        ),
        (
            "serve",
            ("--transfer", "tcp", "--enforce-disagg"),
            "--enforce-disagg, --transfer cannot be used with --deploy",
        ),
    ],
)
def test_a_file_with_roles_takes_no_flags_of_them(tmp_path, monkeypatch, capsys, command, flags, message):
    (tmp_path / "d.yaml").write_text(APART)
    monkeypatch.chdir(tmp_path)
    said = refusal(monkeypatch, capsys, command, "-f", "d.yaml", *flags)
    assert message in said
    assert said.count("\n") == 1


def test_a_sweep_of_splits_has_the_aggregated_deployment_in_its_table(tmp_path):
    flags = (
        "--gpus",
        "4",
        "--vary",
        "prefill_workers=1,2,4",
        "--max-requests",
        "20",
        "--router-mode",
        "kv",
        "--jobs",
        "1",
    )
    done = dynabench("sweep", *flags, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "left out: gpus is 4, pools.prefill uses 4, so 0 left for pools.decode" in done.stdout
    summary = json.loads((tmp_path / "out" / "sweep.json").read_text())["summary"]
    assert [row[:2] for row in summary["rows"]] == [["aggregated", "-"], ["1", "3"], ["2", "2"]]
    points = summary["points"]
    assert [(point["name"], point["workers"]) for point in points] == [
        ("aggregated", 4),
        ("prefill_workers 1, decode_workers 3", 4),
        ("prefill_workers 2, decode_workers 2", 4),
    ]
