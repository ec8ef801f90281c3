"""Rules for the kind of each layer: what it attends to, or that it keeps a state."""

from collections.abc import Callable, Mapping

from mocker.models.keys import LAYERS, MOST_LAYERS, Keys, meaning, shown

FULL, SLIDING, CHUNKED, INDEXED = "full_attention", "sliding_attention", "chunked_attention", "indexed_attention"
LINEAR, CONV, HYBRID = "linear_attention", "conv", "hybrid"
SPARSE_BLOCKS = "minimax_m3_sparse"
COMPRESSED = {
    0: SLIDING,
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}
"""What DeepSeek V4 calls layers, by how many tokens they keep as one."""
EXPERTS, NETWORK, NOTHING = "moe", "mlp", "nothing"
NO_MIXER = (EXPERTS, NETWORK, NOTHING)
STATES = (LINEAR, CONV, HYBRID)
"""Kinds that keep a state; `hybrid` also has attention."""
WORDS = {
    word: word
    for word in (
        FULL,
        SLIDING,
        CHUNKED,
        INDEXED,
        LINEAR,
        CONV,
        HYBRID,
        SPARSE_BLOCKS,
        EXPERTS,
        NETWORK,
        *COMPRESSED.values(),
    )
} | {
    "attention": FULL,
    "full": FULL,
    "global": FULL,
    "local": SLIDING,
    "sliding_window": SLIDING,
    "mamba": LINEAR,
    "mamba2": LINEAR,
    "recurrent": LINEAR,
    "deepseek_sparse_attention": INDEXED,
    "qwen_sparse_attention": INDEXED,
}
"""The kinds, by every word that files have for them."""

Kinds = Callable[[Keys], list[str]]


def num_layers(k: Keys) -> int:
    """Count the layers."""
    return k.number(LAYERS, most=MOST_LAYERS)


def full(k: Keys) -> list[str]:
    """Every layer sees everything."""
    kinds = [FULL] * num_layers(k)
    if (_in_words(k) or kinds) != kinds:
        k.forget("layer_types", "sliding_window")
    return kinds


def all_of(kind: str) -> Kinds:
    """Return the rule that all layers are alike, whatever the file calls them."""

    def kinds(k: Keys) -> list[str]:
        k.ignore("layer_types")
        return [kind] * num_layers(k)

    return kinds


def listed(k: Keys) -> list[str]:
    """The list `layer_types`, or everything is full."""
    return _in_words(k) or [FULL] * num_layers(k)


def one_window(k: Keys) -> list[str]:
    """All layers have the same window, or none."""
    has_window = k.number("sliding_window", 0) > 0
    return _in_words(k) or [SLIDING if has_window else FULL] * num_layers(k)


def late_windows(k: Keys) -> list[str]:
    """Qwen's rule: layers from `max_window_layers` on have a window, if it is used."""
    first, is_used = k.number("max_window_layers", 0), k.flag("use_sliding_window")
    has_window = k.number("sliding_window", 0) > 0 and is_used
    return _in_words(k) or [SLIDING if has_window and layer >= first else FULL for layer in range(num_layers(k))]


def every(step: int, name: str | None = "sliding_window_pattern", *, others: str = SLIDING, last: str = FULL) -> Kinds:
    """Return the rule that the last of every few layers (a number that has a name) is of one kind, the others of another."""

    def kinds(k: Keys) -> list[str]:
        interval = step if name is None else k.number(name, step)
        return _in_words(k) or [last if (layer + 1) % interval == 0 else others for layer in range(num_layers(k))]

    return kinds


def first_of_every(step: int) -> Kinds:
    """Return the rule that the first of every few layers sees everything, the others a window."""

    def kinds(k: Keys) -> list[str]:
        k.ignore("sliding_window_pattern")
        return _in_words(k) or [SLIDING if layer % step else FULL for layer in range(num_layers(k))]

    return kinds


def places(name: str, inside: str, outside: str, *, first: int = 0) -> Kinds:
    """Return the rule that layers whose numbers are listed are of one kind, the others of another.

    Args:
        name: the key of the list; without it, all are alike.
        inside: the kind of those that are listed.
        outside: the kind of the others.
        first: the first layer's number.
    """

    def kinds(k: Keys) -> list[str]:
        chosen = k.places(name)
        found = _in_words(k)
        if found is not None or chosen is None:
            return found or [outside] * num_layers(k)
        return [inside if layer + first in chosen else outside for layer in range(num_layers(k))]

    return kinds


def flags(name: str, kinds_of: Mapping[int, str], default: int) -> Kinds:
    """Return the rule that a list has a number for each layer, which means a kind."""

    def kinds(k: Keys) -> list[str]:
        values = k.of_each_layer(name)
        found = _in_words(k)
        if found is not None or values is None:
            return found or [kinds_of[default]] * num_layers(k)
        return [meaning(name, value, kinds_of) for value in values]

    return kinds


def cohere_moe(k: Keys) -> list[str]:
    """The dense layers at the start have a pattern of their own."""
    step, dense_step = k.number("sliding_window_pattern", 4), k.number("prefix_dense_sliding_window_pattern", 1)
    count, dense = num_layers(k), k.number("first_k_dense_replace", 0)
    start = [SLIDING if (layer + 1) % dense_step else FULL for layer in range(dense)]
    return _in_words(k) or start + [SLIDING if (layer + 1) % step else FULL for layer in range(count - dense)]


