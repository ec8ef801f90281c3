"""A worker's part in a request that two workers share: `kv_transfer_params`, in vLLM's words."""

from dataclasses import dataclass
from typing import Any

COMPUTES, READS = "do_remote_decode", "do_remote_prefill"


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """What a worker is told about the other one, and which part is its own."""

    params: dict[str, Any]
    """As they travel to the worker."""
    computes_prompt: bool
    """Whether it computes the prompt, and another worker reads the KV."""
    reads_prompt: bool
    """Whether it reads the KV of the prompt from another worker."""

    @classmethod
    def of(cls, params: dict[str, Any]) -> "KvTransfer":
        """Read params from a client or a worker."""
        return cls(params, params.get(COMPUTES) is True, params.get(READS) is True)

    @classmethod
    def to_compute(cls, params: dict[str, Any]) -> "KvTransfer":
        """Return the part of a prefill worker."""
        return cls({**params, COMPUTES: True, READS: False}, computes_prompt=True, reads_prompt=False)

    def to_read(self) -> "KvTransfer":
        """Return the other worker's part, if the two meet."""
        return KvTransfer({**self.params, READS: True, COMPUTES: False}, computes_prompt=False, reads_prompt=True)
