"""Simulated engines with the schedulers of other engines than vLLM."""

import pytest

from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.engines import pools_of
from dynabench.deployment.flags import SchedulerConfig, pools_of_type
from dynabench.deployment.paths import change_pool
from mocker import EngineConfig, SglangConfig
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from tests.support.commands import dynabench

H100 = TimingConfig(gpu="h100", model="meta-llama/Llama-3.1-8B-Instruct")


def test_a_simulation_with_sglangs_scheduler_says_so_and_takes_sglangs_flags(tmp_path):
    done = dynabench(
        *("simulate", "--engine-type", "sglang", "--page-size", "16", "--chunked-prefill-size", "2048"),
        *("--max-requests", "40", "--router-mode", "kv", "--out", tmp_path / "run"),
    )
    assert done.returncode == 0, done.stderr
    assert "Scheduler: SGLang 0.5.23's; Layout: " in done.stdout
    assert "Chunk: 2,048 tokens" in done.stdout
    assert "vLLM's defaults" not in done.stdout


@pytest.mark.parametrize(
    ("scheduler", "engine", "sglang", "message"),
    [
        (
            SchedulerConfig(),
            EngineConfig(),
            SglangConfig(page_size=16),
            "--page-size is a setting of --engine-type sglang; --engine-type is vllm",
        ),
        (
            SchedulerConfig(engine_type="sglang"),
            EngineConfig(max_num_seqs=8),
            SglangConfig(),
            "--max-num-seqs is a setting of --engine-type vllm; --engine-type is sglang",
        ),
    ],
)
def test_settings_of_the_other_engine_are_refused(scheduler, engine, sglang, message):
    with pytest.raises(ValueError) as caught:
        pools_of_type((Pool(mocker=engine),), scheduler, sglang)
    assert str(caught.value) == message


def test_an_experiment_may_vary_the_engine_type():
    pool = pools_of_type((Pool(timing=H100),), SchedulerConfig(), SglangConfig(page_size=32), {"engine_type"})[0]
    arms = [change_pool(pool, "engine_type", kind) for kind in ("vllm", "sglang")]
    engines = [pools_of(Deployment(pools=(arm,)))[0].engine for arm in arms]
    assert [engine.config.block_size for engine in engines] == [EngineConfig().block_size, 32]
    assert [type(engine.settings) for engine in engines] == [EngineConfig, SglangConfig]
    assert [arm.timing.timed_as for arm in arms] == ["vllm", "sglang"]


def test_sglangs_kv_cache_takes_its_share_of_the_memory_beside_the_weights():
    few, many = (resolve(SglangConfig(mem_fraction_static=share), H100).num_usable_tokens for share in (0.5, 0.88))
    per_token = 2 * 32 * 8 * 128 * 2
    assert (many - few) * per_token / 2**30 == pytest.approx(0.38 * 80, rel=0.02)
    assert resolve(SglangConfig(max_total_tokens=4096, page_size=16), H100).num_usable_blocks == 256


@pytest.mark.parametrize("settings", [{"role": "prefill"}, {"engine": "echo_core"}])
def test_roles_and_other_engines_are_refused(settings):
    with pytest.raises(ValueError, match="expected 'vllm'"):
        Pool(engine_type="sglang", **settings)
