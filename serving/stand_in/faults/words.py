"""Faults as text, NAME=VALUE: on the command line (`--fault 429=0.05`), and as JSON at the admin port (`{"429": 0.05}`)."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from foundation.settings import Positive, Share, Wait
from serving.stand_in.faults.config import FaultConfig
from serving.stand_in.faults.values import (
    Moment,
    Stall,
    Times,
    read_moment,
    read_share,
    read_stall,
    read_time,
    read_times,
)

FLAG = "--fault"
STATUS = re.compile(r"[45][0-9][0-9]")


def _read_factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor <= 1e6:
        raise ValueError("a factor above 0, such as 2")
    return factor


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text

    return read


OF_TYPES: dict[Any, Callable[[str], Any]] = {
    Share: read_share,
    Positive: _read_factor,
    Wait: read_time,
    Stall | None: read_stall,
    Times | None: read_times,
    Moment | None: read_moment,
}
READERS = {
    name: _one_of(*get_args(hint)) if get_origin(hint) is Literal else OF_TYPES[hint]
    for name, hint in get_type_hints(FaultConfig, include_extras=True).items()
    if name not in ("statuses", "seed")
}
"""What reads each fault that has a name of its own."""
NAMES = ("400 to 599", *READERS)


def read_faults(words: Iterable[str], *, seed: int = 0) -> FaultConfig:
    """Read the values of --fault.

    Raises:
        ValueError: one of them is none; the message is one line.
    """
    settings: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{FLAG} {word}: expected NAME=VALUE, such as 429=0.05")
        if name in settings:
            raise ValueError(f"{FLAG} {word}: {name} is given twice")
        settings[name] = value
    try:
        return changed_faults(FaultConfig(seed=seed), settings)
    except ValueError as error:
        raise ValueError(f"{FLAG} {error}") from None


def changed_faults(config: FaultConfig, settings: Mapping[str, Any]) -> FaultConfig:
    """Return settings with some replaced; None removes one.

    Raises:
        ValueError: a name or value is none of ours; the message names it and says what was expected.
    """
    statuses = dict(config.statuses)
    found = {each.name: getattr(config, each.name) for each in fields(config)}
    default = FaultConfig()
    for name, value in settings.items():
        if STATUS.fullmatch(name):
            statuses.pop(name, None)
            if value is not None:
                statuses[name] = _read(name, value, read_share)
        elif name in READERS:
            found[name] = getattr(default, name) if value is None else _read(name, value, READERS[name])
        else:
            raise ValueError(f"{name}={value}: expected one of {', '.join(NAMES)}")
    return FaultConfig(**(found | {"statuses": statuses}))


def fault_words(config: FaultConfig) -> dict[str, Any]:
    """Return the settings that are not their defaults, as `changed_faults` reads them."""
    default = FaultConfig()
    named = {name: getattr(config, name) for name in READERS if getattr(config, name) != getattr(default, name)}
    words = {name: _word(name, value) for name, value in named.items()}
    return dict(sorted(config.statuses.items())) | words


def _read(name: str, value: Any, read: Callable[[str], Any]) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{name}={value!r}: expected text or a number")
    text = f"{value:.12g}" if isinstance(value, float) else str(value)
    try:
        return read(text)
    except ValueError as error:
        raise ValueError(f"{name}={text}: expected {error}") from None


def _word(name: str, value: Any) -> Any:
    if READERS[name] is read_time:
        return f"{value:.9g}s"
    if isinstance(value, Moment) and value.num_answers is not None:
        return value.num_answers
    return value if isinstance(value, float | str) else str(value)
