"""Read the kind of each layer: what it attends to."""

from collections.abc import Callable

from mocker.models.keys import Keys

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
FULL, SLIDING, CHUNKED, LINEAR, INDEXED = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
    "indexed_attention",
)


def num_layers(k: Keys) -> int:
    """Count the layers."""
    return k.number(*LAYERS)


def all_full(k: Keys) -> list[str]:
    """Every layer sees everything."""
    return [FULL] * num_layers(k)


def all_indexed(k: Keys) -> list[str]:
    """Every layer sees what an index picks."""
    k.get("layer_types")
    return [INDEXED] * num_layers(k)


def layer_types(k: Keys) -> list[str]:
    """The list `layer_types`, or everything is full."""
    return _listed(k) or all_full(k)


def _listed(k: Keys) -> list[str] | None:
    return k.sequence("layer_types")


def one_window(k: Keys) -> list[str]:
    """All layers have the same window, or none."""
    return _listed(k) or [SLIDING if k.number("sliding_window", default=0) else FULL] * num_layers(k)


def late_windows(k: Keys) -> list[str]:
    """Qwen's rule: layers from `max_window_layers` on have a window, if it is used."""
    count, first = num_layers(k), k.number("max_window_layers", default=0)
    window, is_used = k.number("sliding_window", default=0), k.get("use_sliding_window")
    return _listed(k) or [SLIDING if window and is_used and layer >= first else FULL for layer in range(count)]


def every(step: int) -> Callable[[Keys], list[str]]:
    """Return the rule that the last of every few layers sees everything, the others a window."""

    def kinds(k: Keys) -> list[str]:
        interval = k.number("sliding_window_pattern", "_sliding_window_pattern", default=step)
        return _listed(k) or [FULL if (layer + 1) % interval == 0 else SLIDING for layer in range(num_layers(k))]

    return kinds


def exaone(k: Keys) -> list[str]:
    """EXAONE's pattern: a number of layers, or letters (L: a window, G: everything); the last layer sees everything."""
    pattern, count = k.get("sliding_window_pattern"), num_layers(k)
    if (listed := _listed(k)) is not None:
        return listed
    if not k.number("sliding_window", default=0) or not pattern:
        return all_full(k)
    letters = pattern if isinstance(pattern, str) else "L" * (int(pattern) - 1) + "G"
    return [FULL if letters[layer % len(letters)] == "G" or layer == count - 1 else SLIDING for layer in range(count)]


def llama_4(k: Keys) -> list[str]:
    """Layers without rotary positions see everything, the others a chunk."""
    rotated = k.sequence("no_rope_layers") or []
    step = k.number("no_rope_layer_interval", default=4)
    flags = rotated or [(layer + 1) % step != 0 for layer in range(num_layers(k))]
    return _listed(k) or [CHUNKED if flag else FULL for flag in flags]


def mimo(k: Keys) -> list[str]:
    """A list of flags: 1 for a window."""
    k.get("attention_chunk_size")
    flags = k.sequence("hybrid_layer_pattern")
    return [SLIDING if flag else FULL for flag in flags] if flags is not None else all_full(k)


def deepseek_v4(k: Keys) -> list[str]:
    """A list of compression ratios, which may go on to layers that predict further tokens."""
    names = {0: SLIDING, 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    ratios = k.sequence("compress_ratios")
    if ratios is None:
        if (listed := _listed(k)) is None:
            raise ValueError("it lacks compress_ratios")
        return listed
    unknown = sorted({ratio for ratio in ratios if ratio not in names})
    if unknown:
        raise ValueError(f"compress_ratios has {unknown[0]}; expected 0, 4 or 128")
    return [names[ratio] for ratio in ratios[: num_layers(k)]]


def qwen_linear(k: Keys) -> list[str]:
    """Every few layers see everything; the others keep a state."""
    interval = k.number("full_attention_interval", default=4)
    return _listed(k) or [FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(num_layers(k))]


def nemotron_h(k: Keys) -> list[str]:
    """A word for each layer (or a letter: M is Mamba, * attention, E experts, - a dense network)."""
    names = {
        "mamba": LINEAR,
        "attention": FULL,
        "moe": "moe",
        "mlp": "mlp",
        "M": LINEAR,
        "*": FULL,
        "E": "moe",
        "-": "mlp",
    }
    pattern = k.get("layers_block_type") or k.get("hybrid_override_pattern")
    if not pattern:
        raise ValueError("it lacks hybrid_override_pattern")
    return [names[letter] for letter in pattern]
