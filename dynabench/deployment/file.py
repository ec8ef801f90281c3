"""Deployments as YAML.

    model: meta-llama/Llama-3.1-8B      # for every pool without a model
    router_mode: kv
    router: {kv_overlap_score_weight: 1.0}
    pools:
      new: {gpu: h100, replicas: 2}
      old: {gpu: a100, replicas: 4, tensor_parallel_size: 2}

The settings of a pool are on one level, whichever part of the pool they belong to.
"""

import dataclasses
import re
import reprlib
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import yaml

from dynabench.deployment.description import OWN, Deployment, EngineName, Pool
from dynabench.deployment.flags import MeasuredFrontendConfig, MeasuredRouterConfig
from dynabench.deployment.paths import field_of, hints, own, sections, settings_of_pool
from dynabench.elsewhere import of_setting
from foundation.errors import UserError
from foundation.settings import expected, plain_value
from foundation.text import instead_of, one_line
from mocker.timing.choose import resolve
from serving.runtime.config import MAY_HOLD_PASSWORDS, masked

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
UNUSABLE = re.compile("[\0\ud800-\udfff]")
"""What no argument or environment variable can contain."""


SAID_OF_POOLS = ("replicas", "tensor_parallel_size")
"""Settings of pools that a short description has even at their defaults."""

COMMON = ("model", "gpu")
"""Settings of pools that can be set once for all pools."""


MEASURED = {"router": MeasuredRouterConfig, "frontend": MeasuredFrontendConfig}
"""Sections with other defaults if a deployment is measured."""


class DeploymentError(UserError):
    """An invalid deployment; the message names the file, the path, the value and what was expected."""


def read_deployment(path: Path, *, is_measured: bool = False, varied: Collection[str] = ()) -> Deployment:
    """Read a deployment; a measured one has the defaults of `MeasuredRouterConfig` and `MeasuredFrontendConfig`.

    An experiment sets the settings in `varied`.

    Raises:
        DeploymentError: the file cannot be read, or does not describe a valid deployment.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be read ({error.strerror})") from error
    deployment = parse_deployment(text, str(path), is_measured=is_measured)
    try:
        if not any(name.rpartition(".")[2] == "engine_type" for name in varied):
            refuse_idle(deployment)
        check_simulated(deployment)
    except (ValueError, OSError) as error:  # a model's path may not exist
        raise DeploymentError(f"{path}: {error}") from error
    return deployment


def parse_deployment(text: bytes, place: str, *, is_measured: bool = False) -> Deployment:
    """Read a deployment from YAML, without a look at what its engines can do; `is_measured` as for `read_deployment`.

    Raises:
        DeploymentError: it is not a deployment; the message begins with the place.
    """
    if len(text) > MAX_BYTES:
        raise DeploymentError(f"{place}: the file is larger than {MAX_BYTES:,} bytes")
    try:
        values = yaml.load(text.decode(), _Loader)  # noqa: S506 (a SafeLoader)
    except (
        yaml.YAMLError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise DeploymentError(f"{place}: cannot be read as YAML ({_reason(error)})") from error
    try:
        return from_plain(values, is_measured=is_measured)
    except (ValueError, OSError) as error:
        raise DeploymentError(f"{place}: {error}") from error


def _reason(error: Exception) -> str:
    """Describe in one line an error of YAML's parser, or of one of its constructors."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem}, line {mark.line + 1}, column {mark.column + 1}"
    return one_line(error)


