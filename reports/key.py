"""One key for a whole report: each arm's short name, colour, dashes and marker, in one order everywhere."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rich.cells import cell_len, set_cell_size

from foundation.text import printable
from reports.summary import NOISE_FLOOR

PALETTE = (
    ("#1691fb", "#586cfa"),  # blue
    ("#b5520d", "#fb9031"),  # orange
    ("#3c7d68", "#78b899"),  # green
    ("#ef4caf", "#a666a2"),  # pink
    ("#7c0c29", "#e73540"),  # red
    ("#224f6f", "#a4e9fe"),  # navy, sky
    ("#a69357", "#f0e439"),  # khaki, yellow
)
"""Each colour on light and on dark paper, distinct for readers with any form of colour blindness."""
DASHES: tuple[tuple[float, ...], ...] = ((), (4.0, 1.5), (1.2, 1.2), (5.0, 1.5, 1.2, 1.5))
"""Lengths of dashes and gaps in line widths; the first is a solid line. Each round of the palette has its own pattern."""
MARKERS = "osD^vPX"
WIDEST = 22
"""The most character cells of a short name."""
TURNING = re.compile(r"(?:[a-z_.]*\.)?(?:disable|enable|no)_")
"""Beginnings of settings that say which way round a value is; they always stay."""


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """How an arm is shown."""

    arm: str
    """Its full name, for titles."""
    name: str
    place: int
    swatch: int
    """Its colour's number in the palette; the page has each as `--arm-N`."""
    dashes: tuple[float, ...]
    marker: str

    @property
    def colour(self) -> str:
        """Its colour on light paper."""
        return PALETTE[self.swatch][0]

    @property
    def dark(self) -> str:
        """Its colour on dark paper, and in a terminal."""
        return PALETTE[self.swatch][1]


Key = dict[str, KeyEntry]
"""Every arm by its full name, in order."""


def key_of(arms: Sequence[str], *, widest: int = WIDEST) -> Key:
    """Return how each arm is shown, by a name of at most `widest` cells.

    A repeat of the first arm has the colour of the first, dashed.
    """
    places = {arm: place for place, arm in enumerate(arm for arm in arms if not arm.endswith(NOISE_FLOOR))}
    key: Key = {}
    for number, (arm, name) in enumerate(zip(arms, _short(arms, widest), strict=True)):
        twin = arm.removesuffix(NOISE_FLOOR)
        place = places.get(twin, number)
        turn = place // len(PALETTE) + (twin != arm)
        key[arm] = KeyEntry(
            arm, name, number, place % len(PALETTE), DASHES[turn % len(DASHES)], MARKERS[number % len(MARKERS)]
        )
    return key


def with_short_names(text: str, key: Key) -> str:
    """Return a text with the short name of each arm instead of its full one; in quotes if it has commas."""
    shown = {
        arm: f"'{entry.name}'" if "," in entry.name and entry.name != arm else entry.name for arm, entry in key.items()
    }
    longest = sorted(key, key=len, reverse=True)
    in_quotes = {
        f"'{arm}'": shown[arm] if entry.name != arm else f"'{arm}'" for arm, entry in key.items() if "," in arm
    }
    arms = "|".join(re.escape(arm) for arm in [*in_quotes, *longest])
    return re.sub(rf"(?<![\w-])(?:{arms})(?![\w-])", lambda arm: (in_quotes | shown)[arm[0]], text)


def css() -> str:
    """Return the palette as custom properties `--arm-N`, light and dark."""
    light, dark = (" ".join(f"--arm-{n}: {pair[side]};" for n, pair in enumerate(PALETTE)) for side in (0, 1))
    return (
        f":root {{ {light} }}\n"
        f'@media screen and (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark} }} }}\n'
        f'@media screen {{ :root[data-theme="dark"] {{ {dark} }} }}\n'
    )


