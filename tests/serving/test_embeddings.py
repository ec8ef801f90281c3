"""Embeddings come from the engine; scores and rankings are their cosines."""

import base64
import struct

import httpx
import openai
import pytest

from tests.support import speaking_engine
from tests.support.own_engines import serving_engine

MODEL = {"model": "agent"}


def post(url, path, **body):
    return httpx.post(url + path, json=MODEL | body)


def test_the_client_gets_the_engines_vectors_in_order(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(input=["aab", "b"], **MODEL)  # the client asks for base64
        assert [each.embedding for each in found.data] == [[2, 1], [0, 1]]
        assert (found.usage.prompt_tokens, found.usage.total_tokens) == (4, 4)
        assert client.embeddings.create(input=[97, 98], encoding_format="float", **MODEL).data[0].embedding == [1, 1]
        assert len(client.embeddings.create(input=[[97], [98, 98]], **MODEL).data) == 2


def test_both_encodings_hold_the_same_numbers(url):
    as_floats, as_base64 = (
        post(url, "/v1/embeddings", input="ab", encoding_format=form).json()["data"][0]["embedding"]
        for form in ("float", "base64")
    )
    assert struct.unpack("<2f", base64.b64decode(as_base64)) == tuple(as_floats) == (1, 1)


def test_a_score_is_the_cosine_of_two_texts(url):
    answer = post(url, "/v1/score", queries="ab", documents=["a", "abab", "c"]).json()
    assert [each["score"] for each in answer["data"]] == pytest.approx([2**-0.5, 1, 0])
    assert answer["usage"]["prompt_tokens"] == 2 * 3 + 1 + 4 + 1
    pairs = post(url, "/score", text_1=["a", "b"], text_2=["a", "a"]).json()["data"]
    assert [each["score"] for each in pairs] == pytest.approx([1, 0])


def test_a_ranking_is_in_order_of_similarity(url):
    asked = {"query": "a", "documents": ["b", "ab", "a"]}
    answer = post(url, "/v1/rerank", **asked).json()["results"]
    assert [(each["index"], each["document"]["text"]) for each in answer] == [(2, "a"), (1, "ab"), (0, "b")]
    best = post(url, "/rerank", **asked, top_n=1, return_documents=False).json()["results"]
    assert best == [{"index": 2, "relevance_score": pytest.approx(1)}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "a" * 2_000_000}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimension": 3}, "dimension"),
        ("/v1/embeddings", {"input": "a", "model": "plain"}, "model"),
        ("/v1/score", {"queries": "a"}, "documents"),
        ("/v1/score", {"documents": "a"}, "queries"),
        ("/v1/score", {"queries": "a", "text_1": "b", "documents": "a"}, "text_1"),
        ("/v1/score", {"queries": "a", "documents": "a", "text_2": ["b"]}, "text_2"),
        ("/v1/score", {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "queries"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ],
)
def test_what_cannot_be_embedded_is_refused(url, path, body, param):
    answer = post(url, path, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_requests_are_counted(url):
    post(url, "/v1/rerank", query="a", documents=["b"])
    text = httpx.get(f"{url}/metrics").text
    assert 'endpoint="rerank"' in text and 'status="success"' in text


def test_enforce_disagg_does_not_apply_to_what_one_worker_computes_whole(tmp_path):
    with serving_engine(speaking_engine, tmp_path, 2, "--enforce-disagg") as url:
        answer = post(url, "/v1/embeddings", input="aab")
        assert answer.status_code == 200, answer.text
        assert answer.json()["data"][0]["embedding"] == [2, 1]
