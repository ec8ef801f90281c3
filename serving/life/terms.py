"""What a flight is told about its deployment and its request, and what it has to remember of the answer."""

from dataclasses import dataclass

from serving.life.config import DisaggregationConfig


@dataclass(frozen=True, slots=True)
class Terms:
    """What applies to a request: usually the same for all of a deployment."""

    limit: int = 0
    """How often a request may lose its worker and continue on another."""
    config: DisaggregationConfig = DisaggregationConfig()  # noqa: RUF009 (frozen)
    handover_s: float = 0.0
    """Time from the end of a prefill until its decode worker is chosen (s)."""
    needs_blocks_first: bool = False
    """With destination-first, choose the prefill worker only once the decode worker has blocks. Otherwise a request that
    holds blocks could queue at the prefill router behind one that needs them: a deadlock."""
    is_pinned: bool = False
    """Whether its client named the worker: it never goes elsewhere."""
    is_whole: bool = False
    """Whether no prefill worker is called for it: one worker computes all of it, or its client shares it out itself."""
    can_continue: bool = True
    """Whether an answer that has begun can continue on another worker."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The part of an answer that the client already has from workers before."""

    num_tokens: int
    first_token_s: float
    """When its first token arrived."""
    last_token_s: float

    def then(self, more: "Generated") -> "Generated":
        """Return all of the answer, if another worker has continued it."""
        return Generated(self.num_tokens + more.num_tokens, more.first_token_s, more.last_token_s)
