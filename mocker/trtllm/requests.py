"""The requests of an engine: as sequences, which drivers know, and as the scheduler's requests."""

from mocker.sequence import OVER, RUNNING, WAITING, Sequence
from mocker.trtllm.config import TrtllmConfig
from mocker.trtllm.request import Request


class Requests:
    """Keeps both sides of each request."""

    def __init__(self, config: TrtllmConfig, num_blocks: int) -> None:
        self.of: dict[Sequence, Request] = {}
        """In the order in which they came."""
        self.running: list[Sequence] = []
        """Those that hold blocks; cancelled ones, too, until the scheduler has ended them."""
        self._config = config
        self._num_blocks = num_blocks

    def add(self, sequence: Sequence) -> Request:
        """Return the scheduler's side of a new sequence.

        Raises:
            ValueError: it can never fit, or asks for what is not modelled.
        """
        self._refuse(sequence)
        config = self._config
        if config.max_seq_len is not None:
            if sequence.num_prompt >= config.max_seq_len:
                raise ValueError(f"prompt of {sequence.num_prompt} tokens reaches max_seq_len ({config.max_seq_len})")
            sequence.num_limit = min(sequence.num_limit, config.max_seq_len)
            sequence.num_total = min(sequence.num_total, config.max_seq_len)
        is_computed = not sequence.is_remote_prefill
        if is_computed and not config.enable_chunked_context and sequence.num_prompt > config.max_num_tokens:
            raise ValueError(
                f"prompt of {sequence.num_prompt} tokens; without enable_chunked_context it must be at most "
                f"max_num_tokens ({config.max_num_tokens})"
            )
        needed = -(-sequence.num_limit // config.tokens_per_block)
        if needed > self._num_blocks:
            raise ValueError(
                f"{sequence.num_prompt} prompt and {sequence.max_tokens} output tokens need {needed} KV blocks; "
                f"the cache has {self._num_blocks}"
            )
        request = Request(
            sequence.id,
            num_prompt=sequence.num_prompt,
            max_tokens=sequence.num_limit - sequence.num_prompt,
            chain=sequence.chain,
            stop_after=sequence.stop_after,
            is_generation_only=sequence.is_remote_prefill,
        )
        request.is_context_only = sequence.is_remote_decode
        request.sequence = sequence
        self.of[sequence] = request
        return request

    def _refuse(self, sequence: Sequence) -> None:
        role = self._config.server_role
        if sequence.is_remote_prefill and role != "generation":
            raise ValueError(f"the KV of {sequence} is at another engine; expected server_role generation, not {role}")
        if sequence.is_remote_decode is not (role == "context"):
            part = "the prompt" if sequence.is_remote_decode else "all"
            raise ValueError(f"{part} of {sequence} is to be computed; it does not fit server_role {role}")
        asked = {
            f"adapter {sequence.adapter}": bool(sequence.adapter),
            "log-probabilities of prompts": not sequence.reads_cache,
        }
        for name, is_asked in asked.items():
            if is_asked:
                raise ValueError(f"{sequence}: {name} is not modelled yet for TensorRT-LLM")

    def start(self, request: Request) -> bool:
        """Let a request run, if it does not yet; return whether it starts."""
        sequence = request.sequence
        if sequence.num_blocks:
            return False
        sequence.num_blocks = len(request.blocks)
        self.running.append(sequence)
        if sequence.state != OVER:
            sequence.state = RUNNING
        return True

    def pause(self, request: Request) -> Sequence:
        """Let a request wait again without blocks."""
        sequence = request.sequence
        self._stop(sequence)
        if sequence.state != OVER:
            sequence.state = WAITING
        sequence.num_preemptions += 1
        sequence.num_computed = 0
        return sequence

    def remove(self, request: Request) -> None:
        """Remove a request that has left the scheduler."""
        sequence = request.sequence
        if sequence.num_blocks:
            self._stop(sequence)
        sequence.num_known = request.num_tokens
        sequence.state = OVER
        del self.of[sequence]

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.num_blocks = 0
        sequence.decoding = False
