"""Prompts are those of transformers' apply_chat_template."""

import copy

import pytest

from serving.model.files import ModelFiles
from serving.model.template import ChatTemplate
from tests.support.templates import CONVERSATIONS, TEMPLATES

transformers = pytest.importorskip(
    "transformers.utils.chat_template_utils", reason="this environment has no transformers"
)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_the_one_of_transformers(name, conversation):
    source, (messages, tools, variables) = TEMPLATES[name], CONVERSATIONS[conversation]
    ours = ChatTemplate(ModelFiles({"chat_template.jinja": source.encode()}))
    for wanted in (True, False):
        [expected], _ = transformers.render_jinja_template(
            [copy.deepcopy(messages)], tools=tools, chat_template=source, add_generation_prompt=wanted, **variables
        )
        assert ours.render(messages, tools, add_generation_prompt=wanted, variables=variables) == expected
