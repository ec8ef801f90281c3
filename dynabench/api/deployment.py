"""A deployment as Python's users write it: the entries of the YAML file as keywords, and any setting by its own name."""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from html import escape
from pathlib import Path
from typing import Any, Self

import yaml

from dynabench.api.arguments import path_of, plain
from dynabench.api.own import named, placed
from dynabench.api.wording import plain_errors
from dynabench.deployment import description
from dynabench.deployment.description import Pool
from dynabench.deployment.file import (
    COMMON,
    as_changed,
    as_plain,
    check_simulated,
    from_plain,
    parse_deployment,
    plain_pool,
    read_deployment,
    refuse_idle,
)
from dynabench.deployment.flags import DEFAULT_WORKERS, PoolConfig, RoleConfig, refuse_counts
from dynabench.deployment.paths import hints, own, sections, settings_of_pool
from foundation.errors import UserError
from foundation.text import instead_of
from mocker.timing.choose import resolve
from serving.model.card import Role

ROLES: tuple[Role, ...] = ("prefill", "decode")
SIZES = (1, 2, 4, 8)
"""GPUs that a worker may need for its model, in the order in which they are tried."""


FITTED = "# dynabench: fitted tensor_parallel_size"
"""How a file begins whose sizes are what the model needs; a file has to name them, because `simulate -f` would take 1."""
WHY_FITTED = " (nobody chose it, so a plan tries others)\n"


class Deployment(description.Deployment):
    """Workers behind a router: what `simulate`, `run`, `sweep` and `plan` try, and a YAML file describes.

        Deployment(model="meta-llama/Llama-3.1-8B", gpu="h100", workers=8, router_mode="kv")
        Deployment(model="meta-llama/Llama-3.1-8B", gpu="h100", prefill_workers=2, decode_workers=3)
        Deployment(router_mode="kv", pools={"new": {"gpu": "h100", "replicas": 2}, "old": {"gpu": "a100", "replicas": 4}})

    Deployments are values: they are equal if all settings are, and `dataclasses.replace` changes one.
    """

    __slots__ = ()

    def __init__(
        self,
        *,
        model: str | None = None,
        gpu: str | None = None,
        workers: int | None = None,
        router_mode: Any = "round-robin",
        **settings: Any,
    ) -> None:
        """Describe a deployment.

        Args:
            model: a Hugging Face id or a folder with a config.json; without it, step times are generic.
            gpu: the GPU whose step times are simulated, such as `h100` (`dynabench hardware` lists them).
            workers: aggregated workers (default: 4).
            router_mode: how requests are spread: a name from `dynabench modes`, or a mode of your own.
            settings: any other entry of the YAML file (`pools={...}`, `router={...}`, `planner={...}`), or a setting
                of these by its own name: `num_gpu_blocks=4000`, `kv_overlap_score_weight=2.0`, `prefill_workers=2`,
                `prefill_gpu="h100"`. Those of workers are for all pools, or all of a role, that do not set it themselves.
                Without `tensor_parallel_size`, a worker has as many GPUs as its model needs for one sequence as long as
                its context, which vLLM asks for.

        Raises:
            UserError: there is no such setting, a value is invalid, a setting has no effect or contradicts another, or the
                model does not fit the GPU.
        """
        if _is_whole(settings.get("pools")):  # all fields, from `dataclasses.replace`
            with plain_errors():
                description.Deployment.__init__(self, router_mode=named(router_mode, "router_mode"), **settings)
            if not isinstance(self.pools, _Pools):
                self._note(_named(self))
            return
        shared = {"model": model, "gpu": gpu, "workers": workers}
        given = {
            name: plain(value) for name, value in (shared | settings).items() if value is not None or name in settings
        }
        with plain_errors():
            contents = _as_file({"router_mode": router_mode} | given)
            sized = {name for name, its in contents["pools"].items() if "tensor_parallel_size" in its}
            made = _fitting(from_plain(contents, is_measured=True), sized)
            refuse_idle(made)
            check_simulated(made)
        self._take(made, chosen={name for its in contents["pools"].values() for name in its})

    @classmethod
    @plain_errors()
    def from_yaml(cls, source: str | Path) -> Self:
        """Read a deployment from a YAML file, or from YAML itself: a text of several lines.

        Raises:
            UserError: it cannot be read, or is not a valid deployment.
        """
        if isinstance(source, str) and "\n" in source:
            text, made = source, parse_deployment(source.encode(), "the YAML", is_measured=True)
        else:
            file = path_of("source", source)
            made = read_deployment(file, is_measured=True)
            text = file.read_text()
        self = cls.of(made)
        if text.startswith(FITTED):
            self._note(_named(made))
        return self

    @classmethod
    def of(cls, made: description.Deployment) -> Self:
        """Return a deployment that something else made, such as `simulate -f`."""
        self = cls.__new__(cls)
        self._take(made, chosen=_changed(made))
        return self

    @plain_errors()
    def to_yaml(self, path: str | Path | None = None) -> str:
        """Return it as YAML, with what differs from the defaults and without passwords; write it to a file, too, if one is named."""
        text = yaml.safe_dump(as_changed(self), sort_keys=False)
        if "tensor_parallel_size" in _changed(self) and not self.chooses("tensor_parallel_size"):
            text = FITTED + WHY_FITTED + text
        if path is not None:
            path_of("path", path).write_text(text)
        return text

    def __hash__(self) -> int:
        return hash(_hashable(as_plain(self)))

    def __repr__(self) -> str:
        return f"Deployment({', '.join(f'{name}={value!r}' for name, value in self._entries().items())})"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(yaml.safe_dump(self._entries(), sort_keys=False))}</pre>"

    def _entries(self) -> dict[str, Any]:
        """Return what differs from what Python's user gets by default."""
        usual = as_changed(from_plain({"pools": {"worker": {}}}, is_measured=True))
        return {
            name: value
            for name, value in as_changed(self).items()
            if name in ("pools", "router_mode") or value != usual.get(name)
        }

    def chooses(self, name: str) -> bool:
        """Return whether this setting of a pool was chosen by the user, not left to its default."""
        return isinstance(self.pools, _Pools) and name in self.pools.chosen

    def _take(self, made: description.Deployment, *, chosen: Collection[str]) -> None:
        for part in fields(description.Deployment):
            object.__setattr__(self, part.name, getattr(made, part.name))
        self._note(chosen)

    def _note(self, chosen: Collection[str]) -> None:
        object.__setattr__(self, "pools", _Pools.of(self.pools, chosen))


