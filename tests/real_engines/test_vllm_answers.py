"""`vllm serve` still answers as recorded; with DYNABENCH_RECORD=1 its answers are recorded again, for tests/stand_in.

A server takes minutes to start. Only the one with many flags is asked, unless all are recorded.
"""

import os

import httpx
import pytest

from tests.real_engines.serving_vllm import ONE_USE, until_ready, vllm_serve
from tests.stand_in import recorded
from tests.stand_in.outlines import ask
from tests.stand_in.vllm_cases import CASES, CONTEXT, SERVERS

pytestmark = pytest.mark.timeout(900)
RECORD = bool(os.environ.get("DYNABENCH_RECORD"))
ATTEMPTS = 30
"""A server that is late sends several tokens in one event: the request is sent again then."""

VARYING = ("response: streamed", "message: streamed")
"""Cases whose text is sampled from all tokens: how many events it has depends on it."""


@pytest.fixture(scope="module", params=SERVERS if RECORD else ["full"])
def server(request, folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("logs") / request.param
    flags = (*SERVERS[request.param], f"--max-model-len={CONTEXT}")
    with vllm_serve(folder, log, *flags) as (url, process):
        until_ready(url, process, log)
        with httpx.Client(base_url=url, timeout=60, limits=ONE_USE) as client:
            yield request.param, client


def test_vllm_answers_as_recorded(server):
    name, client = server
    known = recorded.load()
    found = {case: settled(client, case, None if RECORD else known[name].get(case)) for case in CASES}
    if RECORD:
        recorded.save(known | {name: found})
    else:
        assert [case for case in CASES if found[case] != known[name][case] and case not in VARYING] == []


def settled(client, case, expected):
    """Return an answer's outline as soon as it is what is expected, or else that with the most events."""
    found = []
    for _ in range(ATTEMPTS):
        found.append(ask(client, CASES[case]))
        if found[-1] == expected or "events" not in found[-1]:
            break
    return max(found, key=lambda outline: outline == expected or sum(count for count, _ in outline.get("events", [])))
