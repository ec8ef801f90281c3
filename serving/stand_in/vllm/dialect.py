"""How vLLM words answers and errors."""

from serving.frontend.answers.selection import answer_of
from serving.frontend.api.messages.errors import body_at
from serving.frontend.dialect import Dialect

VLLM = Dialect(answer_of, body_at)
"""See the module."""
