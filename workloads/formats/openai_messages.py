"""SGLang's openai form: `{"messages", "max_tokens"}`, one request body per line."""

from collections.abc import Iterator

from workloads import texts
from workloads.formats.format import Format, has
from workloads.request import Request
from workloads.source import Source


def _read(source: Source) -> Iterator[Request]:
    return (texts.body_request(source, row) for row in source.objects())


FORMAT = Format(
    name="openai-messages",
    description="a chat request body a line: messages, max_tokens (SGLang's openai form)",
    is_like=has("messages"),
    read=_read,
    block_size=16,
)
