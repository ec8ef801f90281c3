"""What an answer must look like and how its text is split, by what a request asks for and what its model's card says."""

import msgspec

from serving.frontend.api.errors import ApiError
from serving.frontend.api.openai import ChatRequest
from serving.frontend.api.structure import Constraint
from serving.frontend.api.tools import ToolUse
from serving.model.card import ModelCard
from serving.model.parsers import calls_schema, visible_tokens

PROMPT_END = 200
"""Characters of a prompt's end that show whether its template has opened the reasoning."""


class AnswerShape(msgspec.Struct, frozen=True, kw_only=True):
    """How the text of an answer is split into parts (see `serving.model.parts`)."""

    tool_calls: str = ""
    """The format in which it calls tools, by the name of its parser."""
    reasoning: str = ""
    """The format in which it thinks."""
    use: ToolUse | None = None
    prompt_end: str = ""
    """The end of the prompt, where some templates open the reasoning."""
    shows_reasoning: bool = True

    @property
    def visible_tokens(self) -> frozenset[str]:
        """The special tokens that mark parts of the answer."""
        return visible_tokens(self.tool_calls, self.reasoning)


def combined(use: ToolUse | None, wanted: Constraint | None) -> Constraint | None:
    """Return what an answer must look like: calls of tools, if it must call some, whatever else was wanted.

    Raises:
        ApiError: the schemas of its tools are none, or cannot be combined.
    """
    if use is None or not use.is_forced:
        return wanted
    try:
        schema = calls_schema(use.tools, use.forced, parallel=use.is_parallel)
    except ValueError as error:
        raise ApiError(400, str(error), param="tools") from error
    except (AttributeError, LookupError, RecursionError, TypeError) as error:  # a client wrote them
        problem = f"tools: their parameters do not make one schema: {error!r:.100}"
        raise ApiError(400, problem, param="tools") from error
    return Constraint("tool_choice", "json", schema)


def honoured(wanted: Constraint | None, card: ModelCard) -> Constraint | None:
    """Return a constraint.

    Raises:
        ApiError: the model's engine does not honour such.
    """
    if wanted is None or wanted.kind in card.guided_decoding:
        return wanted
    can = ", ".join(card.guided_decoding) or "none"
    message = (
        f"{wanted.field}: the engine of this model honours no constraints of kind {wanted.kind} (it honours: {can})"
    )
    raise ApiError(400, message, code="unsupported_parameter", param=wanted.field)


def shape_of(
    request: ChatRequest, use: ToolUse | None, wanted: Constraint | None, prompt: str, card: ModelCard
) -> AnswerShape | None:
    """Return how an answer is split; one that must fit a constraint does so from its start, so it has no reasoning."""
    is_forced = use is not None and use.is_forced
    is_split = request.separate_reasoning is not False
    reasoning = card.reasoning_parser if is_split and wanted is None and not is_forced else ""
    tool_calls = card.tool_call_parser if use is not None and not is_forced else ""
    if not (reasoning or tool_calls or is_forced):
        return None
    return AnswerShape(
        tool_calls=tool_calls,
        reasoning=reasoning,
        use=use,
        prompt_end=prompt[-PROMPT_END:],
        shows_reasoning=request.include_reasoning is not False,
    )
