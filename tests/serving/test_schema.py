"""Schemathesis against the server's own description."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.support.examples import worth

MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


@pytest.mark.parametrize("is_ours", [True, False], ids=["our model", "any model"])
@pytest.mark.parametrize("mode", MODES, ids=["valid", "invalid"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_whatever_is_asked_gets_an_answer_that_the_description_knows(stack, path, mode, is_ours):
    schema = schemathesis.openapi.from_url(f"{stack.url}/openapi.json")
    operation = schema[path]["POST"]
    statuses = set()

    @settings(max_examples=worth(40), suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        if is_ours and isinstance(case.body, dict):
            case.body["model"] = "mock"
            case.body["max_tokens"] = 3
        answer = case.call()
        case.validate_response(answer, checks=[not_a_server_error])
        statuses.add(answer.status_code)
        documented = operation.definition.raw["responses"]
        assert str(answer.status_code) in documented
        if answer.status_code != 200:
            is_anthropic = path == "/v1/messages"
            assert set(answer.json()["error"]) == {"message", "type"} | (set() if is_anthropic else {"param", "code"})

    ask()
    if mode is GenerationMode.NEGATIVE:
        assert 400 in statuses
    else:
        assert statuses <= {200, 400, 404, 415}
