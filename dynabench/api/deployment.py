"""A deployment as Python's users write it: the entries of the YAML file as keywords, and any setting by its own name."""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from html import escape
from pathlib import Path
from typing import Any, Self

import yaml

from dynabench.api.own import named, placed
from dynabench.api.wording import plain_errors
from dynabench.deployment import description
from dynabench.deployment.description import Pool
from dynabench.deployment.file import (
    COMMON,
    as_changed,
    check_simulated,
    from_plain,
    parse_deployment,
    read_deployment,
)
from dynabench.deployment.flags import DEFAULT_WORKERS
from dynabench.deployment.paths import hints, own, sections, settings_of_pool
from foundation.errors import UserError
from foundation.text import instead_of
from mocker.timing.choose import resolve

ROLES = ("prefill", "decode")
SIZES = (1, 2, 4, 8)
"""GPUs that a worker may need for its model, in the order in which they are tried."""


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
                `prefill_gpu="h100"`. Without `tensor_parallel_size`, a worker has as many GPUs as its model needs for
                one sequence as long as its context, which vLLM asks for.

        Raises:
            UserError: there is no such setting, a value is invalid, or the model does not fit the GPU.
        """
        if isinstance(settings.get("pools"), tuple):  # all fields, from `dataclasses.replace`
            with plain_errors():
                description.Deployment.__init__(self, router_mode=named(router_mode, "router_mode"), **settings)
            return
        shared = {"model": model, "gpu": gpu, "workers": workers}
        given = {name: value for name, value in shared.items() if value is not None} | settings
        with plain_errors():
            contents = _as_file({"router_mode": router_mode} | given)
            sized = {name for name, its in contents["pools"].items() if "tensor_parallel_size" in its}
            made = _fitting(from_plain(contents, is_measured=True), sized)
            check_simulated(made)
        self._take(made)

    @classmethod
    @plain_errors()
    def from_yaml(cls, source: str | Path) -> Self:
        """Read a deployment from a YAML file, or from YAML itself: a text of several lines.

        Raises:
            UserError: it cannot be read, or is not a valid deployment.
        """
        if isinstance(source, str) and "\n" in source:
            made = parse_deployment(source.encode(), "the YAML", is_measured=True)
        else:
            made = read_deployment(Path(source), is_measured=True)
        return cls.of(made)

    @classmethod
    def of(cls, made: description.Deployment) -> Self:
        """Return a deployment that something else made, such as `simulate -f`."""
        self = cls.__new__(cls)
        self._take(made)
        return self

    @plain_errors()
    def to_yaml(self, path: str | Path | None = None) -> str:
        """Return it as YAML, with what differs from the defaults and without passwords; write it to a file, too, if one is named."""
        text = yaml.safe_dump(as_changed(self), sort_keys=False)
        if path is not None:
            Path(path).write_text(text)
        return text

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

    def _take(self, made: description.Deployment) -> None:
        for part in fields(description.Deployment):
            object.__setattr__(self, part.name, getattr(made, part.name))


def _as_file(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of the YAML file that says the same.

    Raises:
        ValueError: there is no such setting.
    """
    given, parts = _with_names(given), sections(description.Deployment)
    entries = {"name", "pools", *COMMON, *own(description.Deployment), *parts}
    top = {name: value for name, value in given.items() if name in entries}
    short = {name: value for name, value in given.items() if name not in entries}
    pools: dict[str, Any] = {}
    of_roles: dict[str, dict[str, Any]] = {role: {} for role in ROLES}
    engine = given.get("engine", Pool().engine)
    for name, value in short.items():
        section, setting = _in_section(name, parts)
        role, _, rest = name.partition("_")
        if section:
            top[section] = {**(top.get(section) or {}), setting: value}
        elif name in ("workers", *settings_of_pool(engine)):
            pools["replicas" if name == "workers" else name] = value
        elif role in ROLES and rest:
            of_roles[role]["replicas" if rest == "workers" else rest] = value
        else:
            of_parts = {each for kind in parts.values() for each in hints(kind)}
            known = sorted({*entries, "workers", *settings_of_pool(engine), *of_parts})
            raise ValueError(f"{name} is unknown; {instead_of(name, known)}")
    if "pools" in top:
        own_pools = {name: {**pools, **_settings_in(name, its)} for name, its in top["pools"].items()}
    elif any(of_roles.values()):
        own_pools = {role: {"role": role, **pools, **its} for role, its in of_roles.items()}
    else:
        own_pools = {Pool().name: {"replicas": DEFAULT_WORKERS, **pools}}
    return top | {"pools": own_pools}


def _settings_in(name: str, its: object) -> Mapping[str, Any]:
    """Return the settings of a pool.

    Raises:
        ValueError: they are no mapping.
    """
    if not isinstance(its, Mapping | None):
        raise ValueError(f"pools.{name} is {its!r}; expected its settings, such as {{'replicas': 2}}")
    return its or {}


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
