"""Settings of a deployment by their paths: `pools.decode.replicas`, `router.kv_overlap_score_weight`, `router_mode`.

A short name is an unambiguous abbreviation of a path: `num_gpu_blocks` for `pools.*.num_gpu_blocks`, `workers` for the
`replicas` of the only pool, `prefill_workers` for those of the only prefill pool, `transfer_latency_ms` for
`transfer.latency_ms`.
"""

import functools
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from dynabench.deployment.description import OWN, Deployment, Pool
from dynabench.elsewhere import of_setting
from foundation.text import instead_of
from mocker import EngineConfig, SglangConfig, TrtllmConfig
from serving.frontend.config import FrontendConfig
from serving.transfer.config import OF_LINKS, TransferRunConfig
from serving.worker.config import WorkerConfig
from serving.worker.registry import ENGINES

DECIDED = {
    FrontendConfig: ("router_mode", "namespace", "seed"),
    WorkerConfig: ("endpoint", "role", "router_mode"),
    EngineConfig: ("kv_role",),
    SglangConfig: ("context_length", "disaggregation_mode"),  # the worker's context is the one that paths name
    TrtllmConfig: ("server_role",),
    TransferRunConfig: OF_LINKS,
    Pool: ("name",),
    Deployment: ("name", "pools"),
}
"""Fields without a path, because the deployment or the run decides them."""

OF_PROCESSES = ("worker", "run", "own", "answers")
"""Sections of a pool that apply only to real processes."""


@functools.cache
def hints(kind: type) -> dict[str, Any]:
    """Return the public settings of a dataclass, with their annotations."""
    known = typing.get_type_hints(kind, include_extras=True)
    decided = {name for base in kind.__mro__ for name in DECIDED.get(base, ())}
    return {part.name: known[part.name] for part in fields(kind) if part.name not in decided}


@functools.cache
def sections(kind: type) -> dict[str, type]:
    """Return the sections of a dataclass: its fields that are dataclasses."""
    options = {name: typing.get_args(hint) or (hint,) for name, hint in hints(kind).items()}
    return {
        name: each
        for name, option in options.items()
        for each in option
        if isinstance(each, type) and is_dataclass(each)
    }


@functools.cache
def own(kind: type) -> dict[str, Any]:
    """Return the settings of a dataclass that belong to none of its sections, with their annotations."""
    return {name: hint for name, hint in hints(kind).items() if name not in sections(kind)}


@functools.cache
def sections_of_pool(engine: str) -> dict[str, type]:
    """Return the sections that matter to a pool with this engine."""
    used = (
        ("mocker", "sglang", "trtllm", "timing", "answers")
        if engine == "mocker"
        else ("own",)
        if engine in OWN
        else ("run",)
        if engine in ENGINES
        else ()
    )
    return {name: kind for name, kind in sections(Pool).items() if name in (*used, "worker")}


@functools.cache
def settings_of_pool(engine: str) -> dict[str, tuple[str, Any]]:
    """Return every setting of a pool with this engine: its section ("" for the pool's own), and its annotation."""
    parts = sections_of_pool(engine)
    found = {name: (part, hint) for part, kind in parts.items() for name, hint in hints(kind).items()}
    if "run" in parts:
        found["model"] = found.pop("model_path")
    return {name: ("", hint) for name, hint in own(Pool).items()} | found


def field_of(name: str) -> str:
    """Return the field of a setting: in engines that run models, `model` is the worker's `model_path`."""
    return "model_path" if name == "model" else name


def full(deployment: Deployment, name: str) -> str | None:
    """Return the path for a short name, or a path unchanged; None if the deployment has no such setting.

    Raises:
        ValueError: the name is ambiguous.
    """
    if "." in name or name in own(Deployment):
        return name
    if name in ("workers", "replicas"):
        if len(deployment.pools) > 1:
            known = ", ".join(f"pools.{pool.name}.replicas" for pool in deployment.pools)
            raise ValueError(f"{name} could belong to any pool; expected one of {known}, or pools.*.replicas")
        return "pools.*.replicas"
    for section, kind in sections(
        Deployment
    ).items():  # first: a frontend's setting takes precedence over those of its workers
        if name in hints(kind):
            return f"{section}.{name}"
    if any(name in settings_of_pool(pool.engine) for pool in deployment.pools):
        return f"pools.*.{name}"
    return _path_of_flag(deployment, *name.split("_", 1)) if "_" in name else None