def from_plain(values: Any, *, is_measured: bool = False) -> Deployment:
    """Make a deployment from the contents of a YAML or JSON file; `is_measured` as for `read`.

    Raises:
        ValueError: it is not a deployment; the message begins with the path of the error.
    """
    if values is None:
        raise ValueError("the file is empty; expected entries of the form NAME: VALUE")
    _check_values(values)
    top = _mapping(values, "the file")
    if "workers" in top and "pools" not in top:
        raise ValueError(
            "workers is unknown; expected pools: the list of workers is now a mapping of pools, each with its name"
        )
    plain = {"name": str} | own(Deployment)
    _refuse_unknown(top, (*plain, *COMMON, *sections(Deployment), "pools"), "")
    common = {name: top[name] for name in COMMON if name in top}
    pools = _mapping(top.get("pools", {}), "pools")
    kinds = sections(Deployment) | (MEASURED if is_measured else {})
    made = {name: _built(kinds[name], top.get(name, {}), name) for name in kinds if name in top or name in MEASURED}
    given = {name: _value(top[name], hint, name) for name, hint in plain.items() if name in top}
    listed = tuple(_pool(name, _mapping(settings or {}, f"pools.{name}"), common) for name, settings in pools.items())
    return Deployment(pools=listed, **given, **made)


def as_plain(deployment: Deployment) -> dict[str, Any]:
    """Return a deployment as YAML and JSON data, with every setting except passwords and keys, for `from_plain`."""
    held = {name: getattr(deployment, name) for name in sections(Deployment)}
    return {
        "name": deployment.name,
        **{name: getattr(deployment, name) for name in own(Deployment)},
        **{name: _plain(section) for name, section in held.items() if section is not None},
        "pools": {pool.name: plain_pool(pool) for pool in deployment.pools},
    }


def as_changed(deployment: Deployment) -> dict[str, Any]:
    """Return the same without what `from_plain` takes as its default, whether the deployment is simulated or measured.

    What everybody wants to know stays: the router mode, and what `SAID_OF_POOLS` names.
    """
    kinds, blank = sections(Deployment), Deployment()
    plain = {name: getattr(deployment, name) for name in ("name", *own(Deployment))}
    found = {name: value for name, value in plain.items() if name == "router_mode" or value != getattr(blank, name)}
    for name in kinds:
        if (held := getattr(deployment, name)) is not None:
            defaults = [_plain(kind()) for kind in (kinds[name], MEASURED.get(name, kinds[name]))]
            changed = {
                key: value for key, value in _plain(held).items() if any(value != each[key] for each in defaults)
            }
            if changed or getattr(blank, name) is None:
                found[name] = changed
    return found | {"pools": {pool.name: _changed_pool(pool) for pool in deployment.pools}}


def _changed_pool(pool: Pool) -> dict[str, Any]:
    plain = plain_pool(pool)
    blank = plain_pool(Pool(name=pool.name, engine=pool.engine)) | {"engine": Pool().engine}
    idle = pool.simulated.idle
    changed = {name for name, value in plain.items() if value != blank[name] and name not in idle}
    return {name: value for name, value in plain.items() if name in changed or name in SAID_OF_POOLS}


def plain_pool(pool: Pool) -> dict[str, Any]:
    """Return the settings of a pool on one level."""
    found = {}
    for name, (part, _) in settings_of_pool(pool.engine).items():
        value = getattr(getattr(pool, part) if part else pool, field_of(name) if part == "worker" else name)
        found[name] = str(value) if isinstance(value, Path) else value
    return found


def _pool(name: str, values: dict[str, Any], common: dict[str, Any]) -> Pool:
    """Make a pool from its settings, and from the shared settings that its engine has."""
    where = f"pools.{name}"
    engine = _value(values.get("engine", "mocker"), EngineName, f"{where}.engine")
    known = settings_of_pool(engine)
    _refuse_unknown(values, tuple(known), f"{where}.")
    parts: dict[str, dict[str, Any]] = {part: {} for part, _ in known.values()}
    for setting, value in ({key: common[key] for key in common if key in known} | values).items():
        part, hint = known[setting]
        key = field_of(setting) if part == "worker" else setting
        parts[part][key] = _value(value, hint, f"{where}.{setting}")
    given = parts.pop("")
    if engine in OWN and "engine_file" not in values:
        raise ValueError(
            f"{where}.engine_file is missing; expected the Python file of your engine, with engine {engine}"
        )
    try:
        blank = Pool(name=name)
        made = {part: dataclasses.replace(getattr(blank, part), **settings) for part, settings in parts.items()}
        return Pool(**{"name": name} | given | made)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def refuse_idle(deployment: Deployment) -> None:
    """Refuse settings of a scheduler that a pool's engines do not have.

    Raises:
        ValueError: there is one.
    """
    for pool in deployment.pools:
        try:
            pool.simulated.refuse_idle()
        except ValueError as error:
            raise ValueError(f"pools.{pool.name}.{error}") from error


