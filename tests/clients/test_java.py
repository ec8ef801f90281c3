"""The JDK's HttpClient, on which LangChain4j and Spring AI stand: it offers HTTP/2 with every first request."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

JAVA = shutil.which("java")
SOURCE = Path(__file__).with_name("Chat.java")


def is_kit():
    """Return whether there is a JDK: without a compiler, java runs no source."""
    modules = subprocess.run([JAVA, "--list-modules"], capture_output=True, text=True, timeout=PATIENCE_S).stdout
    return "jdk.compiler" in modules


pytestmark = pytest.mark.skipif(JAVA is None or not is_kit(), reason="no JDK (apt-get install default-jdk-headless)")


def ask(url, **more):
    """Return the version, status and body of each answer."""
    body = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}
    command = [JAVA, "-Xshare:auto", SOURCE, url, json.dumps(body)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    return [line.split("\t") for line in said.splitlines()]


def test_the_jdks_client_gets_answers_with_both_versions(stack):
    first, second = ask(stack.url)
    assert (first[:2], second[:2]) == (["HTTP_1_1", "200"], ["HTTP_2", "200"])
    texts = [json.loads(body)["choices"][0]["message"]["content"] for _, _, body in (first, second)]
    assert texts[0] == texts[1] and len(texts[0]) == 4


def test_streams_too(stack):
    for _, status, body in ask(stack.url, stream=True):
        events = body.strip("\\n").split("\\n\\n")
        assert (status, events[-1]) == ("200", "data: [DONE]")
        assert len(events) == 1 + 4 + 1 + 1  # the role, the tokens, the finish reason, the end
