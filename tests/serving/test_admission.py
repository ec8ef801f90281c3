"""What may pass into a frontend."""

import pytest

from serving.frontend.admission import KeyAndRoom
from serving.frontend.config import FrontendConfig


def refusal(method="POST", headers=(), *, num_open=0, is_draining=False, **config):
    admission = KeyAndRoom(FrontendConfig(**({"max_inflight_requests": 2} | config)))
    return admission.refusal(method, "/v1/completions", headers, num_open=num_open, is_draining=is_draining)


@pytest.mark.parametrize(
    "given", [[], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"Basic key")], [(b"x-key", b"key")]]
)
def test_without_the_key_nothing_passes(given):
    for method in ("GET", "POST"):
        refused = refusal(method, given, api_key="key")
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")


def test_with_the_key_all_passes():
    assert refusal(headers=[(b"host", b"x"), (b"authorization", b"bearer key")], api_key="key") is None


def test_a_request_beyond_those_in_progress_is_shed():
    assert refusal(num_open=1) is None
    refused = refusal(num_open=2)
    assert (refused.status, refused.headers) == (429, {"retry-after": "1"})


def test_a_process_that_is_about_to_end_takes_no_more():
    assert refusal(is_draining=True).status == 503


def test_questions_about_the_server_are_answered_all_the_same():
    assert refusal("GET", num_open=2, is_draining=True) is None
