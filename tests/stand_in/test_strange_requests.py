"""One request, however strange, does not keep the others waiting: its work is bounded, or done elsewhere."""

import asyncio

from serving.model.template import ChatTemplate
from serving.stand_in.config import ApiConfig
from tests.stand_in.support import running


def ask(*bodies, path="/v1/completions", **settings):
    """Send requests one after the other; return their answers."""

    async def all_of_them():
        async with running(**settings) as client:
            return [await client.post(path, json=body) for body in bodies]

    return asyncio.run(all_of_them())


def test_a_template_of_a_request_is_not_rendered_by_the_server_itself(monkeypatch):
    rendered, render = [], ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda self, *args, **more: rendered.append(more) or render(self, *args, **more)
    )
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    own = chat | {"chat_template": "{{ messages[0].content }}!"}
    api = ApiConfig(trust_request_chat_template=True)
    first, second = ask(own, chat, path="/v1/chat/completions", api=api)
    assert first.json()["usage"]["prompt_tokens"] == len("hello!")
    assert second.status_code == 200
    assert [more["template"] for more in rendered] == [""]
