"""LoRA adapters that a vLLM serves beside its model: `lora_modules`, which vLLM's own server reads and its engine does not know."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from serving.worker.protocol import CacheScope


class LoraModule(NamedTuple):
    """An adapter: clients ask for it by its name, as if it were a model."""

    name: str
    number: int
    """From 1, in the order of their names on the worker's card, as frontends count them."""
    path: str

    @property
    def root(self) -> int:
        """The hash below which the blocks of its prompts are named."""
        return CacheScope(lora_name=self.name, lora_id=self.number).root


def take_modules(arguments: dict[str, Any]) -> tuple[LoraModule, ...]:
    """Take `lora_modules` out of vLLM's arguments, and return the adapters that it names.

    Raises:
        ValueError: it is not valid, or adapters are not enabled.
    """
    given = arguments.pop("lora_modules", None)
    if given is None:
        return ()
    if not arguments.get("enable_lora"):
        raise ValueError("lora_modules names adapters, and enable_lora is not set; expected --enable-lora beside it")
    entries = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    pairs = [_name_and_path(entry) for entry in entries]
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"lora_modules names {', '.join(names)}; expected each name once")
    return tuple(LoraModule(name, number, path) for number, (name, path) in enumerate(pairs, 1))


def _name_and_path(entry: object) -> tuple[str, str]:
    if isinstance(entry, Mapping):
        name, path = entry.get("name"), entry.get("path")
    else:
        name, _, path = str(entry).partition("=")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ValueError(
            f'lora_modules has {entry!r}; expected name=path, {{"name": ..., "path": ...}}, or a list of them'
        )
    return name, path