class _Pools(tuple[Pool, ...]):
    """Pools that know which of their settings were chosen: as part of a field, this stays in copies, also changed ones."""

    chosen: frozenset[str]

    @classmethod
    def of(cls, pools: Collection[Pool], chosen: Collection[str]) -> Self:
        self = cls(pools)
        self.chosen = frozenset(chosen)
        return self


def _is_whole(pools: object) -> bool:
    return isinstance(pools, tuple) and len(pools) > 0 and all(isinstance(pool, Pool) for pool in pools)


def _changed(made: description.Deployment) -> frozenset[str]:
    """Return the settings of pools that are not at their defaults."""
    blank = {pool.engine: plain_pool(Pool(engine=pool.engine)) for pool in made.pools}
    settings = [(name, value, blank[pool.engine]) for pool in made.pools for name, value in plain_pool(pool).items()]
    return frozenset(name for name, value, usual in settings if value != usual[name])


def _named(made: description.Deployment) -> frozenset[str]:
    """Return the settings of pools that are neither at their defaults nor, as GPUs per worker, what `_fitting` gives."""
    is_fitting = all(pool == _fitting_pool(pool) for pool in made.pools)
    return _changed(made) - ({"tensor_parallel_size"} if is_fitting else set())


def _hashable(value: Any) -> Any:
    """Return plain data as a value that has a hash."""
    match value:
        case dict():
            return frozenset((name, _hashable(its)) for name, its in value.items())
        case list() | tuple():
            return tuple(map(_hashable, value))
    return value


