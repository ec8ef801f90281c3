"""A request at one worker."""

from typing import Literal

Stage = Literal["prefill", "decode"]
State = Literal["sought", "chosen", "sent", "kept", "expired", "gone", "over"]


class Leg:
    """A request's stay at one worker.

    sought --placed--> chosen --send--> sent --ended--> over
                                         |
                                         +--its KV waits to be read--> kept --> expired, gone or over (it was read)
    """

    __slots__ = ("call", "has_blocks", "is_answering", "is_moved", "only", "progress", "reads_kv", "slot", "state")

    def __init__(self, only: int | None = None, *, reads_kv: bool = False, is_moved: bool = False) -> None:
        """Look for a worker.

        Args:
            only: the worker that it has to be, if that is settled.
            reads_kv: whether the KV of its prompt comes from another worker.
            is_moved: whether that is a decode worker which leaves, and had begun the answer.
        """
        self.only = only
        self.reads_kv = reads_kv
        self.is_moved = is_moved
        self.state: State = "sought"
        self.slot: int | None = None
        """The worker, by the number that its router knows, once one is chosen."""
        self.has_blocks = False
        """Whether it has blocks for that KV and waits for it."""
        self.is_answering = False
        """Whether it has produced a token: the prefill worker can no longer harm the answer. The driver on sockets sets it."""
        self.progress = (0, 0)
        """Tokens that are computed and blocks that are sent, where a prompt is sent chunk by chunk."""
        self.call: object = None
        """What the driver has there: an engine's sequence, or an open call."""

    @property
    def was_kept(self) -> bool:
        """Whether its prompt was computed and not read; whoever tries to read it learns whether it is still there."""
        return self.state in ("kept", "expired", "gone")

    def take_blocks_to_send(
        self, count: int, *, num_cached: int, num_prompt: int, block_size: int, num_there: int, is_last: bool
    ) -> int:
        """Note that a chunk of the prompt is computed; return how many blocks to send now.

        Those are the blocks that it has filled, or after the last chunk all that are left.

        Args:
            count: tokens of the chunk.
            num_cached: tokens of the prompt that were cached.
            num_prompt: tokens of the prompt.
            block_size: tokens of a block.
            num_there: first blocks of the prompt that the decode worker has cached.
            is_last: whether this is the last chunk.
        """
        num_computed, num_sent = self.progress
        num_computed = max(num_computed, num_cached) + count
        num_filled = -(-num_prompt // block_size) if is_last else num_computed // block_size
        self.progress = num_computed, num_filled
        return max(num_filled - max(num_sent, num_there), 0)
