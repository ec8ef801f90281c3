"""The command that says what a model is made of."""

import json
from typing import Annotated, Any

from cyclopts import Parameter

from dynabench.cli.groups import plain_errors
from dynabench.experiment.model_error import model_error
from dynabench.terminal import Terminal
from foundation.text import printable
from mocker import EngineConfig
from mocker.models.description import approximations, doubt, facts, summary
from mocker.timing.choose import resolve
from mocker.timing.config import KvCacheDtype, Quantization, TimingConfig
from serving.engines.mock.costs import step_costs_of
from serving.router import StepCosts

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
        gpu: Also print how many tokens of KV fit on this GPU, how far off simulated times are there, and what its steps
            cost, as flags of a router (`dynabench hardware` lists GPUs).
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
    room, too_large = _room(timing)
    error = known.text if (known := model_error(timing)) else None
    costs = _step_costs(timing, too_large)
    notes = list(filter(None, [doubt(name, shape), approximations(shape), too_large]))
    if json_output:
        more = {"room": room, "model_error": error, "step_costs": costs and costs.settings, "notes": notes}
        print(json.dumps(found | more, indent=2))
        return
    console = Terminal()
    console.item(f"{printable(name)}: {summary(shape, timing.kv_dtype)}")
    for label, text in _lines(found, room):
        console.entry(f"  {label}", text, width=16)
    if error:
        console.say(f"  {'model error':14} {error}", indent=" " * 17)
    if costs is not None:
        console.say("Costs of its steps, for a router that predicts times (marginal-all and others):")
        console.verbatim(f"  {costs.flags}")
    for note in notes:
        console.say(f"Note: {note}.")


def _step_costs(timing: TimingConfig, refusal: str) -> StepCosts | None:
    """Return what steps cost on a GPU; None without one, or if the model does not fit."""
    if timing.gpu is None:
        return None
    try:
        return step_costs_of(resolve(EngineConfig(), timing))
    except ValueError:
        assert refusal  # `_room` says why
        return None


def _room(timing: TimingConfig) -> tuple[dict[str, Any] | None, str]:
    """Return the room for KV on a GPU, if there is any, and what keeps an engine from starting there."""
    if timing.gpu is None:
        return None, ""
    try:
        engine = resolve(EngineConfig(), timing)
    except ValueError as error:
        return None, f"on {timing.gpu}: {error}"
    context = engine.config.max_model_len or engine.longest_sequence
    sequences = engine.num_usable_blocks / engine.num_blocks_of(context)
    layout = engine.layout
    sizes = [engine.config.block_size] if layout is None else sorted({group.block_size for group in layout.groups})
    room: dict[str, Any] = {
        "num_gpu_blocks": engine.num_blocks,
        "block_size": sizes[0],
        "kv_tokens": engine.num_usable_tokens,
        "sequences_of_full_context": round(sequences, 2),
    }
    if layout is not None:
        room |= {"block_sizes": sizes, "groups": layout.summary}
    if sequences >= 1:
        return room, ""
    most = engine.longest_sequence
    return (
        room,
        f"vLLM starts with this only if --max-model-len is auto, or at most {most:,}: its KV cache must hold one whole sequence",
    )


def _lines(found: dict[str, Any], room: dict[str, Any] | None) -> list[tuple[str, str]]:
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
        tokens, blocks = f"{room['kv_tokens']:,} tokens on each engine", f"{room['num_gpu_blocks']:,} blocks"
        whole = f"{room['sequences_of_full_context']:,} sequences of the full context"
        sizes = " or ".join([f"{size:,}" for size in room.get("block_sizes", [room["block_size"]])])
        lines.append(("room for KV", f"{tokens} ({whole}), in {blocks} of {sizes}"))
        if "groups" in room:
            lines.append(("KV groups", room["groups"]))
    return lines
