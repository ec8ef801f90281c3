"""What a request may ask for in vLLM's API beyond OpenAI's, as far as the frontend and the mocker honour it."""

from typing import Literal

import msgspec


class VllmOptions(msgspec.Struct, kw_only=True, frozen=True):
    """See the module; the fields have vLLM's names and defaults."""

    # for the scheduler and the cache
    priority: int = 0
    cache_salt: str = ""
    dp_rank: int | None = None
    """The data-parallel rank that a header names."""

    # for the prompt
    add_special_tokens: bool | None = None
    """Default: true for a text; false for a conversation, as its template adds them."""
    truncate_prompt_tokens: int | None = None
    """Tokens of the prompt that are kept; -1: as many as fit."""
    truncation_side: Literal["left", "right"] = "left"
    """The side that is cut off."""
    continue_final_message: bool = False
    """Whether the answer continues the last message."""
    chat_template: str = ""
    """The template to use instead of the model's."""

    # for the tokens
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    prompt_logprobs: int | None = None
    repetition: tuple[int, int, int] | None = None
    """End an answer that repeats a pattern: its smallest and largest length, and how often it must come."""

    # for the answer
    request_id: str = ""
    role: str = "assistant"
    """Role of a chat's answer."""
    echoed: str | None = None
    """For a chat, the text of the message that it continues, perhaps none, if that is to be repeated."""
    is_only_echo: bool = False
    """Whether a completion is only its prompt: it may have no tokens."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_prompt_text: bool = False
    include_reasoning: bool = True


NO_OPTIONS = VllmOptions()
