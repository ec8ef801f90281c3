"""Which rows of the published points are no measurements of their own, by what the rows themselves say.

**Runs listed twice.** Several files list the same run, some with all digits and some with two. The row that chose
constants of the model stays, or else the first.

**Rows that contradict another row.** An engine cannot be slower under a lighter load. So TPOT of a row contradicts that of
another if the engine, its version, the model, the GPUs and the layout are the same, the load of the other is as heavy or
heavier (`is_as_heavy`), and its TPOT is shorter by more than repeated runs differ. The slower row counts as wrong: something
else took time, and nothing makes an engine faster than it is. Our predictions have no part in this.

TTFT is not compared. Settings that let prompts wait for each other make it fall with more load.
"""

from typing import Any

import pandas as pd
from recipes import is_limited, replicas_of

ENGINE = ["backend", "backend_version", "model_path", "gpu", "precision", "drafts"]
LAYOUT = ["tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size"]
LOAD = ["backend", "gpu", "precision", "isl", "osl", "concurrency"]
DIGITS = 2
"""How many decimals of a millisecond the shortest files have."""
TOLERANCE = 1.15
"""122 loads were repeated with the same engine: TPOT differs by at most 10.5%, but for one, which once took four times as long."""
TWICE = "the same run as another row"
LOST = "how many of its requests ran at a time was lost"


def doubts(table: pd.DataFrame) -> pd.Series:
    """Return what speaks against each row, or nothing. The rows have a `split`."""
    found = pd.Series("", index=table.index)
    found[[is_limited(row) for row in table.itertuples()]] = LOST
    found[is_listed_twice(table)] = TWICE
    for place, problem in contradictions(table[found == ""]):
        found[place] = problem
    return found


def is_listed_twice(table: pd.DataFrame) -> pd.Series:
    """Return which rows are a run that another row stands for."""
    figures = table[LOAD].assign(ttft=table.silicon_ttft_ms.round(DIGITS), tpot=table.silicon_tpot_ms.round(DIGITS))
    first = (table.split != "fitted").sort_values(kind="stable").index
    return figures.loc[first].duplicated().reindex(table.index)


def contradictions(table: pd.DataFrame) -> list[tuple[Any, str]]:
    """Return the rows whose TPOT is longer than that of a load at least as heavy, with the shortest such TPOT."""
    found = []
    for _, rows in table.groupby([*ENGINE, *LAYOUT], dropna=False):
        runs = list(rows.itertuples())
        for run in runs:
            other = min((other for other in runs if is_as_heavy(other, run)), key=lambda other: other.silicon_tpot_ms)
            if run.silicon_tpot_ms > TOLERANCE * other.silicon_tpot_ms:
                text = f"contradicts another row: {load_of(other)} take {other.silicon_tpot_ms:.4g} ms a token"
                found.append((run.Index, text))
    return found


def is_as_heavy(load: Any, than: Any) -> bool:
    """Return whether no step of a load should be shorter: it has as many requests, prompt tokens and context, or more."""
    context, other = load.isl + load.osl / 2, than.isl + than.osl / 2
    has_prompts = load.isl >= than.isl and load.osl <= than.osl
    return has_prompts and context >= other and num_at_once(load) >= num_at_once(than)


def num_at_once(point: Any) -> int:
    """Return how many requests each engine of a point runs."""
    return int(point.concurrency) // replicas_of(point)


def load_of(point: Any) -> str:
    """Name a load."""
    return f"{num_at_once(point)} requests at a time of {int(point.isl)}/{int(point.osl)}"
