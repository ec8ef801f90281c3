"""What a worker does with requests."""

from typing import Literal

Role = Literal["aggregated", "prefill", "decode"]
"""The whole request, only its prompt, or only its answer."""
