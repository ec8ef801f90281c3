"""Match the names of a model's modules with the lists in quantization_config: exact, with *, expressions, or parts."""

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import translate
from typing import Any

OTHERS = re.compile(r"^(model\.)?(mtp|visual|vision|audio)|vision_tower|audio_tower|embed_vision|embed_audio")
"""Names of modules outside the language model, which have layers of their own."""
WRAPPERS = ("", "model.", "language_model.model.", "model.language_model.")
"""What stands before the number of a layer."""

Matches = Callable[[str], bool]


def everything(module: str) -> bool:
    """Every module."""
    return True


def nothing(module: str) -> bool:
    """No module."""
    return False


def any_of(patterns: Iterable[Any]) -> Matches:
    """Compile names: whole words of a module's name in a row, with * as in file names, or `re:` and an expression.

    A name that ends in * is a module and what is below it: `layers.1*` is not layer 10.
    """
    expressions, parts = [], set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"it names a module {pattern!r}; expected a text")
        if OTHERS.search(pattern):
            continue
        if pattern.startswith("re:"):
            expressions.append(f"(?:{pattern[3:]})")
        elif "*" in pattern:
            expressions.append(_wildcards(plain(pattern)))
        else:
            parts.add(plain(pattern))
    return _compiled(expressions, parts)


def _wildcards(pattern: str) -> str:
    if len(pattern) > 1 and pattern[-1] == "*" and pattern[-2] not in ".*":
        return f"(?:{translate(pattern[:-1])}|{translate(pattern[:-1] + '.*')})"
    return translate(pattern)


def _compiled(expressions: list[str], parts: set[str]) -> Matches:
    try:
        compiled = re.compile("|".join(expressions)) if expressions else None
    except re.error as error:
        raise ValueError(f"it has an expression that cannot be read: {error}") from error

    def matches(module: str) -> bool:
        if compiled is not None and any(compiled.match(f"{before}{module}") for before in WRAPPERS):
            return True
        return bool(parts) and not parts.isdisjoint(_rows_of_words(module))

    return matches


def matching(expression: str) -> Matches:
    """Compile an expression that begins where names begin."""
    return _compiled([f"(?:{expression})"], set())


def below(names: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a function that finds what is said of a module, or of one that it is part of; None: nothing."""
    found = {plain(name): value for name, value in names.items()}

    def value_of(module: str) -> Any:
        words = module.split(".")
        for end in range(len(words), 1, -1):
            if (value := found.get(".".join(words[:end]))) is not None:
                return value
        return None

    return value_of


def plain(name: str) -> str:
    """Remove what stands before `layers` in a module's name, which differs with the class that wraps the model."""
    place = name.find("layers.")
    return name[place:] if place > 0 else name


def _rows_of_words(module: str) -> set[str]:
    """Return all words of a module's name that stand in a row."""
    words = module.split(".")
    return {".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
