"""What a stand-in does with each argument of `vllm serve`; the table is treatment.toml.

    modelled            it sets something here
    harmless            it is accepted, changes nothing that is simulated, and is named once in the log
    refused with --gpu  it would change step times or memory in a way that is not simulated: refused where --gpu
                        predicts them; without --gpu, step times are no GPU's, and it is harmless
    refused             it would change schedules, answers or routes in a way that is not simulated

Only values that differ from vLLM's defaults are refused.
"""

import functools
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, get_args

TABLE = Path(__file__).with_suffix(".toml")

Kind = Literal["modelled", "harmless", "refused with --gpu", "refused"]


class Treatment(NamedTuple):
    """What is done with an argument, and why."""

    kind: Kind
    about: str
    """What it sets, why it changes nothing, or why it is refused, and the way out."""


@functools.cache
def treatments() -> Mapping[str, Treatment]:
    """Return what is done with each argument, by its name in vLLM."""
    return dict(_entries())


def _entries() -> Iterator[tuple[str, Treatment]]:
    """Yield the entries of the table; a test holds them against vLLM's parser."""
    table = tomllib.loads(TABLE.read_text())
    for kind in get_args(Kind):
        for key, value in table[kind].items():
            names, about = (value, key) if kind == "harmless" else (key, value)
            yield from ((name, Treatment(kind, about)) for name in names.split())