def _path_of_flag(deployment: Deployment, head: str, rest: str) -> str | None:
    """Return the path of a setting whose flag begins with its section, or with the role of its pool."""
    if head in sections(Deployment) and rest in hints(sections(Deployment)[head]):
        return f"{head}.{rest}"
    setting = "replicas" if rest == "workers" else rest
    paths = [
        f"pools.{pool.name}.{setting}"
        for pool in deployment.pools
        if pool.role == head and setting in settings_of_pool(pool.engine)
    ]
    if len(paths) > 1:
        raise ValueError(f"{head}_{rest} could belong to any {head} pool; expected one of {', '.join(paths)}")
    return paths[0] if paths else None


def hint_of(deployment: Deployment, path: str) -> Any:
    """Return the annotation of a setting.

    Raises:
        ValueError: there is no such path.
    """
    head, _, rest = path.partition(".")
    if not rest and head in own(Deployment):
        return own(Deployment)[head]
    if head in sections(Deployment):
        return _known(path, rest, hints(sections(Deployment)[head]))
    if head != "pools":
        raise ValueError(f"{path} is unknown; expected {', '.join([*hints(Deployment), 'pools'])}")
    pool, _, name = rest.partition(".")
    found = [_known(path, name, settings_of_pool(each.engine)) for each in _pools(deployment, pool)]
    return found[0][1]


def is_of_processes(deployment: Deployment, path: str) -> bool:
    """Return whether a setting applies only to real processes."""
    head, _, rest = path.partition(".")
    if head != "pools":
        return head in ("frontend", "runtime", "standalone_router", "kv_transfer")
    pool, _, name = rest.partition(".")
    return any(settings_of_pool(each.engine)[name][0] in OF_PROCESSES for each in _pools(deployment, pool))


def change(deployment: Deployment, changes: Mapping[str, Any]) -> Deployment:
    """Change settings by their paths; only the result must be a valid deployment.

    Raises:
        ValueError: a path does not exist, or a value is invalid for it.
    """
    changed: dict[str, Any] = {}
    pools = {pool.name: pool for pool in deployment.pools}
    for path, value in changes.items():
        hint_of(deployment, path)
        head, _, rest = path.partition(".")
        if head in own(Deployment):
            changed[head] = value
        elif head in sections(Deployment):
            section = changed.get(head) or getattr(deployment, head) or sections(Deployment)[head]()
            changed[head] = replace(section, **{rest: value})
        else:
            name, _, setting = rest.partition(".")
            pools |= {pool.name: change_pool(pools[pool.name], setting, value) for pool in _pools(deployment, name)}
    return replace(deployment, pools=tuple(pools.values()), **changed)


def change_pool(pool: Pool, setting: str, value: Any) -> Pool:
    """Change a setting of a pool.

    Raises:
        ValueError: the value is invalid.
    """
    part, _ = settings_of_pool(pool.engine)[setting]
    if setting == "engine_type" and pool.timing.host_times == pool.engine_type:  # the times are those of the engine
        return replace(pool, engine_type=value, timing=replace(pool.timing, timed_as=None))
    if not part:
        return replace(pool, **{setting: value})
    name = field_of(setting) if part == "worker" else setting
    return replace(pool, **{part: replace(getattr(pool, part), **{name: value})})


def _pools(deployment: Deployment, name: str) -> tuple[Pool, ...]:
    return deployment.pools if name == "*" else (deployment.pool(name),)


def _known(path: str, name: str, settings: dict[str, Any]) -> Any:
    if name not in settings:
        raise ValueError(f"{path} is unknown; {of_setting(name, settings) or instead_of(name, sorted(settings))}")
    return settings[name]
