"""The arms of an experiment: which settings each runs with."""

import itertools
import re
import typing
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from dynabench.errors import UserError
from dynabench.experiment.settings import ExperimentConfig, LiveConfig, OverheadConfig
from foundation.text import printable
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from reports.summary import NOISE_FLOOR
from serving.router import RouterConfig
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything one run is made of."""

    mode: str
    workers: int
    shape: ShapeConfig
    load: LoadConfig
    router: RouterConfig
    engine: EngineConfig
    live: LiveConfig | None
    overhead: OverheadConfig = OverheadConfig()  # noqa: RUF009 (frozen)
    timing: TimingConfig = TimingConfig()  # noqa: RUF009

    def __post_init__(self) -> None:
        """Refuse settings that do not go together."""
        if self.live is None or self.live.engine == "mocker":
            return
        if self.timing.model is None:
            raise UserError(f"--engine {self.live.engine} needs --model: a folder, a GGUF file or a Hugging Face id")


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison."""

    name: str
    settings: Settings
    changes: dict[str, Any]
    """What sets it apart, by name of the setting."""
    is_repeated: bool = False
    """Whether it is the first arm once more, to tell how far two equal runs differ."""

    @property
    def plain_changes(self) -> dict[str, str | int | float | None]:
        """What sets it apart, as JSON takes it."""
        return {
            name: value if isinstance(value, (str, int, float, type(None))) else str(value)
            for name, value in self.changes.items()
        }


OWNERS: dict[str, type] = {
    "shape": ShapeConfig,
    "load": LoadConfig,
    "router": RouterConfig,
    "engine": EngineConfig,
    "timing": TimingConfig,
    "live": LiveConfig,
    "overhead": OverheadConfig,
}
"""Where a setting may belong, by the field of `Settings` that holds it."""


def arms_of(experiment: ExperimentConfig, settings: Settings) -> list[Arm]:
    """Make every combination of the values of every axis; the first is the baseline.

    Raises:
        ValueError: an axis is no setting, or a value is none of its.
    """
    axes = [("router_mode", list(experiment.router_mode))] + [read_axis(text, settings) for text in experiment.vary]
    names = [name for name, _ in axes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))} is varied twice")
    if settings.live is not None and settings.live.url:
        ours = [
            name for name in names[1:] if name == "workers" or owner(name, settings) not in ("load", "shape", "live")
        ]
        if ours:
            raise ValueError(
                f"{', '.join(ours)} cannot be varied with --url: what answers there has settings of its own; "
                "vary what is sent to it, such as concurrency=8,16"
            )
    alone = "endpoint" if settings.live is not None and settings.live.url else experiment.router_mode[0]
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
    parts = (str(value) if name == "router_mode" else f"{name} {_text(value)}" for name, value in changes.items())
    return printable(", ".join(parts))


def read_axis(text: str, settings: Settings) -> tuple[str, list[Any]]:
    """Read `name=value,value,...`.

    Raises:
        ValueError: there is no such setting, or a value is none of its.
    """
    name, equals, rest = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    values = [value.strip() for value in re.split(r",(?![^(]*\))", rest) if value.strip()]
    if not equals or not values:
        raise ValueError(
            f"vary {text!r} is not understood; expected NAME=VALUE,VALUE,... such as num_gpu_blocks=1024,2048"
        )
    found = [convert(name, value, settings) for value in values]
    if len(set(map(str, found))) != len(found):
        raise ValueError(f"vary {text!r} names a value twice")
    for value in found:
        change(settings, name, value)
    return name, found


def convert(name: str, value: str, settings: Settings) -> Any:
    """Read a value of a setting.

    Raises:
        ValueError: there is no such setting, or it is none of its values.
    """
    if name == "router_mode":
        return value
    kind = int if name == "workers" else typing.get_type_hints(OWNERS[owner(name, settings)])[name]
    try:
        return (
            None
            if value == "none" and type(None) in typing.get_args(kind)
            else msgspec.convert(value, kind, strict=False)
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"{name} cannot be {value!r}: {error}") from error


def owner(name: str, settings: Settings) -> str:
    """Tell which field of the settings holds one.

    Raises:
        ValueError: none does.
    """
    for part, kind in OWNERS.items():
        if getattr(settings, part) is not None and name in {field.name for field in fields(kind)}:
            return part
    known = sorted(
        field.name for part, kind in OWNERS.items() if getattr(settings, part) is not None for field in fields(kind)
    )
    raise ValueError(
        f"{name} is no setting that can be varied; expected router_mode, workers or one of {', '.join(known)}"
    )


def change(settings: Settings, name: str, value: Any) -> Settings:
    """Give a setting another value.

    Raises:
        ValueError: there is no such setting, or the value is none of its.
    """
    if name == "router_mode":
        return replace(settings, mode=value)
    if name == "workers":
        if value < 1:
            raise ValueError(f"workers must be at least 1, not {value}")
        return replace(settings, workers=value)
    part = owner(name, settings)
    return replace(settings, **{part: replace(getattr(settings, part), **{name: value})})


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
