"""Axes: the settings that can be varied, by name or path, and their valid values."""

import re
import typing
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from dynabench.arm import ClientConfig, Settings
from dynabench.deployment import paths
from dynabench.deployment.description import Deployment
from dynabench.elsewhere import of_setting
from foundation.settings import expected, kinds, plain_value
from foundation.text import instead_of
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig

SENT: dict[str, type] = {"shape": ShapeConfig, "load": LoadConfig, "client": ClientConfig}
"""The parts of `Settings`, besides the deployment, that can be varied."""

MAX_VALUES = 10_000
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})(?:\.\.(\d{1,9}))?")

OF_ROLES = ("kv_transfer", "disaggregation")
"""Sections of a deployment that apply to prefill and decode workers only."""

VIRTUAL = ("overhead", "core", "transfer", "fleet")
"""Sections of a deployment that real processes do not use."""


def read_axis(text: str, settings: Settings) -> tuple[str, list[Any]]:
    """Read `name=value,value,...`; `1..4` means 1,2,3,4, `1..9..4` means 1,5,9, and a value with commas is in `[]`.

    Raises:
        ValueError: there is no such setting, or a value is invalid for it.
    """
    _, equals, rest = text.partition("=")
    name = setting_of(text)
    texts = [value.strip() for value in re.split(r",(?![^(]*\))(?![^\[]*\])", rest) if value.strip()]
    if not equals or not texts:
        raise ValueError(
            f"vary {text!r} is not understood; expected NAME=VALUE,VALUE,... such as num_gpu_blocks=1024,2048 or "
            "workers=1..8"
        )
    values = [convert(name, value, settings) for text in texts for value in _range(text)]
    if len(set(map(str, values))) != len(values):
        raise ValueError(f"vary {text!r} contains a value twice")
    return name, values


def _range(text: str) -> list[str]:
    """Return every whole number of a range, `1..8` or `1..8..2`; return any other text unchanged.

    Raises:
        ValueError: the range is empty or too long.
    """
    match = _RANGE.fullmatch(text)
    if match is None:
        return [text]
    first, last, step = (int(part or 1) for part in match.groups())
    numbers = range(first, last + 1, max(step, 1))
    if not 0 < len(numbers) <= MAX_VALUES:
        raise ValueError(f"the range {text} has {len(numbers):,} values; expected 1 to {MAX_VALUES:,}")
    return [str(number) for number in numbers]


def setting_of(text: str) -> str:
    """Return the setting that `name=value,value,...` varies, written as a flag or as a path."""
    name = text.partition("=")[0].strip().removeprefix("--")
    return name if "." in name else name.replace("-", "_")  # a pool's name may contain a -


def convert(name: str, value: str, settings: Settings) -> Any:
    """Read a value of a setting.

    Raises:
        ValueError: there is no such setting, or the value is invalid for it.
    """
    hint = _hint(path_of(name, settings), settings)
    if value.startswith("[") and value.endswith("]") and str in kinds(hint):
        value = value[1:-1]  # a list, such as rates, is text with commas
    if value == "none" and type(None) in typing.get_args(hint):
        return None
    try:
        return msgspec.convert(plain_value(value, hint), hint, strict=False)
    except msgspec.ValidationError:
        raise ValueError(f"{name} is {value!r}; expected {expected(hint, value)}") from None


def kinds_of(name: str, settings: Settings) -> set[Any]:
    """Return the types of a setting's values.

    Raises:
        ValueError: there is no such setting.
    """
    return kinds(_hint(path_of(name, settings), settings))


def path_of(name: str, settings: Settings) -> str:
    """Return the path of a setting, given its short name.

    Raises:
        ValueError: no setting, or more than one, has this name.
    """
    found = paths.full(settings.deployment, name)
    if found is not None:
        return found
    for part, kind in SENT.items():
        if getattr(settings, part) is not None and name in paths.hints(kind):
            return f"{part}.{name}"
    names = known(settings)
    instead = of_setting(name, names) or instead_of(name, names)
    raise ValueError(f"{name} is not a setting that can be varied; {instead}")


def known(settings: Settings) -> list[str]:
    """Return the short names of everything that can be varied on the clock of these settings."""
    is_virtual = settings.client is None
    unused = {"frontend", "runtime", "kv_transfer"} if is_virtual else set(VIRTUAL)
    unused |= set() if settings.deployment.is_disaggregated else set(OF_ROLES)
    unused |= set() if settings.deployment.has_links else {"transfer"}
    shown = [kind for name, kind in paths.sections(Deployment).items() if name not in unused]
    sent = [kind for part, kind in SENT.items() if getattr(settings, part) is not None]
    names = {name for kind in (*sent, *shown) for name in paths.hints(kind)}
    for pool in settings.deployment.pools:
        settings_of = paths.settings_of_pool(pool.engine)
        names |= {name for name, (part, _) in settings_of.items() if not (is_virtual and part in paths.OF_PROCESSES)}
    return ["router_mode", "workers", *sorted(names - {"router_mode"})]


def change_setting(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """Change settings by name; only the final combination must be valid.

    Raises:
        ValueError: there is no such setting, or the value is invalid for it.
    """
    deployed: dict[str, Any] = {}
    sent: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        path = path_of(name, settings)
        part, _, setting = path.partition(".")
        _hint(path, settings)
        if part in SENT:
            sent.setdefault(part, {})[setting] = value
        else:
            deployed[path] = value
    parts = {part: replace(getattr(settings, part), **values) for part, values in sent.items()}
    return replace(settings, deployment=paths.change(settings.deployment, deployed), **parts)


def _hint(path: str, settings: Settings) -> Any:
    part, _, setting = path.partition(".")
    if part not in SENT:
        hint = paths.hint_of(settings.deployment, path)
        if settings.client is None and paths.is_of_processes(settings.deployment, path):
            raise ValueError(f"{path} applies only to real processes; vary it with dynabench run")
        if part in OF_ROLES and not settings.deployment.is_disaggregated:
            raise ValueError(f"{path} applies only to prefill and decode workers; the deployment has none")
        if part == "transfer" and not settings.deployment.has_links:
            raise ValueError(
                f"{path} applies only to prefill and decode workers or workers with a store; the deployment has neither"
            )
        if settings.client is not None and part in VIRTUAL:
            real = (
                ": real processes take their own time to start and stop, and a planner manages them"
                if part == "fleet"
                else ""
            )
            raise ValueError(f"{path} applies only to virtual time; vary it with dynabench simulate{real}")
        return hint
    hints = paths.hints(SENT[part])
    if getattr(settings, part) is None or setting not in hints:
        raise ValueError(f"{path} is unknown; {instead_of(setting, sorted(hints))}")
    return hints[setting]
