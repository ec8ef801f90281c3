"""The author of the mocker's answers: what is said to a request, and where it ends, is settled when the request comes.

An answer is a pure function of the prompt, the seed and its limits, so that it continues elsewhere with the same token.
"""

from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from serving.engines.mock.answers.calls import call_tokens, callable_tools, check_tools
from serving.engines.mock.answers.embedding import DEFAULT_SIZE, embedding_of
from serving.engines.mock.answers.made_up import answer_length, answer_tokens, drawn_length, eos_place, stop_place
from serving.engines.mock.answers.texts import SaidTokens, source_of
from serving.engines.mock.answers.words import allowed_words, bad_sequences, repetition_place, without
from serving.engines.mock.config import AnswerConfig
from serving.engines.mock.forms.errors import FormError
from serving.engines.mock.forms.fit import choice_tokens, json_tokens, regex_tokens, usual_tokens
from serving.engines.mock.forms.writer import Writer
from serving.model.constraints import NO_GRAMMAR
from serving.model.files import ModelFiles
from serving.model.tokenizer import ByteTokenizer, Tokenizer
from serving.worker.protocol import PreprocessedRequest

SILENT_BYTE = 256
"""A token without text where tokens are bytes."""


SEARCHING = ("bad_words", "repetition")
"""Options for which an answer is searched, for thousands of words or patterns."""


class AnswerPlan(NamedTuple):
    """What will be said to a request."""

    output: list[int]
    limit: int
    """The most tokens that it may have."""
    stop_after: int | None = None
    """The token at which it ends, from 1; None: at the limit."""
    embedding: list[float] | None = None
    """What is returned instead of the output."""
    reason: str = ""
    """Why it ends, if the engine itself cannot know."""


