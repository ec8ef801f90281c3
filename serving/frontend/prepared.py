"""What requests become: prompts in token ids with what their answer needs, or the answer itself."""

from typing import Any

import msgspec

from serving.frontend.api.kinds import KINDS, KindName
from serving.frontend.api.openai import NvExt, OpenAiRequest
from serving.frontend.api.responses.request import ResponseOptions
from serving.frontend.api.structure import Constraint
from serving.frontend.api.vllm_options import NO_OPTIONS, VllmOptions
from serving.frontend.shape import AnswerShape
from serving.model.tokenizer import Ids
from serving.router.hashing import block_hashes, sequence_hashes
from serving.worker.protocol import CacheScope


class PreparedPrompt:
    """A prompt in token ids, hashed once."""

    def __init__(self, tokens: Ids, block_size: int, hashes: list[int] | None = None) -> None:
        if hashes is None:
            hashes = sequence_hashes(block_hashes(tokens, block_size))
        self.tokens = tokens
        self.block_size = block_size
        self.hashes = hashes
        """Sequence hashes of its full blocks."""

    def within(self, scope: CacheScope | None) -> "PreparedPrompt":
        """Return the prompt with hashes that only prompts of the same scope have."""
        if scope is None:
            return self
        hashes = sequence_hashes(block_hashes(self.tokens, self.block_size), scope.root)
        return PreparedPrompt(self.tokens, self.block_size, hashes)


class Prepared(msgspec.Struct, kw_only=True, tag=True):
    """A request in token ids, and what else its answer needs from the request."""

    options: OpenAiRequest
    kind: KindName
    shape: AnswerShape | None
    """None if the answer is one text."""
    constraint: Constraint | None
    """What the answer must look like."""
    tools: list[dict[str, Any]] | None
    """What it may call, if that is left to the model."""
    prompts: list[PreparedPrompt]
    limits: list[int]
    """Tokens that each prompt's answer may have."""
    has_own_limit: bool
    """Whether the limits are the request's own, rather than the room that the context leaves."""
    echoes: list[str]
    """The text that comes before each prompt's answer."""
    num_logprobs: int | None
    """Number of alternatives wanted for each token; None if no log-probabilities are wanted."""
    num_prompt_logprobs: int | None
    """The same for the prompt's tokens."""
    formatted: str
    """The first prompt as text, if it is text and was requested."""
    response: ResponseOptions | None = None
    """For a response, what it needs of its request."""
    vllm: VllmOptions = NO_OPTIONS
    """What it asks for beyond OpenAI's API."""
    prompt_text: str | None = None
    """The prompt of a conversation as text, if that is to be returned."""

    @property
    def endpoint(self) -> str:
        """The label under which it is counted."""
        return KINDS[self.kind].endpoint

    @property
    def is_chat(self) -> bool:
        """Whether it is a turn of a conversation."""
        return self.kind != "completion"

    @property
    def is_limit_a_bound(self) -> bool:
        """Whether the limits only bound the answer: none was set, or the API has no other kind (Anthropic's must be set)."""
        return not self.has_own_limit or self.kind in ("response", "message")

    @property
    def extension(self) -> NvExt:
        """NVIDIA's extensions."""
        return self.options.nvext or NvExt()


class HandedThrough(msgspec.Struct, kw_only=True, tag=True):
    """A request that the engine gets as it is."""

    model: str
    stream: bool
    request: msgspec.Raw
    """In msgpack."""


class Tokenized(msgspec.Struct, kw_only=True, tag=True):
    """The answer to a request for tokens."""

    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, tag=True):
    """The answer to a request for a text."""

    text: str


class Embeddable(msgspec.Struct, kw_only=True, tag=True):
    """Texts in token ids whose embeddings are wanted, and for what."""

    kind: KindName
    model: str
    prompts: list[PreparedPrompt]
    """For scores, the first texts and then as many second ones; for a ranking, the query and then the documents."""
    is_base64: bool = False
    dimensions: int | None = None
    top_n: int | None = None
    documents: list[str] | None = None
    """Those to be ranked, if the answer has their texts."""


Preprocessed = Prepared | HandedThrough | Tokenized | Detokenized | Embeddable
