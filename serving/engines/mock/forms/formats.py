"""Texts of the formats that JSON schemas name."""

from collections.abc import Callable
from functools import partial
from random import Random

WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "harbor", "islet", "juniper", "kelp", "lagoon")


def _word(rng: Random) -> str:
    return WORDS[int(rng.random() * len(WORDS))]


def _number(rng: Random, low: int, high: int) -> int:
    return low + int(rng.random() * (high - low + 1))


def _date(rng: Random) -> str:
    return f"{_number(rng, 1990, 2035)}-{_number(rng, 1, 12):02}-{_number(rng, 1, 28):02}"


def _time(rng: Random) -> str:
    return f"{_number(rng, 0, 23):02}:{_number(rng, 0, 59):02}:{_number(rng, 0, 59):02}Z"


def _hostname(rng: Random) -> str:
    return f"{_word(rng)}.example.com"


def _ipv4(rng: Random) -> str:
    return f"192.0.2.{_number(rng, 1, 254)}"


def _ipv6(rng: Random) -> str:
    return f"2001:db8::{_number(rng, 1, 65535):x}"


def _uuid(rng: Random, version: int = 4) -> str:
    bits = rng.getrandbits(128) & ~(0xF000 << 64) & ~(0xC000 << 48) | version << 76 | 0x8000 << 48
    digits = f"{bits:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _base64(rng: Random) -> str:
    return "".join(_word(rng)[0] for _ in range(8))


FORMATS: dict[str, Callable[[Random], str]] = {
    "date-time": lambda rng: f"{_date(rng)}T{_time(rng)}",
    "date": _date,
    "time": _time,
    "duration": lambda rng: f"P{_number(rng, 1, 9)}DT{_number(rng, 1, 23)}H",
    "email": lambda rng: f"{_word(rng)}@example.com",
    "idn-email": lambda rng: f"{_word(rng)}@example.com",
    "name-email": lambda rng: f"{_word(rng)}@example.com",
    "hostname": _hostname,
    "idn-hostname": _hostname,
    "ipv4": _ipv4,
    "ipv6": _ipv6,
    "ipvanyaddress": _ipv4,
    "ipv4interface": lambda rng: f"{_ipv4(rng)}/24",
    "ipv6interface": lambda rng: f"{_ipv6(rng)}/64",
    "ipvanyinterface": lambda rng: f"{_ipv4(rng)}/24",
    "ipv4network": lambda rng: f"10.{_number(rng, 0, 255)}.0.0/16",
    "ipv6network": lambda rng: f"2001:db8:{_number(rng, 1, 65535):x}::/48",
    "ipvanynetwork": lambda rng: f"10.{_number(rng, 0, 255)}.0.0/16",
    "uri": lambda rng: f"https://{_hostname(rng)}/{_word(rng)}",
    "iri": lambda rng: f"https://{_hostname(rng)}/{_word(rng)}",
    "multi-host-uri": lambda rng: f"postgres://{_hostname(rng)}/{_word(rng)}",
    "uri-reference": lambda rng: f"/{_word(rng)}/{_word(rng)}",
    "iri-reference": lambda rng: f"/{_word(rng)}/{_word(rng)}",
    "uri-template": lambda rng: f"/{_word(rng)}/{{id}}",
    "uuid": _uuid,
    **{f"uuid{version}": partial(_uuid, version=version) for version in (1, 3, 4, 5, 6, 7, 8)},
    "json-pointer": lambda rng: f"/{_word(rng)}/{_number(rng, 0, 9)}",
    "relative-json-pointer": lambda rng: f"{_number(rng, 0, 3)}/{_word(rng)}",
    "regex": lambda rng: f"^{_word(rng)}$",
    "json-string": lambda rng: str(_number(rng, 0, 999)),
    "decimal": lambda rng: f"{_number(rng, 0, 999)}.{_number(rng, 0, 99):02}",
    "byte": _base64,
    "base64url": _base64,
    "color": lambda rng: f"#{rng.getrandbits(24):06x}",
}
"""By name; a text of any other format is free, as the specification has it."""
