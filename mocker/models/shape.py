"""The properties of a model that determine its times and memory: its layers, from its config.json."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mocker.models.architecture import Architecture
from mocker.models.architectures import ARCHITECTURES
from mocker.models.class_defaults import class_defaults
from mocker.models.context import context_length
from mocker.models.identity import architecture_of, instead_of, text_of
from mocker.models.keys import Keys, shown
from mocker.models.kinds import CONV, FULL, HYBRID, LINEAR, NO_MIXER, STATES, num_layers
from mocker.models.layers import BFLOAT16, FeedForward, Layer, Matrix, Mixer, WeightType
from mocker.models.quantisation import Quantisation, quantisation_of
from mocker.models.weight_types import PLAIN

WHOLE_ITEMS = frozenset(["bagel", "gemma3", "molmo2", "moondream3", "paligemma"])
"""Models in which all tokens of an image attend to each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer in numbers."""

    hidden_size: int
    vocab_size: int
    layers: tuple[tuple[Layer, int], ...]
    """Layers that are alike, and how many there are."""
    kinds: tuple[tuple[str, int], ...]
    """How many layers there are of each kind."""
    is_tied: bool
    """Whether the embeddings are also the head."""
    num_other_parameters: int
    """Outside the layers, embeddings and head; in 16 bits."""
    context_length: int | None
    """Most tokens of a sequence, or None if the file does not say."""
    kv_dtype: str
    """The type in which the checkpoint wants its KV kept."""
    weight_block: int
    """Side of the blocks of weights that share a scale; 0: none."""
    architecture: str
    num_nextn_layers: int = 0
    """Layers that predict further tokens, as far as the file says."""
    sees_whole_items: bool = False
    """Whether all tokens of an image attend to each other, so that they are computed at once."""

    @property
    def num_layers(self) -> int:
        """Count the layers; a mixer and a feed-forward network that are layers of their own count as two."""
        return sum([count for _, count in self.kinds])

    @property
    def mixers(self) -> Iterator[tuple[Mixer, int]]:
        """Yield the kinds of mixers, and how many layers have each."""
        for layer, count in self.layers:
            for mixer in layer.mixers:
                yield mixer, count

    @property
    def feed_forwards(self) -> Iterator[tuple[FeedForward, int]]:
        """Yield the kinds of feed-forward networks, and how many layers have each."""
        for layer, count in self.layers:
            if layer.feed_forward is not None:
                yield layer.feed_forward, count

    @property
    def num_experts(self) -> int:
        """Count the routed experts of a layer that has them."""
        return max([network.num_experts for network, _ in self.feed_forwards], default=0)

    @property
    def embedding_parameters(self) -> int:
        """Count those of the embeddings and the head, which are kept in 16 bits."""
        return self.hidden_size * self.vocab_size * (1 if self.is_tied else 2)

    @property
    def num_parameters(self) -> int:
        """Count all."""
        count = self.num_expert_parameters + self.embedding_parameters + self.num_other_parameters
        for mixer, number in self.mixers:
            count += number * (sum([matrix.num_parameters for matrix in mixer.matrices]) + mixer.num_other_parameters)
        for network, number in self.feed_forwards:
            count += number * (sum([m.num_parameters for m in network.matrices]) + network.num_other_parameters)
        return count

    @property
    def num_expert_parameters(self) -> int:
        """Count those of routed experts."""
        return sum([network.num_experts * network.expert_parameters * count for network, count in self.feed_forwards])

    @property
    def num_active_parameters(self) -> int:
        """Count those that a token uses: of the routed experts, only the chosen ones."""
        chosen = sum([f.experts_per_token * f.expert_parameters * count for f, count in self.feed_forwards])
        return self.num_parameters - self.num_expert_parameters + chosen

    def num_adapter_parameters(self, rank: int) -> int:
        """Count those of a LoRA adapter of a rank on all linear layers, without routed experts.

        A matrix of d_in inputs and d_out outputs gets two more, of rank * d_in and rank * d_out weights.
        """
        mixers = [(matrix, count) for mixer, count in self.mixers for matrix in mixer.matrices]
        networks = [(matrix, count) for network, count in self.feed_forwards for matrix in network.matrices]
        sides = sum([n * sum([m.inputs.size + side.size for side in m.outputs]) for m, n in (*mixers, *networks)])
        return rank * sides

    @property
    def weights(self) -> str:
        """The type in which most weights of the layers are stored."""
        counts: Counter[str] = Counter()
        for matrix, number in self.matrices:
            counts[matrix.weight.name] += number * matrix.num_parameters
        return counts.most_common(1)[0][0]

    @property
    def weight_bytes_by_type(self) -> Counter[str]:
        """The bytes of all weights, by type."""
        matrices = sum([number * matrix.num_parameters for matrix, number in self.matrices])
        sizes = Counter({"bfloat16": 2 * (self.num_parameters - matrices)})
        for matrix, number in self.matrices:
            sizes[matrix.weight.name] += round(number * matrix.num_parameters * matrix.weight.bytes)
        return sizes

    @property
    def num_weight_bytes(self) -> int:
        """The bytes of all weights."""
        return self.weight_bytes_by_type.total()

    @property
    def matrices(self) -> Iterator[tuple[Matrix, int]]:
        """Yield the matrices of all layers, and how many times each exists."""
        for mixer, count in self.mixers:
            for matrix in mixer.matrices:
                yield matrix, count
        for network, count in self.feed_forwards:
            for matrix in network.matrices:
                yield matrix, count
            for matrix in network.expert_matrices:
                yield matrix, count * network.num_experts

    def quantised(self, weights: str) -> "ModelShape":
        """Return the model with all matrices of its layers in one type, unless most of them are in that type."""
        if weights == self.weights:
            return self
        return replace(
            self,
            layers=tuple([(_with_weights(layer, lambda _: PLAIN[weights]), count) for layer, count in self.layers]),
            weight_block=0,
        )


def shape_of(
    config: Mapping[str, Any], beside: Mapping[str, Any] | None = None, *, read_as: str | None = None
) -> ModelShape:
    """Read a Hugging Face config.json, and the hf_quant_config.json beside it.

    Args:
        config: the file's values.
        beside: the other file's values.
        read_as: the architecture, where the file's is not known; keys that it does not have are then ignored.

    Raises:
        ValueError: the architecture is not known, or a number is missing, or a size is given that is not understood.
    """
    text = text_of(config)
    name = read_as or architecture_of(config, text)
    if name not in ARCHITECTURES:
        raise ValueError(f"--read-model-as {name} is not known; {instead_of(name)}")
    architecture, quantisation = ARCHITECTURES[name], quantisation_of(config, beside)
    defaults = {**({} if text is config else class_defaults(name)), **architecture.defaults}
    keys = Keys({key: value for key, value in text.items() if not architecture.ignores(key, value)}, defaults)
    kinds = _kinds(keys, architecture)
    layers = [_layer(keys.at(place), kind, architecture, quantisation) for place, kind in enumerate(kinds)]
    _read_unused(keys, kinds, architecture)
    found = ModelShape(
        hidden_size=keys.number("hidden_size"),
        vocab_size=keys.number("vocab_size"),
        layers=tuple(Counter(layers).items()),
        kinds=tuple(Counter(kinds).items()),
        is_tied=_is_tied(config, text, architecture),
        num_other_parameters=architecture.other_parameters(keys),
        context_length=context_length(keys, {**defaults, **text}),
        kv_dtype=quantisation.kv_dtype,
        weight_block=quantisation.block,
        architecture=name,
        num_nextn_layers=keys.number("num_nextn_predict_layers", 0),
        sees_whole_items=_sees_whole_items(config, text, name),
    )
    if quantisation.rules and all(matrix.weight == BFLOAT16 for matrix, _ in found.matrices):
        raise ValueError("its quantization_config names no module of the model; remove it, and set --quantization")
    if read_as is None:
        _refuse_unread(keys, name)
    return found


def _kinds(keys: Keys, architecture: Architecture) -> list[str]:
    """Return the kind of each layer.

    Raises:
        ValueError: there are more or fewer than layers.
    """
    kinds = architecture.kinds(keys)
    if "num_hidden_layers" not in architecture.ignored and len(kinds) != num_layers(keys):
        raise ValueError(f"it has {num_layers(keys)} layers, but the kinds of {len(kinds)}")
    return kinds


def _refuse_unread(keys: Keys, name: str) -> None:
    """Raise ValueError if there is a key that may change sizes, and was not read."""
    for key in keys.unread_sizes()[:1]:
        raise ValueError(
            f"{key} is {keys.shown(key)}, which models of the architecture {name} are not known to have, and it "
            f"may change sizes; --read-model-as {name} ignores it"
        )


def _sees_whole_items(config: Mapping[str, Any], text: Mapping[str, Any], name: str) -> bool:
    """Return whether vLLM lets the tokens of an item attend to each other (`is_mm_prefix_lm`, 0.33)."""
    given = config.get("is_mm_prefix_lm")
    if given is not None:
        return bool(given)
    return (
        not WHOLE_ITEMS.isdisjoint((str(config.get("model_type")), name))
        or text.get("use_bidirectional_attention") == "vision"
    )


def _is_tied(config: Mapping[str, Any], text: Mapping[str, Any], architecture: Architecture) -> bool:
    names = ("tie_word_embeddings", "tie_embedding")
    for name, value in [(name, part.get(name)) for part in (config, text) for name in names]:
        if value is not None and value not in (True, False):
            raise ValueError(f"{name} is {shown(value)}; expected true or false")
        if value is not None:
            return bool(value)
    return architecture.is_tied


def _layer(k: Keys, kind: str, architecture: Architecture, quantisation: Quantisation) -> Layer:
    mixers: list[Mixer] = []
    if kind in STATES:
        if architecture.state is None:
            raise ValueError(f"layer_types has {kind}, which models of this architecture do not have")
        mixers.append(architecture.state(k, kind))
    if kind == HYBRID or (kind not in STATES and kind not in NO_MIXER):
        mixers += [architecture.attention(k, kind)] * architecture.num_attentions
    layer = Layer(tuple(mixers), architecture.feed_forward(k, kind))
    return _with_weights(layer, functools.partial(_stored, quantisation, architecture.names, k.layer))


def _read_unused(keys: Keys, kinds: Sequence[str], architecture: Architecture) -> None:
    """Read the keys of the kinds of layers that a model happens not to have; their sizes do not matter."""
    k = keys.at(0)
    with contextlib.suppress(ValueError):
        if architecture.state is not None and not set(kinds) & set(STATES):
            architecture.state(k, LINEAR)
    with contextlib.suppress(ValueError):
        if not set(kinds) - {*NO_MIXER, LINEAR, CONV}:
            architecture.attention(k, FULL)


def _stored(quantisation: Quantisation, names: Mapping[str, str], place: int, matrix: Matrix) -> WeightType:
    """Return how a matrix is stored, by the names that checkpoints have for it."""
    return quantisation.weight_of([f"layers.{place}.{_renamed(module, names)}" for module in matrix.modules])


def _renamed(module: str, names: Mapping[str, str]) -> str:
    for name, other in names.items():
        module = f".{module}.".replace(f".{name}.", f".{other}.").strip(".")
    return module


def _with_weights(layer: Layer, weight_of: Callable[[Matrix], WeightType]) -> Layer:
    """Return a layer whose matrices are stored as is said of each."""

    def changed(matrices: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
        return tuple([replace(matrix, weight=weight_of(matrix)) for matrix in matrices])

    network = layer.feed_forward
    if network is not None:
        network = replace(network, matrices=changed(network.matrices), expert_matrices=changed(network.expert_matrices))
    return Layer(tuple([replace(mixer, matrices=changed(mixer.matrices)) for mixer in layer.mixers]), network)