def exaone(k: Keys) -> list[str]:
    """EXAONE's pattern: a number of layers, or letters (L: a window, G: everything); the last layer sees everything."""
    has_window, count = k.number("sliding_window", 0) > 0, num_layers(k)
    letters = _letters(k)
    if (found := _in_words(k)) is not None or not has_window:
        return found or [FULL] * count
    return [FULL if letters[layer % len(letters)] == "G" or layer == count - 1 else SLIDING for layer in range(count)]


def _letters(k: Keys) -> str:
    if k.is_text("sliding_window_pattern"):
        letters = k.text("sliding_window_pattern")
        if set(letters) - {"L", "G"}:
            raise ValueError(f"sliding_window_pattern is {shown(letters)}; expected letters of L and G")
        return letters
    return "L" * (k.number("sliding_window_pattern", 4, most=MOST_LAYERS) - 1) + "G"


def jamba(k: Keys) -> list[str]:
    """One layer of every few has attention."""
    period, offset = k.number("attn_layer_period", 8), k.number("attn_layer_offset", 0)
    return _in_words(k) or [FULL if layer % period == offset else LINEAR for layer in range(num_layers(k))]


def zamba(k: Keys) -> list[str]:
    """Layers with attention are listed, or come every few; the first comes early."""
    chosen, period = k.places("hybrid_layer_ids"), k.number("attn_layer_period", 6)
    offset, count = k.number("attn_layer_offset", 4, least=0), num_layers(k)
    if chosen is None:
        chosen = [2, *range(1, count)] if count < period else [2, *range(offset + 3, count, period)]
    return _in_words(k) or [HYBRID if layer in chosen else LINEAR for layer in range(count)]


def llama_4(k: Keys) -> list[str]:
    """Layers without rotary positions see everything, the others a chunk."""
    rotates = k.of_each_layer("no_rope_layers") or []
    step = k.number("no_rope_layer_interval", 0) or k.number("nope_layer_interval", 4)
    rotates = rotates or [min((layer + 1) % step, 1) for layer in range(num_layers(k))]
    return _in_words(k) or [meaning("no_rope_layers", rotated, {0: FULL, 1: CHUNKED}) for rotated in rotates]


def gpt_neo(k: Keys) -> list[str]:
    """A word for each layer, or words that are repeated so many times."""
    repeated, words = k.listed("attention_types") or [], k.listed("attention_layers")
    if words is None:
        words = []
        for part in repeated:
            match part:
                case [list(some), int(times)] if 0 <= times <= MOST_LAYERS:
                    words += some * times
                case _:
                    raise ValueError(f"attention_types has {shown(part)}; expected a list of words and a number")
        return [meaning("attention_types", word, {"global": FULL, "local": SLIDING}) for word in words]
    return [meaning("attention_layers", word, {"global": FULL, "local": SLIDING}) for word in words]


def recurrent_gemma(k: Keys) -> list[str]:
    """Words that are repeated over the layers."""
    words = k.listed("block_types") or ["recurrent", "recurrent", "attention"]
    kinds = [meaning("block_types", word, {"recurrent": LINEAR, "attention": SLIDING}) for word in words]
    return [kinds[layer % len(kinds)] for layer in range(num_layers(k))]


def deepseek_v4(k: Keys) -> list[str]:
    """A ratio of compression for each layer; the list may go on to layers that predict further tokens."""
    ratios, found = k.listed("compress_ratios"), _in_words(k)
    k.ignore("compress_rates")
    if ratios is None:
        if found is None:
            raise ValueError("it lacks compress_ratios")
        return found
    return [meaning("compress_ratios", ratio, COMPRESSED) for ratio in ratios[: num_layers(k)]]


def nemotron_h(k: Keys) -> list[str]:
    """A letter for each layer: M is Mamba, * attention, E experts, - a dense network."""
    letters, kinds = k.text("hybrid_override_pattern"), {"M": LINEAR, "*": FULL, "E": EXPERTS, "-": NETWORK}
    if (words := k.listed("layer_types")) is not None:
        return [_kind(word) for word in words]
    if not letters or set(letters) - set(kinds):
        raise ValueError(f"hybrid_override_pattern is {shown(letters)}; expected letters of M, *, E and -")
    return [kinds[letter] for letter in letters]


def renamed(words: Mapping[str, str], rule: Kinds) -> Kinds:
    """Return a rule with other kinds for some."""

    def kinds(k: Keys) -> list[str]:
        return [words.get(kind, kind) for kind in rule(k)]

    return kinds


def blocks(k: Keys) -> list[str]:
    """Layers that a search took parts from (`block_configs`): without attention, or without anything."""
    for_each = k.of_each_layer("block_configs")
    if for_each is None:
        raise ValueError("it lacks block_configs")
    return [_block(block) for block in for_each]


def _block(block: object) -> str:
    if not isinstance(block, dict) or not all(isinstance(block.get(part), dict) for part in ("attention", "ffn")):
        raise ValueError(f"block_configs has {shown(block)}; expected attention and ffn")
    for part in ("attention", "ffn"):
        if block[part].get("replace_with_linear"):
            raise ValueError(f"block_configs has {part} that is replaced by a linear layer, which is not known")
    if block["attention"].get("no_op"):
        return NOTHING if block["ffn"].get("no_op") else NETWORK
    return FULL


def _in_words(k: Keys) -> list[str] | None:
    """Return what the file calls the layers, if it does."""
    words = k.of_each_layer("layer_types")
    if words is None:
        return None
    k.ignore("sliding_window", "chunked_attention")
    return [_kind(word) for word in words]


def _kind(word: object) -> str:
    return meaning("layer_types", word, WORDS)
