"""How many examples a property test takes: few in the default run, and as many as it is worth in `pytest -m long`.

Of the examples that break a property, most runs meet one soon. The default run looks for that; `.ci/run` runs both.
"""

FEW = 20
"""Examples of a property in the default run."""

MANY = 100
"""Examples of a property that does not say how many it is worth."""

are_many = True


def worth(count=MANY):
    """Return how many examples to take of a property that is worth so many."""
    return count if are_many else min(count, FEW)
