"""What a worker does with requests."""

from typing import Literal

Role = Literal["aggregated", "prefill", "decode"]
"""All of a request, its prompt alone, or its answer alone."""
