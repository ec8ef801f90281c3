"""Conversations that end early: a turn fails, so those that wait for it are not sent."""

import re
from dataclasses import dataclass

NOT_SENT = "not sent: "
"""How the error of a request begins that was never sent."""
TOO_LONG = re.compile(
    r"HTTP 4\d\d: .*(context.(length|size|window)|maximum model length|max_seq_len|prompt is too long|`max_new_tokens` must be)",
    re.IGNORECASE,
)
"""How servers refuse a prompt for which their context has no room: vLLM, SGLang, llama.cpp, OpenAI; vLLM; TensorRT-LLM;
Anthropic; TGI."""


@dataclass(slots=True)
class BrokenOff:
    """How many conversations ended early, and why."""

    num_failed: int = 0
    """Those of which a turn failed otherwise."""
    num_too_long: int = 0
    """Those of which a turn was too long for the server's context."""
    num_unsent: int = 0
    """Turns that were not sent for either reason."""

    def note(self, error: str, num_lost: int) -> str:
        """Count a conversation that loses turns to an error; return the error of these turns."""
        is_too_long = TOO_LONG.match(error) is not None
        self.num_too_long += is_too_long
        self.num_failed += not is_too_long
        self.num_unsent += num_lost
        return NOT_SENT + (
            "a turn before it was too long for the server's context" if is_too_long else "a turn before it failed"
        )
