"""The command that says what a model is made of."""

import json
from typing import Annotated, Any

from cyclopts import Parameter

from dynabench.cli.groups import plain_errors
from dynabench.terminal import Terminal
from foundation.text import printable
from mocker import EngineConfig
from mocker.models.description import approximations, doubt, facts, summary
from mocker.timing.choose import SimulatedEngine, resolve
from mocker.timing.config import KvCacheDtype, Quantization, TimingConfig

GIB = 2**30


def model(
    name: str,
    /,
    *,
    gpu: str | None = None,
    tensor_parallel_size: int = 1,
    quantization: Quantization | None = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    read_model_as: str | None = None,
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Print what a model is made of: parameters, layers, weights, KV, and the room that a GPU has for it.

    Args:
        name: A bundled model's Hugging Face id, or a folder or file with a config.json.
        gpu: Also print how many tokens of KV fit on this GPU (`dynabench hardware` lists them).
        tensor_parallel_size: GPUs that share each layer.
        quantization: Type of the weights (default: the model's).
        kv_cache_dtype: Type of the KV cache (auto: what the model asks for, else bfloat16).
        read_model_as: Read the config.json as this architecture's, and ignore sizes that it does not have.
        json_output: Print JSON.
    """
    with plain_errors():
        timing = TimingConfig(
            model=name,
            gpu=gpu,
            tensor_parallel_size=tensor_parallel_size,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            read_model_as=read_model_as,
        )
        shape = timing.shape
        found = facts(shape, timing.kv_dtype)
        room = None if gpu is None else _room(resolve(EngineConfig(), timing))
    notes = list(filter(None, [doubt(name, shape), approximations(shape)]))
    if json_output:
        print(json.dumps(found | {"room": room, "notes": notes}, indent=2))
        return
    console = Terminal()
    console.say(f"{printable(name)}: {summary(shape, timing.kv_dtype)}")
    for label, text in _lines(found, room):
        console.say(f"  {label:14} {text}")
    for note in notes:
        console.say(f"Note: {note}.")


def _room(engine: SimulatedEngine) -> dict[str, int]:
    return {
        "num_gpu_blocks": engine.num_blocks,
        "block_size": engine.config.block_size,
        "kv_tokens": engine.num_usable_tokens,
    }


def _lines(found: dict[str, Any], room: dict[str, int] | None) -> list[tuple[str, str]]:
    layers = ", ".join(f"{count} {kind}" for kind, count in found["layers"].items())
    lines = [
        ("architecture", found["architecture"]),
        ("layers", layers),
        ("weights", f"{found['weight_bytes'] / GIB:,.1f} GiB, mostly {found['weights']}"),
        ("KV", f"{found['kv_bytes_per_token']:,} bytes a token"),
    ]
    if found["window"]:
        lines.append(("window", f"{found['window']:,} tokens"))
    if found["state_bytes"]:
        lines.append(("state", f"{found['state_bytes'] / 2**20:,.1f} MiB a sequence"))
    context = found["context_length"]
    lines.append(("context", f"{context:,} tokens" if context else "unknown: the file does not say"))
    if room is not None:
        lines.append(
            (
                "room for KV",
                f"{room['kv_tokens']:,} tokens on each engine, in {room['num_gpu_blocks']:,} blocks of {room['block_size']}",
            )
        )
    return lines
