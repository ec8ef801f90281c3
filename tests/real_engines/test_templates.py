"""Prompts are those of transformers' apply_chat_template.

Here the templates of `tests/support` are compared, which are our own: some for single constructs, and one for each of
eight families (Llama 3, Mistral, DeepSeek, Qwen3-Coder, GLM-4.5, MiniMax-M2, gpt-oss, Kimi K2; "hermes" is a ninth). They
run in `.ci/engines`' environments with transformers. Public templates are not ours to commit: llama-cpp-python's sdist
has some (vendor/llama.cpp/models/templates), and `DYNABENCH_TEMPLATES` names a folder of such to compare as well.
`tests/serving/test_templates.py` compares without transformers: with the prompts that it rendered
(`tests/support/prompts.json`), which are checked here.
"""

import copy
import json
import os
from pathlib import Path

import jinja2
import pytest

from serving.model.files import ModelFiles
from serving.model.template import ChatTemplate, TemplateError
from tests.support.templates import CONVERSATIONS, PROMPTS, SPECIAL_TOKENS, TEMPLATES

transformers = pytest.importorskip(
    "transformers.utils.chat_template_utils", reason="this environment has no transformers"
)
FOLDER = os.environ.get("DYNABENCH_TEMPLATES")
PUBLIC = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []


def theirs(source, conversation, *, add_generation_prompt):
    """Return the prompt of transformers."""
    messages, tools, variables = copy.deepcopy(CONVERSATIONS[conversation])
    more = {"tools": tools, "add_generation_prompt": add_generation_prompt, **SPECIAL_TOKENS, **variables}
    [prompt], _ = transformers.render_jinja_template([messages], chat_template=source, **more)
    return prompt


def ours(source, conversation, *, add_generation_prompt):
    """Return our prompt."""
    messages, tools, variables = CONVERSATIONS[conversation]
    files = {"chat_template.jinja": source.encode(), "tokenizer_config.json": json.dumps(SPECIAL_TOKENS).encode()}
    template = ChatTemplate(ModelFiles(files))
    return template.render(messages, tools, add_generation_prompt=add_generation_prompt, variables=variables)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_the_one_of_transformers(name, conversation):
    for wanted in (True, False):
        expected = theirs(TEMPLATES[name], conversation, add_generation_prompt=wanted)
        assert ours(TEMPLATES[name], conversation, add_generation_prompt=wanted) == expected
    assert PROMPTS[name][conversation] == theirs(TEMPLATES[name], conversation, add_generation_prompt=True)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: path.stem)
def test_a_prompt_of_a_public_template_is_the_one_of_transformers(path, conversation):
    source = path.read_text()
    for wanted in (True, False):
        try:
            expected = theirs(source, conversation, add_generation_prompt=wanted)
        except (jinja2.TemplateError, TypeError):
            with pytest.raises(TemplateError):
                ours(source, conversation, add_generation_prompt=wanted)
            continue
        assert ours(source, conversation, add_generation_prompt=wanted) == expected
