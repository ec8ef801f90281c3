"""Runs in virtual time, of a few settings."""

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.kv_store import KvStoreConfig
from dynabench.deployment.overhead import OverheadConfig
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.network.config import TransferConfig
from mocker.timing.config import TimingConfig
from serving.router import RouterConfig
from workloads.pacing import LoadConfig


def deployed(
    mode="round-robin", workers=1, engine=None, timing=None, router=None, overhead=None, kv_store=None, transfer=None
):
    """Return a deployment of one simulated pool."""
    pool = Pool(replicas=workers, mocker=engine or EngineConfig(), timing=timing or TimingConfig())
    return Deployment(
        pools=(pool,),
        router_mode=mode,
        router=router or RouterConfig(),
        overhead=overhead or OverheadConfig(),
        kv_store=kv_store or KvStoreConfig(),
        transfer=transfer or TransferConfig(),
    )


def simulate_pool(
    workload, mode="round-robin", *, load=None, seed=0, on_progress=None, is_interrupted=bool, **deployment
):
    """Simulate a workload on a deployment of one pool."""
    settings = Settings(deployed(mode, **deployment), load=load or LoadConfig())
    return simulate(Run.alone(settings, seed=seed), workload, on_progress=on_progress, is_interrupted=is_interrupted)