def _short(arms: Sequence[str], widest: int) -> list[str]:
    """Shorten names in the gentlest way that makes all of them narrow and keeps them distinct."""
    whole = [printable(" ".join(arm.split())) for arm in arms]
    endings = [NOISE_FLOOR if name.endswith(NOISE_FLOOR) else "" for name in whole]
    bare = [name.removesuffix(ending) for name, ending in zip(whole, endings, strict=True)]
    found = whole
    for ways in (
        (),
        (without_shared,),
        (without_shared, partial(_with_ends_of_settings, widest=widest)),
        (without_shared, _without_settings),
        (without_shared, _without_settings, partial(_without_beginning, widest=widest)),
    ):
        names = bare
        for way in ways:
            names = way(names)
        tried = [name + ending for name, ending in zip(names, endings, strict=True)]
        if all(names) and len(set(tried)) == len(set(whole)):
            found = tried
            if max(map(cell_len, found), default=0) <= widest:
                break
    if endings.count(NOISE_FLOOR) == 1 and max(map(cell_len, found)) > widest:
        found = [NOISE_FLOOR.strip(" ()") if ending else name for name, ending in zip(found, endings, strict=True)]
    return _cut(found, widest)


def without_shared(names: list[str]) -> list[str]:
    """Leave out the parts that all names share."""
    parts = [re.split(r", |/", name) for name in names]
    shared = set.intersection(*map(set, parts)) if len(set(names)) > 1 else set()
    return [", ".join(part for part in its if part not in shared) or " ".join(its[-1:]) for its in parts]


def _with_ends_of_settings(names: list[str], widest: int) -> list[str]:
    """Leave out first words of the names of settings, as few as needed: `speculative_tokens 3` of `num_speculative_tokens 3`."""
    for count in range(1, 4):
        tried = [", ".join(_end_of_setting(part, count) for part in name.split(", ")) for name in names]
        if max(map(cell_len, tried), default=0) <= widest:
            return tried
    return names


def _end_of_setting(part: str, count: int) -> str:
    """Leave out so many words, but never one that turns the value around, nor the last two: one would say too little."""
    setting, space, value = part.partition(" ")
    if " " in value or not space:
        return part
    words = setting.split("_")
    turning = words.pop(0).rpartition(".")[2] + "_" if TURNING.match(setting) else ""
    dropped = min(count, max(len(words) - (1 if turning else 2), 0))
    return turning + ("…" if turning and dropped else "") + "_".join(words[dropped:]) + space + value


def _without_settings(names: list[str]) -> list[str]:
    """Leave out the names of settings: only the number of `chunk_tokens 512` stays; not those that turn a value around."""
    setting = re.compile(rf"^(?!{TURNING.pattern})[a-z_.]{{6,}} (?=\S+$)")
    return [", ".join(setting.sub("", part) for part in name.split(", ")) for name in names]


def _without_beginning(names: list[str], widest: int) -> list[str]:
    """Leave out the words with which all names start, as many as needed; not of settings that turn a value around."""
    if any(map(TURNING.match, names)):
        return names
    words = [re.findall(r"[^\s,/_:+-]+[\s,/_:+-]*|[\s,/_:+-]+", name) for name in names]
    count = 0
    while (
        len(names) > 1
        and all(len(its) > count + 1 and its[count] == words[0][count] for its in words)
        and max(cell_len("".join(its[count:])) for its in words) > widest
    ):
        count += 1
    return ["".join(its[count:]) for its in words]


def _cut(names: list[str], widest: int) -> list[str]:
    """Cut names that are still too wide; number those that would be alike."""
    cut: list[str] = []
    for name in names:
        short = _narrow(name, widest)
        number = 1
        while short in cut:
            number += 1
            short = f"{_narrow(name, widest - len(f' {number}'))} {number}"
        cut.append(short)
    return cut


def _narrow(name: str, width: int) -> str:
    """Cut the first of a name's two parts, or else its middle."""
    if cell_len(name) <= width:
        return name
    head, comma, tail = name.rpartition(", ")
    if comma and cell_len(tail) <= width - 8:
        return f"{set_cell_size(head, width - 3 - cell_len(tail)).rstrip()}…, {tail}"
    return _middle_out(name, width)


def _middle_out(name: str, width: int) -> str:
    head = set_cell_size(name, (width - 1) // 2).rstrip()
    tail = set_cell_size(name[::-1], width - 1 - cell_len(head)).rstrip()[::-1]
    return f"{head}…{tail}"
