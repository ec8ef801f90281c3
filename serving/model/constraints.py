"""The kinds of constraints on an answer: requests name one, engines and model cards say which they honour."""

CONSTRAINTS = ("json", "regex", "choice", "grammar")
"""A JSON schema, a regular expression, a list of texts, and a grammar in EBNF."""

NO_GRAMMAR = tuple(kind for kind in CONSTRAINTS if kind != "grammar")
