"""What the charts of a comparison show."""

from dataclasses import dataclass

from reports.figures.conditions import METRICS, Condition
from reports.key import Key, KeyEntry
from reports.record.records import Record
from reports.summary import ArmSummary, Summary

Runs = dict[str, Record]


@dataclass(frozen=True)
class Comparison:
    """What is drawn."""

    runs: Runs
    summary: Summary
    key: Key

    @property
    def limits(self) -> list[Condition]:
        """The limits of the experiment."""
        return self.summary.conditions

    def limits_of(self, metric: str) -> list[Condition]:
        """Return the limits on a metric, by its name in the summary."""
        return [limit for limit in self.limits if METRICS[limit.metric] == metric]

    @property
    def arms(self) -> list[tuple[KeyEntry, Record, ArmSummary]]:
        """How each arm is shown, its run, and its figures."""
        return [(self.key[arm], run, self.summary.arms[arm]) for arm, run in self.runs.items()]
