"""A model's files on their way from a worker."""

import asyncio

import pytest

from serving.model import files
from serving.model.errors import ModelError
from serving.model.files import ModelFiles

HELD = ModelFiles({"config.json": b"{}", "tokenizer.json": b"x" * (files.CHUNK_BYTES + 1)})


def receive(digests, ask, known):
    return asyncio.run(ModelFiles.receive(digests, ask, known))


def test_files_arrive_whole_and_each_content_once():
    asked, known = [], {}

    def ask(name):
        asked.append(name)
        return HELD.send(name)

    assert receive(HELD.digests, ask, known).contents == HELD.contents
    assert receive(HELD.digests | {"again.json": HELD.digests["config.json"]}, ask, known).contents == (
        HELD.contents | {"again.json": b"{}"}
    )
    assert asked == ["config.json", "tokenizer.json"]


def test_a_file_that_is_not_what_its_card_says_is_refused():
    known = {}
    with pytest.raises(ModelError, match=r"tokenizer\.json of the model arrived damaged"):
        receive({"tokenizer.json": HELD.digests["config.json"]}, HELD.send, known)
    assert known == {}


def test_a_file_that_does_not_arrive_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(files, "RECEIVE_TIMEOUT_S", 0.01)

    async def silent(name):
        await asyncio.Event().wait()
        yield b""

    with pytest.raises(ModelError, match=r"config\.json of the model did not arrive within 0\.01 s"):
        receive({"config.json": HELD.digests["config.json"]}, silent, {})