def _as_file(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of the YAML file that says the same.

    Raises:
        ValueError: there is no such setting.
    """
    given, parts = _with_names(given), sections(description.Deployment)
    entries = {"name", "pools", *COMMON, *own(description.Deployment), *parts}
    top = {name: value for name, value in given.items() if name in entries}
    short = {name: value for name, value in given.items() if name not in entries}
    of_all: dict[str, Any] = {}
    of_roles: dict[Role, dict[str, Any]] = {role: {} for role in ROLES}
    engine = given.get("engine", Pool().engine)
    for name, value in short.items():
        section, setting = _in_section(name, parts)
        role, _, rest = name.partition("_")
        if section:
            top[section] = _with(_entries_of(section, top.get(section)), setting, value, name, f"in {section}")
        elif name in ("workers", *settings_of_pool(engine)):
            _with(of_all, "replicas" if name == "workers" else name, value, name, "as workers or replicas")
        elif role in of_roles and rest:
            setting = "replicas" if rest == "workers" else rest
            _with(of_roles[role], setting, value, name, f"as {role}_workers or {role}_replicas")
        else:
            of_parts = {each for kind in parts.values() for each in hints(kind)}
            known = sorted({*entries, "workers", *settings_of_pool(engine), *of_parts})
            raise ValueError(f"{name} is unknown; {instead_of(name, known)}")
    return top | {"pools": _pools(top, of_all, of_roles)}


def _with(held: dict[str, Any], setting: str, value: Any, name: str, where: str) -> dict[str, Any]:
    """Set a setting where it may be set already, to the same.

    Raises:
        ValueError: it has another value.
    """
    if setting in held and held[setting] != value:
        raise ValueError(f"{name} is {value!r} and {held[setting]!r}, {where}; leave one out")
    held[setting] = value
    return held


def _pools(
    top: Mapping[str, Any], of_all: Mapping[str, Any], of_roles: Mapping[Role, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the pools with the settings that were given for all of them, or for those of a role.

    Raises:
        ValueError: such a setting has no effect, or contradicts another.
    """
    if "pools" in top:
        pools = {name: _entries_of(f"pools.{name}", its) for name, its in _entries_of("pools", top["pools"]).items()}
    elif any(of_roles.values()):
        workers = {role: RoleConfig(workers=its.get("replicas")) for role, its in of_roles.items()}
        refuse_counts(PoolConfig(workers=of_all.get("replicas"), prefill=workers["prefill"], decode=workers["decode"]))
        pools = {role: {"role": role} for role in of_roles}
    else:
        return {Pool().name: {"replicas": DEFAULT_WORKERS, **of_all}}
    for role, its in of_roles.items():
        _spread(its, [pool for pool in pools.values() if pool.get("role") == role], role)
    _spread(of_all, pools.values(), None)
    return pools


def _spread(settings: Mapping[str, Any], pools: Collection[dict[str, Any]], role: Role | None) -> None:
    """Give settings to the pools that do not have them.

    Raises:
        ValueError: a setting has no effect, as every pool has it, or there is none.
    """
    for name, value in settings.items():
        lacking = [pool for pool in pools if name not in pool]
        if not lacking and (not pools or any(value != pool[name] for pool in pools)):
            short = "workers" if name == "replicas" else name
            whose = f"{role} pool" if role else "pool"
            reason = f"every {whose} sets {name} itself" if pools else f"there is no {whose}"
            raise ValueError(f"{role}_{short} has no effect: {reason}" if role else f"{short} has no effect: {reason}")
        for pool in lacking:
            pool[name] = value


def _entries_of(name: str, its: object) -> dict[str, Any]:
    """Return a copy of the entries of a section or a pool.

    Raises:
        ValueError: they are no mapping.
    """
    if not isinstance(its, Mapping | None) or (its is None and name == "pools"):
        wanted = "pools by name, such as {'a': {'replicas': 2}}" if name == "pools" else "its settings, by name"
        if name.startswith("pools."):
            wanted = "its settings, such as {'replicas': 2}"
        raise ValueError(f"{name} is {its!r}; expected {wanted}")
    return dict(its or {})


def _with_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replace objects of the user's own by names; one as `planner` is the policy of the section with that name."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        place = placed(name, [value])
        text = named(value, place)
        if place != name and name == "engine":
            found[name] = "pytok"
        found[place] = {"planner": text} if name == "planner" and isinstance(text, str) else text
    return found


def _in_section(name: str, parts: Mapping[str, type]) -> tuple[str, str]:
    """Return the section that has a setting and its name there, or nothing; `transfer_latency_ms` is that of `transfer`."""
    for section, kind in parts.items():
        if name in hints(kind):
            return section, name
        if name.startswith(f"{section}_") and name.removeprefix(f"{section}_") in hints(kind):
            return section, name.removeprefix(f"{section}_")
    return "", name


def _fitting(made: description.Deployment, sized: Collection[str]) -> description.Deployment:
    """Give simulated workers the GPUs that their model needs for one sequence as long as its context, except in `sized` pools."""
    return replace(made, pools=tuple(pool if pool.name in sized else _fitting_pool(pool) for pool in made.pools))


def _fitting_pool(pool: Pool) -> Pool:
    if pool.engine != "mocker" or pool.timing.model is None or pool.timing.gpu is None:
        return pool
    found = pool
    for size in SIZES:
        tried = replace(pool, timing=replace(pool.timing, tensor_parallel_size=size))
        try:
            engine = resolve(tried.engine_config, tried.timing)
        except ValueError:  # too small, or it cannot be divided so; `check_simulated` reports what is left
            continue
        found, context = tried, engine.config.max_model_len
        if context is None or engine.longest_sequence >= context:
            break
    return found


def deployment_of(given: Any) -> Deployment:
    """Return a deployment that was given as itself, as a YAML file, or not at all.

    Raises:
        UserError: it is something else.
    """
    match given:
        case None:
            return Deployment()
        case Deployment():
            return given
        case description.Deployment():
            return Deployment.of(given)
        case str() | Path():
            return Deployment.from_yaml(given)
    raise UserError(f"expected a Deployment or the path of its YAML file, not {type(given).__name__}")
