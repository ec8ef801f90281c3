"""Whose scheduler decides in a simulated engine."""

from dataclasses import dataclass
from typing import Literal

from foundation.settings import CheckedSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig(CheckedSettings):
    """Whose scheduler decides in simulated engines."""

    engine_core: Literal["mocker", "vllm", "sglang"] = "mocker"
    """Whose scheduler decides: ours, or that of an installed engine of the same engine_type, which runs in a process of its own. That is
    exact for its version, and takes about 20 us for each request and step with vLLM, 0.5 to 2 ms for each step with SGLang: 70 to
    700 times as long as ours."""

    engine_python: str | None = None
    """Python of the environment that has this engine (default: the one that runs dynabench)."""

    def __post_init__(self) -> None:
        """Refuse a Python that nothing runs."""
        CheckedSettings.__post_init__(self)
        if self.engine_python is not None and self.engine_core == "mocker":
            raise ValueError("engine_python is given, and engine_core is mocker; expected vllm or sglang")