def check_simulated(deployment: Deployment) -> None:
    """Refuse simulated engines whose GPU or model is unknown, or does not fit."""
    for pool in deployment.pools:
        if pool.engine == "mocker":
            try:
                resolve(pool.engine_config, pool.timing)
            except ValueError as error:
                raise ValueError(f"pools.{pool.name}: {error}") from error


def _built(kind: type, values: Any, where: str) -> Any:
    """Make a section's dataclass from its settings."""
    settings = _mapping(values, where)
    known = hints(kind)
    _refuse_unknown(settings, tuple(known), f"{where}.")
    shown = {part.name for part in dataclasses.fields(kind) if part.repr}
    given = {
        name: _value(value, known[name], f"{where}.{name}", is_secret=name not in shown)
        for name, value in settings.items()
    }
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _value(value: Any, hint: Any, path: str, *, is_secret: bool = False) -> Any:
    try:
        return msgspec.convert(plain_value(value, hint), hint, dec_hook=_decode)
    except msgspec.ValidationError:
        shown = "invalid (its value is secret)" if is_secret else _shown(value)
        raise ValueError(f"{path} is {shown}; expected {expected(hint, value)}") from None


def _shown(value: Any) -> str:
    """Return a value in a form short enough for a message."""
    text = reprlib.repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _check_values(values: Any) -> None:
    """Refuse values that aliases make too large, or that contain themselves, and text that no process can be given."""
    count, stack = 0, [values]
    while stack:
        value = stack.pop()
        count += 1
        if count > MAX_VALUES:
            raise ValueError(f"the file contains more than {MAX_VALUES:,} values, with every alias expanded")
        if isinstance(value, dict):
            stack += [*value, *value.values()]
        elif isinstance(value, list):
            stack += value
        elif isinstance(value, str) and UNUSABLE.search(value):
            raise ValueError("the file contains text with a NUL or a lone surrogate, which no process can be given")


def _decode(kind: type, value: Any) -> Any:
    """Convert a text to a type that msgspec does not know (paths)."""
    if not isinstance(value, str):
        raise TypeError
    return kind(value)


def _mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{path} is {_shown(value)}; expected entries of the form NAME: VALUE")
    for name in value:
        if not isinstance(name, str):
            raise ValueError(f"{path} has the name {_shown(name)}, which is not text; put it in quotes")
    return value


def _refuse_unknown(values: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in values:
        if name not in known:
            instead = of_setting(name, known) or instead_of(name, sorted(known))
            raise ValueError(f"{where}{name} is unknown{_elsewhere(name) or f'; {instead}'}")


def _elsewhere(name: str) -> str:
    """Return the section that has a setting, "" if none does; a store on both clocks takes precedence."""
    found = [section for section, kind in sections(Deployment).items() if name in hints(kind)]
    return f" here; expected it in the deployment's section {found[-1]}" if found else ""


def _plain(section: Any) -> dict[str, Any]:
    """Return the settings of a section, without those that are secret, and URLs of servers without their passwords."""
    kind: Any = type(section)
    shown = {part.name: part.repr for part in dataclasses.fields(section)}
    found = {}
    for name, hint in hints(kind).items():
        value = getattr(section, name)
        if MAY_HOLD_PASSWORDS in typing.get_args(hint):
            found[name] = masked(value)
        elif shown[name]:
            found[name] = value
    return found


class _Loader(yaml.SafeLoader):
    """YAML in which a key that is defined twice is an error, rather than the last one being taken, and 1:20 is not 80."""

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        if node.tag in NUMBERS and ":" in node.value:  # base 60, which YAML 1.2 has no longer
            node.tag = "tag:yaml.org,2002:str"
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name = self.construct_object(key, deep=True)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{name} is defined twice", key.start_mark)
            seen.add(name)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found
