"""Embeddings from a model's engine, and scores and rankings by their cosine."""

import asyncio
import base64
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.responses import Response

from serving.frontend.answers.sending import together
from serving.frontend.api.errors import ApiError
from serving.frontend.generation.attempt import Attempts
from serving.frontend.generation.call import ChoiceRequest
from serving.frontend.model_info import json_response
from serving.frontend.prepared import Embeddable, PreparedPrompt
from serving.frontend.served_model import ServedModel
from serving.life.terms import Terms
from serving.runtime.world import world
from serving.worker.protocol import StopConditions

Vectors = npt.NDArray[np.float32]

MAX_CALLS = 64
"""Texts of one request that are at engines at once."""


async def embed(model: ServedModel, asked: Embeddable, request_id: str) -> Response:
    """Answer a request for embeddings, scores or a ranking.

    Raises:
        ApiError: there is no worker to send it to, or one failed.
    """
    vectors = await _vectors(model, asked.prompts, request_id)
    tokens = sum(len(prompt.tokens) for prompt in asked.prompts)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    name = asked.model if model.adapter is None else model.adapter.name
    head = {"id": f"{asked.kind}-{request_id}", "created": int(world().wall_s()), "model": name}
    match asked.kind:
        case "embedding":
            if asked.dimensions not in (None, vectors.shape[1]):
                problem = f"dimensions: this model's embeddings have {vectors.shape[1]} numbers, not {asked.dimensions}"
                raise ApiError(400, problem, param="dimensions")
            return json_response(head | {"object": "list", "data": _embeddings(vectors, asked), "usage": usage})
        case "score":
            return json_response(head | {"object": "list", "data": _scores(vectors), "usage": usage})
        case _:
            return json_response(head | {"results": _ranking(vectors, asked), "usage": usage})


async def _vectors(model: ServedModel, prompts: list[PreparedPrompt], request_id: str) -> Vectors:
    """Return the embedding of each prompt; the first failure ends them all."""
    slots = asyncio.Semaphore(MAX_CALLS)

    async def vector(place: int, prompt: PreparedPrompt) -> list[float]:
        async with slots:
            return await _vector(model, prompt, request_id, is_refusable=not place)

    found = await together([vector(*each) for each in enumerate(prompts)])
    if len(set(map(len, found))) > 1:
        raise ApiError(500, "the engine sent embeddings of different lengths")
    return np.array(found, np.float32)


async def _vector(model: ServedModel, prompt: PreparedPrompt, request_id: str, *, is_refusable: bool) -> list[float]:
    request = ChoiceRequest(
        prompt=prompt,
        conditions=StopConditions(max_tokens=1, ignore_eos=True),
        sampling={},
        eos_token_ids=[],
        request_id=request_id,
        is_embedding=True,
    )
    terms = Terms(model.card.migration_limit, model.stages.config, is_whole=True)
    attempts = Attempts.begin(model.stages, request, terms, is_refusable=is_refusable)
    try:
        while True:
            output = await attempts.take()
            if output.embedding is not None:
                return output.embedding
            if output.finish_reason:
                raise ApiError(500, "the engine ended a request for an embedding without one")
    finally:
        attempts.close()


def _embeddings(vectors: Vectors, asked: Embeddable) -> list[dict[str, Any]]:
    return [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
            if asked.is_base64
            else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]


def _scores(vectors: Vectors) -> list[dict[str, Any]]:
    """Return the score of each pair: the first half of the vectors against the second."""
    first, second = np.split(_units(vectors), 2)
    scores = (first * second).sum(axis=1).tolist()
    return [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]


def _ranking(vectors: Vectors, asked: Embeddable) -> list[dict[str, Any]]:
    """Return documents, best first; the first vector is the query's."""
    query, *others = _units(vectors)
    scores = [float(query @ other) for other in others]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n or None]
    return [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": asked.documents[index]}} if asked.documents else {})
        for index in best
    ]


def _units(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths == 0, 1, lengths)).astype(np.float32)
