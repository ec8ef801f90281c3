"""What `dynabench plan` looks for, and how far."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from foundation.settings import Count, check


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What is looked for."""

    price: tuple[str, ...] = ()
    """Price of a kind of GPU, such as h100=2.5 (an hour, say); given for several, the cheapest is looked for among them."""

    max_gpus: Count = 64
    """Most GPUs that a layout may use."""

    loads: str = "1,1.25,1.5,2"
    """Multiples of the workload's rate to plan for; the first is the one to plan for, the others show what more would take."""

    attainment: Annotated[float, Meta(gt=0, le=1)] = 0.99
    """Share of the requests that must be within the limits of each request."""

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        check(self)
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


def _price(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        price = float(value)
    except ValueError:
        price = 0.0
    if not name or not 0 < price < 1e9:
        raise ValueError(f"price {text!r} is not understood; expected a GPU and its price, such as h100=2.5")
    return name.strip(), price
