"""Adapt the record of a live run to a number of workers that changes."""

from dataclasses import replace

import numpy as np

from dynabench.deployment.description import Deployment, Pool
from dynabench.planner.programs import has_planner
from reports.record.fleet import FleetUse, PoolFleet
from reports.record.pools import PoolUse
from reports.record.records import Record

APART = 100_000
"""First number of decode workers until the maximum number of prefill workers is known."""


def num_ranks_of(pool: Pool) -> int:
    """Return the initial number of a pool's ranks, which a router counts as workers."""
    return pool.replicas * pool.dp_size


def offset_of(deployment: Deployment) -> int:
    """Return the offset to add to a router's numbers of decode workers during a run: prefill workers come first."""
    prefill = [pool for pool in deployment.pools if pool.role == "prefill"]
    return APART if prefill and has_planner(deployment) else sum(map(num_ranks_of, prefill))


def with_fleet(record: Record, fleet: FleetUse, deployment: Deployment) -> Record:
    """Add the fleet to a record; if a planner changed it, set the numbers of workers to their maxima."""
    if not has_planner(deployment):
        return replace(record, fleet=fleet)
    most = {pool.pool: _most(pool) for pool in fleet.pools}
    pools = tuple(_pool(deployment.pool(use.name), most[use.name]) for use in record.pools)
    requests, num_workers = record.requests, sum(pool.workers for pool in pools)
    if deployment.is_disaggregated:
        num_prefill = sum(pool.workers for pool in pools if pool.role == "prefill")
        worker = requests.worker
        shifted = np.where(worker.data >= APART, worker.data - APART + num_prefill, worker.data)
        requests = replace(requests, worker=np.ma.MaskedArray(shifted, worker.mask))
    known = requests.worker.compressed()
    num_workers = max(num_workers, int(known.max()) + 1 if len(known) else 0)
    return replace(record, requests=requests, num_workers=num_workers, pools=pools, fleet=fleet)


def _pool(pool: Pool, most: int) -> PoolUse:
    return PoolUse(pool.name, pool.role, most * pool.dp_size, most * pool.gpus_per_worker)


def _most(pool: PoolFleet) -> int:
    return max((int(row.ready + row.draining) for row in pool.history), default=0)
