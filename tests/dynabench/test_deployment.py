"""Deployments: files, paths, and what cannot be deployed."""

import typing
from pathlib import Path

import pytest
import yaml

from dynabench.deployment import file, paths
from dynabench.deployment.description import Deployment, EngineName, Pool
from dynabench.deployment.flags import LivePoolConfig, MeasuredFrontendConfig, MeasuredRouterConfig, live_pools
from dynabench.deployment.processes import deployment_programs
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from serving.engines.mock.config import AnswerConfig
from serving.runtime.config import RuntimeConfig
from serving.transfer.config import TransferRunConfig
from serving.worker.config import ModelRunConfig, WorkerConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
TWO_GPUS = """
model: meta-llama/Llama-3.1-8B
gpus: 6
router_mode: kv
router: {kv_overlap_score_weight: 0.5}
pools:
  new: {replicas: 2, gpu: h100, max_num_seqs: 64}
  old: {replicas: 1, gpu: a100, tensor_parallel_size: 4}
"""


def read(folder, text):
    path = folder / "deployment.yaml"
    path.write_text(text)
    return file.read_deployment(path)


def test_a_file_describes_pools_whose_settings_stand_side_by_side(tmp_path):
    deployment = read(tmp_path, TWO_GPUS)
    new, old = deployment.pools
    assert (new.name, new.replicas, new.mocker.max_num_seqs) == ("new", 2, 64)
    assert (new.timing.gpu, new.timing.model) == ("h100", "meta-llama/Llama-3.1-8B")
    assert (old.timing.gpu, old.num_gpus) == ("a100", 4)
    assert (deployment.router_mode, deployment.router.kv_overlap_score_weight) == ("kv", 0.5)
    assert deployment.num_workers == 3


def test_the_share_of_tool_calls_reaches_the_workers_of_its_pool(tmp_path):
    deployment = read(tmp_path, "pools: {a: {tool_call_share: 0.25, tool_call_parser: mistral}, b: {}}")
    workers = deployment_programs(deployment, RuntimeConfig(), namespace="n", descriptor=3)[:2]
    assert [setting for worker in workers for setting in worker.settings if isinstance(setting, AnswerConfig)] == [
        AnswerConfig(tool_call_share=0.25),
        AnswerConfig(),
    ]
    assert file.from_plain(file.as_plain(deployment)) == deployment


def test_on_a_memory_network_workers_reach_the_store_at_its_node(tmp_path):
    deployment = read(tmp_path, "pools: {a: {kv_offloading_size: 1}}\nkv_store: {kv_store_size: 4}")
    runtime = RuntimeConfig(discovery_backend="memory", etcd_endpoints="", nats_server="")
    store, worker, *_ = deployment_programs(deployment, runtime, namespace="n", descriptor=3)
    (transfer,) = (each for each in worker.settings if isinstance(each, TransferRunConfig))
    assert store.name == store.settings[0].host == "kv-store"
    assert transfer.kv_store == f"kv-store:{store.settings[0].port}"


def test_only_simulated_engines_have_a_share_of_tool_calls(tmp_path):
    with pytest.raises(file.DeploymentError, match=r"pools.a.tool_call_share is unknown"):
        read(tmp_path, "pools: {a: {engine: vllm, model: m, tool_call_share: 0.25}}")
    with pytest.raises(ValueError, match="--tool-call-share is for simulated engines, not for --engine vllm"):
        answers = AnswerConfig(tool_call_share=0.25)
        live_pools(LivePoolConfig(engine="vllm"), Pool(timing=TimingConfig(model="m")), answers=answers)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_deployment_written_down_is_read_back_equal(example):
    deployment = file.read_deployment(example)
    assert file.from_plain(file.as_plain(deployment)) == deployment


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_what_differs_from_the_defaults_is_enough_to_read_a_deployment_back(example, is_measured):
    deployment = file.read_deployment(example, is_measured=is_measured)
    short = file.as_changed(deployment)
    assert file.from_plain(short, is_measured=is_measured) == deployment
    assert len(yaml.safe_dump(short).splitlines()) < 30


def test_merge_keys_share_settings_between_pools(tmp_path):
    text = "pools:\n  a: &a {gpu: h100, replicas: 2}\n  b-2: {<<: *a, replicas: 1}\nmodel: meta-llama/Llama-3.1-8B"
    pools = read(tmp_path, text).pools
    assert [(pool.name, pool.timing.gpu, pool.replicas) for pool in pools] == [("a", "h100", 2), ("b-2", "h100", 1)]


