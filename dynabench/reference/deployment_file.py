"""The page about the YAML file of a deployment."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import docstring_parser

from dynabench.deployment.description import ECHOES, HAND_OVER, OWN, Deployment, Pool
from dynabench.deployment.file import COMMON, MEASURED
from dynabench.deployment.paths import field_of, hints, is_of_processes, own, sections, settings_of_pool
from dynabench.experiment.axes import OF_ROLES, VIRTUAL
from dynabench.reference.setting import Setting, default_of, item, paragraph, prose, words
from serving.worker.registry import ENGINES

HEAD = """\
# The deployment file

`simulate`, `run`, `sweep` and `serve` read it with `--deployment FILE`, and `kubernetes` as its first argument. [Describe a deployment](../deployment.md) shows
how to use it; this page lists every key.

```yaml
model: meta-llama/Llama-3.1-8B
router_mode: kv
router: {kv_overlap_score_weight: 1.0}
pools:
  new: {replicas: 1, gpu: h100}
  old: {replicas: 2, gpu: l40s}
```

A key that is unknown or has a value that it cannot have is refused, with its path and what was expected.
"""

KINDS = {
    "Simulated engines": (("mocker",), "mocker"),
    "Engines that run a model": (tuple(ENGINES), "run"),
    "Your own engine": (OWN, "own"),
    "Workers of every engine": (("mocker", *ENGINES, *ECHOES, *OWN), "worker"),
}
"""Settings of pools: which engines have them, and the part of a pool that holds them."""


BOOLEANS = ("false", "true")


def page() -> str:
    """Return the page in Markdown."""
    return "\n".join((HEAD, *_top(), *_pools(), *_sections()))


def _top() -> Iterator[str]:
    yield "## Top level\n"
    yield _line(Deployment, "name", str)
    yield from (_line(Deployment, name, hint) for name, hint in own(Deployment).items())
    for name in COMMON:
        yield item(f"**`{name}`**: The same key of every pool that has none of its own. *Text.*")
    yield item(
        "**`pools`**: Pools by name. A name is a letter, then letters, digits, - and _. *A mapping; see [pools](#pools).*"
    )
    for name in sections(Deployment):
        about = prose(_texts(Deployment)[name])
        yield item(f"**`{name}`**: {about} *A mapping; see [{name}](#{name}).*")


def _pools() -> Iterator[str]:
    yield "\n## pools\n"
    yield paragraph(
        "Workers that are alike, by the name of the pool. The settings of a pool stand side by side. Only "
        f"{', '.join(HAND_OVER)} can have the roles prefill and decode."
    )
    yield "\n### Every pool\n"
    yield from (_line(Pool, name, hint) for name, hint in own(Pool).items())
    for title, (engines, part) in KINDS.items():
        yield f"\n### {title}\n"
        yield f"For `engine` {', '.join(f'`{name}`' for name in engines)}.\n"
        known = settings_of_pool(engines[0]).items()
        holder = type(getattr(Pool(), part))
        if part == "mocker":
            yield from (_line(holder, name, hint) for name, (held, hint) in known if held == part)
            for section in ("timing", "answers", "sglang", "trtllm"):
                if section in ("sglang", "trtllm"):
                    yield f"\nInstead of the settings of vLLM's scheduler, with `engine_type: {section}`:\n"
                kind = type(getattr(Pool(), section))
                yield from (_line(kind, name, hint) for name, (held, hint) in known if held == section)
            continue
        pool = getattr(Pool(), part)
        yield from (_line(holder, field_of(name), hint, pool, name) for name, (held, hint) in known if held == part)


def _sections() -> Iterator[str]:
    for name, kind in sections(Deployment).items():
        yield f"\n## {name}\n"
        yield paragraph(f"{prose(_texts(Deployment)[name])} {_when(name)}") + "\n"
        for key, hint in hints(kind).items():
            yield _line(kind, key, hint, measured=MEASURED.get(name))


def _when(section: str) -> str:
    """Say where a section matters."""
    found = []
    if section in VIRTUAL:
        found.append("Virtual time only (`simulate`, `sweep`, `plan`).")
    elif is_of_processes(Deployment(), section):
        found.append("Processes only (`run`, `serve`).")
    if section in OF_ROLES:
        found.append("Roles: prefill and decode.")
    return " ".join(found)


def _line(kind: type, name: str, hint: Any, values: Any = None, key: str = "", *, measured: type | None = None) -> str:
    """Return a key as an item; its default is the field's, or that of `values`."""
    default = default_of(_default(kind, name) if values is None else getattr(values, name), BOOLEANS)
    setting = Setting((key or name,), _texts(kind).get(name, ""), words(hint), default)
    if measured is None or _default(measured, name) == _default(kind, name):
        return setting.line()
    other = default_of(_default(measured, name), BOOLEANS)
    return setting.line(f" Where it is measured (`simulate`, `run`, `sweep`): {f'`{other}`' if other else 'none'}.")


def _default(kind: type, name: str) -> Any:
    field = next(field for field in dataclasses.fields(kind) if field.name == name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _texts(kind: type) -> dict[str, str]:
    """Return what the fields of a dataclass say about themselves, inherited ones included."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        parsed = docstring_parser.parse_from_object(base) if dataclasses.is_dataclass(base) else None
        found |= {part.arg_name: part.description or "" for part in parsed.params} if parsed else {}
    return found
