"""Settings of `dynabench plan`: what it searches for, and how far."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dynabench.experiment.settings import ATTAINMENT, Attainment, Backend
from foundation.settings import Count, check_settings

WHERE = ("backend", "cluster")
"""The settings that change nothing about a point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What to search for."""

    price: tuple[str, ...] = ()
    """Price of a kind of GPU, such as h100=2.5 (in any unit, such as dollars per hour); may be repeated, to choose the cheapest of several. --gpu must be one of them."""

    tensor_parallel_size: tuple[Count, ...] = (1, 2, 4, 8)
    """GPUs that share each layer of the model; may be repeated, to choose from several sizes."""

    max_num_batched_tokens: tuple[Count, ...] = (512, 1024, 2048, 4096, 8192)
    """Most tokens that a step computes (the chunk size); may be repeated, to choose from several."""

    max_gpus: Count = 64
    """Most GPUs that a layout may use."""

    loads: str = "1,1.25,1.5,2"
    """Multiples of the workload's rate or, in a closed loop, of what is in flight; the plan is for the first, and the others
    show what more load needs."""

    attainment: Attainment = ATTAINMENT
    """Share of the requests that must be within the per-request limits."""

    backend: Backend = "local"
    """Where to simulate: the cores of this machine, or a Ray or Dask cluster (pip install ray, or distributed)."""

    cluster: str | None = None
    """Address of the cluster (default: one is started on this machine)."""

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        check_settings(self)
        _ = self.prices, self.multiples

    @property
    def prices(self) -> dict[str, float]:
        """The price of each kind of GPU that was named."""
        return dict(_price(text) for text in self.price)

    @property
    def multiples(self) -> tuple[float, ...]:
        """The multiples of the workload's rate."""
        try:
            found = tuple(float(part) for part in self.loads.split(","))
        except ValueError:
            found = ()
        if not found or not all(0 < part <= 1000 for part in found):
            raise ValueError(f"loads is {self.loads!r}; expected multiples of the rate such as 1,1.25,1.5,2")
        return found

    @property
    def identity(self) -> dict[str, Any]:
        """What points of a plan depend on besides their own settings; the search's extent and prices do not matter."""
        given = {name: value for name, value in asdict(self).items() if name not in WHERE}
        return given | {"price": sorted(self.prices), "max_gpus": None, "loads": None}

    @property
    def free(self) -> dict[str, Sequence[Any]]:
        """The settings to choose from, by their names."""
        found: dict[str, Sequence[Any]] = {"gpu": tuple(self.prices)} if self.price else {}
        return found | {name: getattr(self, name) for name in ("tensor_parallel_size", "max_num_batched_tokens")}


def _price(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        price = float(value)
    except ValueError:
        price = 0.0
    if not name or not 0 < price < 1e9:
        raise ValueError(f"price {text!r} is not understood; expected a GPU and its price, such as h100=2.5")
    return name.strip(), price
