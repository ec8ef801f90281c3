"""The models that are bundled by name, and models from a config.json."""

import difflib
import functools
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mocker.models.keys import shown
from mocker.models.shape import ModelShape, shape_of

BUNDLED = Path(__file__).with_name("data") / "models.json"
VARIANTS = ("-instruct", "-chat", "-hf", "-base", "-it", "-bf16", "-fp8", "-nvfp4")
WEIGHTS = {"-fp8": "fp8", "-nvfp4": "fp4", "-bf16": "bfloat16"}
"""Ends of names that say how the weights are stored."""


def find_model(name: str, read_as: str | None = None) -> ModelShape:
    """Return the shape of a bundled model, by its Hugging Face id, or of the config.json at a path.

    Args:
        name: the id, or a folder or file.
        read_as: the architecture as which to read the file.

    Raises:
        ValueError: the model is unknown, and there is no such file, or the file is not understood.
    """
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        beside = path.with_name("hf_quant_config.json")
        return _read(path, _changed_ns(path), beside if beside.is_file() else None, _changed_ns(beside), read_as)
    return _bundled(name)


def hub_id(name: str) -> str:
    """Return the Hugging Face id of a bundled model that is called by less than that; other names as they are."""
    key = bundled_id(name)
    if key is None or name.lower() not in key.lower() or (_stated(name) or "bfloat16") != (_stated(key) or "bfloat16"):
        return name
    return key


def bundled_id(name: str) -> str | None:
    """Return the Hugging Face id of the bundled model that has a model's shape; None if there is none, or the name is a path."""
    return None if Path(name).exists() else _key(name)


def original_id(name: str) -> str | None:
    """Return the Hugging Face id that all bundled checkpoints of a model share: its original's, if that is bundled."""
    key = bundled_id(name)
    return None if key is None else _by_plain_name()[_plain(key)]


def assumed(name: str, weights: str) -> str:
    """Say in a clause that a model's checkpoint is not bundled, if its weights count as what no file says; else nothing.

    Args:
        name: the model, as given.
        weights: the type that most of its weights count as.
    """
    key, stated = bundled_id(name), _stated(name)
    if (
        key is None
        or stated in (_stated(key), "bfloat16")
        or _stated(key) == "bfloat16"
        or weights != (stated or "bfloat16")
    ):
        return ""
    if stated is None:
        return f"of this model, only {key} is bundled; without --quantization, all weights count as BF16"
    if _bundled(key).weights == stated:
        return ""
    return (
        f"this checkpoint is not bundled; all layers of {key} count as {stated.upper()}, though such checkpoints often "
        "leave some out or scale weights in blocks, which its config.json says"
    )


def _changed_ns(path: Path) -> int:
    return path.stat().st_mtime_ns if path.is_file() else 0


@functools.lru_cache(maxsize=64)
def _read(path: Path, _: int, beside: Path | None, __: int, read_as: str | None) -> ModelShape:
    """Read both files; the times tell edited ones from those that were read before."""
    config, more = _object(path), _object(beside) if beside is not None else None
    try:
        return shape_of(config, more, read_as=read_as)
    except ValueError as error:
        raise ValueError(f"model {path}: {error}") from error


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"model {path}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"model {path}: it is {shown(found)}; expected an object")
    return found


@functools.lru_cache(maxsize=256)
def _bundled(name: str) -> ModelShape:
    known, key = model_configs(), _key(name)
    if key is None:
        raise ValueError(
            f"model {name!r} is neither bundled nor a folder or file with a config.json{_like(name, known)}; "
            "`dynabench hardware` lists the bundled ones"
        )
    stated, config = _stated(name), known[key]
    if stated == _stated(key):
        return shape_of(config)
    if _stated(key) is not None:  # only quantised checkpoints are bundled; their sizes are those of others, too
        config = {part: value for part, value in config.items() if part != "quantization_config"}
    found = shape_of(config)
    if stated is None or found.weights == stated:
        return found
    if found.weights != "bfloat16":
        raise ValueError(
            f"model {name!r} is not bundled, and the weights of {key}, which is, are {found.weights.upper()}; give the "
            f"model's config.json, or {key} and --quantization {stated} to count all layers as {stated.upper()}"
        )
    return found.quantised(stated)


def _stated(name: str) -> str | None:
    """Return the type of weights that a name ends with."""
    return next((weights for end, weights in WEIGHTS.items() if name.lower().endswith(end)), None)


def _key(name: str) -> str | None:
    """Return the bundled model that a name stands for: of several alike, that with its type of weights, or the original."""
    known = model_configs()
    if name in known:
        return name
    alike = [key for key in known if _plain(key) == _plain(name) and _stated(key) == _stated(name)]
    return min(alike) if alike else _by_plain_name().get(_plain(name)) or _only_longer(_plain(name), _by_plain_name())


@functools.cache
def _by_plain_name() -> dict[str, str]:
    """Return the bundled models by the names of their shapes; of several, the one that states no type of weights."""
    ordered = sorted(model_configs(), key=lambda key: (_stated(key) is not None, key), reverse=True)
    return {_plain(key): key for key in ordered}


def _only_longer(name: str, plain: Mapping[str, str]) -> str | None:
    """Return the only bundled model whose name adds its size to this one, as Nemotron-3-Nano-30B-A3B does to Nemotron-3-Nano."""
    longer = [key for shape, key in plain.items() if re.match(rf"{re.escape(name)}-\d+b\b", shape)]
    return longer[0] if len(longer) == 1 else None


def _like(name: str, known: Collection[str]) -> str:
    """Suggest bundled models with a similar name."""
    ends = {key.rpartition("/")[2].lower(): key for key in known}
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), ends, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join([ends[end] for end in close])}?" if close else ""


@functools.cache
def model_configs() -> dict[str, dict[str, Any]]:
    """Return the bundled parts of common models' config.json, by Hugging Face id."""
    configs: dict[str, dict[str, Any]] = json.loads(BUNDLED.read_text())
    return configs


def _plain(name: str) -> str:
    """Reduce a model's id to the name of its shape: without organisation and without changes to the weights."""
    plain = name.lower().rpartition("/")[2].removeprefix("meta-").removeprefix("nvidia-")
    while plain.endswith(VARIANTS):
        plain = plain.rpartition("-")[0]
    return plain