def test_a_deployment_that_is_measured_has_the_defaults_of_measured_flags(tmp_path):
    path = tmp_path / "d.yaml"
    path.write_text("pools: {a: {}}")
    served, measured = file.read_deployment(path), file.read_deployment(path, is_measured=True)
    assert (served.router.max_queue_depth, served.frontend.http_port) == (1.0, 8080)
    assert measured.router == MeasuredRouterConfig()
    assert measured.frontend == MeasuredFrontendConfig()
    assert (served.pools[0].replicas, served.pools[0].worker.migration_limit) == (1, 3)


def test_passwords_are_not_written_down(tmp_path):
    text = "runtime: {nats_server: 'nats://me:secret@host', etcd_password: secret}\npools: {a: {}}"
    assert "secret" not in str(file.as_plain(read(tmp_path, text)))
    assert "nats://***@host" in str(file.as_plain(read(tmp_path, text)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pools: {a: {replica: 2}}", "pools.a.replica is unknown; did you mean replicas?"),
        ("pools: {a: {replicas: two}}", "pools.a.replicas is 'two'; expected a whole number from 0 to 10000"),
        ("pools: {a: {replicas: 0}}", "pools have 0 replicas in total; expected at least one worker"),
        ("pools: {a: {replicas: 10000000}}", "pools.a.replicas is 10000000; expected from 0 to 10000"),
        ("pools: {a: {replicas: 2.0}}", "pools.a.replicas is 2.0; expected a whole number from 0 to 10000"),
        ("pools: {a: {speedup_ratio: .inf}}", "pools.a.speedup_ratio is inf; expected at least 0"),
        ("pools: {yes: {}}", "pools has the name True, which is not text; put it in quotes"),
        ("? [a]\n: 1", "cannot be read as YAML (unhashable type"),
        ("pools: !!map [a]", "cannot be read as YAML ("),
        ("name: !!bool x", "cannot be read as YAML ("),
        ("name: 2001-99-99", "cannot be read as YAML (month must be in 1..12)"),
        ("pools: {a: {engine: vllm, model: x, engine_args: &r {x: *r}}}", "the file contains more than 100,000 values"),
        (
            "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
            "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\npools: [*e,*e,*e,*e,*e,*e,*e,*e]",
            "the file contains more than 100,000 values",
        ),
        (
            "pools: {a: {}}\nfrontend: {api_key: 12345}",
            "frontend.api_key is invalid (its value is secret); expected text",
        ),
        ("pools: {a: {gpu: h100}}", "pools.a: gpu h100 needs a model"),
        ("pools: {a: {gpu: h1}}\nmodel: meta-llama/Llama-3.1-8B", "pools.a: gpu 'h1' is not known; expected one of "),
        ("pools: {a: {role: decoder}}", "pools.a.role is 'decoder'; expected one of aggregated, prefill, decode"),
        ("pools: {a: {engine: vllm, block_size: 16}}", "pools.a.block_size is unknown; expected one of "),
        ("pools: {a: {}, a: {}}", "a is defined twice"),
        ("pools: {}", "pools is empty; expected at least one pool"),
        ("pools: [a]", "pools is ['a']; expected entries of the form NAME: VALUE"),
        (
            "pools: {a.b: {}}",
            "pools.a.b: name 'a.b' cannot be used; expected a letter followed by letters, digits, - or _",
        ),
        (
            "pools: {a: {kv_store_size: 4}}",
            "pools.a.kv_store_size is unknown here; expected it in the deployment's section kv_store",
        ),
        (
            "pools: {a: {kv_offloading_size: 64GB}}",
            "expected a number from 0 to 1000000000 (GiB for each data-parallel rank)",
        ),
        ("pools: {a: {}}\nrouters: {}", "routers is unknown; did you mean router?"),
        ("pools: {a: {}}\nrouter: {kv: 1}", "router.kv is unknown; expected one of "),
        ("pools: {a: {}}\nrouter: {router_temperature: -1}", "router.router_temperature is -1; expected at least 0"),
        ("pools: {a: {}}\nfrontend: {router_mode: kv}", "frontend.router_mode is unknown; expected one of "),
        ("pools: {a: {}}\nrouter_mode: best", "router_mode 'best' is unknown; expected one of "),
        ("pools: {a: {block_size: 16}, b: {block_size: 32}}", "pools.b.block_size is 32; expected 16, as in pools.a"),
        (
            "gpus: 3\npools: {a: {replicas: 2, tensor_parallel_size: 2}}",
            "gpus is 3; expected at least 4, the number that the pools",
        ),
        ("workers: [{count: 2}]", "workers is unknown; expected pools"),
        ("pools: {a: {engine_args: {x: 1}}}", "pools.a: engine_args is only for engines that run a model"),
        ("[1, 2]", "the file is [1, 2]; expected entries of the form NAME: VALUE"),
        ("pools: {a: {}", "cannot be read as YAML ("),
        (
            "standalone_router: true\npools: {a: {model_name: x}, b: {model_name: y}}",
            "standalone_router is true; expected one model, not x, y",
        ),
    ],
)
def test_what_cannot_be_deployed_is_one_line_that_names_file_path_value_and_what_was_expected(tmp_path, text, message):
    with pytest.raises(file.DeploymentError) as caught:
        read(tmp_path, text)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path / 'deployment.yaml'}: ")
    assert message in said
    assert "\n" not in said


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(file.DeploymentError, match=r"none.yaml: cannot be read \(No such file or directory\)"):
        file.read_deployment(tmp_path / "none.yaml")


