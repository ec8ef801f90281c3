"""The core of an engine with vLLM's scheduler."""

from mocker.installed.core import InstalledCore
from mocker.installed.scheduler import InstalledScheduler
from mocker.sequence import Sequence
from mocker.speculation.drafter import Drafter
from mocker.step_log import StepLog
from mocker.vllm.config import EngineConfig


class InstalledVllmCore(InstalledCore):
    """Asks vLLM's scheduler."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        scheduler: InstalledScheduler,
        *,
        drafter: Drafter | None = None,
        steps: StepLog | None = None,
    ) -> None:
        """Start idle; `num_blocks` includes the null block."""
        super().__init__(config, num_blocks - 1, scheduler, drafter=drafter, steps=steps)
        self._num_ahead = config.num_speculative_tokens

    def _check(self, sequence: Sequence) -> None:
        limit = self._config.max_model_len
        if limit is not None:
            sequence.cut_at(limit)
        needed = -(-(sequence.num_total - 1 + self._num_ahead) // self._config.block_size)
        if needed > self._num_blocks:
            raise ValueError(f"{sequence} needs {needed} KV blocks; the cache has {self._num_blocks}")