class Author:
    """Makes up the answers of one simulated model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: AnswerConfig = AnswerConfig(),  # noqa: B008 (frozen)
        *,
        tool_call_parser: str = "hermes",
        embedding_size: int = DEFAULT_SIZE,
    ) -> None:
        """Learn to write in a model's tokens.

        Raises:
            ValueError: tools are to be called, and JSON cannot be written in these tokens; or what answers say cannot be
                read.
        """
        self.vocabulary: npt.NDArray[np.uint32] = np.asarray(tokenizer.speakable())
        self.words: list[int] = np.unique(self.vocabulary).tolist()
        self._config = config
        self._tokenizer = tokenizer
        self._source = source_of(config.answers, tokenizer, self.vocabulary)
        self._parser = tool_call_parser
        self._embedding_size = embedding_size
        self._is_bytes = isinstance(tokenizer, ByteTokenizer)
        self._writer: Writer | None = None
        try:
            self._writer = Writer(tokenizer)
        except FormError as error:
            if config.tool_call_share:
                raise ValueError(f"tool_call_share is {config.tool_call_share:g}; expected 0: {error}") from error

    def may_be_formed(self, request: PreprocessedRequest) -> bool:
        """Return whether the answer may have a form, must be looked up or is searched, so that making it up takes a while."""
        if request.is_embedding:
            return False
        return (
            not self._source.is_quick
            or any(request.sampling_options.get(name) for name in SEARCHING)
            or request.sampling_options.get("guided_decoding") is not None
            or bool(self._config.tool_call_share and request.tools)
        )

    @property
    def forms(self) -> tuple[str, ...]:
        """What an answer can be made to look like in these tokens."""
        return () if self._writer is None else NO_GRAMMAR

    def plan(self, request: PreprocessedRequest, tokens: npt.NDArray[np.uint32], *, most: int | None) -> AnswerPlan:
        """Settle the answer to a request.

        Args:
            request: the request.
            tokens: its prompt, and what was generated elsewhere.
            most: the longest sequence, None if there is no limit.

        Raises:
            ValueError: it asks for a form that the mocker cannot honour.
        """
        prompt = tokens[: len(tokens) - request.num_generated]
        if request.is_embedding:
            _refuse_sharing(request)
            return AnswerPlan([], 1, 1, embedding_of(prompt, self._embedding_size, is_bytes=self._is_bytes))
        options = request.sampling_options
        seed = int(options.get("seed") or options.get("choice") or 0)
        limit = request.stop_conditions.max_tokens or most or len(tokens)
        said = None if self._is_formed(request) else self._source.say(prompt, seed)
        end = self._end(request, prompt, seed, said)
        length = limit if end is None else min(end, limit)
        formed = self._formed(request, prompt, seed, request.num_generated + length, request.num_generated + limit)
        if formed is not None:
            output = self._ended(request, formed[request.num_generated :], limit)
            end = None if len(output) == limit and request.stop_conditions.ignore_eos else len(output)
        else:
            assert said is not None
            output = self._text(request, prompt, seed, length, said)
        end = stop_place(request, output[:limit]) or end
        output = output[:limit][:end]
        if (pattern := options.get("repetition")) and (place := repetition_place(output, pattern)) is not None:
            return AnswerPlan(output[:place], limit, place, reason="repetition")
        return AnswerPlan(output, limit, end)

    def first(self, request: PreprocessedRequest, tokens: npt.NDArray[np.uint32]) -> AnswerPlan:
        """Return the one token of a request whose prompt alone is computed here; nobody reads it."""
        _refuse_sharing(request)
        return AnswerPlan(answer_tokens(tokens, 0, 0, 1, self.vocabulary), 1)

    def _text(
        self, request: PreprocessedRequest, prompt: npt.NDArray[np.uint32], seed: int, length: int, said: SaidTokens
    ) -> list[int]:
        """Return free text: what is said, or of the words that the request allows, if it does not allow all.

        Raises:
            ValueError: it allows none.
        """
        options = request.sampling_options
        words = allowed_words(options, self.vocabulary)
        if words is self.vocabulary:
            output = said.tokens(request.num_generated, length)
        else:
            output = answer_tokens(prompt, seed, request.num_generated, length, words)
        bad = options.get("bad_words")
        if not bad:
            return output
        ordered = self.words if words is self.vocabulary else words.tolist()
        return without(output, bad_sequences(bad, self._tokenizer), ordered)

    def _end(
        self, request: PreprocessedRequest, prompt: npt.NDArray[np.uint32], seed: int, said: SaidTokens | None
    ) -> int | None:
        """Return the token at which free text ends, from 1; None if only its limit ends it."""
        if said is not None and said.length is not None:
            return eos_place(request, said.length, is_all=True)
        config = self._config
        length = drawn_length(prompt, seed, *config.lengths) if config.output_tokens else answer_length(prompt, seed)
        return eos_place(request, length, is_all=False)

    def _is_formed(self, request: PreprocessedRequest) -> bool:
        return request.sampling_options.get("guided_decoding") is not None

    def _formed(
        self, request: PreprocessedRequest, prompt: npt.NDArray[np.uint32], seed: int, target: int, enough: int
    ) -> list[int] | None:
        """Return the whole answer if it must have a form, or calls tools; None if it is free text."""
        form: dict[str, Any] | None = request.sampling_options.get("guided_decoding")
        share = self._config.tool_call_share
        tools = callable_tools(request.tools) if share and form is None else []
        if form is None and not tools:
            return None
        drawn = xxh3_64_intdigest(prompt.tobytes(), (seed + 2) & 0xFFFF_FFFF_FFFF_FFFF)
        if self._writer is None:
            raise FormError("the model's tokenizer does not reproduce JSON text, so answers have no form")
        if form is not None:
            is_free = request.stop_conditions.is_default_limit
            return _guided(form, drawn, target, self._writer, enough, is_free=is_free)
        check_tools(tools, self._writer)
        if drawn >= share * 2.0**64:
            return None
        return call_tokens(tools, Random(drawn), target, self._writer, self._parser, share)

    def _ended(self, request: PreprocessedRequest, rest: list[int], limit: int) -> list[int]:
        """Return the rest of an answer, filled up where EOS is not allowed or nothing is left to say.

        Blanks after a JSON text are part of it. Other answers are filled up with EOS, which has no text, as engines do
        that may generate nothing else.
        """
        conditions = request.stop_conditions
        wanted = limit if conditions.ignore_eos else min(max(conditions.min_tokens, 1), limit)
        if len(rest) >= wanted:
            return rest
        assert self._writer is not None
        form = request.sampling_options.get("guided_decoding")
        blank = self._writer.space if form is None or "json" in form else None
        if blank is None:
            blank = SILENT_BYTE if self._is_bytes else next(iter(request.eos_token_ids), None)
        if blank is None:
            raise FormError(
                "the answer ends before min_tokens, or ignores EOS, and the model has no EOS to fill it up with"
            )
        return rest + [blank] * (wanted - len(rest))


def _refuse_sharing(request: PreprocessedRequest) -> None:
    if request.is_embedding and request.kv_transfer_params is not None:
        raise ValueError("an embedding cannot be shared between workers; expected no kv_transfer_params")


def _guided(form: dict[str, Any], seed: int, target: int, writer: Writer, enough: int, *, is_free: bool) -> list[int]:
    """Return an answer of a form in tokens; if its length is free, one that looks like an application's.

    Raises:
        FormError: the mocker cannot make it up.
    """
    [(kind, value)] = form.items()
    match kind:
        case "json":
            if is_free:
                target = max(target, min(usual_tokens(value, writer), enough))
            return json_tokens(value, seed, target, writer, enough=enough)
        case "regex":
            return regex_tokens(value, seed, target, writer)
        case "choice":
            return choice_tokens(value, seed, writer)
    raise FormError(f"guided_decoding is {kind}; expected one of {', '.join(NO_GRAMMAR)}: the mocker honours no other")


def embedding_size_of(files: ModelFiles) -> int:
    """Return the length of a model's embeddings: its hidden size, if its config.json has one."""
    config = files.json("config.json")
    config = config | config.get("text_config", {})
    return int(config.get("hidden_size") or config.get("n_embd") or DEFAULT_SIZE)
