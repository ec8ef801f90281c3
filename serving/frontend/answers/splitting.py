"""From the text of one choice to the parts that its client asked for, counted on the way."""

from serving.frontend.api.sse import unescape
from serving.frontend.shape import AnswerShape
from serving.model.parsers import answer_parser, required_calls_parser
from serving.model.parsers.answer import ScriptParser
from serving.model.parts import Arguments, CallStart, Part, Reasoning


class AnswerParts:
    """Splits a choice's text while it arrives."""

    def __init__(self, shape: AnswerShape) -> None:
        self.num_calls = 0
        self.num_reasoning = 0
        """Tokens of the reasoning, as far as pieces are tokens."""
        self._shape = shape
        self._parser = _parser(shape)
        self._is_parallel = shape.use is None or shape.use.is_parallel

    @property
    def is_thinking(self) -> bool:
        """Whether the answer is still in its reasoning."""
        return self._parser.is_thinking

    def reason(self, reason: str) -> str:
        """Return the finish reason: `tool_calls` if the answer ended with one, unless the client had named the tool."""
        is_named = self._shape.use is not None and self._shape.use.choice == "named"
        return "tool_calls" if reason == "stop" and self.num_calls and not is_named else reason

    def push(self, piece: bytes) -> list[Part]:
        """Return what the next token's text settles; the text is escaped for JSON."""
        parts = self._parser.push(unescape(piece))
        if parts and all(isinstance(part, Reasoning) for part in parts):
            self.num_reasoning += 1
        return self._wanted(parts)

    def end(self) -> list[Part]:
        """Return what was held back."""
        return self._wanted(self._parser.end())

    def _wanted(self, parts: list[Part]) -> list[Part]:
        wanted = []
        for part in parts:
            if isinstance(part, CallStart):
                self.num_calls += 1
            is_further_call = isinstance(part, CallStart | Arguments) and self.num_calls > 1
            is_hidden = isinstance(part, Reasoning) and not self._shape.shows_reasoning
            if not is_hidden and (self._is_parallel or not is_further_call):
                wanted.append(part)
        return wanted


def _parser(shape: AnswerShape) -> ScriptParser:
    use = shape.use
    if use is not None and use.is_forced:
        return required_calls_parser(use.forced)
    tools = [] if use is None else use.tools
    return answer_parser(shape.tool_calls, shape.reasoning, tools, prompt_end=shape.prompt_end)
