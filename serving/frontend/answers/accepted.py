"""A request whose answer is in progress."""

from dataclasses import dataclass
from typing import Any

from serving.frontend import nvext
from serving.frontend.api.openai import StreamOptions
from serving.frontend.api.sse import usage
from serving.frontend.generation.choice import Choice
from serving.frontend.metrics import ModelMetrics
from serving.frontend.prepared import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedRequest:
    """A request whose choices are in progress, and what is needed to answer it."""

    prepared: Prepared
    id: str
    choices: list[Choice]
    metrics: ModelMetrics
    started: float

    @property
    def is_streamed(self) -> bool:
        """Whether its client reads the answer as it arrives."""
        return bool(self.prepared.options.stream)

    @property
    def stream_options(self) -> StreamOptions:
        """The options of the stream."""
        return self.prepared.options.stream_options or StreamOptions()

    def echo(self, index: int) -> str:
        """Return the text that comes before a choice."""
        return self.prepared.echoes[index // (self.prepared.options.n or 1)]

    def usage(self, num_reasoning: int | None = None) -> dict[str, Any]:
        """Return the usage: each prompt counts once, however many choices it has."""
        prompts = self.choices[:: self.prepared.options.n or 1]
        num_prompt = sum(choice.num_prompt for choice in prompts)
        num_cached = sum(choice.num_cached for choice in prompts)
        return usage(num_prompt, sum(choice.num_completion for choice in self.choices), num_cached, num_reasoning)

    def extras(self, choice: Choice) -> dict[str, dict[str, Any] | None]:
        """Return what the end of an answer may contain besides text and usage."""
        return {
            "nvext": nvext.extra_fields(self.prepared.extension, choice, self.started),
            "kv_transfer_params": choice.kv_transfer_params,
        }

    def headers(self) -> dict[str, str]:
        """Return the headers that say where the request went."""
        placement = self.choices[0].attempts.placement
        headers = {"cache-control": "no-cache"} if self.is_streamed else {}
        return headers | {
            "x-request-id": self.id,
            "x-worker-id": f"{placement.rank.instance_id:x}",
            "x-worker-slot": str(placement.slot),
            "x-overlap-tokens": str(self.choices[0].num_overlap_tokens),
        }
