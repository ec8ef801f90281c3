"""Names of formats, where users and other versions give them."""

import asyncio
import re
from pathlib import Path

import pytest

from serving.model.card import ModelType
from serving.model.errors import ModelError
from serving.model.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS, check_parsers
from serving.worker.config import WorkerConfig
from serving.worker.registration import register_llm


def test_a_worker_refuses_an_unknown_parser_with_the_known_names():
    with pytest.raises(
        ValueError, match=r"tool_call_parser 'hermess' is unknown: expected one of deepseek_v3, .*hermes, "
    ):
        WorkerConfig(tool_call_parser="hermess")
    with pytest.raises(ValueError, match="reasoning_parser 'r1' is unknown: expected one of deepseek_r1, "):
        WorkerConfig(reasoning_parser="r1")


def test_known_parsers_go_together_but_for_harmony():
    check_parsers("", "")
    for calls in TOOL_CALL_PARSERS:
        for reasoning in REASONING_PARSERS:
            if (calls == "openai") == (reasoning == "openai_gptoss"):
                check_parsers(calls, reasoning)
                continue
            with pytest.raises(ValueError, match="are one format, which goes with no other"):
                check_parsers(calls, reasoning)


def test_a_model_is_not_registered_with_an_unknown_parser():
    class Nowhere:
        runtime = address = None

    registered = register_llm(ModelType.Backend, Nowhere(), "", "m", tool_call_parser="nope")
    with pytest.raises(ModelError, match="tool_call_parser 'nope' is unknown"):
        asyncio.run(registered)


def test_the_page_on_engines_has_every_name():
    page = (Path(__file__).parents[3] / "docs" / "engines.md").read_text()
    section = page.split("\n## Tool calls and reasoning\n")[1].split("\n## ")[0]
    _, calls, reasoning = section.split("parser` |")
    for table, names in ((calls, TOOL_CALL_PARSERS), (reasoning, REASONING_PARSERS)):
        rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")]
        assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == list(names)
