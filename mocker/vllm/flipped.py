"""Settings with one rule of their version turned round, to find out what that rule does."""

from dataclasses import dataclass, fields

from mocker.vllm.config import EngineConfig
from mocker.vllm.versions import NEWEST, RULES, Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class FlippedConfig(EngineConfig):
    """Settings of an engine in which one rule is the other way."""

    flipped: str = ""
    """The name of the rule."""

    @property
    def rules(self) -> Rules:
        """The rules of its version, but for this one."""
        rules = RULES[self.engine_version or NEWEST]
        return rules._replace(**{self.flipped: not getattr(rules, self.flipped)}) if self.flipped else rules


def with_rule_flipped(config: EngineConfig, rule: str) -> FlippedConfig:
    """Return settings with one rule the other way.

    Raises:
        ValueError: they make no sense together with it.
    """
    values = {field.name: getattr(config, field.name) for field in fields(EngineConfig)}
    return FlippedConfig(**values, flipped=rule)
