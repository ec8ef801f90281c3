"""The page of the flags of `vllm serve`, and what a stand-in does with each."""

import json
from collections.abc import Iterator
from typing import Any

from dynabench.reference.setting import item
from serving.stand_in.vllm.flags.arguments import Argument, version
from serving.stand_in.vllm.flags.help import groups, values
from serving.stand_in.vllm.flags.treatment import treatments

HEAD = """\
# Flags of vllm serve

`dynabench vllm` takes every flag of `vllm serve` {version}, in every spelling that vLLM takes: `--max_model_len`,
`--max-model-len=8k`, `-tp 2`, `-O3`, `--kv-events-config.topic kv`, `--config FILE.yaml`. Its own flags are on
[its page](vllm.md). `dynabench vllm --help=WORD` searches this list.

- **modelled**: it sets something in the stand-in.
- **harmless**: it is accepted and changes nothing that is simulated. The log names it once.
- **refused with --gpu**: it would change step times or memory in a way that is not simulated. Where no GPU's step times
  are predicted, it is harmless.
- **refused**: it would change schedules, answers or routes in a way that is not simulated.

Only a value that differs from vLLM's default is refused.
"""
MOST = 40
"""Characters of a default that is printed."""


def page() -> str:
    """Return the page in Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield HEAD.format(version=version())
    for title, members in groups().items():
        yield f"## {title}\n"
        for argument in members:
            yield item(_line(argument))
        yield ""


def _line(argument: Argument) -> str:
    kind, about = treatments()[argument.dest]
    flags = ", ".join(f"`{flag}`" for flag in argument.flags) or f"`{argument.dest.upper()}`"
    takes = f" `{values(argument).strip()}`" if values(argument) else ""
    return f"{flags}{takes}: **{kind}**, {about}.{_default(argument.default)}"


def _default(value: Any) -> str:
    text = json.dumps(value)
    return "" if value in (None, "", [], {}) or value is False or len(text) > MOST else f" Default: `{text}`."