@pytest.mark.parametrize("engine", typing.get_args(EngineName))
def test_no_two_settings_of_a_pool_have_the_same_name(engine):
    names = [name for kind in paths.sections_of_pool(engine).values() for name in paths.hints(kind)]
    assert len(set(names)) == len(names)
    assert not set(names) & {"replicas", "role", "router_mode", "engine", "engine_args"}


def two_pools():
    return Deployment(pools=(Pool(name="new", replicas=1), Pool(name="old", replicas=2)))


def test_a_setting_of_one_pool_or_of_all_is_changed_by_its_path():
    changed = paths.change(two_pools(), {"pools.old.replicas": 5})
    assert [pool.replicas for pool in changed.pools] == [1, 5]
    changed = paths.change(changed, {"pools.*.num_gpu_blocks": 100})
    assert [pool.mocker.num_gpu_blocks for pool in changed.pools] == [100, 100]
    changed = paths.change(changed, {"router.router_temperature": 0.5})
    assert changed.router.router_temperature == 0.5
    assert paths.change(changed, {"router_mode": "kv"}).router_mode == "kv"


def test_a_short_name_stands_for_the_path_it_can_only_mean():
    deployment = two_pools()
    assert paths.full(deployment, "num_gpu_blocks") == "pools.*.num_gpu_blocks"
    assert paths.full(deployment, "router_temperature") == "router.router_temperature"
    assert paths.full(deployment, "request_overhead_ms") == "overhead.request_overhead_ms"
    assert paths.full(Deployment(), "workers") == "pools.*.replicas"
    assert paths.full(deployment, "colour") is None
    with pytest.raises(
        ValueError, match=r"workers could belong to any pool; expected one of pools.new.replicas, pools.old"
    ):
        paths.full(deployment, "workers")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("pools.mid.replicas", "pools.mid is unknown; expected one of new, old"),
        ("pools.new.replica", "pools.new.replica is unknown; did you mean replicas?"),
        ("pools.new", "pools.new is unknown; expected one of "),
        ("pool.new.replicas", "pool.new.replicas is unknown; expected gpus, router_mode, "),
        ("router.kv", "router.kv is unknown; expected one of "),
        ("router_mode.x", "router_mode.x is unknown; expected gpus, router_mode, "),
    ],
)
def test_a_path_to_nothing_is_refused_with_what_there_is(path, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        paths.change(two_pools(), {path: 1})


def test_gpus_are_counted_over_pools_and_parallelism():
    pool = Pool(replicas=3, mocker=EngineConfig(dp_size=2), timing=TimingConfig(tensor_parallel_size=4))
    assert pool.num_gpus == 24
    with pytest.raises(
        ValueError, match=r"gpus is 23; expected at least 24, the number that the pools need \(worker 24\)"
    ):
        Deployment(pools=(pool,), gpus=23)


def test_pools_with_one_model_name_serve_it_together():
    named = [
        Pool(name=name, worker=WorkerConfig(model_name=model)) for name, model in (("a", "x"), ("b", "y"), ("c", "x"))
    ]
    models = Deployment(pools=tuple(named)).models
    assert {model: [pool.name for pool in pools] for model, pools in models.items()} == {"x": ["a", "c"], "y": ["b"]}


def test_two_pools_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"pools.a is defined twice; expected each pool to have a different name"):
        Deployment(pools=(Pool(name="a"), Pool(name="a")))


def test_a_deployment_of_vllm_is_refused_where_vllm_would_not_start():
    pool = {"engine": "vllm", "run": ModelRunConfig(tensor_parallel_size=8)}
    with pytest.raises(ValueError, match="28 attention heads cannot be divided over tensor_parallel_size 8"):
        Pool(**pool, worker=WorkerConfig(model_path="Qwen/Qwen2.5-7B", migration_limit=3))
    Pool(**pool, worker=WorkerConfig(model_path="somebody/unknown-model", migration_limit=3))
