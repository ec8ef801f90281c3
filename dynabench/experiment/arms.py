"""The arms of an experiment: which settings each runs with."""

import itertools
import re
import typing
from dataclasses import replace
from typing import Any

import msgspec

from dynabench.deployment import paths
from dynabench.deployment.description import Deployment
from dynabench.experiment.settings import ExperimentConfig
from dynabench.plan import Arm, ClientConfig, Settings
from foundation.settings import expected, short
from foundation.text import printable
from reports.summary import NOISE_FLOOR
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig

SENT: dict[str, type] = {"shape": ShapeConfig, "load": LoadConfig, "client": ClientConfig}
"""What may be varied beside the deployment, by the field of `Settings` that holds it."""


def arms_of(experiment: ExperimentConfig, settings: Settings) -> list[Arm]:
    """Make every combination of the values of every axis; the first is the baseline.

    Raises:
        ValueError: an axis is not a setting, or a value is not one of its.
    """
    modes = experiment.router_mode or (settings.deployment.router_mode,)
    axes = [("router_mode", list(modes))] + [read_axis(text, settings) for text in experiment.vary]
    names = [name for name, _ in axes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))} is varied twice")
    if settings.url:
        ours = [name for name in names[1:] if path_of(name, settings).partition(".")[0] not in SENT]
        if ours:
            raise ValueError(
                f"{', '.join(ours)} cannot be varied with --url: what answers there has settings of its own; "
                "vary what is sent to it, such as concurrency=8,16"
            )
    alone = "endpoint" if settings.url else modes[0]
    arms = []
    for values in itertools.product(*(values for _, values in axes)):
        changes = dict(zip(names, values, strict=True))
        changed = settings
        for name, value in changes.items():
            changed = change(changed, name, value)
        shown = {name: value for name, value in changes.items() if len(dict(axes)[name]) > 1}
        arms.append(Arm(arm_name(shown) or alone, changed, changes))
    if experiment.noise_floor:
        first = arms[0]
        arms.append(replace(first, name=first.name + NOISE_FLOOR, is_repeated=True))
    return arms


def arm_name(changes: dict[str, Any]) -> str:
    """Name an arm by what sets it apart."""
    parts = (str(value) if name == "router_mode" else f"{name} {short(value)}" for name, value in changes.items())
    return printable(", ".join(parts))


def read_axis(text: str, settings: Settings) -> tuple[str, list[Any]]:
    """Read `name=value,value,...`.

    Raises:
        ValueError: there is no such setting, or a value is not one of its.
    """
    name, equals, rest = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    texts = [value.strip() for value in re.split(r",(?![^(]*\))", rest) if value.strip()]
    if not equals or not texts:
        raise ValueError(
            f"vary {text!r} is not understood; expected NAME=VALUE,VALUE,... such as num_gpu_blocks=1024,2048"
        )
    values = [convert(name, value, settings) for value in texts]
    if len(set(map(str, values))) != len(values):
        raise ValueError(f"vary {text!r} names a value twice")
    for value in values:
        change(settings, name, value)
    return name, values


def convert(name: str, value: str, settings: Settings) -> Any:
    """Read a value of a setting.

    Raises:
        ValueError: there is no such setting, or it is not one of its values.
    """
    hint = _hint(path_of(name, settings), settings)
    if value == "none" and type(None) in typing.get_args(hint):
        return None
    try:
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError:
        raise ValueError(f"{name} is {value!r}; expected {expected(hint, value)}") from None


def path_of(name: str, settings: Settings) -> str:
    """Return the path of a setting that is given by its short name.

    Raises:
        ValueError: there is none of that name, or several.
    """
    found = paths.full(settings.deployment, name)
    if found is not None:
        return found
    for part, kind in SENT.items():
        if getattr(settings, part) is not None and name in paths.hints(kind):
            return f"{part}.{name}"
    raise ValueError(f"{name} is not a setting that can be varied; expected one of {', '.join(known(settings))}")


def known(settings: Settings) -> list[str]:
    """Return the short names of everything that can be varied on the clock of these settings."""
    is_virtual = settings.client is None
    sections = paths.sections(Deployment).items()
    shown = [kind for name, kind in sections if name not in (("frontend", "runtime") if is_virtual else ("overhead",))]
    sent = [kind for part, kind in SENT.items() if getattr(settings, part) is not None]
    names = {name for kind in (*sent, *shown) for name in paths.hints(kind)}
    for pool in settings.deployment.pools:
        settings_of = paths.settings_of_pool(pool.engine)
        names |= {name for name, (part, _) in settings_of.items() if not (is_virtual and part in ("worker", "run"))}
    return ["router_mode", "workers", *sorted(names)]


def change(settings: Settings, name: str, value: Any) -> Settings:
    """Give a setting another value.

    Raises:
        ValueError: there is no such setting, or the value is not one of its.
    """
    path = path_of(name, settings)
    part, _, setting = path.partition(".")
    _hint(path, settings)
    if part not in SENT:
        return replace(settings, deployment=paths.change(settings.deployment, path, value))
    return replace(settings, **{part: replace(getattr(settings, part), **{setting: value})})


def _hint(path: str, settings: Settings) -> Any:
    part, _, setting = path.partition(".")
    if part not in SENT:
        hint = paths.hint_of(settings.deployment, path)
        if settings.client is None and paths.is_of_processes(settings.deployment, path):
            raise ValueError(
                f"{path} applies to processes, which virtual time does not have; vary it with dynabench run"
            )
        if settings.client is not None and part == "overhead":
            raise ValueError(f"{path} applies to virtual time; vary it with dynabench simulate")
        return hint
    hints = paths.hints(SENT[part])
    if getattr(settings, part) is None or setting not in hints:
        raise ValueError(f"{path} is unknown; expected one of {', '.join(sorted(hints))}")
    return hints[setting]
