"""A config.json: each value by one name, of the model or of one layer, and which keys were read."""

from collections.abc import Mapping
from typing import Any

from mocker.models.spellings import FIRST_COUNTS, NESTED, SPELLINGS, may_change_sizes

MOST = 10**9
MOST_LAYERS = 1000
LAYERS = "num_hidden_layers"


class Keys:
    """The values of a file, with an architecture's defaults for those that it leaves out."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._given = dict(_flat(values))
        self._defaults = defaults
        self._read: set[str] = set()
        self._layer: int | None = None

    @property
    def layer(self) -> int:
        """The number of the layer that is asked about, of which lists have a value each; the whole model is asked as its first."""
        return self._layer or 0

    def at(self, layer: int) -> "Keys":
        """Return the values of one layer."""
        found = Keys({}, self._defaults)
        own = self._of_layers().get(layer) or {}
        found._given, found._read, found._layer = {**self._given, **own}, self._read, layer
        return found

    def number(self, name: str, default: int | None = None, *, least: int | None = None, most: int = MOST) -> int:
        """Return a whole number of at least 1, or of at least 0 if that is what it means to leave it out.

        Raises:
            ValueError: it is missing and there is no default, or it is no such number.
        """
        spelling, value = self._find(name)
        if isinstance(value, list) and self._layer is not None:
            value = self._one_of(spelling, value)
        if value is None and default is None:
            raise ValueError(f"it lacks {name}")
        least = least if least is not None else 0 if default == 0 else 1
        found = default if value is None else whole(value)
        if found is None or (value is not None and not least <= found <= most):
            raise ValueError(f"{spelling} is {shown(value)}; expected a whole number from {least} to {most:,}")
        return found

    def number_or(self, name: str, word: str, default: int) -> int:
        """Return a whole number of at least 1; a word of its own, or to leave it out, means the default.

        Raises:
            ValueError: it is neither.
        """
        spelling, value = self._find(name)
        if value is None or value == word:
            return default
        if (found := whole(value)) is None or not 1 <= found <= MOST:
            raise ValueError(f"{spelling} is {shown(value)}; expected a whole number from 1 to {MOST:,}, or {word!r}")
        return found

    def real(self, name: str, default: float) -> float:
        """Return a number above 0.

        Raises:
            ValueError: it is no such number.
        """
        spelling, value = self._find(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MOST:
            raise ValueError(f"{spelling} is {shown(value)}; expected a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return whether something is on.

        Raises:
            ValueError: it is neither true nor false.
        """
        spelling, value = self._find(name)
        if value is not None and value not in (True, False):
            raise ValueError(f"{spelling} is {shown(value)}; expected true or false")
        return default if value is None else bool(value)

    def text(self, name: str) -> str:
        """Return a word, or an empty one."""
        spelling, value = self._find(name)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{spelling} is {shown(value)}; expected a word")
        return value or ""

    def listed(self, name: str) -> list[Any] | None:
        """Return a list, or None.

        Raises:
            ValueError: it is something else.
        """
        spelling, value = self._find(name)
        if value is not None and not isinstance(value, list):
            raise ValueError(f"{spelling} is {shown(value)}; expected a list")
        return value

    def places(self, name: str) -> list[int] | None:
        """Return a list of layers' numbers, or None.

        Raises:
            ValueError: it is something else.
        """
        found = self.listed(name)
        if found is not None and any(whole(place) is None for place in found):
            raise ValueError(f"{name} is {shown(found)}; expected a list of numbers of layers")
        return found

    def of_each_layer(self, name: str) -> list[Any] | None:
        """Return a list of one value for each layer, or None; values of layers that predict further tokens are left out.

        Raises:
            ValueError: it is something else, or has another length.
        """
        found, count = self.listed(name), self.number(LAYERS, most=MOST_LAYERS)
        if found is None:
            return None
        further = self.number("num_nextn_predict_layers", 0)
        if not count <= len(found) <= count + further:
            raise ValueError(f"{name} has {len(found)} values; expected one for each of {count} layers")
        return found[:count]

    def is_list(self, name: str) -> bool:
        """Return whether it is a list."""
        return isinstance(self._find(name)[1], list)

    def is_text(self, name: str) -> bool:
        """Return whether it is a word."""
        return isinstance(self._find(name)[1], str)

    def has(self, name: str) -> bool:
        """Return whether there is a value, whatever it is."""
        return self._find(name)[1] is not None

    def is_null(self, name: str) -> bool:
        """Return whether a value is given as null, which says that it is not known."""
        return any(
            spelling in self._given and self._given[spelling] is None for spelling in SPELLINGS.get(name, (name,))
        )

    def ignore(self, *names: str) -> None:
        """Take keys as read: here they say nothing, or nothing new."""
        for name in names:
            self._read.update(SPELLINGS.get(name, (name,)))

    def forget(self, *names: str) -> None:
        """Take keys as not read: this architecture has no use for what they say."""
        for name in names:
            self._read.difference_update(SPELLINGS.get(name, (name,)))

    def unread_sizes(self) -> list[str]:
        """Return the keys that may change sizes, ask for something, and were not read."""
        return sorted(
            [name for name, value in self._given.items() if name not in self._read and may_change_sizes(name, value)]
        )

    def shown(self, name: str) -> str:
        """Return a value as it is shown in a message."""
        return shown(self._given[name])

    def _find(self, name: str) -> tuple[str, Any]:
        """Return the spelling by which a value is given, and the value."""
        spellings = SPELLINGS.get(name, (name,))
        self._read.update(spellings)
        is_given = any(spelling in self._given for spelling in spellings)  # null is a value, too
        values = self._given if is_given else self._defaults
        found = [(spelling, values[spelling]) for spelling in spellings if values.get(spelling) not in (None, [])]
        if name not in FIRST_COUNTS:
            _check_alike(found)
        return found[0] if found else (name, None)

    def _one_of(self, name: str, values: list[Any]) -> Any:
        if self.layer >= len(values):
            raise ValueError(f"{name} has {len(values)} values; expected one for each layer")
        return values[self.layer]

    def _of_layers(self) -> dict[int, Mapping[str, Any]]:
        """Return the values that differ from layer to layer (`per_layer_config`, by a layer's number)."""
        self._read.add("per_layer_config")
        found = self._given.get("per_layer_config")
        if found is None:
            return {}
        if not isinstance(found, dict) or not all(
            key.isdigit() and isinstance(own, dict) for key, own in found.items()
        ):
            raise ValueError(f"per_layer_config is {shown(found)}; expected values by the number of a layer")
        return {int(key): own for key, own in found.items()}


def _check_alike(found: list[tuple[str, Any]]) -> None:
    """Raise ValueError if a number is given by two names, and they differ."""
    numbers = [(name, number) for name, value in found if (number := whole(value)) is not None]
    for name, number in numbers[1:]:
        if number != numbers[0][1]:
            raise ValueError(f"{numbers[0][0]} is {numbers[0][1]}, but {name} is {number}; expected one of them")


def whole(value: Any) -> int | None:
    """Return a whole number, or None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if isinstance(value, int) or value.is_integer() else None


def meaning(name: str, value: object, meanings: Mapping[Any, str]) -> str:
    """Return what one of a list's values means.

    Raises:
        ValueError: it means nothing.
    """
    if isinstance(value, int | str) and value in meanings:
        return meanings[value]
    known = ", ".join([str(word) for word in meanings][:5])
    raise ValueError(f"{name} has {shown(value)}; expected values such as {known}")


def shown(value: Any) -> str:
    """Return the beginning of a value as one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _flat(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return keys and values, those of nested parts with the part's name before them."""
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        if name in NESTED and isinstance(value, dict):
            found += [(f"{name}.{inner}", own) for inner, own in value.items()]
        else:
            found.append((name, value))
    return found
