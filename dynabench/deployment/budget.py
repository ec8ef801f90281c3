"""How many workers of one pool fit a budget of GPUs, next to the other pools or instead of them."""

from dataclasses import replace

from dynabench.deployment.description import Deployment, Pool

AGGREGATED = "aggregated"
"""Name of the pool that replaces prefill and decode workers."""


class BudgetError(ValueError):
    """The GPUs cannot be divided in this way; the message shows how many each pool uses."""


def pool_of_rest(deployment: Deployment) -> Pool:
    """Return the pool that gets the GPUs that prefill workers leave: the one that decodes.

    Raises:
        ValueError: there are several.
    """
    decode = [pool for pool in deployment.pools if pool.role == "decode"]
    if len(decode) > 1:
        names = ", ".join(f"pools.{pool.name}" for pool in decode)
        raise ValueError(f"gpus cannot be divided: {names} all decode; expected one decode pool, or no gpus setting")
    return decode[0]


def filled(deployment: Deployment, name: str, gpus: int) -> Deployment:
    """Give a pool as many workers as fit the GPUs that the others leave.

    Raises:
        BudgetError: no GPUs are left, or not a multiple of what a worker needs.
    """
    pool = deployment.pool(name)
    others = [other for other in deployment.pools if other is not pool]
    left = gpus - sum(other.num_gpus for other in others)
    count, unused = divmod(left, pool.gpus_per_worker)
    if count < 1 or unused:
        taken = "".join(f", pools.{other.name} uses {other.num_gpus}" for other in others)
        raise BudgetError(
            f"gpus is {gpus}{taken}, so {left} left for pools.{name}; expected a positive multiple of "
            f"{pool.gpus_per_worker}, the "
            "GPUs that each of its workers needs"
        )
    pools = tuple(replace(pool, replicas=count) if other is pool else other for other in deployment.pools)
    return replace(deployment, pools=pools, gpus=gpus)


def aggregated(deployment: Deployment) -> Deployment:
    """Return a deployment of one pool like the decode pool, but with aggregated workers, and without a budget."""
    pool = replace(pool_of_rest(deployment), name=AGGREGATED, role="aggregated", router_mode=None)
    return replace(deployment, pools=(pool,), gpus=None)
