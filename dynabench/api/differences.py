"""How one arm differs from another, for `Result.compare`."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from foundation.errors import UserError
from reports.figures.metrics import LABELS
from reports.summary import PAIRED, SHARES, Difference, Verdict

NAMES = {"ttft": "ttft_sched", "tpot": "tpot", "e2e": "e2e_sched"}
"""What users call the metrics that are paired by request: those from the schedule are the headlines."""
assert set(NAMES.values()) == set(PAIRED)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A difference of two arms, with its 95% interval."""

    value: float
    """This arm minus the other (s): below zero, this one is faster."""
    interval: tuple[float, float]
    """The 95% confidence interval (s), paired by request."""
    relative: float
    """The difference as a share of the other arm's figure."""
    verdict: Verdict
    """Whether it is `better` or `worse` by more than noise, `equal` in practice, `inconclusive`, or not known: `unstable`."""
    base: float
    """The other arm's figure (s)."""
    pairs: int
    """Requests that both arms answered."""
    detectable: float
    """The smallest difference, as a share, that such a sample finds with a 90% chance."""

    @classmethod
    def of(cls, pair: Difference) -> "Estimate":
        """Return what is known of a difference."""
        return cls(
            pair.mean, (pair.low, pair.high), pair.relative, pair.verdict, pair.base, pair.count, pair.detectable
        )

    def __repr__(self) -> str:
        low, high = self.interval
        return (
            f"{self.value * 1e3:+,.3g} ms ({self.relative:+.1%}) [{low * 1e3:+,.3g}, {high * 1e3:+,.3g}] {self.verdict}"
        )


@dataclass(frozen=True, slots=True)
class MetricDifference:
    """How arms differ in one metric, by statistic; None where too few requests are paired."""

    mean: Estimate | None
    p50: Estimate | None
    p90: Estimate | None
    p99: Estimate | None


@dataclass(frozen=True, slots=True)
class ArmDifference:
    """How one arm differs from another: `.ttft`, `.tpot` and `.e2e`, each with `.mean`, `.p50`, `.p90` and `.p99`."""

    arm: str
    to: str
    ttft: MetricDifference
    """Time to first token, from the intended arrival."""
    tpot: MetricDifference
    """Time per output token."""
    e2e: MetricDifference
    """Time to the whole answer, from the intended arrival."""

    @classmethod
    def of(cls, arm: str, to: str, found: Mapping[str, Mapping[str, Difference | None]]) -> "ArmDifference":
        """Return the differences by metric and statistic."""

        def metric(name: str) -> MetricDifference:
            pairs = found[NAMES[name]]
            return MetricDifference(*(Estimate.of(pair) if (pair := pairs[each]) else None for each in SHARES))

        return cls(arm, to, metric("ttft"), metric("tpot"), metric("e2e"))

    def _rows(self) -> list[tuple[str, list[str]]]:
        metrics = {LABELS[full]: getattr(self, name) for name, full in NAMES.items()}
        return [
            (label, ["n/a" if (one := getattr(metric, each)) is None else repr(one) for each in SHARES])
            for label, metric in metrics.items()
        ]

    def __repr__(self) -> str:
        lines = [f"{self.arm} against {self.to}, paired by request, with 95% intervals:"]
        for label, cells in self._rows():
            lines += [f"  {label} {each}: {cell}" for each, cell in zip(SHARES, cells, strict=True)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{each}</th>" for each in SHARES)
        rows = "".join(
            f"<tr><th>{label}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
            for label, cells in self._rows()
        )
        caption = f"{escape(self.arm)} against {escape(self.to)}, paired by request, with 95% intervals"
        return (
            f"<table><caption>{caption}</caption><thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        )


def check_arm(arm: str, arms: Mapping[str, object]) -> None:
    """Refuse the name of an arm that does not exist.

    Raises:
        UserError: it does not.
    """
    if not isinstance(arm, str) or arm not in arms:
        raise UserError(f"there is no arm {arm!r}; expected one of {', '.join(arms)}")
