"""The page on endpoints and the fields of requests, here and elsewhere."""

from collections.abc import Iterator

import msgspec

from dynabench.reference.others import ENDPOINTS, FIELDS, fields_of
from serving.frontend.api.fields import names_of
from serving.frontend.api.kinds import KINDS, WITHOUT_EFFECT, KindName
from serving.frontend.api.unsupported import neutral_of
from serving.frontend.routes import ROUTES

INTRODUCTION = """\
# Endpoints and fields

Which endpoints the frontend has, and what it does with each field of a request, beside OpenAI, Anthropic, vLLM 0.32,
SGLang 0.5.23 and Dynamo. What is refused gets 400 with the field's name, unless its value is null. Fields that are not
listed are refused unless their value asks for nothing (null, false, empty); `--strict` refuses them in any case. Fields
without effect are checked and change nothing (a response repeats some of them). Constraints on answers
(`response_format`, `structured_outputs`, `guided_*`, ...) and required tool calls need an engine that honours them
([engines](../engines.md)).
"""
SERVERS = ("OpenAI", "Anthropic", "vLLM", "SGLang", "Dynamo")
ALIASES = {"/score": "/v1/score", "/rerank": "/v1/rerank", "/v1/tokenize": "/tokenize", "/v1/detokenize": "/detokenize",
           "/get_model_info": "/model_info"}  # fmt: skip
"""Endpoints with two addresses."""


NARROW: dict[KindName, dict[str, str]] = {"embedding": {"dimensions": "only the model's own size"}}
"""Fields of which only some values can be honoured, which depends on the model."""


def page() -> str:
    """Return the page in Markdown."""
    return "\n".join([INTRODUCTION, "## Endpoints\n", *_endpoints(), *_kinds()])


def endpoints_here() -> set[str]:
    """Return the frontend's endpoints, those with two addresses once, without what names a part of them."""
    return {ALIASES.get(path, path.partition("{")[0].rstrip("/")) for path, _, _ in ROUTES}


def _endpoints() -> Iterator[str]:
    here = endpoints_here()
    yield _row("endpoint", "here", *SERVERS)
    yield _row(*["---"] * (2 + len(SERVERS)))
    for path, having in ENDPOINTS.items():
        others = [other for other, name in ALIASES.items() if name == path]
        names = ", ".join(f"`{name}`" for name in (path, *others))
        yield _row(names, _mark(path in here), *(_mark(server in having.split()) for server in SERVERS))


def _kinds() -> Iterator[str]:
    for name, servers in FIELDS.items():
        yield f"\n## Fields of {KINDS[name].path}\n"
        yield _row("field", "here", *servers)
        yield _row(*["---"] * (2 + len(servers)))
        own, theirs = names_of(KINDS[name].type), {server: fields_of(name, server) for server in servers}
        for field in sorted(own.union(*theirs.values())):
            yield _row(f"`{field}`", _treatment(name, field), *(_mark(field in each) for each in theirs.values()))


def _treatment(kind: KindName, field: str) -> str:
    """Return what happens to a field here."""
    type = KINDS[kind].type
    if field in WITHOUT_EFFECT.get(kind, ()):
        return "accepted, no effect"
    if field in names_of(type):
        return NARROW.get(kind, {}).get(field, "yes")
    values = neutral_of(type).get(field, ())
    shown = " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values)
    return f"only {shown}" if shown else "no"


def _mark(has: bool) -> str:
    return "yes" if has else ""


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
