"""Read the feed-forward network of a layer: dense, or a mixture of experts."""

from collections.abc import Callable

from mocker.models.keys import Keys
from mocker.models.layers import FeedForward, Matrix, Side, column, row
from mocker.models.mixers import HIDDEN

SIZE = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "feed_forward_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_k",
    "moe_top_k",
)
EXPERT_SIZE = (
    "moe_intermediate_size",
    "expert_ffn_hidden_size",
    "moe_ffn_hidden_size",
    "intermediate_size",
    "ffn_hidden_size",
)


def gated(k: Keys, layer: int) -> FeedForward:
    """Two matrices in, one of them through an activation, and one out."""
    return dense(k, k.number(*SIZE))


def plain(k: Keys, layer: int) -> FeedForward:
    """One matrix in and one out."""
    return dense(k, k.number(*SIZE, default=4 * k.number(*HIDDEN)), is_gated=False)


def dense(k: Keys, size: int, *, is_gated: bool = True, name: str = "mlp") -> FeedForward:
    """Build a dense network of a size."""
    return FeedForward(size=size, matrices=_matrices(k.number(*HIDDEN), size, name, is_gated=is_gated))


def _matrices(hidden: int, size: int, name: str, *, is_gated: bool = True) -> tuple[Matrix, ...]:
    inner = (f"{name}.gate_proj", f"{name}.up_proj", f"{name}.gate_up_proj") if is_gated else (f"{name}.up_proj",)
    side = Side(size, size)
    return (
        column(inner, hidden, *([side] * (2 if is_gated else 1))),
        row(f"{name}.down_proj", side, hidden),
    )


def everywhere(k: Keys, layer: int) -> bool:
    """Every layer is a mixture."""
    return True


def nothing_shared(k: Keys, expert_size: int) -> int:
    """All experts are routed."""
    return 0


def after_dense(k: Keys, layer: int) -> bool:
    """DeepSeek's rule: the first layers are dense, then every layer (or every few) is a mixture."""
    types = k.sequence("mlp_layer_types")
    freq = k.get("moe_layer_freq")
    first = k.number("first_k_dense_replace", default=0)
    if types is not None:
        return bool(types[layer] == "sparse")
    if isinstance(freq, list):
        return bool(freq[layer])
    return layer >= first and layer % int(freq or 1) == 0


def every_few(k: Keys, layer: int) -> bool:
    """Qwen's rule: every `decoder_sparse_step`th layer is a mixture, but those that are listed."""
    only = k.sequence("mlp_only_layers") or []
    return layer not in only and (layer + 1) % k.number("decoder_sparse_step", default=1) == 0


def shared_by_count(*names: str) -> Callable[[Keys, int], int]:
    """Return the rule that so many experts are shared by all tokens, each as large as the others."""

    def size(k: Keys, expert_size: int) -> int:
        return k.number(*names, default=0) * expert_size

    return size


def shared_by_size(k: Keys, expert_size: int) -> int:
    """Qwen's rule: the size of what all tokens share is given."""
    return k.number("shared_expert_intermediate_size", default=0)


def mixture(
    *,
    is_sparse: Callable[[Keys, int], bool] = everywhere,
    shared: Callable[[Keys, int], int] = nothing_shared,
    is_gated: bool = True,
    has_shared_gate: bool = False,
    name: str = "mlp",
    experts: str = "experts",
    shared_name: str = "shared_experts",
) -> Callable[[Keys, int], FeedForward]:
    """Return a reader of mixtures of experts: which layers have one, and the size of what all tokens share."""

    def read(k: Keys, layer: int) -> FeedForward:
        if not is_sparse(k, layer):
            return dense(k, k.number(*SIZE), is_gated=is_gated, name=name)
        size = k.number(*EXPERT_SIZE)
        return experts_beside(
            k,
            size,
            shared(k, size),
            is_gated=is_gated,
            has_gate=has_shared_gate,
            name=name,
            experts=experts,
            shared_name=shared_name,
        )

    return read


def experts_beside(
    k: Keys,
    size: int,
    shared: int,
    *,
    is_gated: bool = True,
    has_gate: bool = False,
    name: str = "mlp",
    experts: str = "experts",
    shared_name: str = "shared_experts",
    latent: int = 0,
) -> FeedForward:
    """Build a mixture from its sizes; `latent` is what tokens are compressed to before they reach experts (0: nothing).

    Raises:
        ValueError: it is not said how many experts a token uses.
    """
    hidden, count = k.number(*HIDDEN), k.number(*EXPERTS)
    chosen = k.number(*CHOSEN, default=0)
    if not 0 < chosen <= count:
        raise ValueError(f"it has {count} experts, and {CHOSEN[0]} is {chosen or 'missing'}; expected 1 to {count}")
    beside = _matrices(hidden, shared, f"{name}.{shared_name}", is_gated=is_gated) if shared else ()
    if latent:
        beside += (
            column((f"{name}.fc1_latent_proj",), hidden, Side(latent)),
            column((f"{name}.fc2_latent_proj",), latent, Side(hidden)),
        )
    return FeedForward(
        size=shared,
        matrices=beside,
        num_experts=count,
        experts_per_token=chosen,
        expert_size=size,
        expert_matrices=_matrices(latent or hidden, size, f"{name}.{experts}.0", is_gated=is_gated),
        num_other_parameters=hidden * (count + (1 if has_gate and shared else 0)),
    )
