"""An installed scheduler is held against ours in random scenarios, and what comes of it is written down."""

from dataclasses import dataclass, field

from dynabench.fidelity.audit.compare import Difference
from dynabench.fidelity.audit.run import Audit, audit, rules_for
from dynabench.fidelity.audit.scenarios import scenario, sglang_scenario
from dynabench.installed.compared import Comparison
from dynabench.installed.process import SchedulerProcess

UNKNOWN = "unknown"
"""In place of a rule, if none explains a difference alone."""


@dataclass(slots=True)
class Verification:
    """What came of random scenarios."""

    release: str
    rules: str
    num_scenarios: int
    num_steps: int = 0
    differing: dict[int, Difference] = field(default_factory=dict)
    """The first difference, by the seed of a scenario."""
    reasons: dict[str, list[int]] = field(default_factory=dict)
    """The seeds of the scenarios that differ, by the rule that explains the difference."""

    @property
    def comparison(self) -> Comparison:
        """What is written down of it."""
        num_identical = self.num_scenarios - len(self.differing)
        return Comparison(self.release, self.rules, self.num_scenarios, num_identical, sorted(self.reasons))

    def add(self, seed: int, found: Audit) -> None:
        """Take in what the audit of a scenario found."""
        self.num_steps += found.right.num_steps
        if found.difference is not None:
            rule = next((one.rule for one in found.explanations if one.difference is None), UNKNOWN)
            self.differing[seed] = found.difference
            self.reasons.setdefault(rule, []).append(seed)


def verify_installed(process: SchedulerProcess, num_scenarios: int) -> Verification:
    """Hold an installed scheduler against ours in so many random scenarios.

    Raises:
        UserError: the scheduler fails in one of them.
    """
    release = process.release
    rules = rules_for(release) if release.engine == "vllm" else release.version
    found = Verification(release.version, rules, num_scenarios)
    for seed in range(num_scenarios):
        made = scenario(seed, rules_for(release)) if release.engine == "vllm" else sglang_scenario(seed)
        found.add(seed, audit(*made, process, seed=seed))
    return found
